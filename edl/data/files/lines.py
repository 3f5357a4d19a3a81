# SPDX-License-Identifier: Apache-2.0
"""Random access to the lines of a file. Only the offset of every 64th or 1024th line is kept."""

from __future__ import annotations

import json

import numpy as np

from edl.data.files.addresses import File
from edl.data.files.index_file import cached
from edl.data.files.joined import span

EVERY = 1024  # lines per stored offset
CHUNK = 1 << 24  # bytes that are scanned at once


class Lines:
    """The lines of a file, by number. Indexing takes one pass over the file, and 1 MB per 10^8 lines.

    Args:
        every: lines per stored offset; fewer make single lines quicker to read.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, file: File, every: int = EVERY):
        self.path, self._file, self._every = file.name, file, every
        index = cached(file, json.dumps(["lines", 1, every]), lambda: _scan(file, every)).view(np.int64)
        self._count, self._places = int(index[0]), index[1:]

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> bytes:
        """Return the lines [start, stop), including their newlines.

        Raises:
            DataError: the file cannot be read, or has changed.
        """
        if start >= stop:
            return b""
        first, last = start // self._every, -(-stop // self._every)
        begin = int(self._places[first])
        end = int(self._places[last]) if last < len(self._places) else self._file.size
        data = self._file.read(begin, end, span(start, stop))
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
        skipped, wanted = start - first * self._every, stop - first * self._every
        return data[ends[skipped - 1] if skipped else 0 : ends[wanted - 1] if wanted <= len(ends) else None]


def _scan(file: File, every: int) -> bytes:
    """The number of lines, and where every `every`th line begins, as int64."""
    places, count, at, last = [np.zeros(1, np.int64)], 0, 0, b"\n"
    with file.open() as opened:
        while at < file.size:
            chunk = opened.read_at(at, min(at + CHUNK, file.size))
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + at + 1
            places.append(ends[-(count + 1) % every :: every])
            count, at, last = count + len(ends), at + len(chunk), chunk[-1:]
    count += last != b"\n"  # the last line may lack a newline
    return np.concatenate([[count], *places]).astype(np.int64).tobytes()
