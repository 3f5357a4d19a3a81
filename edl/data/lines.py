"""Random access to the lines of a file. Only the offset of every 1024th line is kept in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edl.errors import DataError

EVERY = 1024  # lines per stored offset
CHUNK = 1 << 24  # bytes that are scanned at once


class Lines:
    """The lines of a file, by number. Indexing takes one pass over the file, and 1 MB per 10^8 lines.

    Raises:
        DataError: the file cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        places, count, at, last = [np.zeros(1, np.int64)], 0, 0, b"\n"
        try:
            with open(path, "rb", buffering=0) as file:
                while chunk := file.read(CHUNK):
                    ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + at + 1
                    places.append(ends[-(count + 1) % EVERY :: EVERY])
                    count, at, last = count + len(ends), at + len(chunk), chunk[-1:]
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        self._places, self._size = np.concatenate(places), at
        self._count = count + (last != b"\n")  # the last line may lack a newline

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> bytes:
        """Return the lines [start, stop), including their newlines.

        Raises:
            DataError: the file cannot be read, or has become shorter.
        """
        if start >= stop:
            return b""
        first, last = start // EVERY, -(-stop // EVERY)
        begin = int(self._places[first])
        end = int(self._places[last]) if last < len(self._places) else self._size
        try:
            with open(self.path, "rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(data) != end - begin:
            raise DataError(f"{self.path}: is shorter than it was when the job began; it must not change")
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
        skipped, wanted = start - first * EVERY, stop - first * EVERY
        return data[ends[skipped - 1] if skipped else 0 : ends[wanted - 1] if wanted <= len(ends) else None]
