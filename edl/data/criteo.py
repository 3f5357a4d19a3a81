# SPDX-License-Identifier: Apache-2.0
"""The public click logs of Criteo, in the formats in which they are published.

A record is an impression: whether it was clicked, 13 numbers and 26 categories. The text files (Criteo
Display Advertising Challenge, Criteo 1TB) have a tab-separated line for each record, and no header. Their
categories are 32-bit hashes in hexadecimal digits; missing values are empty. The Parquet files have the same
columns, named `label`, `I1` to `I13`, `C1` to `C26`, or `integer_feature_1`, `categorical_feature_1` and so
on, with categories as text or as numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from edl.data.files import find
from edl.data.lines import Lines
from edl.data.parquet_file import Parquet
from edl.errors import DataError

NUMBERS, FIELDS = 13, 26
MISSING = -1  # id of a missing category
NAMES = ["label", *(f"I{n + 1}" for n in range(NUMBERS)), *(f"C{n + 1}" for n in range(FIELDS))]
OTHER_NAMES = [
    "label",
    *(f"integer_feature_{n + 1}" for n in range(NUMBERS)),
    *(f"categorical_feature_{n + 1}" for n in range(FIELDS)),
]


class Criteo:
    """A reader over one file.

    Args:
        records: number of records in the file.
        columns: returns the pyarrow columns of the records [start, stop), in the order of NAMES.
        source: name of the file, for messages.
    """

    def __init__(self, records: int, columns: Callable[[int, int], list[Any]], source: str):
        self._records, self._columns, self._source = records, columns, source

    def __len__(self) -> int:
        return self._records

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return the records [start, stop).

        Returns:
            clicked: float32 [n], 0 or 1.
            numbers: float32 [n, 13]: log(1 + x), as is usual for counts; 0 where x is missing or negative.
            ids: int64 [n, 26]: the number of the field, from 0, in front of the category's 32 bits, so that
                no two fields have an id in common; MISSING for missing categories.

        Raises:
            DataError: a record is invalid; the message names it.
        """
        label, *rest = map(self._known, NAMES, self._columns(start, stop))
        clicked = _filled(label, -1)
        if (wrong := ~np.isin(clicked, (0, 1))).any():
            raise DataError(f"{self._source}: record {start + int(wrong.argmax())}: the label must be 0 or 1")
        numbers = np.stack([_filled(column, 0) for column in rest[:NUMBERS]], -1)
        ids = np.stack([self._ids(n, column, start) for n, column in enumerate(rest[NUMBERS:])], -1)
        return {
            "clicked": clicked.astype(np.float32),
            "numbers": np.log1p(np.fmax(numbers, 0)).astype(np.float32),  # fmax also turns NaN into 0
            "ids": ids,
        }

    def _known(self, name: str, column: Any) -> Any:
        """Check the type of a column, and convert it where necessary.

        Raises:
            DataError: the Criteo format does not allow the column's type.
        """
        from pyarrow import types

        kind = column.type
        if types.is_null(kind):  # all values are missing
            return column.cast("int64")
        if name[0] == "C":
            expected, of = "text or whole numbers", kind.value_type if types.is_dictionary(kind) else kind
            texts = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
            good = types.is_integer(of) or any(is_text(of) for is_text in texts)
            if types.is_dictionary(kind):
                column = column.cast(of)
        else:
            expected, good = "numbers", types.is_integer(kind) or types.is_floating(kind)
            if name == "label" and types.is_boolean(kind):
                return column.cast("int8")
        if not good:
            raise DataError(f"{self._source}: column {name} holds {kind}; expected {expected}")
        return column

    def _ids(self, field: int, column: Any, start: int) -> np.ndarray:
        import pyarrow

        there = ~np.asarray(column.is_null())
        if pyarrow.types.is_integer(column.type):
            values = _filled(column, 0).astype(np.int64) & 0xFFFFFFFF
        else:
            wrong = _not_hexadecimal(column)
            if len(wrong):
                raise DataError(
                    f"{self._source}: record {start + wrong[0]}: category C{field + 1} must be up to eight "
                    f"hexadecimal digits, and is {column[wrong[0]].as_py()!r}"
                )
            values = _hexadecimal(column)
        return np.where(there, values | (field << 32), MISSING)


def criteo(path: str | os.PathLike[str]) -> Criteo:
    """A reader over a file of Criteo's click logs: `.parquet`, or else text. Only one block is in memory.

    Raises:
        DataError: the file cannot be read, or has a different format.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        parquet = Parquet(find(path, reader="criteo")[0])
        for names in (NAMES, OTHER_NAMES):
            if set(names) <= set(parquet.names):
                return Criteo(len(parquet), partial(parquet.columns, names), str(path))
        missing = [name for name in NAMES if name not in parquet.names]
        raise DataError(
            f"{path}: is not one of Criteo's: column {missing[0]!r} is missing; expected are {NAMES[0]}, "
            f"I1 to I{NUMBERS}, C1 to C{FIELDS}"
        )
    if path.suffix in (".gz", ".zst", ".zip"):
        raise DataError(f"{path}: is compressed; records are read from anywhere in it. Unpack it first")
    lines = Lines(find(path, reader="criteo")[0])
    return Criteo(len(lines), partial(_parsed, lines), str(path))


def _parsed(lines: Lines, start: int, stop: int) -> list[Any]:
    import pyarrow
    from pyarrow import csv as pa_csv

    types = {name: pyarrow.string() if name[0] == "C" else pyarrow.int64() for name in NAMES}
    if start == stop:  # pyarrow refuses empty text
        return [pyarrow.array([], types[name]) for name in NAMES]
    try:
        table = pa_csv.read_csv(
            BytesIO(lines.read(start, stop)),
            read_options=pa_csv.ReadOptions(column_names=NAMES, use_threads=False),
            parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
            convert_options=pa_csv.ConvertOptions(
                column_types=types, null_values=[""], strings_can_be_null=True
            ),
        )
    except pyarrow.ArrowInvalid as error:
        where, what = f"lines {start + 1} to {stop}", str(error)
        if row := re.search(r"Row #(\d+): ", what):
            where, what = f"line {start + int(row[1])}", what[row.end() :]
        if column := re.search(r"In CSV column #(\d+)", str(error)):
            where += f", column {NAMES[int(column[1])]}"
        raise DataError(f"{lines.path}: {where}: not a click log of Criteo: {what}") from error
    return [table[name].combine_chunks() for name in NAMES]


def _filled(column: Any, value: int) -> np.ndarray:
    import pyarrow.compute

    return np.asarray(pyarrow.compute.fill_null(column, value))


def _not_hexadecimal(column: Any) -> np.ndarray:
    """The indices of texts that are not categories."""
    import pyarrow.compute

    good = pyarrow.compute.match_substring_regex(column, "^[0-9a-fA-F]{0,8}$")
    return np.flatnonzero(~np.asarray(pyarrow.compute.fill_null(good, True)))


def _hexadecimal(column: Any) -> np.ndarray:
    """The values of texts of up to eight hexadecimal digits, int64 [n]; 0 for missing or empty texts."""
    return np.array([int(text or "0", 16) for text in column.to_pylist()], np.int64)
