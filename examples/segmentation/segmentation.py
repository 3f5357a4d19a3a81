# SPDX-License-Identifier: Apache-2.0
"""Image segmentation: down, and up again, with BatchNormalization; a class for each pixel."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import edl

CLASSES, RECORDS = 3, 480


def normalized(x: Any) -> Any:
    return layers.BatchNormalization()(x)


def model() -> keras.Model:
    inputs = keras.Input((16, 16, 3))
    x = layers.Activation("relu")(normalized(layers.Conv2D(4, 3, strides=2, padding="same")(inputs)))
    before = x
    for filters in (8,):
        for _ in range(2):
            x = normalized(layers.SeparableConv2D(filters, 3, padding="same")(layers.Activation("relu")(x)))
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        before = layers.Conv2D(filters, 1, strides=2, padding="same")(before)
        x = before = layers.add([x, before])
    for filters in (8, 4):
        x = normalized(layers.Conv2DTranspose(filters, 3, padding="same")(layers.Activation("relu")(x)))
        x = layers.UpSampling2D(2)(x)
        before = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(before))
        x = before = layers.add([x, before])
    made = keras.Model(inputs, layers.Conv2D(CLASSES, 3, activation="softmax", padding="same")(x))
    made.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    return made


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images with a disc (class 1) and a square (class 2), which have the same colour."""
    chance = np.random.default_rng(seed)
    rows, columns = np.mgrid[:16, :16]
    masks = np.zeros((RECORDS, 16, 16, 1), "i8")
    for mask, centers in zip(masks, chance.integers(3, 13, (RECORDS, 2, 2)), strict=True):
        down, right = (np.abs(at - centers[:, i, None, None]) for i, at in enumerate((rows, columns)))
        mask[down[0] ** 2 + right[0] ** 2 <= 9] = 1
        mask[np.maximum(down[1], right[1]) <= 2] = 2
    noise = chance.normal(scale=0.1, size=(RECORDS, 16, 16, 3))
    return np.where(masks, 0.7, 0.3).astype("f4") + noise.astype("f4"), masks


def data(split: str) -> Any:
    return edl.arrays(*arrays(seed=0 if split == "train" else 1))
