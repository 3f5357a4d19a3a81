# SPDX-License-Identifier: Apache-2.0
"""A loop with hvd.elastic, as Horovod's guide has it; with BENCH_PLAIN one that is not elastic.

The state is an ObjectState that keeps the weights itself: benchmarks/peer_elastic.py says why.
"""

import itertools

import horovod.tensorflow as hvd
import tensorflow as tf
from job import PLAIN, RATE, SIZES, batch, done, share

EVERY = 1  # steps from one commit to the next
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()
tf.random.set_seed(1)
weights = [tf.Variable(tf.random.normal(shape, stddev=0.05)) for shape in itertools.pairwise(SIZES)]
weights += [tf.Variable(tf.zeros(width)) for width in SIZES[1:]]


@tf.function(autograph=False, reduce_retracing=True)
def train_step(x: tf.Tensor, y: tf.Tensor) -> None:
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        for w, b in zip(weights[:2], weights[3:5], strict=True):
            x = tf.nn.relu(x @ w + b)
        logits = x @ weights[2] + weights[5]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        w.assign_sub(RATE * gradient)


def one_step(step: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    x, y = batch(step, rank, size)
    train_step(tf.constant(x), tf.constant(y))
    done(step, size, share(step, rank, size))


class State(hvd.elastic.ObjectState):
    def __init__(self) -> None:
        self.saved = [tf.identity(w) for w in weights]
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, step=0)

    def save(self) -> None:
        self.saved = [tf.identity(w) for w in weights]
        super().save()

    def restore(self) -> None:
        for w, saved in zip(weights, self.saved, strict=True):
            w.assign(saved)
        super().restore()

    def sync(self) -> None:
        hvd.broadcast_variables(weights, root_rank=0)
        self.saved = [tf.identity(w) for w in weights]
        super().sync()


@hvd.elastic.run
def train(state: State) -> None:
    while True:
        one_step(state.step)
        state.step += 1
        if state.step % EVERY == 0:
            state.commit()


if PLAIN:
    hvd.broadcast_variables(weights, root_rank=0)
    for step in itertools.count():
        one_step(step)
else:
    train(State())
