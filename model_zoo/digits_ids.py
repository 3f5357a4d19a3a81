# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits as ids: each shade of each pixel of scikit-learn's 1,797 real images is one.

A pixel has 17 shades, so an image is 64 ids of 1,088: which pixel, and how dark it is.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import edl.layers

PIXELS, SHADES = 64, 17


def model() -> keras.Model:
    """Build and compile a network over the ids of an image's pixels, int64 [batch, 64]."""
    ids = keras.Input((PIXELS,), dtype="int64")
    x = edl.layers.Embedding(32, combiner="sum", input_dim=PIXELS * SHADES, name="pixels")(ids)
    x = keras.layers.Dense(64, activation="relu")(x)
    model = keras.Model(ids, keras.layers.Dense(10)(x))
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data(split: str) -> edl.Reader:
    """Return ids, int64 [n, 64], one for each pixel and shade, and labels, int64 [n]. A fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    ids = np.arange(PIXELS) * SHADES + images.astype(np.int64)
    chosen = np.random.default_rng(0).permutation(len(labels))
    held_out = len(labels) // 5
    chosen = chosen[held_out:] if split == "train" else chosen[:held_out]
    return edl.arrays(ids[chosen], labels[chosen])
