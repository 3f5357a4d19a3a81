# SPDX-License-Identifier: Apache-2.0
"""Made images whose brightness is their label, and a convolutional model of them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

SIDE, RECORDS = 6, 512  # the smallest side, in pixels, for two convolutions and a pool


def dataset(batch: int = 64) -> tf.data.Dataset:
    """Endless batches: images, float32 [batch, SIDE, SIDE, 1], and their classes, int64 [batch]."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, RECORDS)
    images = labels[:, None, None, None] / 10 + generator.uniform(0, 0.02, (RECORDS, SIDE, SIDE, 1))
    made = tf.data.Dataset.from_tensor_slices((images.astype("float32"), labels))
    return made.repeat().shuffle(RECORDS).batch(batch)


def model() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Conv2D(8, 3, activation="relu"),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(pool_size=2),
            layers.Dropout(0.1),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )


def choose_gpu(local_rank: int) -> None:
    """Give this process one GPU, if there are any, as scripts of Horovod do."""
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[local_rank], "GPU")
