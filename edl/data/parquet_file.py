"""A reader over Parquet files that holds one row group at a time in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.columns import Wanted
from edl.data.selected import columns_of, with_roles
from edl.errors import DataError


class Parquet:
    """A reader over a Parquet file. Records are a dict of its columns.

    Args:
        names, types, fill_null: see `parquet`.

    Raises:
        DataError: the file is not a Parquet file, or a column is missing or duplicated.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str] = (),
        types: Mapping[str, Any] | None = None,
        fill_null: Mapping[str, Any] | None = None,
    ):
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.names = list(self._file.schema_arrow.names)
        self._wanted = Wanted(str(path), types or {}, fill_null or {})
        self._wanted.refuse_missing(self.names, names)
        self._kept = list(names) or self.names
        self._lock = threading.Lock()
        self._read: tuple[int, tuple[str, ...], Any] = -1, (), None  # the last row group

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the records [start, stop).

        Raises:
            DataError: a value is missing, is a list whose length differs from the first, or has a type that
                no array has.
        """
        columns = self.columns(self._kept, start, stop)

        def place(record: int) -> str:
            return f"{self.path}: record {start + record}"

        return {
            name: self._wanted.array(name, column, place)
            for name, column in zip(self._kept, columns, strict=True)
        }

    def columns(self, names: Sequence[str], start: int, stop: int) -> list[Any]:
        """The pyarrow columns of the records [start, stop), each in one chunk, including nulls."""
        import pyarrow

        found = []
        group = int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            first = int(self._ends[group - 1]) if group else 0
            last = min(stop, int(self._ends[group]))
            found.append(self._group(group, tuple(names)).slice(start - first, last - start))
            start, group = last, group + 1
        table = (
            pyarrow.concat_tables(found)
            if found
            else self._file.schema_arrow.empty_table().select(list(names))
        )
        return [table[name].combine_chunks() for name in names]

    def _group(self, group: int, names: tuple[str, ...]) -> Any:
        import pyarrow

        with self._lock:
            if self._read[:2] != (group, names):
                try:
                    table = self._file.read_row_group(group, columns=list(names), use_threads=False)
                except (OSError, pyarrow.ArrowInvalid) as error:
                    raise DataError(f"{self.path}: row group {group} cannot be read: {error}") from error
                self._read = group, names, table
            return self._read[2]


def parquet(
    path: str | os.PathLike[str],
    names: Sequence[str] = (),
    types: Mapping[str, Any] | None = None,
    fill_null: Mapping[str, Any] | None = None,
    *,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
) -> Reader:
    """A reader over a Parquet file.

    Records are a dict of columns, or (features, labels[, weights]) if `features`, `label` or `weight` name
    columns. Columns are numbers, text, times, or lists of them, nested or not, of one length at each level.
    One row group at a time is in memory.

    Args:
        names: the columns to keep; all by default.
        types: NumPy types to convert to, by column, if no value is lost: `{"price": "float64"}`. For a column
            of lists, the type of the values in the lists.
        fill_null: replacements for nulls, by column, also in lists: `{"age": -1}`. Other columns must be
            complete.
        features, label, weight: the columns' roles, as in `dataset`.

    Raises:
        DataError: the file cannot be read, or a column is missing or duplicated.
    """
    kept = names or columns_of(features, label, weight)
    return with_roles(Parquet(Path(path), kept, types, fill_null), features, label, weight, str(path))
