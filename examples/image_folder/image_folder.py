# SPDX-License-Identifier: Apache-2.0
"""A classifier of images in one folder for each class, with augmentation on the workers."""

from __future__ import annotations

import os
from typing import Any

import keras
from keras import layers

import edl

FOLDER = os.environ.get("IMAGES", "images")


def data(split: str) -> Any:
    return edl.split(edl.images(FOLDER, channels=1), validation=0.2, seed=1)[split]


def model() -> keras.Model:
    made = keras.Sequential(
        [
            keras.Input((None, None, 1)),
            layers.Rescaling(1 / 255),
            layers.RandomRotation(0.03, seed=1),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return made
