# SPDX-License-Identifier: Apache-2.0
"""A forecast: the next hours of a series from the hours before."""

import keras
import numpy as np

PAST, FUTURE = 72, 12  # hours


def series(hours: int = 6_000) -> np.ndarray:
    """Make a series, float32 [hours]: days, weeks and noise. Replace it by yours."""
    hour, rng = np.arange(hours), np.random.default_rng(0)
    day, week = np.sin(2 * np.pi * hour / 24), np.sin(2 * np.pi * hour / 168)
    return (day + 0.5 * week + rng.normal(scale=0.1, size=hours)).astype("float32")


def model() -> keras.Model:
    """Build and compile the model: two dilated convolutions over the past."""
    model = keras.Sequential(
        [
            keras.Input((PAST, 1)),
            keras.layers.Conv1D(16, 5, dilation_rate=2, activation="relu"),
            keras.layers.Conv1D(16, 5, dilation_rate=4, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(FUTURE),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss="mse", metrics=["mae"])
    return model


def data(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pasts, float32 [records, 72, 1], and futures, float32 [records, 12].

    The last tenth of the series is held out: a record must not be between those that are trained on.
    """
    values = series()
    border = len(values) * 9 // 10
    values = values[:border] if split == "train" else values[border:]
    windows = np.lib.stride_tricks.sliding_window_view(values, PAST + FUTURE)
    return windows[:, :PAST, None].copy(), windows[:, PAST:].copy()
