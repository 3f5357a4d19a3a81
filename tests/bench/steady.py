"""Steady state on two ranks, ours and plain Horovod's, on the same engine, model and data.

    python -m tests.bench.steady edl|plain RANK PORT WORK

The parent holds a rendezvous store at PORT. A rank waits for a line on stdin, makes STEPS
steps, prints the median seconds of one, and waits for the next line. WORK is seconds of
computing per step beside the model's own, spent spinning so that both sides have the same.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf

from edl.contract.ranges import RangeSet
from trainer import control
from trainer.data import Batch
from trainer.learner import Learner
from trainer.ring.horovod import HorovodRing

STEPS = 60
BATCH = 16


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(256, activation="relu"), keras.layers.Dense(256, activation="relu")]
    made = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    made.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def main() -> None:
    side, rank, port, work = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    chance = np.random.default_rng(rank)
    x, y = chance.normal(size=(4096, 64)).astype("f4"), chance.integers(0, 10, 4096)
    ring = HorovodRing(port, "lo", f"{side}-{rank}")
    ring.form(rank, 2)
    made = model()
    one_step = ours(made, ring, rank, x, y) if side == "edl" else plain(made, x, y)
    for number in range(20):
        one_step(number)
    print("here", flush=True)
    for _ in sys.stdin:
        seconds = []
        for number in range(STEPS):
            began = time.perf_counter()
            while time.perf_counter() - began < work:
                pass
            one_step(number)
            seconds.append(time.perf_counter() - began)
        print(statistics.median(seconds), flush=True)


def ours(made: keras.Model, ring: HorovodRing, rank: int, x: np.ndarray, y: np.ndarray):  # type: ignore[no-untyped-def]
    """As trainer.worker does it: batch, control, sum, ledger, update."""
    learner = Learner(made, Batch((0, 2), x[:2], y[:2], None))
    applied = RangeSet()

    def step(number: int) -> None:
        nonlocal applied
        at = number * BATCH % 4000
        positions = (number * 2 * BATCH + rank * BATCH, number * 2 * BATCH + (rank + 1) * BATCH)
        batch = Batch(positions, x[at : at + BATCH], y[at : at + BATCH], None)
        told = control.write(rank, 2, positions, leave=False)
        total = ring.reduce(learner.gradients(batch, told, number, rank))
        agreed = learner.agreed(total)
        learner.update(total)
        if number == 0:
            applied = RangeSet()
        for start, stop in agreed.batches:
            applied = applied.add(start, stop)

    return step


def plain(made: keras.Model, x: np.ndarray, y: np.ndarray):  # type: ignore[no-untyped-def]
    """As Horovod's documentation does it, but for Keras 3's variables."""
    import horovod.tensorflow as hvd

    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.optimizer.build(made.trainable_variables)
    variables = [v.value for v in made.trainable_variables]

    @tf.function(autograph=False)
    def graph(bx: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(by, made(bx, training=True))
        made.optimizer.apply(tape.gradient(loss, variables), made.trainable_variables)
        return loss

    def step(number: int) -> None:
        at = number * BATCH % 4000
        graph(x[at : at + BATCH], y[at : at + BATCH])

    return step


if __name__ == "__main__":
    main()
