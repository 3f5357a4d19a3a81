# SPDX-License-Identifier: Apache-2.0
"""A classifier of images: which way stripes run."""

import keras
import numpy as np

SIZE, CLASSES = 32, 4


def model() -> keras.Model:
    """Build and compile a small convolutional network; shifts vary the images it trains on."""
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            keras.layers.RandomTranslation(0.1, 0.1, fill_mode="wrap"),
            keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images, float32 [records, 32, 32, 1], and labels, int64 [records].

    With files, return a reader instead: `edl.images("photos")`, a folder for each class.
    """
    rng = np.random.default_rng(0 if split == "train" else 1)
    labels = rng.integers(0, CLASSES, 2_000 if split == "train" else 400)
    angle = (labels * np.pi / CLASSES)[:, None, None]
    phase = rng.uniform(0, 2 * np.pi, len(labels))[:, None, None]
    y, x = np.mgrid[:SIZE, :SIZE]
    waves = np.sin((x * np.cos(angle) + y * np.sin(angle)) + phase)
    noise = rng.normal(scale=0.3, size=waves.shape)
    return (waves + noise).astype("float32")[..., None], labels
