# SPDX-License-Identifier: Apache-2.0
"""A reader over Parquet files that holds one row group at a time in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, File, find
from edl.data.files.joined import Joined, same_columns, span
from edl.data.files.partitions import refuse_partitions
from edl.data.objects.columns import Wanted, for_columns, index_columns, is_list
from edl.data.objects.selected import columns_of, with_roles
from edl.errors import DataError

SUFFIXES = (".parquet", ".pq", ".parq")
_FAR = 2**63 // 1000 - 1  # microseconds from 1970 that 64 bits hold as nanoseconds
OPEN = 16  # files whose metadata is kept in memory


class Parquet:
    """A reader over one Parquet file. Records are a dict of its columns.

    Args:
        names, dtype, fill: see `parquet`.

    Raises:
        DataError: the file is not a Parquet file, or a column is missing or duplicated.
    """

    def __init__(
        self,
        file: File,
        names: Sequence[str] = (),
        dtype: Mapping[str, Any] | None = None,
        fill: Mapping[str, Any] | None = None,
    ):
        import pyarrow
        from pyarrow import parquet

        self.path, self._file = file.name, file
        try:
            with file.open() as opened:
                self._metadata = parquet.read_metadata(opened)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{self.path}: cannot be read as Parquet: {error}") from error
        sizes = [self._metadata.row_group(n).num_rows for n in range(self._metadata.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.records_per_read = max(sizes, default=1) or 1  # a row group is decoded as a whole
        self.schema = self._metadata.schema.to_arrow_schema()
        self._int96 = {
            self._metadata.schema.column(n).path.removesuffix(".list.element")
            for n in range(self._metadata.num_columns)
            if self._metadata.schema.column(n).physical_type == "INT96"
        }
        index = () if names else index_columns(self.schema)
        self.names = [name for name in self.schema.names if name not in index]
        self._wanted = Wanted(self.path, dtype or {}, fill or {})
        self._wanted.refuse_missing(self.schema.names, names)
        self._kept = list(names) or self.names
        self._lock = threading.Lock()
        self._read: tuple[int, tuple[str, ...], Any] = -1, (), None  # the last row group

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the records [start, stop).

        Raises:
            DataError: a value is missing, is a list whose length differs from the first, or has a type that
                no array has; or the file has changed.
        """
        columns = self.columns(self._kept, start, stop)

        def place(record: int) -> str:
            return f"{self.path}: record {start + record}"

        return {
            name: self._wanted.array(name, column, place)
            for name, column in zip(self._kept, columns, strict=True)
        }

    def place(self, index: int) -> str:
        return f"{self.path}: record {index}"

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
        table = pyarrow.concat_tables(found) if found else self.schema.empty_table().select(list(names))
        return [table[name].combine_chunks() for name in names]

    def _group(self, group: int, names: tuple[str, ...]) -> Any:
        import pyarrow
        from pyarrow import parquet

        with self._lock:
            if self._read[:2] != (group, names):
                first = int(self._ends[group - 1]) if group else 0
                what = f"{span(first, int(self._ends[group]))} (row group {group})"
                try:
                    with self._file.open(what) as opened:
                        source = parquet.ParquetFile(opened, metadata=self._metadata)
                        table = source.read_row_group(group, columns=list(names), use_threads=False)
                        if far := [name for name in names if name in self._int96]:
                            source = parquet.ParquetFile(
                                opened, metadata=self._metadata, coerce_int96_timestamp_unit="us"
                            )
                            micro = source.read_row_group(group, columns=far, use_threads=False)
                            table = self._exact_times(table, micro, first)
                except pyarrow.ArrowInvalid as error:
                    raise DataError(f"{self.path}: row group {group} cannot be read: {error}") from error
                self._read = group, names, table
            return self._read[2]

    def _exact_times(self, nano: Any, micro: Any, first: int) -> Any:
        """The columns in nanoseconds, or in microseconds if `dtype` says so.

        Spark and Impala write times as INT96 (days and nanoseconds). pyarrow reads them as nanoseconds in 64
        bits, which wrap around outside of the years 1678 to 2262.

        Raises:
            DataError: a time cannot be kept exactly.
        """
        from pyarrow import types

        for name in micro.column_names:
            long, short = (_flat(table[name]) for table in (micro, nano))
            wanted = self._wanted.arrow_type(name)
            is_far = np.abs(long) > _FAR
            is_fine = (short - long * 1000 != 0) & ~is_far
            takes_micro = wanted is not None and types.is_timestamp(wanted) and wanted.unit != "ns"
            wrong = is_fine if takes_micro else is_far
            if wrong.any():
                per = max(len(long) // max(len(micro), 1), 1)
                what = "nanoseconds" if takes_micro else "the year outside of 1678 to 2262"
                unit = "ns" if takes_micro else "us"
                raise DataError(
                    f"{self.path}: record {first + int(wrong.argmax()) // per}: column {name!r} has a time "
                    f"(INT96) with {what}; dtype={{{name!r}: 'datetime64[{unit}]'}} keeps it"
                )
            if takes_micro:
                at = nano.column_names.index(name)
                nano = nano.set_column(at, micro.schema.field(name), micro[name])
        return nano


def _flat(column: Any) -> np.ndarray:
    """The times of a column, in its unit, as int64; 0 for nulls."""
    import pyarrow
    import pyarrow.compute as pc

    while is_list(column.type):
        column = pc.list_flatten(column)
    times: np.ndarray = column.cast(pyarrow.int64()).fill_null(0).to_numpy()
    return times


class _Files:
    """Several Parquet files with the same columns; the metadata of `OPEN` of them are in memory."""

    def __init__(self, files: Sequence[File], options: tuple[Any, ...]):
        self._files, self._options = files, options
        self._open: dict[int, Parquet] = {}

    def __call__(self, nth: int) -> Parquet:
        found = self._open.pop(nth, None) or Parquet(self._files[nth], *self._options)
        self._open[nth] = found  # the newest
        while len(self._open) > OPEN:
            self._open.pop(next(iter(self._open)), None)
        return found

    def read(self, nth: int, start: int, stop: int) -> dict[str, np.ndarray]:
        return self(nth).read(start, stop)


def parquet(
    path: Addresses,
    names: Sequence[str] = (),
    dtype: Any = None,
    fill: Any = None,
    *,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
) -> Reader:
    """A reader over Parquet files.

    Records are a dict of columns, or (features, labels[, weights]) if `features`, `label` or `weight` name
    columns. Columns are numbers, text, times, or lists of them, nested or not, of one length at each level.
    One row group at a time is in memory.

    Args:
        path: a file, a list of files, a glob, a directory, or an address such as s3://bucket/folder. All
            files must have the same columns.
        names: the columns to keep; all by default.
        dtype: the NumPy type to convert to, if no value is lost: by column, `{"price": "float64"}`, or one
            for all features. For a column of lists, the type of the values in the lists.
        fill: replacement for nulls, also in lists: by column, `{"age": -1}`, or one for all columns. Without
            it, columns must be complete.
        features, label, weight: the columns' roles, as in `dataset`.

    Raises:
        DataError: a file is missing, changes or cannot be read, or a column is missing or duplicated.
    """
    files = find(path, SUFFIXES, "parquet")
    kept = list(names) or columns_of(features, label, weight)
    refuse_partitions(path, files, kept, lambda: Parquet(files[0]).schema.names)
    columns = kept or Parquet(files[0]).names
    types = for_columns(dtype, columns, besides=(label, weight))
    options = (kept, types, for_columns(fill, columns))
    opened = _Files(files, options)
    first = opened(0)
    records: Reader = first
    if len(files) > 1:
        expected, counts, together = _kinds(first, kept, types), [len(first)], first.records_per_read
        for nth in range(1, len(files)):
            other = opened(nth)
            same_columns(expected, _kinds(other, kept, types), other.path, first.path, converts=True)
            counts.append(len(other))
            together = max(together, other.records_per_read)
        names = [file.name for file in files]
        records = Joined(counts, opened.read, records_per_read=together, names=names)
    return with_roles(records, features, label, weight, first.path)


def _kinds(file: Parquet, kept: Sequence[str], converted: Mapping[str, Any]) -> dict[str, str]:
    """The types of the columns that must be alike in all files; those that are converted may differ."""
    kinds = dict(zip(file.schema.names, file.schema.types, strict=True))
    return {
        name: "" if name in converted else str(kind)
        for name, kind in kinds.items()
        if name in (kept or file.names)
    }
