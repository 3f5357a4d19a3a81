# SPDX-License-Identifier: Apache-2.0
"""DCN-v2: clicks on adverts, by ids; of a synthetic log, or of Criteo's (EDL_CRITEO=FILE).

Cross layers multiply the features with each other, once more in each layer, and a network follows (Wang et
al., 2021). What it learns from, and the environment variables that change it: model_zoo/datasets/clicks.py.
"""

from typing import Any

import keras
import numpy as np

import edl.layers
from edl.zoo.datasets import clicks
from edl.zoo.datasets.clicks import data

__all__ = ["data", "feed", "model"]

DIM = 8


def model(dim: int = DIM, crosses: int = 2, units: tuple[int, ...] = (64, 32)) -> keras.Model:
    """Build and compile the model.

    Args:
        dim: length of an id's vector.
        crosses: number of cross layers.
        units: widths of the deep network's layers.
    """
    wide_numbers, fields = clicks.widths()
    numbers = keras.Input((wide_numbers,), name="numbers")
    ids = keras.Input((fields,), dtype="int64", name="ids")
    vectors = edl.layers.Embedding(dim, input_dim=clicks.buckets(), name="vectors")(ids)
    features = keras.layers.concatenate([keras.layers.Flatten()(vectors), numbers])
    x = features
    for _ in range(crosses):
        x = keras.layers.add(
            [keras.layers.multiply([features, keras.layers.Dense(features.shape[-1])(x)]), x]
        )
    for width in units:
        x = keras.layers.Dense(width, activation="relu")(x)
    model = keras.Model({"numbers": numbers, "ids": ids}, keras.layers.Dense(1)(x))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def feed(records: dict[str, np.ndarray]) -> tuple[dict[str, Any], np.ndarray]:
    """Turn records into features, ids int64 [n, fields] among them, and targets, float32 [n, 1]."""
    features = {"numbers": records["numbers"], "ids": clicks.hashed(records["ids"])}
    return features, records["clicked"][:, None]
