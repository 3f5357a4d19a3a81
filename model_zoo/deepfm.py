# SPDX-License-Identifier: Apache-2.0
"""DeepFM: clicks on adverts, by ids; of a synthetic log, or of Criteo's (EDL_CRITEO=FILE).

A factorization machine and a network share the vectors of the ids (Guo et al., 2017). What it learns from,
and the environment variables that change it: model_zoo/datasets/clicks.py.
"""

from typing import Any

import keras
import numpy as np

import edl.layers
from edl.zoo.datasets import clicks
from edl.zoo.datasets.clicks import data

__all__ = ["data", "feed", "model"]

DIM = 8


def model(dim: int = DIM, units: tuple[int, ...] = (64, 32)) -> keras.Model:
    """Build and compile the model.

    Args:
        dim: length of an id's vector.
        units: widths of the deep network's layers.
    """
    wide_numbers, fields = clicks.widths()
    numbers = keras.Input((wide_numbers,), name="numbers")
    ids = keras.Input((fields,), dtype="int64", name="ids")
    weights = edl.layers.Embedding(
        1, combiner="sum", initializer="zeros", input_dim=clicks.buckets(), name="weights"
    )(ids)
    vectors = edl.layers.Embedding(dim, input_dim=clicks.buckets(), name="vectors")(ids)
    # All products of two different vectors: half of (the square of the sum less the sum of the squares).
    squares = keras.ops.sum(vectors, 1) ** 2 - keras.ops.sum(vectors**2, 1)
    products = 0.5 * keras.ops.sum(squares, -1, keepdims=True)
    deep = keras.layers.concatenate([keras.layers.Flatten()(vectors), numbers])
    for width in units:
        deep = keras.layers.Dense(width, activation="relu")(deep)
    odds = keras.layers.add(
        [weights, products, keras.layers.Dense(1, use_bias=False)(numbers), keras.layers.Dense(1)(deep)]
    )
    model = keras.Model({"numbers": numbers, "ids": ids}, odds)
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
