"""CSV files with a header line.

pyarrow reads them. Values that pyarrow would change silently are detected afterwards: whole numbers that a
float rounds, and digits that lose their leading zeros. Line numbers are only determined for messages.
"""

from __future__ import annotations

import codecs
import csv as python_csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.columns import Wanted
from edl.data.in_memory import EXACT, Arrays
from edl.data.selected import columns_of, with_roles
from edl.errors import DataError

PADDED = r"^\s*0[0-9]+\s*$"  # digits with leading zeros, which a number would lose
CHUNK = 1 << 24  # bytes
_UNDECODED = "\ufffd"


def csv(
    path: str | PathLike[str],
    names: Sequence[str] = (),
    delimiter: str = ",",
    types: Mapping[str, Any] | None = None,
    fill_null: Mapping[str, Any] | None = None,
    encoding: str = "utf-8",
    *,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
) -> Reader:
    """A reader over a CSV file with a header line.

    Records are a dict of columns, or (features, labels[, weights]) if `features`, `label` or `weight` name
    columns. The type of a column is inferred from all of its values: int64, uint64 for larger ones, float64,
    bool, a time or text. Values are kept exactly; if no type does that, the column is refused by name.

    Args:
        names: the columns to keep; all by default.
        types: NumPy types by column: `{"zip": str, "user": "uint64"}`.
        fill_null: replacements for missing values, by column: `{"age": -1}`. Other columns must be complete.
        encoding: Python's name of the text's encoding.
        features, label, weight: the columns' roles, as in `dataset`.

    Raises:
        DataError: the file or one of its lines cannot be read, a column is missing or duplicated, a value is
            missing, or a value cannot be kept exactly.
    """
    file = _File(Path(path), delimiter, encoding)
    wanted = Wanted(str(path), types or {}, fill_null or {})
    columns = file.header()
    wanted.refuse_missing(columns, names)
    kept = list(names) or columns_of(features, label, weight) or columns
    wanted.refuse_missing(columns, kept)
    given = {name: wanted.arrow_type(name) for name in kept if name in wanted.types}
    table = file.read(kept, given)
    given |= file.exact(table, given)
    table = file.read(kept, given, table)
    arrays = {}
    for name in kept:
        file.refuse_bytes(name, table[name], given)
        if name not in wanted.fill_null:
            file.refuse_empty(name, table[name])
        arrays[name] = wanted.array(name, table[name], file.place(name))
    return with_roles(Arrays(arrays, source=str(path)), features, label, weight, str(path))


@dataclass(frozen=True)
class _File:
    path: Path
    delimiter: str
    encoding: str

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1:
            raise DataError(f"{self.path}: delimiter must be one character, not {self.delimiter!r}")
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise DataError(
                f"{self.path}: Python knows no encoding {self.encoding!r} (expected e.g. 'latin-1')"
            ) from None

    def header(self) -> list[str]:
        """The names of the columns.

        Raises:
            DataError: the file has no header, or the header has a different encoding.
        """
        try:
            line, found = next(self._rows(), (1, []))
        except (OSError, python_csv.Error) as error:
            raise DataError(f"{self.path}: cannot be read as CSV: {error}") from error
        if not found:
            raise DataError(f"{self.path}: cannot be read as CSV: it has no header line")
        if _UNDECODED in "".join(found):
            raise DataError(f"{self.path}: line {line}: the header {self._not_encoded()}")
        return found

    def read(self, names: list[str], types: dict[str, Any], known: Any = None) -> Any:
        """Read columns into a pyarrow table.

        Args:
            known: a table whose columns are reused if they have the requested types.

        Raises:
            DataError: a line cannot be read, or a value does not fit its type.
        """
        import pyarrow

        if known is not None:
            again = [name for name in names if types.get(name, known[name].type) != known[name].type]
            if not again:
                return known
            new = self.read(again, types)
            return pyarrow.table({name: (new if name in again else known)[name] for name in names})
        try:
            return self._table(names, types)
        except (OSError, UnicodeError, pyarrow.ArrowException) as error:
            raise DataError(f"{self.path}: {self._why(error, names, types)}") from error

    def _table(self, names: list[str], types: dict[str, Any], use_threads: bool = True) -> Any:
        from pyarrow import csv as pa_csv

        return pa_csv.read_csv(
            self.path,
            read_options=pa_csv.ReadOptions(encoding=self.encoding, use_threads=use_threads),
            # Without newlines_in_values, pyarrow fails if a block of a large file ends in a quoted value.
            parse_options=pa_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(include_columns=names, column_types=types),
        )

    def exact(self, table: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Better types for columns whose values were changed by the types that pyarrow chose.

        Raises:
            DataError: no type keeps the values.
        """
        import pyarrow
        import pyarrow.compute as pc

        free = {name: table[name].type for name in table.column_names if name not in given}
        times = {name: pyarrow.string() for name, kind in free.items() if pyarrow.types.is_time(kind)}
        whole = [name for name, kind in free.items() if kind == pyarrow.int64()]
        if whole and not self._has_padded_numbers():
            whole = []
        large = [
            name
            for name, kind in free.items()
            if kind == pyarrow.float64() and (pc.max(pc.abs(table[name])).as_py() or 0) >= EXACT
        ]
        if not whole and not large:
            return times
        texts = self.read([*whole, *large], {name: pyarrow.string() for name in (*whole, *large)})
        for name in texts.column_names:
            if (record := _index(pc.match_substring_regex(texts[name], PADDED))) is not None:
                text = texts[name][record].as_py().strip()
                raise DataError(
                    f"{self.place(name)(record)}: column {name!r} is {text!r}, which loses its "
                    f"zeros as a number; types={{{name!r}: str}} keeps it as text, "
                    f"types={{{name!r}: 'int64'}} reads it as a number"
                )
        return times | {name: self._type_of_large(name, table[name], texts[name]) for name in large}

    def _type_of_large(self, name: str, column: Any, texts: Any) -> Any:
        """The type of a column with numbers beyond 2^53: uint64 if all fit, float64 if that is exact."""
        import pyarrow
        import pyarrow.compute as pc

        is_whole = pc.match_substring_regex(texts, r"^\s*[+-]?[0-9]+\s*$")
        whole = pc.filter(texts, is_whole)
        values = [int(text) for text in whole.to_pylist()]
        if len(values) == len(column) - column.null_count and all(0 <= v < 2**64 for v in values):
            return pyarrow.uint64()
        rounded = [abs(v) > EXACT and int(float(v)) != v for v in values]
        if any(rounded):
            nth = rounded.index(True)
            record = int(np.flatnonzero(np.asarray(is_whole))[nth])
            raise DataError(
                f"{self.place(name)(record)}: column {name!r} is {values[nth]}, which a float64 rounds, and "
                f"other values of it are no whole numbers from 0 to 2^64-1; types={{{name!r}: str}} keeps "
                f"them as text, types={{{name!r}: 'float64'}} rounds them"
            )
        return pyarrow.float64()

    def _has_padded_numbers(self) -> bool:
        """Whether a value may begin with a zero and a further digit."""
        import pyarrow

        if "0,".encode(self.encoding) != b"0,":
            return True  # such as UTF-16, in which a byte is not a character
        before = np.zeros(256, bool)
        before[list(b'\n\r"' + self.delimiter.encode())] = True
        last = b"\n\n"
        with pyarrow.input_stream(self.path) as file:
            while chunk := file.read(CHUNK):
                text = np.frombuffer(last + chunk + b"\n", np.uint8)
                zeros = np.flatnonzero(text[2:-1] == ord("0")) + 2
                previous, following = text[zeros - 1], text[zeros + 1]
                previous = np.where(previous == ord(" "), text[zeros - 2], previous)  # a space after a comma
                if (before[previous] & (following >= ord("0")) & (following <= ord("9"))).any():
                    return True
                last = bytes(text[-4:-1])  # a zero at the end meets its digit in the next chunk
        return False

    def refuse_bytes(self, name: str, column: Any, given: Mapping[str, Any]) -> None:
        """Refuse a column whose text does not have the expected encoding.

        Raises:
            DataError: a value is not valid text in this encoding.
        """
        import pyarrow

        if name in given or not pyarrow.types.is_binary(column.type):
            return
        for record, value in enumerate(column.to_pylist()):
            try:
                value.decode()
            except UnicodeDecodeError:
                raise DataError(
                    f"{self.place(name)(record)}: column {name!r} {self._not_encoded()}"
                ) from None

    def refuse_empty(self, name: str, column: Any) -> None:
        """Refuse a column with missing values.

        Raises:
            DataError: a value is missing.
        """
        if column.null_count:
            record = int(np.asarray(column.is_null()).argmax())
            line, value = self._line(record, name)
            what = f"is {value!r}, which counts as empty" if value else "is empty"
            raise DataError(
                f"{self.path}: line {line}: column {name!r} {what}; a value is needed "
                f"(fill_null={{{name!r}: VALUE}} fills it)"
            )

    # --- the lines of the file, for messages

    def place(self, name: str) -> Callable[[int], str]:
        """Return a function that names a record's value of this column by its line."""

        return lambda record: f"{self.path}: line {self._line(record, name)[0]}"

    def _line(self, record: int, name: str = "") -> tuple[int | str, str]:
        """Find the line of a record, or of its value in a column, and this value."""
        try:
            rows = self._rows()
            _, header = next(rows)
            line, row = next(found for nth, found in enumerate(rows) if nth == record)
        except (OSError, python_csv.Error, StopIteration):
            return f"of record {record}", ""
        at = header.index(name) if name in header else 0
        before = sum(len(re.findall(r"\r\n|\r|\n", value)) for value in row[:at])
        return line + before, row[at] if at < len(row) else ""

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line at which each row begins, and its values. Empty lines are not rows."""
        import pyarrow

        encoding = "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding
        with (
            pyarrow.input_stream(self.path) as stream,
            TextIOWrapper(stream, encoding, errors="replace", newline="") as text,
        ):
            rows, last = python_csv.reader(text, delimiter=self.delimiter), 0
            for row in rows:
                if row:
                    yield last + 1, row
                last = rows.line_num

    def _why(self, error: Exception, names: list[str], types: dict[str, Any]) -> str:
        """Describe an error of pyarrow, with the line at which it occurred."""
        import pyarrow

        if isinstance(error, UnicodeError):
            rows = (line for line, row in self._rows() if _UNDECODED in "".join(row))
            return f"line {next(rows, 1)}: {self._not_encoded()}"
        try:  # with threads, errors do not name the row
            self._table(names, types, use_threads=False)
        except pyarrow.ArrowException as again:
            error = again
        what = str(error)
        if not (row := re.search(r"Row #(\d+): ", what)):
            return f"cannot be read as CSV: {what}"
        column = re.search(r"In CSV column #(\d+)", what)
        name = self.header()[int(column[1])] if column else ""
        line, _ = self._line(int(row[1]) - 2, name)
        what = what[row.end() :]
        if "invalid UTF8" in what:
            what = self._not_encoded()
        of = f"column {name!r}: " if column else ""
        return f"line {line}: cannot be read as CSV: {of}{what}"

    def _not_encoded(self) -> str:
        return f"is not {self.encoding}; name the file's encoding, e.g. encoding='latin-1'"


def _index(truth: Any) -> int | None:
    """The index of the first true value; None if all are false."""
    found = np.flatnonzero(np.asarray(truth))
    return int(found[0]) if len(found) else None
