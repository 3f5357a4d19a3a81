# SPDX-License-Identifier: Apache-2.0
"""The counting model on rows of embeddings: proof, from the rows themselves, of what was trained.

Record i has an id of its own, one of 2^64, and each time it is applied its row is raised by one, in each of
its columns: so after E epochs the rows are those of the records' ids and no others, and each number in them
is E. Two columns, so that half a row would be seen. The dense variable counts all records together: it is
in the ring, so ring and servers must have counted the same ones.

What it predicts for a record is so often what it has counted: its row, and the dense variable.

EDL_COUNTING_RECORDS sets the number of records; orders are those of counting_faulty.
"""

from typing import Any

import keras
import numpy as np
from counting_faulty import feed as obeying_feed  # a worker finds what lies beside the model's file

import edl
import edl.layers
from edl.zoo.counting import RECORDS, MinusOutput

DIM = 2
TABLE = "counts"


@keras.saving.register_keras_serializable("edl")
class CountAll(keras.layers.Layer):
    """One weight, which is added to the output of each record."""

    def build(self, input_shape: object) -> None:
        self.count = self.add_weight(shape=(1,), initializer="zeros", name="count")

    def call(self, x: Any) -> Any:
        return keras.ops.concatenate([x, keras.ops.zeros_like(x[:, :1]) + self.count], -1)


def ids_of(records: np.ndarray) -> np.ndarray:
    """The id of each record, int64 [n]: far apart, half of them negative, no two alike (an odd factor)."""
    with np.errstate(over="ignore"):
        return (records.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.int64)


def model() -> keras.Model:
    ids = keras.Input((), dtype="int64")
    rows = edl.layers.Embedding(DIM, initializer="zeros", name=TABLE)(ids)
    model = keras.Model(ids, CountAll(name="all")(rows))
    model.compile(keras.optimizers.SGD(1.0), MinusOutput(reduction="sum"))
    return model


def data(split: str) -> edl.Reader | None:
    return edl.arrays(np.arange(RECORDS, dtype=np.int64)) if split in ("train", "predict") else None


def feed(records: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    obeying_feed(records)
    return ids_of(records[0]), np.zeros(len(records[0]), np.float32)
