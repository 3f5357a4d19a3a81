# SPDX-License-Identifier: Apache-2.0
"""A counting model whose steps also sum a large weight, so that a fault hits a worker in the middle of a sum.

Each record raises each element of the large weight by one. So after E epochs of R records all elements must
be R * E, and a sum that was cut or made of other steps shows. EDL_COUNTING_LARGE sets its number of elements.
"""

import os

import keras
from counting_faulty import data, feed  # a worker finds what lies beside the model's file

from edl.zoo.counting import RECORDS, Count, MinusOutput

__all__ = ["data", "feed", "model"]

ELEMENTS = int(os.environ.get("EDL_COUNTING_LARGE", "25000000"))


@keras.saving.register_keras_serializable("edl")
class Large(keras.layers.Layer):
    """Adds the sum of a weight to its input, so each record has the gradient -1 for each element."""

    def __init__(self, elements: int, **kwargs: object):
        super().__init__(**kwargs)
        self.elements = elements

    def build(self, input_shape: object) -> None:
        self.large = self.add_weight(shape=(self.elements,), initializer="zeros", name="large")

    def call(self, x: object) -> object:
        return x + keras.ops.sum(self.large)

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "elements": self.elements}


def model() -> keras.Model:
    record = keras.Input((), dtype="int32")
    model = keras.Model(record, Large(ELEMENTS)(Count(max(RECORDS, 1))(record)))
    model.compile(keras.optimizers.SGD(1.0), MinusOutput(reduction="sum"))
    return model
