# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a directory of a file system.

Promise: once `write` or `create` has returned, the file survives a loss of power. `create` is atomic, and
only one call succeeds per name. No symbolic link below the directory is followed: nothing outside is touched.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

BLOCK = 4 << 20  # bytes
_DIRECT = getattr(os, "O_DIRECT", 0)  # not everywhere
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
# Errors where the file system has no files without a name, or no link to one can be made (ENOENT: no /proc).
_NO_UNNAMED = _NO_LINKS | {errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.EXDEV}


class Files:
    """Directories of files, one level deep. All methods raise OSError."""

    # Errors from reading a file that does not exist, is not a file, or is on a broken disk.
    damage = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO})

    def __init__(self, root: Path):
        self.where = str(root)
        self._root = root

    def may_pass(self, error: OSError) -> bool:
        """Return False: an error of a file system is permanent."""
        return False

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """The files of each wanted directory whose name begins with `prefix`, with their sizes in bytes.

        Raises:
            OSError: one of these directories is a symbolic link. Its target cannot be pruned; and if it were
                left out, an older state could pass for the newest.
        """
        try:
            with self._open() as root:
                names = [name for name in os.listdir(root) if name.startswith(prefix) and wanted(name)]
        except FileNotFoundError:  # nothing has been written yet
            return {}
        found = {}
        for name in names:
            with suppress(NotADirectoryError, FileNotFoundError), self._open(name) as directory:
                found[name] = dict(_files(directory))
            if name not in found and (self._root / name).is_symlink():
                raise OSError(
                    errno.ELOOP,
                    f"{name} is a symbolic link; move the directory itself there, or remove the link",
                )
        return found

    def sizes(self, directory: str, prefix: str = "") -> dict[str, int]:
        """The files of a directory whose name begins with `prefix`, with their sizes in bytes."""
        try:
            with self._open(directory) as inside:
                return {name: size for name, size in _files(inside) if name.startswith(prefix)}
        except (NotADirectoryError, FileNotFoundError):
            return {}

    def write(self, directory: str, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a new file."""
        self._make(directory)
        with self._open(directory) as inside:
            descriptor = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=inside
            )
            try:
                with open(descriptor, "wb", buffering=0) as file:
                    _write_past_cache(file.fileno(), pieces)
                    os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    os.unlink(name, dir_fd=inside)  # it takes space that other files need
                raise
            _sync(inside)

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Create a file atomically. Return False if a file of this name exists.

        Raises:
            OSError: the file system failed, other than by lacking hard links.
        """
        self._make(directory)
        try:
            return self._link(directory, name, data)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
        unfinished = f".{name}.{secrets.token_hex(4)}"
        self.write(directory, unfinished, [memoryview(data)])
        with self._open(directory) as inside:
            try:
                os.link(unfinished, name, src_dir_fd=inside, dst_dir_fd=inside, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if name in os.listdir(inside):
                    return False
                os.rename(unfinished, name, src_dir_fd=inside, dst_dir_fd=inside)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(unfinished, dir_fd=inside)
            _sync(inside)
        return True

    def _link(self, directory: str, name: str, data: bytes) -> bool:
        """Create a file as `create` does, from one without a name: a process that is killed leaves nothing.

        Raises:
            OSError: the file system failed, or has no files without a name.
        """
        with self._open(directory) as inside:
            descriptor = os.open(".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o644, dir_fd=inside)
            with open(descriptor, "wb", buffering=0) as file:
                _write_past_cache(file.fileno(), [memoryview(data)])
                os.fsync(file.fileno())
                try:
                    os.link(f"/proc/self/fd/{descriptor}", name, dst_dir_fd=inside, follow_symlinks=True)
                except FileExistsError:
                    return False
            _sync(inside)
        return True

    def open(self, directory: str, name: str) -> BinaryIO:
        """Open a file for reading from its beginning.

        Raises:
            FileNotFoundError: the name does not exist, or is not that of a regular file.
        """
        with self._open(directory) as inside:
            # O_NONBLOCK: do not wait for a writer if the name is that of a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=inside)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "not a file", name)
        return open(descriptor, "rb", buffering=0)

    def rename(self, directory: str, name: str, other: str) -> None:
        with self._open(directory) as inside:
            os.rename(name, other, src_dir_fd=inside, dst_dir_fd=inside)
            _sync(inside)

    def remove(self, directory: str, names: Iterable[str]) -> None:
        """Remove these files in this order, and then the directory if it is empty.

        Raises:
            OSError: the file system failed. Absent files are no error.
        """
        with suppress(FileNotFoundError), self._open(directory) as inside:
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=inside)
                    _sync(inside)  # keep this order on the disk, too
        with self._open() as root:
            try:
                os.rmdir(directory, dir_fd=root)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
            _sync(root)

    def _make(self, directory: str) -> None:
        new = [path for path in (self._root, *self._root.parents) if not path.exists()]
        self._root.mkdir(parents=True, exist_ok=True)
        for path in new:
            descriptor = os.open(path.parent, _DIRECTORY)
            _sync(descriptor)
            os.close(descriptor)
        with self._open() as root:
            with suppress(FileExistsError):
                os.mkdir(directory, dir_fd=root)
            _sync(root)

    @contextmanager
    def _open(self, directory: str = "") -> Iterator[int]:
        """Open the root, or a directory in it, and yield the descriptor."""
        opened = [os.open(self._root, _DIRECTORY)]
        try:
            if directory:
                opened.append(os.open(directory, _DIRECTORY | os.O_NOFOLLOW, dir_fd=opened[0]))
            yield opened[-1]
        finally:
            for descriptor in opened:
                os.close(descriptor)


def _files(directory: int) -> Iterator[tuple[str, int]]:
    for name in os.listdir(directory):
        with suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                yield name, found.st_size


def _sync(directory: int) -> None:
    """Flush the names in a directory to the disk, if its file system supports that.

    Raises:
        OSError: the flush failed.
    """
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _write_past_cache(descriptor: int, pieces: Iterable[memoryview]) -> None:
    """Write pieces one after the other, in blocks with O_DIRECT if the file system supports it.

    Through the page cache, most of the processor time of a checkpoint is the kernel's, and training waits.
    """
    block, filled = memoryview(mmap.mmap(-1, BLOCK)), 0  # O_DIRECT needs whole, aligned pages
    for piece in pieces:
        while piece:
            taken = min(len(piece), BLOCK - filled)
            block[filled : filled + taken] = piece[:taken]
            filled, piece = filled + taken, piece[taken:]
            if filled == BLOCK:
                _write_direct(descriptor, block)
                filled = 0
    _write_all(descriptor, block[:filled])


def _write_direct(descriptor: int, block: memoryview) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        block = block[os.write(descriptor, block) :]
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    _write_all(descriptor, block)  # the rest of the block, or all of it if O_DIRECT is not supported


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
