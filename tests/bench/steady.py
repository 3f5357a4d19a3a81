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
import threading
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf

from edl import config
from edl.config import values
from edl.contract.layout import Layout, Part
from edl.contract.steps import Steps
from trainer.data import Batch, Batches
from trainer.learner import KerasLearner
from trainer.ring.horovod import HorovodRing
from trainer.session.orders import FormRing
from trainer.session.state import Session
from trainer.telemetry import Telemetry
from trainer.worker import Worker

STEPS = 60
WARM = 20  # steps that are not measured
BATCH = 16
MOST = 1 << 40  # records: more than there is time for


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
    if side == "edl":
        ours(ring, rank, x, y, work)
        return
    ring.form(rank, 2)
    one_step = plain(model(), x, y)
    for number in range(WARM):
        one_step(number)
    pace = Timing(work)
    pace.go()
    while True:
        for number in range(STEPS):
            pace.begins()
            one_step(number)
            pace.ends()


class Timing:
    """Spends `work` seconds in each step, and has STEPS of them measured for each line on stdin."""

    def __init__(self, work: float):
        self._work = work
        self._seconds: list[float] = []
        self._began = 0.0

    def go(self) -> None:
        """All is warm: wait for the first line."""
        print("here", flush=True)
        self._wait()

    def begins(self) -> None:
        self._began = time.perf_counter()
        while time.perf_counter() - self._began < self._work:
            pass

    def ends(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) == STEPS:
            print(statistics.median(self._seconds), flush=True)
            self._seconds = []
            self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)


class Paced(Telemetry):
    """Knows when the loop begins a step, and when it has done it."""

    def __init__(self, session: Session, pace: Timing):
        super().__init__(session, Steps(MOST, 2 * BATCH), log=lambda line: None)
        self._pace, self._steps = pace, 0

    def step_begins(self) -> None:
        super().step_begins()
        if self._steps == WARM:
            self._pace.go()
        if self._steps >= WARM:
            self._pace.begins()

    def step_done(self, *arguments: Any) -> None:
        super().step_done(*arguments)
        if self._steps >= WARM:
            self._pace.ends()
        self._steps += 1


class Endless:
    """A source that has records at every position."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        self._x, self._y = x, y

        self.layout = Layout(MOST)

    def lay_out(self, layout: Layout) -> None:
        assert layout == self.layout

    def batch(self, start: int, stop: int, part: Part) -> Batch:
        first, last = part.of(stop - start)
        at = (start + first) % 4000
        x, y = self._x[at : at + last - first], self._y[at : at + last - first]
        return Batch(np.arange(at, at + len(x)), x, y, None)


def ours(ring: HorovodRing, rank: int, x: np.ndarray, y: np.ndarray, work: float) -> None:
    """The worker's own loop, with a session that nobody is at the other end of."""
    learner = KerasLearner(model(), Batch(np.arange(2), x[:2], y[:2], None))
    values_ = values.merge(values.defaults(), {"training": {"batchSize": 2 * BATCH}})
    session = Session(rank, lambda message: None, threading.Event())
    batches = Batches(Endless(x, y), 2 * BATCH)
    worker = Worker(
        config.parse(values_), session, ring, learner, batches, Paced(session, Timing(work)), lambda: ({}, "")
    )
    worker.ride(FormRing(1, (0, 1), 0, sync=True, epochs=1, shares=(1, 1), layout=Layout(MOST)))


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
