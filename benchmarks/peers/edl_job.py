# SPDX-License-Identifier: Apache-2.0
"""The job as a model of edl."""

import keras
import numpy as np
from job import RATE, SIZES, X, Y
from stamped import stamp_steps

stamp_steps()


def model() -> keras.Model:
    layers = [keras.layers.Dense(width, activation="relu") for width in SIZES[1:-1]]
    model = keras.Sequential([keras.Input(SIZES[:1]), *layers, keras.layers.Dense(SIZES[-1])])
    model.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def data(split: str) -> tuple[np.ndarray, np.ndarray] | None:
    return (X, Y) if split == "train" else None
