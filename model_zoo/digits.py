# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits, 8x8 pixels: 1,797 real images that come with scikit-learn."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import edl


def model() -> keras.Model:
    """Build and compile a small convolutional network for images, float32 [batch, 8, 8, 1], of ten digits."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.4),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data(split: str) -> edl.Reader:
    """Return images, float32 [n, 8, 8, 1] from 0 to 1, and labels, int64 [n]. A fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    chosen = np.random.default_rng(0).permutation(len(labels))
    held_out = len(labels) // 5
    chosen = chosen[held_out:] if split == "train" else chosen[:held_out]
    return edl.arrays(images[chosen], labels[chosen])
