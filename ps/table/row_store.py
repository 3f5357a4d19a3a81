# SPDX-License-Identifier: Apache-2.0
"""Ids with their rows, in flat arrays that grow in place, and an index of the ids.

Promise: memory grows with the contents, and growing copies nothing large.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from edl.ps.table import kernels

META = kernels.META
MIN_INDEX = 1 << 10  # pairs
FULL = 0.6  # of an index; beyond that it is doubled
GROWTH = 1 << 22  # bytes, at the least, by which an array grows
NEVER = -(1 << 62)  # older than every step


class _Array:
    """A flat array that grows in place: the kernel moves its pages, and allocates only pages in use."""

    def __init__(self, dtype: str):
        self._dtype = np.dtype(dtype)
        self._map = mmap.mmap(-1, GROWTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.values = self._view()

    def _view(self) -> np.ndarray:
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(self._map, self._dtype)

    def reserve(self, count: int) -> None:
        """Make room for `count` values."""
        needed = count * self._dtype.itemsize
        if needed <= len(self._map):
            return
        size = max(needed, len(self._map) + max(GROWTH, len(self._map) // 4))
        size += -size % GROWTH
        self.values = np.empty(0, self._dtype)  # no view may refer to memory that is resized
        try:
            self._map.resize(size)
        except (SystemError, ValueError):  # a system without mremap
            larger = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            larger[: len(self._map)] = self._map[:]
            self._map = larger
        self.values = self._view()


class RowStore:
    """Ids with their slots, numbers (last step, count) and rows.

    Args:
        stride: the number of values of each row; 0 for ids without rows.
    """

    def __init__(self, stride: int):
        self.stride, self.n = stride, 0
        self.index = _index(MIN_INDEX)
        self._meta, self._rows = _Array("int64"), _Array("float32")

    @property
    def meta(self) -> np.ndarray:
        return self._meta.values

    @property
    def rows(self) -> np.ndarray:
        return self._rows.values

    def reserve(self, more: int) -> None:
        """Make room for `more` further ids."""
        count = self.n + more
        if count > FULL * (self.index.size // 2):
            self.index = _index(_index_size(count))
            kernels.index_more(self.index, self.meta, 0, self.n)
        self._meta.reserve(META * count)
        self._rows.reserve(max(1, self.stride * count))

    def find(self, ids: np.ndarray, oldest: int) -> np.ndarray:
        slots = np.empty(len(ids), np.int64)
        kernels.find(self.index, self.meta, ids, oldest, slots)
        return slots

    def drop_older(self, oldest: int) -> None:
        self.n = kernels.drop_older(self.index, self.meta, self.rows, self.n, self.stride, oldest)

    def remove(self, gone: np.ndarray) -> None:
        """Remove the rows of the mask `gone`: make them too old for every step, and drop old rows."""
        numbers = self.numbers()
        numbers[gone, 1] = NEVER - 1
        self.drop_older(NEVER)

    def nbytes(self, more: int = 0) -> int:
        """The memory that the store takes, in bytes, with `more` further ids."""
        count = self.n + more
        pairs = self.index.size // 2
        if count > FULL * pairs:
            pairs += _index_size(count)  # the old and the new index, while the new one is filled
        return count * (4 * self.stride + 8 * META) + 16 * pairs

    def numbers(self) -> np.ndarray:
        """[n, META]: ids, last steps, counts."""
        return self.meta[: META * self.n].reshape(-1, META)


def _index_size(count: int) -> int:
    return 1 << max(MIN_INDEX.bit_length() - 1, int(count / FULL).bit_length())


def _index(pairs: int) -> np.ndarray:
    return np.full(2 * pairs, -1, np.int64)
