"""From leases to batches: which positions come next, and the records that are there.

How records are read is trainer/records.py; this module knows neither Keras nor files.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edl.contract.ranges import Range, RangeSet


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one contiguous range of positions, ready for the model."""

    positions: Range
    x: Any
    y: Any
    weights: Any  # None, or one weight per record
    indices: np.ndarray | None = None  # of the records in the reader, for people

    def __len__(self) -> int:
        return self.positions[1] - self.positions[0]

    def __str__(self) -> str:
        if self.indices is None:
            return f"records at positions [{self.positions[0]}, {self.positions[1]})"
        return named(self.indices)


NAMED = 32


def named(indices: np.ndarray) -> str:
    """Records by their index in the reader, for people: `records 17, 4, 203 and 29 others`."""
    first = ", ".join(map(str, indices[:NAMED].tolist()))
    others = len(indices) - NAMED
    return f"records {first}" + (f" and {others} others" if others > 0 else "")


class HeldLeases:
    """The positions that this worker may train on, and nobody else.

    What is left is always `lease minus applied`: nothing is taken out before it is applied.
    """

    def __init__(self) -> None:
        self._left = RangeSet()

    def replace(self, left: RangeSet) -> None:
        self._left = left

    def add(self, lease: Range) -> None:
        self._left = self._left.add(*lease)

    def applied(self, applied: RangeSet) -> None:
        """Nothing in the applied set is left of any lease."""
        self._left = self._left.minus(applied)

    def peek(self, count: int, epoch_size: int, after: int = 0) -> Range | None:
        """The first at most `count` positions from `after` on, contiguous and within one epoch."""
        left = self._left.minus(RangeSet(((0, after),))) if after else self._left
        batch, _ = left.take(count)
        if batch is None:
            return None
        start, stop = batch
        return start, min(stop, (start // epoch_size + 1) * epoch_size)

    def __len__(self) -> int:
        return len(self._left)


class Source(Protocol):
    """Where the records are."""

    def batch(self, positions: Range) -> Batch:
        """The records at `positions`, which lie in one epoch.

        Raises:
            DataError: they cannot be read, or are not what they should be.
        """
        ...


class Batches:
    """The batches of this worker's leases, one after the other.

    While the ring is busy with one, the next is read.

    Args:
        epoch_size: records in one epoch.
        reading: reads one batch at a time; None: a thread of its own.
    """

    def __init__(self, source: Source, epoch_size: int, reading: Executor | None = None) -> None:
        self._source, self.epoch_size = source, epoch_size
        self._reading = reading or ThreadPoolExecutor(1, thread_name_prefix="read")
        self._ahead: tuple[Range, Future[Batch]] | None = None

    def first(self, leases: HeldLeases, count: int) -> Batch | None:
        """The next at most `count` records of the leases; None when nothing is left of them.

        It stays the first until it is applied: asked again, it is the same.
        """
        positions = leases.peek(count, self.epoch_size)
        if positions is None:
            return None
        batch = self._read(positions).result()
        following = leases.peek(count, self.epoch_size, after=positions[1])
        self._ahead = None if following is None else (following, self._read(following))
        return batch

    def _read(self, positions: Range) -> Future[Batch]:
        if self._ahead is not None and self._ahead[0] == positions:
            return self._ahead[1]
        return self._reading.submit(self._source.batch, positions)
