# SPDX-License-Identifier: Apache-2.0
"""A reader over Keras' PyDataset, whose batches are split into records."""

from __future__ import annotations

from typing import Any

from edl.data.exact import concatenated
from edl.data.nest import leaves, map_leaves
from edl.data.objects.in_memory import as_in_fit
from edl.errors import DataError

KEPT = 2  # batches in memory: a part of a step may end within a batch


class Batched:
    """A reader over a `keras.utils.PyDataset`.

    Record i is in batch i // size. All batches must have the size of the first; only the last may be smaller.
    A batch must be the same each time that it is read, since several workers may read it.
    `on_epoch_end` is not called: the job shuffles records itself.

    Args:
        batches: the dataset.
        source: its name, for messages.

    Raises:
        DataError: the number of batches is not known, or a batch has no records.
    """

    def __init__(self, batches: Any, source: str):
        self._batches, self._source = batches, source
        try:
            count = len(batches)
        except (TypeError, NotImplementedError, ValueError) as error:
            raise DataError(
                f"{source}: the PyDataset does not know its number of batches: {error}"
            ) from error
        self._kept: dict[int, Any] = {}
        self.records_per_read = 1
        self._length = self._count = 0
        if count:
            self._count = count
            self.records_per_read = _records(self._at(0), f"{source}: batch 0")
            last = _records(self._at(count - 1), f"{source}: batch {count - 1}")
            self._length = (count - 1) * self.records_per_read + last

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop) in the structure of a batch.

        Raises:
            DataError: a batch has a different number of records than the first, or arrays of another kind.
        """
        size = self.records_per_read
        first, last = start // size, (stop - 1) // size
        pieces = []
        for number in range(first, last + 1):
            batch, begin = self._batch(number), number * size
            here = slice(max(start - begin, 0), stop - begin)
            pieces.append(map_leaves(lambda array, here=here: array[here], batch))
        try:
            return pieces[0] if len(pieces) == 1 else map_leaves(concatenated, *pieces)
        except ValueError as error:
            raise DataError(
                f"{self._source}: batches {first} to {last} do not go together: {error}"
            ) from error

    def _batch(self, number: int) -> Any:
        batch = self._at(number)
        expected = min(self.records_per_read, self._length - number * self.records_per_read)
        if (found := _records(batch, f"{self._source}: batch {number}")) != expected:
            raise DataError(
                f"{self._source}: batch {number} has {found} records; expected {expected}, as batch 0 has "
                f"{self.records_per_read} (only the last batch may have fewer)"
            )
        return batch

    def _at(self, number: int) -> Any:
        if number in self._kept:
            self._kept[number] = self._kept.pop(number)  # the newest
            return self._kept[number]
        batch = as_in_fit(self._batches[number], f"{self._source}: batch {number}")
        while len(self._kept) >= KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[number] = batch
        return batch


def _records(batch: Any, source: str) -> int:
    lengths = {path: len(array) if array.shape else 0 for path, array in leaves(batch)}
    if len(set(lengths.values())) != 1 or not next(iter(lengths.values()), 0):
        raise DataError(f"{source} must have arrays of one length, at least 1; it has {lengths or 'none'}")
    return next(iter(lengths.values()))
