# SPDX-License-Identifier: Apache-2.0
"""A description of the records at an address, for people: `edl data inspect`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from edl.data.base import RandomAccess
from edl.data.files.addresses import find
from edl.data.formats.by_name import format_of, open_files
from edl.data.formats.image_files import classes_of
from edl.data.nest import leaves
from edl.data.objects.selected import columns_in
from edl.errors import DataError

SHOWN = 3  # records
MAX_VALUES = 4  # of an array in a cell
MAX_TEXT = 40  # characters in a cell


@dataclass(frozen=True)
class Column:
    """An array of the records.

    Args:
        name: its column, or its place in records that are no dict; empty if the records are one array.
        shape: the shape of one record.
        first: its values in the first records, as text.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """What is at an address.

    Args:
        bytes: size of the files.
        single_records: whether any record can be read by itself; otherwise blocks of records are read.
        open_seconds: time to open the files, with the index where a format needs one.
        index_seconds: time that building the index took now; 0 if it was there, or none is needed.
        index_bytes: size of the indexes that lie beside the files.
        matrix: the names of the columns of a matrix of features; empty for other features.
        classes: the names of the labels' classes by number; empty if labels are numbers.
    """

    address: str
    format: str
    files: int
    bytes: int
    records: int
    single_records: bool
    open_seconds: float
    index_seconds: float
    index_bytes: int
    columns: tuple[Column, ...]
    matrix: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def describe(
    address: str, format: str | None = None, options: Mapping[str, Any] | None = None
) -> Description:
    """Open the files at an address, and read the first records.

    Args:
        format, options: as for `open_files`.

    Raises:
        DataError: the format is unknown, or the files cannot be read.
    """
    kind = format or format_of(address).name
    options = options or {}
    before = _indexes(address)
    began = time.monotonic()
    open_files(address, kind, **options)
    built = time.monotonic()
    reader = open_files(address, kind, **options)  # with the libraries imported, and the index built
    opened = time.monotonic()
    indexes = _indexes(address)
    index_seconds = built - began if indexes.keys() - before.keys() else 0.0
    count = len(reader)
    try:
        records = reader.read(0, min(SHOWN, count)) if count else None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{address}: the first records cannot be read as {kind}: {error}") from error
    columns = tuple(
        _column(_name(path, isinstance(records, tuple)), np.asarray(array))
        for path, array in leaves(records)
        if array is not None
    )
    files = find(address)
    return Description(
        address,
        kind,
        len(files),
        sum(file.size for file in files),
        count,
        isinstance(reader, RandomAccess),
        opened - built,
        index_seconds,
        sum(indexes.values()),
        columns,
        columns_in(reader),
        classes_of(reader),
    )


def _indexes(address: str) -> dict[Path, int]:
    """The sizes of the indexes that lie beside the files at an address."""
    paths = [Path(file.name) for file in find(address) if file.is_local]
    found = (index for path in paths for index in path.parent.glob(f".{escape(path.name)}.*.edl-index"))
    return {index: index.stat().st_size for index in found}


def _name(path: str, has_roles: bool) -> str:
    """The name of an array by its place in the records: `age`, or `features['age']` with roles."""
    if has_roles and (found := re.match(r"\[([012])\]", path)):
        return ("features", "labels", "weights")[int(found[1])] + path[found.end() :]
    named = re.fullmatch(r"\['(.*)'\]", path)
    return named[1] if named else path


def _column(name: str, array: np.ndarray) -> Column:
    dtype = "text" if array.dtype.kind in "USTO" else str(array.dtype)
    shown = tuple(_shown(value) for value in array)
    return Column(name, dtype, tuple(array.shape[1:]), shown)


def _shown(value: Any) -> str:
    """A value in few characters."""
    if isinstance(value, np.ndarray) and value.ndim:
        values = [_shown(v) for v in value.reshape(-1)[:MAX_VALUES]]
        return ", ".join(values) + (", ..." if value.size > MAX_VALUES else "")
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = f"{value:g}" if isinstance(value, float | np.floating) else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
