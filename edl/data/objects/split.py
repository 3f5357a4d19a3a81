# SPDX-License-Identifier: Apache-2.0
"""Random division of a reader's records into training data and held-out data."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.data.base import RandomAccess, Reader
from edl.data.exact import concatenated
from edl.data.nest import map_leaves
from edl.data.objects.dataset import dataset
from edl.data.place import place
from edl.errors import DataError

MAX_RUN = 256  # consecutive records that stay together if records are read in blocks


class Subset:
    """A reader over some runs of consecutive records of an underlying reader.

    Args:
        records: the underlying reader.
        starts, stops: bounds of each run, int64 [runs], ascending; runs do not overlap.
    """

    def __init__(self, records: Reader, starts: np.ndarray, stops: np.ndarray):
        self.underlying = self._records = records
        self._starts = starts
        self._before = np.concatenate([[0], np.cumsum(stops - starts)])  # records in the runs before each
        if isinstance(records, RandomAccess):
            self.take = lambda indices: records.take(self._there(indices))

    def __len__(self) -> int:
        return int(self._before[-1])

    def place(self, index: int) -> str:
        return place(self._records, int(self._there(np.array([index]))[0]))

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop) of the subset.

        Raises:
            DataError: runs of the underlying reader differ in their arrays.
        """
        if isinstance(self._records, RandomAccess):
            return self._records.take(self._there(np.arange(start, stop)))
        first = int(np.searchsorted(self._before, start, side="right")) - 1
        last = int(np.searchsorted(self._before, stop, side="left")) - 1
        pieces = []
        for run in range(first, last + 1):
            begin = int(self._starts[run]) + max(start - int(self._before[run]), 0)
            end = int(self._starts[run]) + min(stop, int(self._before[run + 1])) - int(self._before[run])
            pieces.append(self._records.read(begin, end))
        try:
            return pieces[0] if len(pieces) == 1 else map_leaves(concatenated, *pieces)
        except ValueError as error:
            raise DataError(f"records {start} to {stop - 1} do not go together: {error}") from error

    def _there(self, indices: np.ndarray) -> np.ndarray:
        run = np.searchsorted(self._before, indices, side="right") - 1
        there: np.ndarray = self._starts[run] + indices - self._before[run]
        return there


def split(data: Any, validation: float | None = None, test: float = 0.0, seed: int = 0) -> dict[str, Reader]:
    """Divide records at random, the same way on every worker and in every run.

    If any record can be read by itself, single records are drawn; from files that are read in blocks, runs of
    up to 256 consecutive records.

    Args:
        data: a reader, or any argument of `dataset`.
        validation: share of the records that the model is evaluated on while it is trained, from 0 to less
            than 1, rounded to whole records. None: 0.2, or 0 with a share for the test.
        test: share of the records that only the trained model is evaluated on.
        seed: seed of the draw.

    Returns:
        Readers by split, for `data(split)`: "train", and "validation" and "test" if their shares are above 0.

    Raises:
        DataError: the shares leave no record for a split, or a share is not in [0, 1).
    """
    records = dataset(data, source="split")
    count = len(records)
    if validation is None:
        validation = 0.0 if test else 0.2
    shares = {"validation": validation, "test": test}
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise DataError(f"split: {name} is {share}; expected a share from 0 to less than 1, such as 0.2")
    run = 1 if isinstance(records, RandomAccess) else max(min(MAX_RUN, count // 1000), 1)
    runs = -(-count // run)
    sizes = {name: round(runs * share) for name, share in shares.items()}
    wanted = {name: size for name, size in sizes.items() if shares[name] > 0}
    sizes["train"] = runs - sum(sizes.values())
    for name in ("train", *wanted):
        if sizes[name] < 1:
            raise DataError(f"split: of {count} records, none is left for {name!r} ({validation=}, {test=})")
    order = np.random.default_rng(seed).permutation(runs)
    found: dict[str, Reader] = {}
    begin = 0
    for name in ("train", *wanted):
        starts = np.sort(order[begin : begin + sizes[name]]).astype(np.int64) * run
        found[name] = Subset(records, starts, np.minimum(starts + run, count))
        begin += sizes[name]
    return found
