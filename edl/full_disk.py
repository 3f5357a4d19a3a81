# SPDX-License-Identifier: Apache-2.0
"""Tolerance of full disks: a process continues to run.

A failure to write a log line, the next journal entry or the summary is no reason to end a running training.
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

# Errors that are not the program's fault and may be temporary: no space, no quota, or a failing disk.
PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})


class _Lossy(io.RawIOBase):
    """A file that discards data for which the disk has no space."""

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
    """Open a text file on the descriptor that accepts any text, and loses it when the disk is full."""
    buffer = io.BufferedWriter(_Lossy(descriptor))  # type: ignore[type-var]
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def outlive() -> None:
    """Make stdout and stderr lossy: output of this process is lost while the disk is full."""
    sys.stdout, sys.stderr = lossy(1), lossy(2)


def log_file(path: Path) -> int:
    """Open a descriptor for a process's output: a new file, or the null device if the disk is full.

    Raises:
        OSError: the file cannot be created, for a permanent reason.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in PASSING:
            raise
        return os.open(os.devnull, os.O_WRONLY)


def places(*directories: Path | None) -> Iterator[Path]:
    """The directories to try for files that must not be lost: these, and then a new temporary one."""
    for directory in directories:
        if directory is not None:
            yield directory
    yield Path(tempfile.mkdtemp(prefix="edl-job-"))
