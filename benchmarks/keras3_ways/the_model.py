# SPDX-License-Identifier: Apache-2.0
"""The Keras 3 model that two workers train, with each way of `scripts/bench keras3`."""

import keras
import numpy as np

RECORDS, BATCH, EPOCHS = 2048, 64, 2  # the batch is that of both workers


def model() -> keras.Model:
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    built = keras.Sequential([keras.Input((64,)), *layers])
    built.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return built


def data(split: str) -> tuple[np.ndarray, np.ndarray] | None:
    if split != "train":
        return None
    rng = np.random.default_rng(1)
    return rng.random((RECORDS, 64), np.float32), rng.integers(0, 10, RECORDS)
