"""Parameter servers: the processes that keep the rows of embedding tables.

    __main__       wiring: flags, signals, where it listens
    service        the calls of ps.proto, and how a refusal is worded
    durable        one server: the calls that there always are, and how it comes back
    ring_order  any_order   how it takes steps: a ring's, or in any order
    rearranging    rows on their way to more servers, or fewer
    storage        what it has: rows in memory, and the log and base that they come back from
    log  parts     the log on the disk; a server's part of a checkpoint
    staging        which calls count and which are late, of a ring's steps: pure
    taking         which steps count, and who makes which, in any order: pure
    table          the rows of one table
    optimizers  initializers
    native  compiled   what Numba compiles

Promise: a server that was killed comes back where it was, or says that it cannot. Nothing here imports
TensorFlow or Keras.
"""

import os

# gRPC's older way to listen, where the thread that waits for bytes also takes them: half as many threads are
# woken for a message, and a small one costs a quarter less. It is read when gRPC is imported first. Where it
# is gone, gRPC says so, and goes on.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
