"""What a process does about a disk that is full: it goes on.

A log line, the journal's next entry or the summary is no reason to end a training that runs.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# What is no fault of the program's, and may pass: no room, no quota, and what a disk says that fails.
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})


class _Lossy(io.RawIOBase):
    """A file that swallows what it has no room for."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            return len(data)


def lossy(descriptor: int) -> TextIO:
    """A text file on the descriptor that takes any text, and loses it when the disk is full."""
    buffer = io.BufferedWriter(_Lossy(descriptor))  # type: ignore[type-var]
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def outlive() -> None:
    """From now on what this process prints is lost when there is no room for it."""
    sys.stdout, sys.stderr = lossy(1), lossy(2)


def log_file(path: Path) -> int:
    """A descriptor for a process' output: a new file, or nowhere when there is no room for one.

    Raises:
        OSError: it cannot be made, and that will not pass.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in PASSING:
            raise
        return os.open(os.devnull, os.O_WRONLY)


def places(*directories: Path | None) -> Iterator[Path]:
    """Where to write what must not be lost: these directories, and then a new temporary one."""
    for directory in directories:
        if directory is not None:
            yield directory
    yield Path(tempfile.mkdtemp(prefix="edl-job-"))
