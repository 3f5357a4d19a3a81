# SPDX-License-Identifier: Apache-2.0
"""Steady state of real models: ours, plain Horovod's and Keras' `fit`, on the same engine, model and data.

    python -m benchmarks.steady edl|plain|fit MODEL OPTIMIZER RANK RANKS PORT SECRET

The parent holds a rendezvous store at PORT. A rank waits for a line on stdin, makes as many steps as that
says, prints the median seconds of one and the most memory that it has had (MiB), and waits for the next line.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf

from edl import config
from edl.config import values
from edl.contract.layout import Layout, Part
from edl.contract.steps import Steps
from edl.trainer.build_learner import learner_of
from edl.trainer.model.data import Batch, Batches
from edl.trainer.parts.ring_steps import RingSteps
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State
from edl.trainer.worker import Worker

WARM = 6  # steps that are not measured
MOST = 1 << 40  # records: more than there is time for
CLASSES = 10


@dataclass(frozen=True)
class Model:
    """What is trained, and on what."""

    build: Callable[[], keras.Model]
    shape: tuple[int, ...]
    batch: int  # records of one rank


def mlp(*widths: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(n, activation="relu") for n in widths[1:]]
        return keras.Sequential([keras.Input((widths[0],)), *layers, keras.layers.Dense(CLASSES)])

    return build


def encoder(blocks: int = 6, width: int = 512, heads: int = 8, vocabulary: int = 2000) -> keras.Model:
    """A transformer's encoder of 20 million parameters, for texts of 32 tokens."""
    tokens = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    for _ in range(blocks):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = keras.layers.LayerNormalization()(keras.layers.add([x, attended]))
        inner = keras.layers.Dense(4 * width, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(keras.layers.add([x, keras.layers.Dense(width)(inner)]))
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, keras.layers.Dense(CLASSES)(x))


def application(name: str, side: int) -> Callable[[], keras.Model]:
    of = getattr(keras.applications, name)
    return lambda: of(weights=None, input_shape=(side, side, 3), classes=CLASSES, classifier_activation=None)


MODELS = {
    "mlp-1m": Model(mlp(256, 768, 768, 256), (256,), 16),
    "mlp-8m": Model(mlp(1024, 2048, 2048, 1024), (1024,), 16),
    "mlp-25m": Model(mlp(2048, 4096, 3072, 1024), (2048,), 16),
    "mlp-100m": Model(mlp(4096, 8192, 6144, 2560), (4096,), 16),
    "mobilenet-v2": Model(application("MobileNetV2", 96), (96, 96, 3), 8),
    "resnet50": Model(application("ResNet50", 64), (64, 64, 3), 8),
    "encoder-20m": Model(encoder, (32,), 8),
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.001),
    "adam": lambda: keras.optimizers.Adam(1e-5),
}


def made(model: Model, optimizer: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    built = model.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(OPTIMIZERS[optimizer](), loss)
    return built


def main() -> None:
    side, name, optimizer = sys.argv[1:4]
    rank, ranks, port = map(int, sys.argv[4:7])
    model = MODELS[name]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    chance = np.random.default_rng(rank)
    records = 4 * model.batch
    x: np.ndarray = chance.normal(size=(records, *model.shape)).astype("f4")
    if name.startswith("encoder"):
        x = chance.integers(0, 2000, (records, *model.shape)).astype("i4")
    y = chance.integers(0, CLASSES, records)
    if side == "fit":
        fit(made(model, optimizer), model, x, y)
        return
    ring = HorovodRing(port, "lo", f"{side}-{rank}", store_secret=sys.argv[7])
    if side == "edl":
        ours(made(model, optimizer), model, ring, rank, ranks, x, y)
        return
    ring.form(rank, ranks)
    one_step, pace = plain(made(model, optimizer), model, x, y), Timing()
    number = 0
    while True:
        pace.begins()
        one_step(number)
        pace.ends()
        number += 1


class Timing:
    """Has steps measured for each line on stdin, as many as it says."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = 0.0
        self._many = WARM
        self._warm = False

    def begins(self) -> None:
        self._began = time.perf_counter()

    def ends(self) -> None:
        self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) < self._many:
            return
        if not self._warm:
            self._warm = True
            print("here", flush=True)
        else:
            print(statistics.median(self._seconds), memory(), flush=True)
        if not (line := sys.stdin.readline()):
            os._exit(0)
        self._many, self._seconds = int(line), []


def memory() -> int:
    """The most that this process has had, in MiB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


class Paced(Telemetry):
    """Knows when the loop begins a step, and when it has done it."""

    def __init__(self, session: Session, pace: Timing, batch: int):
        super().__init__(session, Steps(MOST, batch), log=lambda line: None)
        self._timing = pace

    def step_begins(self) -> None:
        super().step_begins()
        self._timing.begins()

    def step_done(self, *arguments: Any) -> None:
        super().step_done(*arguments)
        self._timing.ends()


class Endless:
    """A source that has records at every position."""

    def __init__(self, x: np.ndarray, y: np.ndarray, batch: int):
        self._x, self._y, self._batch = x, y, batch
        self.layout = Layout(MOST)

    def lay_out(self, layout: Layout) -> None:
        assert layout == self.layout

    def batch(self, start: int, stop: int, part: Part) -> Batch:
        first, last = part.of(stop - start)
        at = start % (len(self._x) - self._batch + 1)
        x, y = self._x[at : at + last - first], self._y[at : at + last - first]
        return Batch(np.arange(at, at + len(x)), x, y, None)


def ours(
    built: keras.Model, model: Model, ring: HorovodRing, rank: int, ranks: int, x: np.ndarray, y: np.ndarray
) -> None:
    """The worker's own loop, with a session without a master."""
    learner = learner_of(built, [Batch(np.arange(2), x[:2], y[:2], None)], ring, "warn", print)
    whole = ranks * model.batch
    values_ = values.merge(values.defaults(), {"training": {"batchSize": whole}})
    session = Session(rank, lambda message: None, threading.Event())
    batches = Batches(Endless(x, y, model.batch), whole, ready=learner.ready)
    report = Paced(session, Timing(), whole)
    state = State(learner, batches.steps)
    steps = RingSteps(config.parse(values_), session, state, batches, report)
    worker = Worker(session, ring, state, report, steps)
    members, shares = tuple(range(ranks)), (1,) * ranks
    worker.run_ring(FormRing(1, members, 0, sync=True, epochs=1, shares=shares, layout=Layout(MOST)))


def plain(built: keras.Model, model: Model, x: np.ndarray, y: np.ndarray) -> Callable[[int], None]:
    """As Horovod's documentation does it, but for Keras 3's variables."""
    import horovod.tensorflow as hvd

    built.optimizer.build(built.trainable_variables)
    variables = [v.value for v in built.trainable_variables]

    @tf.function(autograph=False)
    def graph(bx: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = built.loss(by, built(bx, training=True))
        built.optimizer.apply(tape.gradient(loss, variables), built.trainable_variables)
        return loss

    def step(number: int) -> None:
        at = number * model.batch % len(x)
        float(graph(x[at : at + model.batch], y[at : at + model.batch]))

    return step


def fit(built: keras.Model, model: Model, x: np.ndarray, y: np.ndarray) -> None:
    pace = Timing()
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: pace.begins(),
        on_train_batch_end=lambda batch, logs: pace.ends(),
    )
    built.fit(x, y, batch_size=model.batch, epochs=MOST, verbose=0, callbacks=[callback], shuffle=False)


if __name__ == "__main__":
    main()
