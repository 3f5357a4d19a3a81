# SPDX-License-Identifier: Apache-2.0
"""Temporary directories that are removed with their process, even if it is killed.

A process holds a lock on each of its directories for as long as it lives. Each new directory, and the end of
a job, first removes unlocked directories: their processes were killed.

    directory          for the length of a block
    of_this_process    for as long as the process lives
    unfinished         beside a file or directory that is being written, and then replaces the old one
    for_results        for files that stay; a directory whose process was killed before one was complete goes
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "edl-scratch-"
RESULTS = "edl-result-"
UNFINISHED = ".edl-unfinished-"


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


@contextlib.contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """A path for writing a file or directory that is moved to `target` at the end of the block.

    It lies beside `target`, in the same file system, so that a reader sees the old file, none, or the whole
    new one. Paths of writers of `target` that were killed are removed. After an error, the old file stays.

    Args:
        target: a file, or the name of a new directory; its parent exists.

    Raises:
        OSError: nothing can be written there.
    """
    with directory(target.parent, _prefix(target)) as inside:
        path = inside / target.name
        yield path
        os.replace(path, target)


def remove_unfinished(target: Path) -> None:
    """Remove what writers of `target` that were killed have left beside it."""
    remove_abandoned(target.parent, _prefix(target))


def _prefix(target: Path) -> str:
    return f".{target.name}{UNFINISHED}"


def for_results() -> Path:
    """A new directory whose complete files stay when this process ends.

    Names of files that are not complete begin with a dot. A directory without others is removed later.

    Raises:
        OSError: the directory cannot be created.
    """
    remove_abandoned()
    return _locked(None, RESULTS)[0]


def remove_abandoned(inside: Path | None = None, prefix: str = "") -> None:
    """Remove this user's directories whose processes have ended.

    Args:
        inside: where they lie; None for the system's directory of temporary files.
        prefix: of their names; empty for those of all temporary directories.
    """
    for known in [prefix] if prefix else [PREFIX, RESULTS]:
        for path in (inside or Path(tempfile.gettempdir())).glob(f"{glob.escape(known)}*"):
            with contextlib.suppress(OSError):  # another user's, one in use, or another process removes it
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    lock = _open(path)
    try:
        if os.fstat(lock).st_uid != os.getuid():  # root may open those of all users
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.name.startswith(RESULTS) or all(name.startswith(".") for name in os.listdir(lock)):
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
