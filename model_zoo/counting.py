# SPDX-License-Identifier: Apache-2.0
"""A model whose weights count: proof, from the weights themselves, of what was trained.

Weight i is raised by one each time record i is applied. So after a job of E epochs every
weight must be exactly E, with any faults of the workers; and a weight that is not names
the record that was lost or counted twice. float32 counts exactly up to 2^24.

EDL_COUNTING_RECORDS sets the number of records, EDL_COUNTING_SLEEP seconds of work per batch.
"""

import os
import time

import keras
import numpy as np

import edl

RECORDS = int(os.environ.get("EDL_COUNTING_RECORDS", "20000"))
SLEEP = float(os.environ.get("EDL_COUNTING_SLEEP", "0"))


@keras.saving.register_keras_serializable("edl")
class Count(keras.layers.Layer):
    """One weight per record; the output of a record is its weight."""

    def __init__(self, records: int, **kwargs: object):
        super().__init__(**kwargs)
        self.records = records

    def build(self, input_shape: object) -> None:
        self.count = self.add_weight(shape=(self.records,), initializer="zeros", name="count")

    def call(self, record: object) -> object:
        return keras.ops.take(self.count, record)

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "records": self.records}


@keras.saving.register_keras_serializable("edl")
class MinusOutput(keras.losses.Loss):
    """A loss whose gradient is -1 for each record of the batch, so that SGD adds one."""

    def call(self, _: object, output: object) -> object:
        return keras.ops.negative(output)


def model() -> keras.Model:
    """Build and compile the model: its input is a record's number, int32 [batch]."""
    record = keras.Input((), dtype="int32")
    model = keras.Model(record, Count(max(RECORDS, 1))(record))
    model.compile(
        optimizer=keras.optimizers.SGD(1.0),
        loss=MinusOutput(reduction="sum"),
    )
    return model


def data(split: str) -> edl.Reader | None:
    """Return the records 0, 1, ... for training; nothing is held out."""
    records = np.arange(RECORDS, dtype=np.int32)
    return edl.arrays(records) if split == "train" else None


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Turn a batch into the records' numbers, int32 [n], and targets, float32 [n], which the loss ignores."""
    if SLEEP:
        time.sleep(SLEEP)
    return records[0], np.zeros(len(records[0]), np.float32)
