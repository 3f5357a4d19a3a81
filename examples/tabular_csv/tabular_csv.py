# SPDX-License-Identifier: Apache-2.0
"""A regression on a CSV file whose columns are chosen by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

import edl

FEATURES = ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6")


def table() -> Any:
    """Open the table: ten features, float32, and the label."""
    file = Path(__file__).with_name("diabetes.csv")
    return edl.csv(file, features=FEATURES, label="progression", dtype="float32")


def data(split: str) -> Any:
    return edl.split(table(), validation=0.2, seed=1)[split]


def model() -> keras.Model:
    features, _ = table().read(0, len(table()))
    scale = keras.layers.Normalization()
    scale.adapt(features)  # equal on all workers, because each reads the whole table
    made = keras.Sequential(
        [
            keras.Input((len(FEATURES),)),
            scale,
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
            keras.layers.Rescaling(75.0, offset=150.0),  # to the mean and the spread of the label
        ]
    )
    made.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return made
