"""The records at given positions, in the order of the job: what a reader gives, as batches for the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from edl.contract.ranges import Range
from edl.contract.shuffle import Order
from edl.data import Reader
from edl.errors import DataError
from trainer.arrays import standard
from trainer.data import Batch, named
from trainer.watchdog import Watch, unwatched


class Records:
    """A reader's records as batches, in the order of the job.

    Args:
        reader: the records.
        feed: from raw records to (features, labels) or (features, labels, weights); None
            when the reader gives such tuples itself.
        watch: goes around each call of the reader and of `feed`.
    """

    def __init__(
        self,
        reader: Reader,
        order: Order,
        feed: Callable[[Any], Any] | None,
        name: str,
        watch: Watch = unwatched,
    ):
        self._reader, self._watch = reader, watch
        self._order = order
        self._feed = feed
        self._name = name
        self._block: tuple[int, Any] | None = None

    def batch(self, positions: Range) -> Batch:
        """The records at `positions`.

        Raises:
            DataError: the reader gave something else than it promised.
        """
        indices = self._order.records(*positions)
        return self._as_batch(positions, self._pick(indices), indices)

    def plain(self, start: int, stop: int) -> Batch:
        """The records [start, stop) as they lie, without any order: for evaluation."""
        return self._as_batch((start, stop), self._read(start, stop), np.arange(start, stop))

    def _as_batch(self, positions: Range, records: Any, indices: np.ndarray) -> Batch:
        fed = self._fed(records, indices)
        where = "feed(records)" if self._feed else "data(split).read()"
        if not isinstance(fed, tuple | list) or len(fed) not in (1, 2, 3):
            raise DataError(
                f"{self._name}: {where} must give (features, labels) or (features, labels, weights), or "
                f"(features, None) where the model needs no labels, not {type(fed).__name__}"
                + (f" of {len(fed)}" if isinstance(fed, tuple | list) else "")
            )
        x, y, weights = keras.tree.map_structure(standard, tuple(fed) + (None,) * (3 - len(fed)))
        for path, array in keras.tree.flatten_with_path((x, y, weights)):
            # What a record becomes is counted as that record, so it must be one.
            if array is not None and (not array.shape or array.shape[0] != len(indices)):
                name = ("features", "labels", "weights")[path[0]] + "".join(f"[{key!r}]" for key in path[1:])
                what = f"{array.shape[0]} records" if array.shape else "a single value"
                raise DataError(
                    f"{self._name}: {where} must keep the number of records: of {len(indices)}, {name} has "
                    f"{what} ({named(indices)})"
                )
        return Batch(positions, x, y, weights, indices)

    def _fed(self, records: Any, indices: np.ndarray) -> Any:
        if self._feed is None:
            return records
        with self._watch(lambda: f"{self._name}: feed() of the {named(indices)}"):
            return self._feed(records)

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
        with self._watch(lambda: f"{self._name}: read({start}, {stop})"):
            records = self._reader.read(start, stop)
        for array in keras.tree.flatten(records):
            if len(array) != stop - start:
                raise DataError(
                    f"{self._name}: read({start}, {stop}) gave {len(array)} records, not {stop - start}"
                )
        return records
