"""A counting model of several weights that a ring sums one by one, and that must agree in the end.

So a step is several collectives, and most of its time is spent between the first and the last of them. Their
gradients are one and the same: what TensorFlow might take for one sum must be as many as the ranks expect.
"""

import keras
from counting_faulty import data, feed  # a worker finds what lies beside the model's file

from model_zoo.counting import RECORDS, Count, MinusOutput

__all__ = ["data", "feed", "model"]

COUNTS = 6


def model() -> keras.Model:
    record = keras.Input((), dtype="int32")
    counts = [Count(max(RECORDS, 1), name=f"count_{i}")(record) for i in range(COUNTS)]
    model = keras.Model(record, keras.layers.Add()(counts))
    model.compile(keras.optimizers.SGD(1.0), MinusOutput(reduction="sum"))
    return model
