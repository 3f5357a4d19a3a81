# SPDX-License-Identifier: Apache-2.0
"""A small model whose end goes wrong on order.

Orders are files in the directory EDL_FAULTS: `idle` makes each batch take long. `raise`, `exit` and `kill`,
followed by `-read` (of the held-out records) or `-config` (asked for when the model is saved), say what
happens there; `kill` happens once. `nan-read` makes what is read no number.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import edl

ORDERS = Path(os.environ["EDL_FAULTS"])
RECORDS = 200


def obey(where: str) -> None:
    if (ORDERS / f"raise-{where}").exists():
        raise RuntimeError(f"no {where} today")
    if (ORDERS / f"exit-{where}").exists():
        sys.exit(f"no {where} today")
    if (ORDERS / f"kill-{where}").exists():
        (ORDERS / f"kill-{where}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Touchy(keras.layers.Layer):
    """A layer that is none of Keras', and that fails only when it is loaded."""

    def call(self, x: Any) -> Any:
        return x * 2

    def get_config(self) -> dict[str, Any]:
        obey("config")
        return dict(super().get_config())


class HeldOut:
    """A reader that may fail when it is read."""

    def __len__(self) -> int:
        return 20

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        obey("read")
        value = np.nan if (ORDERS / "nan-read").exists() else 1
        return np.full((stop - start, 4), value, np.float32), np.ones((stop - start, 1), np.float32)


def model() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Touchy(), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model


def data(split: str) -> edl.Reader | None:
    if split != "train":
        return HeldOut() if split == "validation" else None
    x = np.random.default_rng(0).normal(size=(RECORDS, 4)).astype(np.float32)
    return edl.arrays(x, x.sum(1, keepdims=True))


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    if (ORDERS / "idle").exists():
        time.sleep(0.3)
    return records
