# SPDX-License-Identifier: Apache-2.0
"""A model file of a test: BatchNormalization over the whole ring in steps that run as plain Python."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import edl


def model() -> keras.Model:
    layers = [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.Dense(1),
    ]
    made = keras.Sequential([keras.Input((3,)), *layers])
    made.compile("sgd", "mse", run_eagerly=True)
    return made


def data(split: str) -> Any:
    x = np.random.default_rng(0).normal(size=(48, 3)).astype("f4")
    return edl.arrays(x, x.sum(1, keepdims=True))
