"""Readers: where records come from. Any object with these two methods is one.

A reader gives raw records by index range; the trainer asks for one block at a time, in the
order of the epoch, and picks the records of a batch out of it. So a reader over a file reads
consecutive records and needs no index for shuffling.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edl.errors import DataError


@runtime_checkable
class Reader(Protocol):
    """Raw records by index."""

    def __len__(self) -> int:
        """How many records there are. Must not change while a job runs."""
        ...

    def read(self, start: int, stop: int) -> Any:
        """The records [start, stop): an array, or a tuple, list or dict of arrays (nested as you
        like), each with stop - start entries along its first axis."""
        ...


class Arrays:
    """Records that lie in memory: a tuple or a dict of arrays of one length."""

    def __init__(self, columns: tuple[np.ndarray, ...] | dict[str, np.ndarray], source: str = "arrays"):
        values = columns.values() if isinstance(columns, dict) else columns
        lengths = {len(column) for column in values}
        if len(lengths) != 1:
            raise DataError(f"{source}: the columns differ in length: {sorted(lengths)}")
        self._columns = columns
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Any:
        """A view of the records [start, stop)."""
        if isinstance(self._columns, dict):
            return {name: column[start:stop] for name, column in self._columns.items()}
        return tuple(column[start:stop] for column in self._columns)


def arrays(*columns: np.ndarray) -> Arrays:
    """A reader over NumPy arrays of one length, usually (features, labels).

    Raises:
        DataError: the arrays differ in length, or there are none.
    """
    if not columns:
        raise DataError("arrays: at least one array is needed")
    return Arrays(tuple(np.asarray(column) for column in columns))


def npz(path: str | os.PathLike[str], names: Sequence[str] = ()) -> Arrays:
    """A reader over an .npz file, as a dict of its arrays: all of them, or those in `names`.

    Raises:
        DataError: the file cannot be read, lacks a name, or its arrays differ in length.
    """
    try:
        with np.load(Path(path), allow_pickle=False) as file:
            missing = sorted(set(names) - set(file.files))
            if missing:
                raise DataError(f"{path}: no array {missing[0]!r}; it has {', '.join(sorted(file.files))}")
            columns = {name: file[name] for name in names or file.files}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as .npz: {error}") from error
    if not columns:
        raise DataError(f"{path}: holds no array")
    return Arrays(columns, source=str(path))


def csv(path: str | os.PathLike[str], names: Sequence[str] = (), delimiter: str = ",") -> Arrays:
    """A reader over a CSV file with a header line, as a dict of its columns (numbers or strings).

    Args:
        names: the columns to keep; all by default.

    Raises:
        DataError: the file or one of its lines cannot be read, or a column is missing.
    """
    import pyarrow
    from pyarrow import csv as pa_csv

    try:
        table = pa_csv.read_csv(
            Path(path),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter),
            convert_options=pa_csv.ConvertOptions(include_columns=list(names) or None),
        )
    except (OSError, pyarrow.ArrowInvalid, pyarrow.ArrowKeyError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from error
    columns = {}
    for name in table.column_names:
        column = table[name]
        if column.null_count:
            line = column.is_null().to_numpy().argmax() + 2
            raise DataError(f"{path}: line {line}: column {name!r} is empty; a value is needed")
        columns[name] = column.to_numpy()
    return Arrays(columns, source=str(path))
