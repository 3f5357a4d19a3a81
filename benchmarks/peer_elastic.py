# SPDX-License-Identifier: Apache-2.0
"""An elastic script as users of Horovod write it, run by horovodrun or by `edl horovod`.

Writes one line per step to $BENCH_DIR/steps.PID: `monotonic-seconds step size`, and the seconds of the step
and of its commit. If $BENCH_DATA names a .npz file with records (x [n, 64], y [n]), it trains on them. Rank 0
then also writes the loss over all of them to $BENCH_DIR/losses.PID: `monotonic-seconds loss`, twice a second.
"""

import itertools
import os
import time
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()
SIZES = [64, 256, 256, 10]
tf.random.set_seed(1)
weights = [tf.Variable(tf.random.normal(shape, stddev=0.05)) for shape in itertools.pairwise(SIZES)]
pace = float(os.environ.get("BENCH_PACE", "0.01"))
out = open(Path(os.environ["BENCH_DIR"]) / f"steps.{os.getpid()}", "w", buffering=1)
BATCH, LOSSES = 16, 0.5  # records of a worker's step; seconds from one written loss to the next
if records := os.environ.get("BENCH_DATA"):
    with np.load(records) as loaded:
        x, y = loaded["x"], loaded["y"]
    losses = open(Path(os.environ["BENCH_DIR"]) / f"losses.{os.getpid()}", "w", buffering=1)
else:
    x, y = np.random.default_rng(1).normal(size=(BATCH, 64)).astype("f4"), np.zeros(BATCH, "i8")


@tf.function(autograph=False)
def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    h = x
    for w in weights[:-1]:
        h = tf.nn.relu(h @ w)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, h @ weights[-1]))


@tf.function(autograph=False)
def one_step(x: tf.Tensor, y: tf.Tensor) -> None:
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(x, y)
    for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
        w.assign_sub(0.01 * g)


def batch(step: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return this worker's records of a step: the ring takes the records in order, again and again."""
    at = (np.arange(BATCH) + (step * hvd.size() + hvd.rank()) * BATCH) % len(x)
    return tf.constant(x[at]), tf.constant(y[at])


class State(hvd.elastic.ObjectState):
    """The weights and the step, as TensorFlowKerasState keeps a model.

    Neither of Horovod's own states will do: TensorFlowKerasState fails with Keras 3, and
    TensorFlowState broadcasts in its constructor, where a newcomer waits for ever, because
    those that run already are in `sync` by then.
    """

    def __init__(self) -> None:
        self.save_weights()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, step=0)

    def save_weights(self) -> None:
        self.saved_weights = [tf.identity(w) for w in weights]

    def save(self) -> None:
        self.save_weights()
        super().save()

    def restore(self) -> None:
        for w, saved in zip(weights, self.saved_weights, strict=True):
            w.assign(saved)
        super().restore()

    def sync(self) -> None:
        hvd.broadcast_variables(weights, root_rank=0)
        self.save_weights()
        super().sync()


@hvd.elastic.run
def train(state: State) -> None:
    written = 0.0
    while not (Path(os.environ["BENCH_DIR"]) / "end").exists():
        began = time.monotonic()
        one_step(*batch(state.step))
        state.step += 1
        made = time.monotonic()
        state.commit()
        now = time.monotonic()
        out.write(f"{now} {state.step} {hvd.size()} {made - began} {now - made}\n")
        if records and hvd.rank() == 0 and now - written >= LOSSES:
            losses.write(f"{now} {loss_of(x, y)}\n")
            written = now
        time.sleep(pace)


train(State())
