# SPDX-License-Identifier: Apache-2.0
"""Dense variables as rows of a table (mode=ps): one variable after the other, each in whole rows.

So servers keep, train, log and write them as they do the rows of embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.trainer.model.graphs import compiled

DIM = 256


class DenseRows:
    """Dense variables as rows of a table.

    Args:
        variables: float32.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self.variables = tuple(variables)
        self._sizes = [int(math.prod(v.shape)) for v in variables]
        counts = [-(-size // DIM) for size in self._sizes]
        self._begins = np.concatenate([[0], np.cumsum(counts)]).astype(int).tolist()
        self._puts: dict[tuple[int, ...], Callable[[Any], Any]] = {}

    @property
    def ids(self) -> np.ndarray:
        """The ids of all rows."""
        return np.arange(self._begins[-1], dtype=np.int64)

    def ids_of(self, places: Sequence[int]) -> np.ndarray:
        """The ids of the rows of these variables, by their indexes."""
        ranges = [np.arange(self._begins[p], self._begins[p + 1], dtype=np.int64) for p in places]
        return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)

    def place(self, variable: keras.Variable) -> int:
        """The index of a variable."""
        return next(place for place, v in enumerate(self.variables) if v is variable)

    def value(self, place: int) -> np.ndarray:
        """The present value of a variable, by its index."""
        found: np.ndarray = self.variables[place].value.numpy()
        return found

    def values(self) -> np.ndarray:
        """All rows as the variables are now, float32 [n, DIM]."""
        return self.packed({place: self.value(place) for place in range(len(self.variables))})

    def packed(self, values: Mapping[int, np.ndarray]) -> np.ndarray:
        """The rows of `ids_of` these places, in their order, with these values of the variables."""
        counts = {place: self._begins[place + 1] - self._begins[place] for place in values}
        found = np.zeros(sum(counts.values()) * DIM, np.float32)
        at = 0
        for place, value in values.items():
            found[at : at + self._sizes[place]] = value.reshape(-1)
            at += counts[place] * DIM
        return found.reshape(-1, DIM)

    def put(self, places: Sequence[int], rows: np.ndarray) -> None:
        """Give these variables the values of their rows."""
        key = tuple(places)
        if not key:
            return
        if key not in self._puts:
            self._puts[key] = compiled(
                lambda rows: self._put_graph(key, rows), tf.TensorSpec([None, DIM], tf.float32)
            )
        self._puts[key](rows)

    def _put_graph(self, places: Sequence[int], rows: tf.Tensor) -> None:
        flat, at = tf.reshape(rows, [-1]), 0
        for place in places:
            variable = self.variables[place]
            variable.assign(tf.reshape(flat[at : at + self._sizes[place]], variable.shape))
            at += (self._begins[place + 1] - self._begins[place]) * DIM
