# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits as ids that are not counted in advance: the rows of a training can only be on servers.

Some ids of the records for validation, no training has seen; those of "test" it has.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import edl
import edl.layers

PIXELS, SHADES, UNKNOWN = 64, 17, 7


def model() -> keras.Model:
    ids = keras.Input((PIXELS,), dtype="int64")
    x = edl.layers.Embedding(8, combiner="mean", name="pixels")(ids)
    model = keras.Model(ids, keras.layers.Dense(10)(x))
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def records(split: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    ids = (np.arange(PIXELS) * SHADES + images.astype(np.int64)) * (1 << 40)
    if split == "train":
        return ids[:1000], labels[:1000]
    if split == "test":
        known = 1000 + np.flatnonzero(np.isin(ids[1000:], ids[:1000]).all(1))
        return ids[known], labels[known]
    ids[:, :UNKNOWN] += 1
    return ids[1000:], labels[1000:]


def data(split: str) -> edl.Reader:
    return edl.arrays(*records(split))
