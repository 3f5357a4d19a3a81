# SPDX-License-Identifier: Apache-2.0
"""The text of CSV files: parts of it as pyarrow tables, and errors that name the line."""

from __future__ import annotations

import codecs
import csv as python_csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader, BytesIO, TextIOWrapper
from typing import Any

import numpy as np

from edl.data.files.addresses import File
from edl.data.objects.in_memory import EXACT
from edl.errors import DataError

PADDED = r"^\s*0[0-9]+\s*$"  # digits with leading zeros, which a number would lose
HEXADECIMAL = r"^\s*0[xX][0-9a-fA-F]+\s*$"  # which pyarrow reads as a signed number of the type's bits
CHUNK = 1 << 24  # bytes
_FOLLOWING = np.frombuffer(b"0123456789xX", np.uint8)
_UNDECODED = "\ufffd"


@dataclass(frozen=True)
class CsvFile:
    """A CSV file.

    Args:
        names: the columns of a file without a header, empty to number them; None: the file has a header.

    Raises:
        DataError: an option is invalid.
    """

    file: File
    delimiter: str
    encoding: str
    names: tuple[str, ...] | None

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1:
            raise DataError(f"{self.name}: delimiter must be one character, not {self.delimiter!r}")
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise DataError(
                f"{self.name}: Python knows no encoding {self.encoding!r} (expected e.g. 'latin-1')"
            ) from None

    @property
    def name(self) -> str:
        return self.file.name

    @cached_property
    def columns(self) -> list[str]:
        """The names of the columns.

        Raises:
            DataError: the file is empty, its header has a different encoding, or it has another number of
                columns than `names`.
        """
        try:
            line, found = next(self.rows(), (1, []))
        except (OSError, python_csv.Error) as error:
            raise DataError(f"{self.name}: cannot be read as CSV: {error}") from error
        if not found:
            lacks = "it has no header line" if self.names is None else "it has no line"
            raise DataError(f"{self.name}: cannot be read as CSV: {lacks}")
        if self.names is not None:
            if self.names and len(self.names) != len(found):
                raise DataError(
                    f"{self.name}: line {line} has {len(found)} columns, and names has {len(self.names)}; "
                    "without a header, names must name all columns"
                )
            return list(self.names) or [f"f{n}" for n in range(len(found))]
        if _UNDECODED in "".join(found):
            raise DataError(f"{self.name}: line {line}: the header {self.not_encoded()}")
        return found

    def whole(self) -> ByteRange:
        return ByteRange(self, 0, None, 0, self.names is None)

    def part(self, begin: int, end: int, first: int, what: str) -> ByteRange:
        """The records in the bytes [begin, end).

        Args:
            first: the number of the first of them.
            what: their name in messages.
        """
        return ByteRange(self, begin, end, first, False, what)

    @property
    def compression(self) -> str | None:
        ends = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
        return next((codec for end, codec in ends.items() if self.name.lower().endswith(end)), None)

    def refuse_unless_splittable(self) -> None:
        """Check that the file can be read from anywhere.

        Raises:
            DataError: it is compressed, or its encoding has characters that contain the byte of a line end.
        """
        if self.compression:
            raise DataError(
                f"{self.name}: is compressed, so its records cannot be read from anywhere, and together with "
                "the other files it is too large to be kept in memory; unpack it, or write Parquet"
            )
        if self.is_wide:
            raise DataError(
                f"{self.name}: is {self.encoding}, in which a large file cannot be read from anywhere; write "
                "it in UTF-8"
            )

    @property
    def is_wide(self) -> bool:
        """Whether a byte of this encoding may not be a character, as in UTF-16."""
        return "0,\n".encode(self.encoding) != b"0,\n"

    @contextmanager
    def stream(self, what: str = "") -> Iterator[Any]:
        """Open the unpacked bytes of the file."""
        import pyarrow

        with self.file.open(what) as opened:
            if self.compression:
                yield pyarrow.CompressedInputStream(pyarrow.PythonFile(opened, "r"), self.compression)
            else:
                yield opened

    # --- the lines of the file, for messages

    def line(self, record: int, name: str = "") -> tuple[int | str, str]:
        """Find the line of a record, or of its value in a column, and this value."""
        try:
            rows = self.rows()
            if self.names is None:
                next(rows)
            line, row = next(found for nth, found in enumerate(rows) if nth == record)
        except (OSError, python_csv.Error, StopIteration, DataError):
            return f"of record {record}", ""
        at = self.columns.index(name) if name in self.columns else 0
        before = sum(len(re.findall(r"\r\n|\r|\n", value)) for value in row[:at])
        return line + before, row[at] if at < len(row) else ""

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the line at which each row begins, and its values. Empty lines are not rows."""
        encoding = "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding
        with self.stream() as stream:
            raw = stream if self.compression else BufferedReader(stream, 1 << 16)
            with TextIOWrapper(raw, encoding, errors="replace", newline="") as text:
                rows, last = python_csv.reader(text, delimiter=self.delimiter), 0
                for row in rows:
                    if row:
                        yield last + 1, row
                    last = rows.line_num

    def not_encoded(self) -> str:
        return f"is not {self.encoding}; name the file's encoding, e.g. encoding='latin-1'"


@dataclass(frozen=True)
class ByteRange:
    """Consecutive records of a file.

    Args:
        begin, end: their bytes; `end` is None for the whole file, unpacked.
        first: the number of the first record.
        has_header: whether the part begins with the header.
        what: name of the records in messages.
    """

    file: CsvFile
    begin: int
    end: int | None
    first: int
    has_header: bool
    what: str = ""

    def read(self, names: Sequence[str], types: Mapping[str, Any], known: Any = None) -> Any:
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
        except (UnicodeError, pyarrow.ArrowException) as error:
            raise DataError(f"{self.file.name}: {self._why(error, names, types)}") from error

    def _table(self, names: Sequence[str], types: Mapping[str, Any], use_threads: bool = True) -> Any:
        import pyarrow
        from pyarrow import csv as pa_csv

        if self.end is not None and self.begin == self.end:  # pyarrow refuses empty text
            return pyarrow.table({name: pyarrow.array([], types.get(name)) for name in names})
        with self._stream() as stream:
            return pa_csv.read_csv(
                stream,
                read_options=pa_csv.ReadOptions(
                    encoding=self.file.encoding,
                    use_threads=use_threads,
                    column_names=None if self.has_header else self.file.columns,
                ),
                # Without newlines_in_values, pyarrow fails if a block of a large file ends in a quoted value.
                parse_options=pa_csv.ParseOptions(delimiter=self.file.delimiter, newlines_in_values=True),
                convert_options=pa_csv.ConvertOptions(
                    include_columns=list(names),
                    column_types={name: kind for name, kind in types.items() if name in names},
                ),
            )

    @contextmanager
    def _stream(self) -> Iterator[Any]:
        if self.end is None:
            with self.file.stream(self.what) as stream:
                yield stream
        else:
            yield BytesIO(self.file.file.read(self.begin, self.end, self.what))

    def refuse_changed(self, table: Mapping[str, Any], is_large: Callable[[Any], bool]) -> None:
        """Check that numbers are those of the text.

        Args:
            table: the columns whose types were inferred.
            is_large: whether a column has numbers that a float64 may round.

        Raises:
            DataError: a number has lost leading zeros, or was rounded.
        """
        import pyarrow
        import pyarrow.compute as pc

        whole = self._with_odd_numbers(table)
        rounded = [n for n, column in table.items() if column.type == pyarrow.float64() and is_large(column)]
        if not whole and not rounded:
            return
        names = [*whole, *rounded]
        texts = self.read(names, dict.fromkeys(names, pyarrow.string()))
        for name in names:
            if (record := _index(pc.match_substring_regex(texts[name], PADDED))) is not None:
                text = texts[name][record].as_py().strip()
                raise DataError(
                    f"{self.place(name)(record)}: column {name!r} is {text!r}, which loses its "
                    f"zeros as a number; dtype={{{name!r}: str}} keeps it as text, "
                    f"dtype={{{name!r}: 'int64'}} reads it as a number"
                )
            if (record := _index(pc.match_substring_regex(texts[name], HEXADECIMAL))) is not None:
                text = texts[name][record].as_py().strip()
                raise DataError(
                    f"{self.place(name)(record)}: column {name!r} is {text!r}, a hexadecimal number; "
                    f"dtype={{{name!r}: str}} keeps it as text, dtype={{{name!r}: 'uint64'}} reads it as a "
                    "number"
                )
        for name in rounded:
            self._refuse_infinite(name, table[name], texts[name])
            self._refuse_rounded(name, texts[name])

    def _with_odd_numbers(self, table: Mapping[str, Any]) -> list[str]:
        """The columns of whole numbers, if one of them may begin with a zero and more."""
        import pyarrow

        whole = [name for name, column in table.items() if pyarrow.types.is_integer(column.type)]
        return whole if whole and self._has_padded_numbers() else []

    def refuse_overflow(self, table: Mapping[str, Any]) -> None:
        """Check that no number has become infinite or negative.

        Args:
            table: the columns whose types were given.

        Raises:
            DataError: a number is beyond those of the column's type.
        """
        import pyarrow
        import pyarrow.compute as pc

        signed = {n: c for n, c in table.items() if pyarrow.types.is_signed_integer(c.type)}
        if whole := self._with_odd_numbers(signed):
            texts = self.read(whole, dict.fromkeys(whole, pyarrow.string()))
            for name in whole:
                wrong = _both(pc.less(table[name], 0), pc.match_substring_regex(texts[name], HEXADECIMAL))
                self._refuse_beyond(name, wrong, table[name].type, texts[name])
        infinite = [
            name
            for name, column in table.items()
            if pyarrow.types.is_floating(column.type) and pc.any(pc.is_inf(column)).as_py()
        ]
        if infinite:
            texts = self.read(infinite, dict.fromkeys(infinite, pyarrow.string()))
            for name in infinite:
                self._refuse_infinite(name, table[name], texts[name])

    def _refuse_infinite(self, name: str, numbers: Any, texts: Any) -> None:
        import pyarrow.compute as pc

        wrong = _both(pc.is_inf(numbers), pc.match_substring_regex(texts, "[0-9]"))
        self._refuse_beyond(name, wrong, numbers.type, texts)

    def _refuse_beyond(self, name: str, wrong: Any, kind: Any, texts: Any) -> None:
        if (record := _index(wrong)) is not None:
            raise DataError(
                f"{self.place(name)(record)}: column {name!r} is {texts[record].as_py()!r}, which is beyond "
                f"the numbers of {kind}; dtype={{{name!r}: str}} keeps it as text"
            )

    def _refuse_rounded(self, name: str, texts: Any) -> None:
        is_whole, values = _whole_numbers(texts)
        rounded = [abs(v) > EXACT and int(float(v)) != v for v in values]
        if any(rounded):
            nth = rounded.index(True)
            record = int(np.flatnonzero(is_whole)[nth])
            raise DataError(
                f"{self.place(name)(record)}: column {name!r} is {values[nth]}, which a float64 rounds, and "
                f"other values of it are no whole numbers from 0 to 2^64-1; dtype={{{name!r}: str}} keeps "
                f"them as text, dtype={{{name!r}: 'float64'}} rounds them"
            )

    def type_of_large(self, name: str, column: Any) -> Any:
        """The type of a column of floats beyond 2^53: uint64 if all are whole and fit, otherwise float64."""
        import pyarrow

        _, values = _whole_numbers(self.read([name], {name: pyarrow.string()})[name])
        if len(values) == len(column) - column.null_count and all(0 <= v < 2**64 for v in values):
            return pyarrow.uint64()
        return pyarrow.float64()

    def _has_padded_numbers(self) -> bool:
        """Whether a value may begin with a zero and a further digit, or an x."""
        if self.file.is_wide:
            return True
        before = np.zeros(256, bool)
        before[list(b'\n\r"' + self.file.delimiter.encode())] = True
        last = b"\n\n"
        with self._stream() as stream:
            while chunk := stream.read(CHUNK):
                text = np.frombuffer(last + chunk + b"\n", np.uint8)
                zeros = np.flatnonzero(text[2:-1] == ord("0")) + 2
                previous, following = text[zeros - 1], text[zeros + 1]
                previous = np.where(previous == ord(" "), text[zeros - 2], previous)  # a space after a comma
                if (before[previous] & np.isin(following, _FOLLOWING)).any():
                    return True
                last = bytes(text[-4:-1])  # a zero at the end meets its digit in the next chunk
        return False

    def refuse_bytes(self, name: str, column: Any) -> None:
        """Refuse a column whose text does not have the expected encoding.

        Raises:
            DataError: a value is not valid text in this encoding.
        """
        import pyarrow

        if not pyarrow.types.is_binary(column.type):
            return
        for record, value in enumerate(column.to_pylist()):
            try:
                value.decode()
            except UnicodeDecodeError:
                raise DataError(
                    f"{self.place(name)(record)}: column {name!r} {self.file.not_encoded()}"
                ) from None

    def refuse_empty(self, name: str, column: Any) -> None:
        """Refuse a column with missing values.

        Raises:
            DataError: a value is missing.
        """
        if column.null_count:
            record = int(np.asarray(column.is_null()).argmax())
            line, value = self.file.line(self.first + record, name)
            what = f"is {value!r}, which counts as empty" if value else "is empty"
            raise DataError(
                f"{self.file.name}: line {line}: column {name!r} {what}; a value is needed "
                f"(fill={{{name!r}: VALUE}} fills it)"
            )

    def place(self, name: str) -> Callable[[int], str]:
        """Return a function that names a record's value of this column by its line."""
        return lambda record: f"{self.file.name}: line {self.file.line(self.first + record, name)[0]}"

    def _why(self, error: Exception, names: Sequence[str], types: Mapping[str, Any]) -> str:
        """Describe an error of pyarrow, with the line at which it occurred."""
        import pyarrow

        if isinstance(error, UnicodeError):
            rows = (line for line, row in self.file.rows() if _UNDECODED in "".join(row))
            return f"line {next(rows, 1)}: {self.file.not_encoded()}"
        try:  # with threads, errors do not name the row
            self._table(names, types, use_threads=False)
        except pyarrow.ArrowException as again:
            error = again
        what = str(error)
        if not (row := re.search(r"Row #(\d+): ", what)):
            return f"cannot be read as CSV: {what}"
        column = re.search(r"In CSV column #(\d+)", what)
        name = self.file.columns[int(column[1])] if column else ""
        line, _ = self.file.line(self.first + int(row[1]) - 1 - self.has_header, name)
        what = what[row.end() :]
        if "invalid UTF8" in what:
            what = self.file.not_encoded()
        of = f"column {name!r}: " if column else ""
        return f"line {line}: cannot be read as CSV: {of}{what}"


def _whole_numbers(texts: Any) -> tuple[np.ndarray, list[int]]:
    """Which texts are whole numbers, and these numbers."""
    import pyarrow.compute as pc

    is_whole = pc.match_substring_regex(texts, r"^\s*[+-]?[0-9]+\s*$")
    return np.asarray(is_whole), [int(text) for text in pc.filter(texts, is_whole).to_pylist()]


def _both(one: Any, other: Any) -> Any:
    """Where two pyarrow columns of truth values are true; nulls are false."""
    return np.asarray(one.fill_null(False)) & np.asarray(other.fill_null(False))


def _index(truth: Any) -> int | None:
    """The index of the first true value; None if all are false."""
    found = np.flatnonzero(np.asarray(truth))
    return int(found[0]) if len(found) else None
