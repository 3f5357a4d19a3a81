# SPDX-License-Identifier: Apache-2.0
"""A forecast of a time series, from its past and from what is known of the future: hour and weekday."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

HOURS, PAST, FUTURE = 4_000, 48, 24


def series() -> tuple[np.ndarray, np.ndarray]:
    """Made demand, float32 [hours], and its calendar, float32 [hours, 4]: weekends are low, and nights."""
    hour = np.arange(HOURS)
    weekend = (hour // 24 % 7) >= 5
    day = np.sin(2 * np.pi * hour / 24)
    noise = np.random.default_rng(0).normal(scale=0.1, size=HOURS)
    demand = day * np.where(weekend, 0.3, 1.0) - 0.5 * weekend + noise
    week = 2 * np.pi * hour / 168
    calendar = np.stack([day, np.cos(2 * np.pi * hour / 24), np.sin(week), np.cos(week)], axis=1)
    return demand.astype("float32"), calendar.astype("float32")


def data(split: str) -> Any:
    """Windows over the series. The last fifth is held out, because neighbouring windows share hours."""
    demand, calendar = series()
    border = HOURS * 4 // 5
    part = slice(0, border) if split == "train" else slice(border, HOURS)
    windows = np.lib.stride_tricks.sliding_window_view(demand[part], PAST + FUTURE)
    known = np.lib.stride_tricks.sliding_window_view(calendar[part], PAST + FUTURE, axis=0)
    inputs = {"past": windows[:, :PAST].copy(), "known": known[:, :, PAST:].reshape(len(known), -1).copy()}
    return inputs, windows[:, PAST:].copy()


def model() -> keras.Model:
    past, known = keras.Input((PAST,), name="past"), keras.Input((4 * FUTURE,), name="known")
    x = layers.Dense(64, activation="relu")(layers.Concatenate()([past, known]))
    made = keras.Model([past, known], layers.Dense(FUTURE)(x))
    made.compile(optimizer=keras.optimizers.Adam(0.003), loss="mse", metrics=["mae"])
    return made
