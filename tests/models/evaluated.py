# SPDX-License-Identifier: Apache-2.0
"""A model that is mostly evaluated: EDL_EVALUATED, of MODELS, on HELD_OUT records after each step.

Where EDL_BENCH is a directory, each process writes a file of its own there: a line for each step and each
round of an evaluation, with monotonic seconds, and `step` or `round`.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import keras
import numpy as np

import edl
from edl.trainer.session.telemetry import Telemetry

HELD_OUT, TRAINED, CLASSES = 10_000, 32, 10


def cnn() -> keras.Model:
    """As that of the zoo's digits."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(CLASSES),
        ]
    )


def mlp() -> keras.Model:
    """Of 8 million parameters."""
    hidden = [keras.layers.Dense(width, "relu") for width in (2048, 2048, 1024)]
    return keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(CLASSES)])


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...]]] = {
    "cnn": (cnn, (8, 8, 1)),
    "mlp": (mlp, (1024,)),
}


def model() -> keras.Model:
    write_down()
    keras.utils.set_random_seed(5)
    built = MODELS[os.environ["EDL_EVALUATED"]][0]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.SGD(1e-3), loss, metrics=["accuracy"])
    return built


def data(split: str) -> edl.Reader | None:
    return edl.arrays(*records(split)) if split in ("train", "validation") else None


def records(split: str) -> tuple[np.ndarray, np.ndarray]:
    shape, some = MODELS[os.environ["EDL_EVALUATED"]][1], np.random.default_rng(1)
    many = TRAINED if split == "train" else HELD_OUT
    return some.normal(size=(many, *shape)).astype(np.float32), some.integers(0, CLASSES, many)


def write_down() -> None:
    if not (directory := os.environ.get("EDL_BENCH")):
        return
    log = open(Path(directory) / f"{os.getpid()}", "a", buffering=1)

    def noting(done: Callable[..., None], what: str) -> Callable[..., None]:
        @wraps(done)
        def noted(*arguments: Any) -> None:
            log.write(f"{time.monotonic()} {what}\n")
            done(*arguments)

        return noted

    Telemetry.step_done = noting(Telemetry.step_done, "step")  # type: ignore[method-assign]
    Telemetry.round_done = noting(Telemetry.round_done, "round")  # type: ignore[method-assign]
