# SPDX-License-Identifier: Apache-2.0
"""A dense network of 25 million weights on records that are drawn once, which notes when it takes them, as
timed_deepfm.py does."""

import keras
import numpy as np

import edl
from benchmarks.timed_deepfm import stamp

WIDTH, CLASSES, RECORDS = 3536, 10, 8192


def model() -> keras.Model:
    """3536 * 3536 * 2 weights, and a few."""
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    built = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    return built


def data(split: str) -> edl.Reader | None:
    if split != "train":
        return None
    rng = np.random.default_rng(1)
    return edl.arrays(rng.random((RECORDS, WIDTH), np.float32), rng.integers(0, CLASSES, RECORDS))


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    x, y = records
    stamp(len(x))
    return x, y
