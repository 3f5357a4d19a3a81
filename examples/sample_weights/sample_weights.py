# SPDX-License-Identifier: Apache-2.0
"""Sample weights: one record in fifty is positive, and counts fifty times as much in the loss."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

RECORDS, FEATURES, SHARE = 10_000, 8, 0.02


def data(split: str) -> Any:
    """Return features, labels and, for training only, weights."""
    chance = np.random.default_rng(0)
    labels = (chance.uniform(size=RECORDS) < SHARE).astype("float32")
    features = chance.normal(size=(RECORDS, FEATURES)).astype("float32")
    features[:, 0] += 2 * labels
    weights = np.where(labels == 1, 1 / SHARE, 1).astype("float32")
    border = RECORDS * 4 // 5
    if split == "train":
        return features[:border], labels[:border], weights[:border]
    return features[border:], labels[border:]


def model() -> keras.Model:
    hidden = layers.Dense(16, activation="relu")
    made = keras.Sequential([keras.Input((FEATURES,)), hidden, layers.Dense(1, activation="sigmoid")])
    metrics = [keras.metrics.Recall(name="recall"), keras.metrics.AUC(name="auc")]
    made.compile(optimizer=keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=metrics)
    return made
