# SPDX-License-Identifier: Apache-2.0
"""A counting model with further weights whose sums are rounded, and which depend on random numbers."""

import keras
from counting_faulty import data, feed  # a worker finds what lies beside the model's file

from edl.zoo.counting import RECORDS, Count, MinusOutput

__all__ = ["data", "feed", "model"]


def model() -> keras.Model:
    record = keras.Input((), dtype="int32")
    x = keras.layers.Embedding(RECORDS, 8)(record)  # a large gradient, from 2,048 records on
    x = keras.layers.Dropout(0.2)(keras.layers.Dense(16, "tanh", use_bias=False)(x))
    x = keras.ops.sin(keras.layers.Dense(1, use_bias=False)(x))  # never flat, so that every step rounds
    small = keras.ops.multiply(keras.ops.reshape(x, (-1,)), 0.01)
    model = keras.Model(record, keras.layers.Add()([Count(RECORDS)(record), small]))
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss=MinusOutput(reduction="sum"))
    return model
