# SPDX-License-Identifier: Apache-2.0
"""A model with one record whose loss is not finite."""

import os

import keras
import numpy as np

import edl

RECORDS = int(os.environ["EDL_COUNTING_RECORDS"])


def model() -> keras.Model:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")
    return model


def data(split: str) -> edl.Reader | None:
    x = np.linspace(0, 1, RECORDS, dtype=np.float32)[:, None]
    x[123] = np.inf
    return edl.arrays(x, np.ones_like(x)) if split == "train" else None
