# SPDX-License-Identifier: Apache-2.0
"""Temporary directories that are removed with their process, even if it is killed.

A process holds a lock on each of its directories for as long as it lives. Each new directory, and the end of
a job, first removes unlocked directories: their processes were killed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "edl-scratch-"


@contextlib.contextmanager
def directory(inside: Path | None = None, prefix: str = PREFIX) -> Iterator[Path]:
    """A new directory that is removed at the end of the block, or once this process has ended.

    Args:
        inside: where to create it; None for the system's directory of temporary files.
        prefix: of its name.

    Raises:
        OSError: the directory cannot be created.
    """
    remove_abandoned(inside, prefix)
    path, lock = _locked(inside, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def of_this_process() -> Path:
    """A new directory that is removed when this process exits, or once it has been killed.

    Raises:
        OSError: the directory cannot be created.
    """
    remove_abandoned()
    path, _ = _locked()
    atexit.register(_remove, path, os.getpid())
    return path


def remove_abandoned(inside: Path | None = None, prefix: str = PREFIX) -> None:
    """Remove this user's directories whose processes have ended; the arguments are those of `directory`."""
    for path in (inside or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, one in use, or another process removes it
            lock = _open(path)
            try:
                if os.fstat(lock).st_uid != os.getuid():  # root may open those of all users
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(path, ignore_errors=True)


def _locked(inside: Path | None = None, prefix: str = PREFIX) -> tuple[Path, int]:
    """Create a new directory and return it with the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
        lock = -1
        with contextlib.suppress(FileNotFoundError):
            lock = _open(path)
            with contextlib.suppress(OSError):  # without locks in the file system, no directory is removed
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return path, lock
        # A different process has removed it between its creation and its locking.
        if lock >= 0:
            os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
