# SPDX-License-Identifier: Apache-2.0
"""A network with two outputs that is stopped early by a callback, after a different one killed its worker."""

import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import callbacks as k

import edl

RECORDS, FEATURES, BATCH = 400, 6, 100
ORDERS = Path(os.environ.get("EDL_FAULTS", "."))


def model() -> keras.Model:
    keras.utils.set_random_seed(5)
    x = inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(8, "tanh")(x)
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(x) for name in ("value", "square")})
    model.compile(
        keras.optimizers.SGD(0.2, momentum=0.8),
        loss={"value": "mse", "square": "mae"},
        loss_weights={"value": 1.0, "square": 0.05},
        metrics={"value": ["mae"], "square": []},
    )
    return model


def records(split: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """What is held out is so unlike that it is soon forgotten how to tell it."""
    some = np.random.default_rng(1)
    x = some.normal(size=(RECORDS, FEATURES)).astype(np.float32)
    y = np.sin(x @ some.normal(size=(FEATURES, 1)).astype(np.float32))
    if split != "train":
        x, y = x[:60] + 0.5, np.cos(y[:60])
    return x, {"value": y, "square": y * y}


def data(split: str) -> edl.Reader:
    x, labels = records(split)
    return edl.arrays(x, *labels.values())


def feed(given: tuple[np.ndarray, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return given[0], {"value": given[1], "square": given[2]}


def die(epoch: int, logs: Any) -> None:
    """Once, in the middle of what is called for the second epoch's end."""
    if epoch == 1 and (ORDERS / "die").exists():
        (ORDERS / "die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def callbacks() -> list[k.Callback]:
    return [
        k.ReduceLROnPlateau("val_loss", factor=0.3, patience=1),
        k.CSVLogger(ORDERS / "log.csv"),
        k.LambdaCallback(on_epoch_end=die),
        k.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
    ]
