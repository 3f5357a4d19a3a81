# SPDX-License-Identifier: Apache-2.0
"""The counting model with a second, unused weight. On order, one of its bits flips in one worker's memory.

An order is a file `flip` in the directory EDL_FAULTS: the first worker that takes it flips a bit, once. The
counts stay as they are, so that the weights of the others still say whether a record was lost.

The first worker that takes the order `other` builds a different model, with an environment variable that no
other worker has.
"""

import os
from pathlib import Path
from typing import Any

import keras
from counting_faulty import feed as wait_and_obey

from edl.zoo import counting
from edl.zoo.counting import data

__all__ = ["data", "feed", "model"]

built: list[Any] = []  # the weights of this process's models: one of them is trained, others are tried out


@keras.saving.register_keras_serializable("edl_tests")
class Beside(keras.layers.Layer):
    """Hands on what it is given, and has a weight that no gradient reaches."""

    def build(self, input_shape: Any) -> None:
        self.memory = self.add_weight(shape=(8, 8), initializer="ones", name="memory", trainable=False)
        built.append(self.memory)

    def call(self, inputs: Any) -> Any:
        return inputs * float(os.environ.get("EDL_TEST_SCALE", "1"))


def model() -> keras.Model:
    if taken("other"):
        os.environ["EDL_TEST_SCALE"] = "1.5"
    record = keras.Input((), dtype="int32")
    made = keras.Model(record, Beside()(counting.Count(max(counting.RECORDS, 1))(record)))
    made.compile(keras.optimizers.SGD(1.0), loss=counting.MinusOutput(reduction="sum"))
    return made


def feed(records: Any) -> Any:
    if not taken("flip"):
        return wait_and_obey(records)
    for memory in built:
        values = memory.numpy().copy()
        values.view("uint32")[2, 1] ^= 1 << 3
        memory.assign(values)
    return wait_and_obey(records)


def taken(name: str) -> bool:
    """Whether there is an order of this name that no other process has taken."""
    order = Path(os.environ.get("EDL_FAULTS", ".")) / name
    try:
        order.rename(order.with_name(f"{name}-{os.getpid()}"))
    except FileNotFoundError:
        return False
    return True
