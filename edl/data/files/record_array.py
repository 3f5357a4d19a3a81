# SPDX-License-Identifier: Apache-2.0
"""Arrays in files, read by range: records of one type and shape, one after the other.

They are read and not memory-mapped: a file that becomes shorter would kill a process that maps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.data.files.addresses import File
from edl.data.files.joined import Joined, span
from edl.errors import DataError


class RecordArray:
    """An array in a file.

    Args:
        begin: the byte at which the first record begins.
        dtype: of the values.
        shape: [records, ...], in C order.

    Raises:
        DataError: the file is shorter than the array.
    """

    def __init__(self, file: File, begin: int, dtype: np.dtype, shape: Sequence[int]):
        self.file, self._begin, self.dtype = file, begin, dtype
        self.records, self.shape = int(shape[0]), tuple(int(n) for n in shape[1:])
        self._size = int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize  # bytes of a record
        if (end := begin + self.records * self._size) > file.size:
            there = max(file.size - begin, 0) // max(self._size, 1)
            raise DataError(
                f"{file.name}: record {there} is torn: the file ends at byte {file.size}; expected {end} "
                f"bytes for {self.records} records"
            )

    @property
    def kind(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    def read(self, start: int, stop: int) -> np.ndarray:
        data = self.file.read(*self._bytes(start, stop), span(start, stop)) if start < stop else b""
        return self._array(data, max(stop - start, 0))

    def take(self, indices: np.ndarray) -> np.ndarray:
        wanted, back = np.unique(indices, return_inverse=True)
        pieces = []
        with self.file.open(f"{len(wanted)} records from record {wanted[0]}") as opened:
            for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
                pieces.append(opened.read_at(*self._bytes(int(run[0]), int(run[-1]) + 1)))
        found: np.ndarray = self._array(b"".join(pieces), len(wanted))[back]
        return found

    def _bytes(self, start: int, stop: int) -> tuple[int, int]:
        return self._begin + start * self._size, self._begin + stop * self._size

    def _array(self, data: bytes, count: int) -> np.ndarray:
        array = np.frombuffer(data, self.dtype).reshape(count, *self.shape)
        return array.astype(self.dtype.newbyteorder("="), copy=False)


def joined(arrays: Sequence[Any]) -> Joined:
    """One reader over arrays of one type and shape, each with `records`, `kind`, `read` and `take`.

    Raises:
        DataError: an array differs from the first.
    """
    for other in arrays[1:]:
        if other.kind != arrays[0].kind:
            raise DataError(
                f"{other.file.name}: records are {other.kind}, and {arrays[0].kind} in "
                f"{arrays[0].file.name}; all files must have records of one type and shape"
            )
    is_near = all(array.file.is_local for array in arrays)
    return Joined(
        [array.records for array in arrays],
        lambda nth, start, stop: arrays[nth].read(start, stop),
        (lambda nth, indices: arrays[nth].take(indices)) if is_near else None,
        names=[array.file.name for array in arrays],
    )
