# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: the processes that hold the rows of embedding tables.

    __main__       wiring: flags, signals, the listening address
    rpc            the gRPC service: calls, statuses, multiplexing over one stream
    server         one server: declare, restore, read, checkpoint; recovery from the log
    sync           update mode of mode=hybrid: synchronous steps of a ring
    asynchronous   update mode of mode=ps: asynchronous SGD
    reshard        moving rows to another shard assignment
    storage        rows in memory; the log, snapshots and checkpoint shards they are recovered from
    table          the rows of one table, their initializers and optimizers, compiled with Numba

Promise: a server that was killed resumes where it was, or reports that it cannot. Nothing here imports
TensorFlow or Keras.
"""

import os

# gRPC's older listener lets the thread that polls for bytes read them, too: half as many threads wake up for
# a message, and a small message costs a quarter less. gRPC reads this variable when it is first imported. A
# version of gRPC without this listener logs that and ignores the variable.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
