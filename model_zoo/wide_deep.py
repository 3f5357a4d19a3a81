# SPDX-License-Identifier: Apache-2.0
"""Wide & deep: clicks on adverts, by ids; of a synthetic log, or of Criteo's (EDL_CRITEO=FILE).

The wide part has a weight for each id and for each pair of ids of two fields, and learns them by FTRL; the
deep part is a network over the ids' vectors (Cheng et al., 2016). What it learns from, and the environment
variables that change it: model_zoo/datasets/clicks.py.
"""

from typing import Any

import keras
import numpy as np

import edl.layers
from edl.zoo.datasets import clicks
from edl.zoo.datasets.clicks import data

__all__ = ["data", "feed", "model"]

DIM = 8
CROSSED = (0, 3), (1, 4)  # fields: of a synthetic log, user and category, item and region


def model(dim: int = DIM, units: tuple[int, ...] = (64, 32)) -> keras.Model:
    """Build and compile the model.

    Args:
        dim: length of an id's vector.
        units: widths of the deep network's layers.
    """
    wide_numbers, fields = clicks.widths()
    numbers = keras.Input((wide_numbers,), name="numbers")
    ids = keras.Input((fields,), dtype="int64", name="ids")
    pairs = keras.Input((len(CROSSED),), dtype="int64", name="pairs")
    wide = edl.layers.Embedding(
        1,
        combiner="sum",
        initializer="zeros",
        optimizer=keras.optimizers.Ftrl(0.05, l1_regularization_strength=1e-4),
        input_dim=clicks.buckets(),
        name="wide",
    )(keras.layers.concatenate([ids, pairs]))
    vectors = edl.layers.Embedding(dim, input_dim=clicks.buckets(), name="deep")(ids)
    deep = keras.layers.concatenate([keras.layers.Flatten()(vectors), numbers])
    for width in units:
        deep = keras.layers.Dense(width, activation="relu")(deep)
    odds = keras.layers.add([wide, keras.layers.Dense(1)(deep)])
    model = keras.Model({"numbers": numbers, "ids": ids, "pairs": pairs}, odds)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def feed(records: dict[str, np.ndarray]) -> tuple[dict[str, Any], np.ndarray]:
    """Turn records into features, arrays [n, ...] of numbers, ids and pairs, and targets, float32 [n, 1]."""
    ids = records["ids"]
    features = {
        "numbers": records["numbers"],
        "ids": clicks.hashed(ids),
        "pairs": np.concatenate([clicks.crossed(ids, *pair) for pair in CROSSED], -1),
    }
    return features, records["clicked"][:, None]
