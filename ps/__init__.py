"""Parameter servers: the processes that keep the rows of embedding tables.

    __main__       wiring: flags, signals, where it listens
    service        the calls of ps.proto, and how a refusal is worded
    durable        one server's state: what it is told goes into the log, then into the tables
    log  parts     the log on the disk; a server's part of a checkpoint
    staging        which calls count and which are late: pure
    table          the rows of one table
    optimizers  initializers  native

Promise: a server that was killed comes back where it was, or says that it cannot. Nothing here imports
TensorFlow or Keras.
"""
