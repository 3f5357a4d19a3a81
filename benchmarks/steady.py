# SPDX-License-Identifier: Apache-2.0
"""One rank of a steady ring, or of a peer that trains the same model on the same data.

    python -m benchmarks.steady SIDE MODEL OPTIMIZER RANK RANKS PORT SECRET [--gpu] [--batch N] ...

| side | |
| --- | --- |
| edl | the worker's own loop, with a session without a master |
| deterministic | the same with training.deterministic, of the same records |
| plain | Horovod's DistributedGradientTape, in a ring that cannot change |
| fit | `keras.fit` of arrays |
| fit-pipeline | `keras.fit` of a tf.data pipeline, which prefetches batches to the device |
| fit-resident | the step of `keras.fit`, on a batch that stays on the device: a step without input |

The parent holds a rendezvous store at PORT. A rank waits for a line on stdin, makes as many steps as that
says, prints the seconds of a step, the peak of its memory (MiB) and the CPU seconds of a step, and waits for
the next line.

The seconds of a step are a median; with --gpu a mean, because a GPU computes behind the program.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf

from edl import config
from edl.config import values
from edl.contract.layout import Layout, StepSlice
from edl.contract.steps import Steps
from edl.trainer.agreement.exact_sums import BLOCKS
from edl.trainer.parts.ring_steps import RingSteps
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.start.build_learner import learner_of
from edl.trainer.state import State
from edl.trainer.worker import Worker

OURS = "edl", "deterministic"
WARM = 6  # steps that are not measured
MAXIMUM = 1 << 40  # records: more than there is time for
CLASSES, VOCABULARY = 10, 2000
ARRAYS = 1 << 29  # bytes: with --gpu, `fit` has arrays of at most this size, and at most so many batches:
BATCHES = 64  # it ends an epoch after all of them


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


def encoder(blocks: int = 6, width: int = 512, heads: int = 8, length: int = 32) -> keras.Model:
    """A transformer's encoder for texts of so many tokens; by default of 20 million parameters."""
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, width)(tokens)
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
    "resnet50-224": Model(application("ResNet50", 224), (224, 224, 3), 8),
    "encoder-1m": Model(functools.partial(encoder, 2, 128, 4), (32,), 8),
    "encoder-20m": Model(encoder, (32,), 8),
    "encoder-87m": Model(functools.partial(encoder, 12, 768, 12, 128), (128,), 8),
}
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.001),
    "adam": lambda: keras.optimizers.Adam(1e-5),
}


def made(model: Model, optimizer: str, jit: bool | str = "auto") -> keras.Model:
    keras.utils.set_random_seed(1)
    built = model.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(OPTIMIZERS[optimizer](), loss, jit_compile=jit)
    return built


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steady")
    parser.add_argument("side", choices=(*OURS, "plain", *FITS))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    for name in ("rank", "ranks", "port"):
        parser.add_argument(name, type=int)
    parser.add_argument("secret")
    parser.add_argument(
        "--gpu", action="store_true", help="time steps as a whole, use all of TensorFlow's threads"
    )
    parser.add_argument("--batch", type=int, help="records of a rank; default: the model's")
    parser.add_argument("--precision", default="float32", help="Keras' precision policy")
    parser.add_argument("--xla", action="store_true", help="compile with XLA; default with --gpu: do not")
    parser.add_argument("--profile", help="a folder; the steps of the second line are traced into its SIDE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    model = MODELS[args.model]
    if args.batch:
        model = replace(model, batch=args.batch)
    jit: bool | str = "auto"
    if args.gpu:
        Timing.whole, jit = True, args.xla
        keras.mixed_precision.set_global_policy(args.precision)
    else:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    Timing.profile = args.profile and str(Path(args.profile) / args.side)
    x, y = drawn(model, args.rank, text=args.model.startswith("encoder"), large=args.gpu)
    if args.side in FITS:
        FITS[args.side](made(model, args.optimizer, jit), model, x, y)
        return
    ring = HorovodRing(args.port, "lo", f"{args.side}-{args.rank}", store_secret=args.secret)
    if args.side in OURS:
        bits = args.side == "deterministic"
        if bits:
            tf.config.experimental.enable_op_determinism()
        ours(bits, made(model, args.optimizer, jit), model, ring, args.rank, args.ranks, x, y)
        return
    ring.form(args.rank, args.ranks)
    batches = iter(pipeline(model, x, y)) if args.gpu else slices(model, x, y)
    one_step, pace = plain(made(model, args.optimizer, jit)), Timing()
    for batch in batches:
        pace.begins()
        one_step(*batch)
        pace.ends()


def drawn(model: Model, seed: int, text: bool, large: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw records and labels; so many batches of them that `fit` seldom ends an epoch, if they are timed."""
    chance = np.random.default_rng(seed)
    batches = max(4, min(BATCHES, ARRAYS // (4 * model.batch * math.prod(model.shape)))) if large else 4
    shape = batches * model.batch, *model.shape
    x = (
        chance.integers(0, VOCABULARY, shape).astype("i4")
        if text
        else chance.standard_normal(shape, np.float32)
    )
    return x, chance.integers(0, CLASSES, len(x))


class Timing:
    """Has steps measured for each line on stdin, as many as it says."""

    whole = False  # whether the steps of a line are timed as one
    profile: str | None = None  # the folder of a trace

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._began = 0.0
        self._first = self._first_cpu = 0.0
        self._many = WARM
        self._lines = 0

    def begins(self) -> None:
        self._began = time.perf_counter()
        if not self._seconds:
            self._first, self._first_cpu = self._began, time.process_time()

    def ends(self, wait: Callable[[], object] = lambda: None) -> None:
        """End a step.

        Args:
            wait: returns when the device has computed all steps; called before the last one is timed.
        """
        if len(self._seconds) >= self._many - 1:
            wait()
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        if len(self._seconds) < self._many or (not self._lines and compiling()):
            return
        if not self._lines:
            print("here", flush=True)
        else:
            step = (now - self._first) / self._many if self.whole else statistics.median(self._seconds)
            cpu = (time.process_time() - self._first_cpu) / self._many
            if self.profile and self._lines == 2:
                tf.profiler.experimental.stop()
            print(step, memory(), cpu, flush=True)
        if not (line := sys.stdin.readline()):
            os._exit(0)
        self._many, self._seconds = int(line), []
        self._lines += 1
        if self.profile and self._lines == 2:
            tf.profiler.experimental.start(self.profile)


def compiling() -> bool:
    """Whether XLA compiles a step in the background (trainer/step/background_compile.py)."""
    return any(thread.name == "XLA" for thread in threading.enumerate())


def memory() -> int:
    """The most that this process has had, in MiB."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


class Paced(Telemetry):
    """Knows when the loop begins a step, and when it has done it."""

    def __init__(self, session: Session, pace: Timing, batch: int):
        super().__init__(session, Steps(MAXIMUM, batch), log=lambda line: None)
        self._timing = pace

    def step_begins(self) -> None:
        super().step_begins()
        self._timing.begins()

    def step_done(self, *arguments: Any) -> None:
        super().step_done(*arguments)
        self._timing.ends()


class Endless:
    """A source that has records at every position."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        self._x, self._y = x, y
        self.layout = Layout(MAXIMUM)

    def lay_out(self, layout: Layout) -> None:
        assert layout == self.layout

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch:
        first, last = part.of(stop - start)
        at = start % (len(self._x) - last + first + 1)
        x, y = self._x[at : at + last - first], self._y[at : at + last - first]
        return Batch(np.arange(at, at + len(x)), x, y, None)


def ours(
    bits: bool,
    built: keras.Model,
    model: Model,
    ring: HorovodRing,
    rank: int,
    ranks: int,
    x: np.ndarray,
    y: np.ndarray,
) -> None:
    """The worker's own loop, with a session without a master."""
    whole = ranks * model.batch
    training_ = {"batchSize": whole, "deterministic": bits}
    values_ = values.merge(values.defaults(), {"training": training_})
    training = config.parse(values_).training
    learner = learner_of(built, [Batch(np.arange(2), x[:2], y[:2], None)], ring, training, print)
    session = Session(rank, lambda message: None, threading.Event())
    batches = Batches(Endless(x, y), whole, ready=learner.ready, blocks=BLOCKS * bits)
    report = Paced(session, Timing(), whole)
    state = State(learner, batches.steps)
    steps = RingSteps(config.parse(values_), session, state, batches, report)
    worker = Worker(session, ring, state, report, steps)
    members, shares = tuple(range(ranks)), (1,) * ranks
    worker.run_ring(FormRing(1, members, 0, sync=True, epochs=1, shares=shares, layout=Layout(MAXIMUM)))


def plain(built: keras.Model) -> Callable[[Any, Any], float]:
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

    return lambda x, y: float(graph(x, y))


def slices(model: Model, x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches of the arrays, again and again."""
    for at in itertools.cycle(range(0, len(x), model.batch)):
        yield x[at : at + model.batch], y[at : at + model.batch]


def pipeline(model: Model, x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """The batches of the arrays, again and again, prefetched to the GPU if there is one."""
    batches = (values.reshape(-1, model.batch, *values.shape[1:]) for values in (x, y))
    data = tf.data.Dataset.from_tensor_slices(tuple(batches)).repeat()
    if tf.config.list_physical_devices("GPU"):
        return data.apply(tf.data.experimental.prefetch_to_device("/GPU:0"))
    return data.prefetch(tf.data.AUTOTUNE)


class Marks(keras.callbacks.Callback):
    """Times the steps of `fit`, each from its begin to the next one's.

    A callback at the end of batches would make `fit` wait for the loss of each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pace, self._stepped = Timing(), False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._stepped:
            self._pace.ends(self._wait)
        self._stepped = True
        self._pace.begins()

    def _wait(self) -> None:
        self.model.trainable_variables[-1].numpy()  # the device copies it after all steps before


def fit(built: keras.Model, model: Model, x: np.ndarray, y: np.ndarray) -> None:
    built.fit(x, y, batch_size=model.batch, epochs=MAXIMUM, verbose=0, callbacks=[Marks()], shuffle=False)


def fit_pipeline(built: keras.Model, model: Model, x: np.ndarray, y: np.ndarray) -> None:
    built.fit(pipeline(model, x, y), steps_per_epoch=MAXIMUM, verbose=0, callbacks=[Marks()])


def fit_resident(built: keras.Model, model: Model, x: np.ndarray, y: np.ndarray) -> None:
    batch = next(iter(pipeline(model, x, y)))
    built.train_on_batch(*batch)  # makes the function of `fit`
    marks, same = Marks(), itertools.repeat(batch)
    marks.set_model(built)
    for number in itertools.count():
        marks.on_train_batch_begin(number)
        built.train_function(same)


FITS = {"fit": fit, "fit-pipeline": fit_pipeline, "fit-resident": fit_resident}


if __name__ == "__main__":
    main()
