# SPDX-License-Identifier: Apache-2.0
"""Features, labels and weights from readers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.data.base import RandomAccess, Reader
from edl.data.place import place
from edl.errors import DataError


class Zipped:
    """A reader whose records are (features, labels[, weights]), each from a reader of its own."""

    def __init__(self, readers: Sequence[Reader]):
        self._readers = readers
        near = [reader for reader in readers if isinstance(reader, RandomAccess)]
        if len(near) == len(readers):
            self.take = lambda indices: tuple(reader.take(indices) for reader in near)

    def __len__(self) -> int:
        return len(self._readers[0])

    def place(self, index: int) -> str:
        return place(self._readers[0], index)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Return the records [start, stop) of each reader."""
        return tuple(reader.read(start, stop) for reader in self._readers)


def zipped(readers: Sequence[Reader | None], source: str) -> Reader:
    """A reader over features, labels and weights: the features alone if there is nothing else.

    Raises:
        DataError: weights without labels, or other numbers of records.
    """
    names = ("features", "labels", "weights")
    features, labels, weights = readers
    assert features is not None
    if labels is None and weights is not None:
        raise DataError(f"{source}: weight is given without label")
    given: list[Any] = [reader for reader in readers if reader is not None]
    for name, reader in zip(names, given, strict=False):
        if len(reader) != len(features):
            raise DataError(
                f"{source}: there are {len(features)} records of features and {len(reader)} of {name}"
            )
    return features if len(given) == 1 else Zipped(given)
