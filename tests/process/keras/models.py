# SPDX-License-Identifier: Apache-2.0
"""Small models and data that many cases share."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

RECORDS = 30
chance = np.random.default_rng(0)
X = chance.normal(size=(RECORDS, 4)).astype("f4")
Y = chance.normal(size=(RECORDS, 2)).astype("f4")
CLASSES = chance.integers(0, 3, RECORDS)
WEIGHTS = np.linspace(0.1, 2, RECORDS).astype("f4")
TOKENS = np.where(np.arange(6) < chance.integers(1, 7, (RECORDS, 1)), chance.integers(1, 9, (RECORDS, 6)), 0)
TAGS = chance.integers(0, 3, (RECORDS, 6))


def plain() -> tuple[Any, Any, Any]:
    return X, Y, None


def weighted() -> tuple[Any, Any, Any]:
    return X, Y, WEIGHTS


def classes() -> tuple[Any, Any, Any]:
    return X, CLASSES, None


def tagged() -> tuple[Any, Any, Any]:
    return TOKENS, TAGS, None


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, **options)


def dense(
    optimizer: Any = None, loss: Any = "mse", outputs: int = 2, layers: Any = (), **compiled: Any
) -> keras.Model:
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((4,))
    x = keras.layers.Dense(8, activation="tanh")(x)
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(outputs)(x))
    model.compile(optimizer or sgd(), loss=loss, **compiled)
    return model


def by_weights() -> keras.losses.Loss:
    """A mean that is divided by the weights of the whole batch."""
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def tagger(loss: Any = None, optimizer: Any = None, mask: bool = True, **compiled: Any) -> keras.Model:
    """A class for each token of a padded text."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, 5, mask_zero=mask)(inputs)
    x = keras.layers.LSTM(4, return_sequences=True)(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or sgd(), loss=loss, **compiled)
    return model
