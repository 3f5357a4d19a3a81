# SPDX-License-Identifier: Apache-2.0
"""Where the records of a large CSV file begin, found by one scan without parsing the values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edl.errors import DataError

if TYPE_CHECKING:
    from edl.data.formats.csv_text import CsvFile

EVERY = 1024  # records per stored offset
LONGEST = 64 << 20  # bytes of one record


@dataclass(frozen=True)
class Scan:
    """What a scan has found.

    Args:
        records: their number.
        places: the offset of each 1024th record, and where the last one ends.
        kinds: by column, its type as text, and its least value.
    """

    records: int
    places: list[int]
    kinds: dict[str, list[Any]]

    def range_of(self, start: int, stop: int) -> tuple[int, int, int]:
        """The first record, the first byte and the end of the bytes that hold the records [start, stop)."""
        first = min(start // EVERY, max(len(self.places) - 2, 0))
        last = min(-(-stop // EVERY), len(self.places) - 1) if stop > start else first
        return first * EVERY, self.places[first], self.places[last]

    def text(self) -> bytes:
        return json.dumps([self.records, self.places, self.kinds]).encode()

    @classmethod
    def parse(cls, text: bytes) -> Scan:
        return cls(*json.loads(text))


def boundaries(file: CsvFile, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the offsets at which records begin, and the end of the last, for `size` bytes at a time.

    A line end within quotes belongs to a value. Empty lines are no records.

    Raises:
        DataError: a quote opens within a value, so that line ends cannot be told apart; or a record is longer
            than 64 MiB.
    """
    at, left = 0, b""  # `left` begins with a record
    while at < file.file.size:
        stop = min(at + size, file.file.size)
        text = left + file.file.read(at, stop)
        begin, at = at - len(left), stop
        if at == file.file.size and not text.endswith(b"\n"):
            text += b"\n"  # the last line may lack one
        ends = _line_ends(text, begin, file)
        if not len(ends):
            left = text
            if len(left) > LONGEST or at == file.file.size:
                raise DataError(
                    f"{file.name}: the record that begins at byte {begin} has no end within {len(left)} "
                    "bytes; is a quote never closed?"
                )
            continue
        starts = np.concatenate([[0], ends])
        raw = np.frombuffer(text, np.uint8)
        lengths = np.diff(starts)
        blank = (lengths == 1) | ((lengths == 2) & (raw[starts[:-1]] == ord("\r")))
        whole = starts[:-1][~blank] + begin
        left = text[int(ends[-1]) :]
        yield begin, np.append(whole, min(begin + int(ends[-1]), file.file.size))
    if left:
        raise DataError(f"{file.name}: the last record has no end; is a quote never closed?")


def _line_ends(text: bytes, begin: int, file: CsvFile) -> np.ndarray:
    """The indices behind the line ends that are not within quotes. `text` begins with a record.

    Raises:
        DataError: a quote opens in the middle of a value.
    """
    raw = np.frombuffer(text, np.uint8)
    lines = np.flatnonzero(raw == ord("\n"))
    quotes = np.flatnonzero(raw == ord('"'))
    if not len(quotes):
        return lines + 1
    inside = np.searchsorted(quotes, lines) % 2 == 1
    # A quote in the middle of a value is text to pyarrow. Then quotes and line ends cannot be matched here.
    opening = quotes[::2]
    previous = np.where(opening > 0, raw[opening - 1], ord("\n"))
    legal = np.isin(previous, [ord("\n"), ord("\r"), ord('"'), ord(file.delimiter)])
    if not legal.all():
        at = begin + int(opening[np.argmin(legal)])
        raise DataError(
            f"{file.name}: byte {at}: a quote opens in the middle of a value; in files of this size, put "
            'the whole value in quotes and double the quote: "5"" pipe"'
        )
    found: np.ndarray = lines[~inside] + 1
    return found
