"""From leases to batches: which positions come next, and the records that lie there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from edl.contract.ranges import Range, RangeSet
from edl.contract.shuffle import Order
from edl.data import Reader
from edl.errors import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one contiguous range of positions, ready for the model."""

    positions: Range
    x: Any
    y: Any
    weights: Any  # None, or one weight per record

    def __len__(self) -> int:
        return self.positions[1] - self.positions[0]


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


class Source:
    """Batches of a reader's records, in the order of the job.

    Args:
        reader: the records.
        feed: from raw records to (features, labels) or (features, labels, weights); None
            when the reader gives such tuples itself.
    """

    def __init__(self, reader: Reader, order: Order, feed: Callable[[Any], Any] | None, name: str):
        self._reader = reader
        self._order = order
        self._feed = feed
        self._name = name
        self._block: tuple[int, Any] | None = None

    def batch(self, positions: Range) -> Batch:
        """The records at `positions`.

        Raises:
            DataError: the reader gave something else than it promised.
        """
        records = self._pick(self._order.records(*positions))
        return self._as_batch(positions, records)

    def plain(self, start: int, stop: int) -> Batch:
        """The records [start, stop) as they lie, without any order: for evaluation."""
        return self._as_batch((start, stop), self._read(start, stop))

    def _as_batch(self, positions: Range, records: Any) -> Batch:
        fed = self._feed(records) if self._feed else records
        if not isinstance(fed, tuple | list) or len(fed) not in (2, 3):
            where = "feed(records)" if self._feed else "data(split).read()"
            raise DataError(
                f"{self._name}: {where} must give (features, labels) or (features, labels, weights), "
                f"not {type(fed).__name__}" + (f" of {len(fed)}" if isinstance(fed, tuple | list) else "")
            )
        x, y, *weights = fed
        return Batch(positions, x, y, weights[0] if weights else None)

    def _pick(self, indices: np.ndarray) -> Any:
        """The records at `indices`, which lie in one block or a few."""
        blocks = indices // self._order.block
        edges = np.flatnonzero(np.diff(blocks)) + 1
        parts = []
        for part in np.split(indices, edges):
            block = int(part[0]) // self._order.block
            within = part - block * self._order.block
            parts.append(keras.tree.map_structure(lambda a, i=within: np.asarray(a)[i], self._load(block)))
        if len(parts) == 1:
            return parts[0]
        return keras.tree.map_structure(lambda *arrays: np.concatenate(arrays), *parts)

    def _load(self, block: int) -> Any:
        if self._block is None or self._block[0] != block:
            start = block * self._order.block
            self._block = block, self._read(start, min(start + self._order.block, self._order.size))
        return self._block[1]

    def _read(self, start: int, stop: int) -> Any:
        records = self._reader.read(start, stop)
        for array in keras.tree.flatten(records):
            if len(array) != stop - start:
                raise DataError(
                    f"{self._name}: read({start}, {stop}) gave {len(array)} records, not {stop - start}"
                )
        return records


class Batches:
    """The batches of this worker's leases, one after the other.

    While the ring is busy with one, the next is read.
    """

    def __init__(self, source: Source, epoch_size: int) -> None:
        self._source, self._epoch_size = source, epoch_size
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._ahead: tuple[Range, Future[Batch]] | None = None

    def first(self, leases: HeldLeases, count: int) -> Batch | None:
        """The next at most `count` records of the leases; None: nothing is left of them.

        It stays the first until it is applied: asked again, it is the same.
        """
        positions = leases.peek(count, self._epoch_size)
        if positions is None:
            return None
        batch = self._read(positions).result()
        following = leases.peek(count, self._epoch_size, after=positions[1])
        self._ahead = None if following is None else (following, self._read(following))
        return batch

    def _read(self, positions: Range) -> Future[Batch]:
        if self._ahead is not None and self._ahead[0] == positions:
            return self._ahead[1]
        return self._reading.submit(self._source.batch, positions)
