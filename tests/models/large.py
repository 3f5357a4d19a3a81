# SPDX-License-Identifier: Apache-2.0
"""A dense model with Adam, of EDL_LARGE million parameters, whose workers write down when a step was done.

Lines of a file for each process in EDL_BENCH: monotonic seconds, generation, how many members hold the state.
"""

import os
import time
from functools import wraps
from pathlib import Path
from typing import Any

import keras
import numpy as np

import edl
from edl.trainer.session.telemetry import Telemetry

WIDTH, RECORDS, CLASSES = 1024, 20_000, 10


def model() -> keras.Model:
    write_down()
    hidden = (float(os.environ["EDL_LARGE"]) * 1e6) ** 0.5 / 2
    widths = [round(hidden * share) for share in (1.6, 1.6, 0.6)]
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(n, "relu") for n in widths]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES)])
    model.compile(keras.optimizers.Adam(1e-5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data(split: str) -> edl.Reader | None:
    if split != "train":
        return None
    some = np.random.default_rng(1)
    x = some.normal(size=(RECORDS, WIDTH)).astype(np.float32)
    return edl.arrays(x, some.integers(0, CLASSES, RECORDS))


def write_down() -> None:
    log = open(Path(os.environ["EDL_BENCH"]) / f"{os.getpid()}", "a", buffering=1)
    done = Telemetry.step_done

    @wraps(done)
    def noted(self: Telemetry, generation: int, rank: int, step: int, trained: int, agreed: Any) -> None:
        log.write(f"{time.monotonic()} {generation} {agreed.synced_ranks}\n")
        done(self, generation, rank, step, trained, agreed)

    Telemetry.step_done = noted  # type: ignore[method-assign]
