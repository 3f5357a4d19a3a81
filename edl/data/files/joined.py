# SPDX-License-Identifier: Apache-2.0
"""The records of several files as those of one reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edl.data.nest import map_leaves
from edl.data.place import in_files
from edl.errors import DataError


class Joined:
    """A reader over the records of several sources, one after the other.

    Args:
        counts: the number of records of each source.
        read: returns the records [start, stop) of a source, given its index.
        take: returns the records at some indices of a source, in their order; None if this is not cheap.
        records_per_read: see `Reader`.
        names: the names of the sources, for messages.
    """

    def __init__(
        self,
        counts: Sequence[int] | np.ndarray,
        read: Callable[[int, int, int], Any],
        take: Callable[[int, np.ndarray], Any] | None = None,
        records_per_read: int = 1,
        *,
        names: Sequence[str],
    ):
        self.place = in_files(names, counts)
        self.ends = np.cumsum(np.asarray(counts, np.int64), dtype=np.int64)
        self._read, self._take, self.records_per_read = read, take, records_per_read
        if take is not None:
            self.take = self._taken

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop)."""
        pieces = []
        source = int(np.searchsorted(self.ends, start, "right"))
        while start < stop and source < len(self.ends):
            first, last = self._first(source), int(self.ends[source])
            if first < last:
                end = min(stop, last)
                pieces.append(self._read(source, start - first, end - first))
                start = end
            source += 1
        if not pieces:
            return self._read(0, 0, 0)
        return pieces[0] if len(pieces) == 1 else map_leaves(_together, *pieces)

    def _taken(self, indices: np.ndarray) -> Any:
        """Return the records at `indices`. Each source is asked once."""
        assert self._take is not None
        if not len(indices):
            return self._read(0, 0, 0)
        sources = np.searchsorted(self.ends, indices, "right")
        order = np.argsort(sources, kind="stable")
        pieces = []
        for source in np.unique(sources).tolist():
            within = indices[order][sources[order] == source] - self._first(source)
            pieces.append(self._take(source, within))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return map_leaves(lambda *arrays: _together(*arrays)[back], *pieces)

    def _first(self, source: int) -> int:
        return int(self.ends[source - 1]) if source else 0


def same_columns(
    first: Mapping[str, Any], other: Mapping[str, Any], name: str, first_name: str, converts: bool = False
) -> None:
    """Check that a file has the columns of the first file, with the same types.

    Args:
        converts: the format's reader has an option `dtype`, which gives columns one type.

    Raises:
        DataError: a column is missing, is additional or has a different type.
    """
    for missing in [column for column in first if column not in other]:
        raise DataError(f"{name}: column {missing!r} is missing, which {first_name} has")
    for more in [column for column in other if column not in first]:
        raise DataError(f"{name}: has the column {more!r}, which {first_name} lacks")
    for column, kind in first.items():
        if kind != other[column]:
            raise DataError(
                f"{name}: column {column!r} is {other[column]}, and {kind} in {first_name}; all files must "
                "have the same columns" + f" (dtype={{{column!r}: TYPE}} converts them)" * converts
            )


def span(start: int, stop: int) -> str:
    """Records of a file, for messages: "record 5" or "records 5 to 9"."""
    return f"record {start}" if stop - start == 1 else f"records {start} to {max(stop - 1, start)}"


def _together(*arrays: Any) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
