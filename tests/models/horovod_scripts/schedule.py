# SPDX-License-Identifier: Apache-2.0
"""An elastic script for scenarios: ranks end at chosen batches, and rank 0 awaits changes of the ring's size.

It writes a line of JSON for each epoch. `--exits` maps "epoch,batch" to the first ranks of the workers that
end there. `--sizes` are the ring's sizes by epoch: where two differ, rank 0 waits for the change at the end
of the epoch.
"""

import argparse
import json
import os
import signal
import time

import horovod.tensorflow as hvd
import tensorflow as tf

BATCHES, RATE = 10, 0.001  # batches of an epoch

parser = argparse.ArgumentParser()
parser.add_argument("--record", required=True, help="the file for the lines")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--exits", type=json.loads, default={})
parser.add_argument("--exit-mode", choices=("exception", "kill"), default="exception")
parser.add_argument("--sizes", type=json.loads, default=[])
parser.add_argument("--seconds", type=float, default=60, help="the longest wait for a change")
arguments = parser.parse_args()

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
hvd.init()
first_rank = int(os.environ.get("HOROVOD_RANK", "0"))
features = tf.random.uniform([32, 2])
target = tf.one_hot(tf.random.uniform([32], minval=0, maxval=2, dtype=tf.int64), 2)
model = tf.keras.Sequential([tf.keras.layers.Dense(2, activation="softmax")])
optimizer = tf.optimizers.SGD(RATE * hvd.size())


def end_if_due(epoch: int, batch: int) -> None:
    if first_rank not in arguments.exits.get(f"{epoch},{batch}", ()):
        return
    if arguments.exit_mode == "exception":
        raise RuntimeError(f"rank {first_rank} ends at epoch {epoch}, batch {batch}")
    os.kill(os.getpid(), signal.SIGKILL)


@tf.function
def step(in_ring: bool = True) -> None:
    with tf.GradientTape() as tape:
        loss = tf.losses.categorical_crossentropy(target, model(features, training=True))
    if in_ring:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def await_change(state: hvd.elastic.State) -> None:
    """Wait until this process has heard of a change of the hosts; the next commit acts on it."""
    deadline = time.monotonic() + arguments.seconds
    while state._host_messages.empty():  # Horovod's own integration test looks here, too
        if time.monotonic() > deadline:
            raise TimeoutError("the ring was to change")
        time.sleep(0.1)


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowKerasState) -> None:
    state.rendezvous += 1
    while state.epoch < arguments.epochs:
        while state.batch < BATCHES:
            end_if_due(state.epoch, state.batch)
            step()
            state.batch += 1
            state.commits += 1
            state.commit()
        if hvd.rank() == 0:
            keys = ("epoch", "batch", "commits", "rendezvous")
            known = {key: getattr(state, key) for key in keys}
            line = known | {"start_rank": first_rank, "rank": hvd.rank(), "size": hvd.size()}
            with open(arguments.record, "a") as file:
                print(json.dumps(line), file=file)
            if len(set(arguments.sizes[state.epoch : state.epoch + 2])) > 1:
                await_change(state)
        state.epoch += 1
        state.batch = 0
        state.commits += 1
        state.commit()


step(in_ring=False)
state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0, commits=0, rendezvous=0)
state.register_reset_callbacks([lambda: optimizer.lr.assign(RATE * hvd.size())])
train(state)
