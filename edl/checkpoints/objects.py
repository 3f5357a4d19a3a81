# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as objects of a store that fsspec supports: S3, Google Cloud Storage, Azure, memory.

Promise: `create` is one conditional put, so it is atomic, and only one of several concurrent calls succeeds.
Errors of a store's client are raised as OSError (edl.object_store).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO, cast

from edl.errors import CheckpointError
from edl.object_store import S3, client, short, speaking

BLOCK = 8 << 20  # bytes of one request; S3 allows 10,000 per object, so s3fs makes them larger if necessary
_LASTING = (PermissionError, FileNotFoundError)  # permanent refusals of a store


class Objects:
    """Directories of objects, one level deep. All methods raise OSError.

    Raises:
        CheckpointError: no client for this store is installed, or the client refuses the address.
    """

    damage = frozenset({errno.ENOENT})

    def __init__(self, url: str):
        self.where = url.rstrip("/")
        try:
            self._client, self._root = client(self.where)
        except Exception as error:  # any error of the client, such as a missing package
            raise CheckpointError(f"{url}: {short(error)}") from error

    def may_pass(self, error: OSError) -> bool:
        """Whether the store may answer later: the error is not a refusal."""
        return not isinstance(error, _LASTING)

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """The objects of each wanted directory whose name begins with `prefix`, with their sizes in bytes."""
        found: dict[str, dict[str, int]] = {}
        for (directory, *names), size in self._list(self._root, prefix):
            if len(names) == 1 and wanted(directory):
                found.setdefault(directory, {})[names[0]] = size
        return found

    def sizes(self, directory: str, prefix: str = "") -> dict[str, int]:
        """The objects of a directory whose name begins with `prefix`, with their sizes in bytes."""
        found = self._list(self._path(directory), prefix)
        return {name: size for (name, *more), size in found if not more and name.startswith(prefix)}

    def write(self, directory: str, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a new object. It does not appear before it is complete."""
        path = self._path(directory, name)
        with speaking():
            file = self._client.open(path, "wb", block_size=BLOCK)
        try:
            for piece in pieces:
                with speaking():
                    file.write(piece)
            with speaking():
                file.close()
        except BaseException:
            with suppress(Exception):  # the cause of the failure may be the store
                file.discard()
            with suppress(AttributeError):  # raised by a file in memory
                file.closed = True  # else it would be completed when it is collected
            with suppress(Exception):  # some stores show an incomplete object at once
                self._client.rm_file(path)
            raise

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Create an object atomically. Return False if an object of this name exists.

        Raises:
            OSError: the store failed, and the object does not exist.
        """
        path = self._path(directory, name)
        try:
            with speaking():
                self._client.pipe_file(path, data, mode="create")
        except OSError:
            # Either the put was refused because the object exists (each client has its own error for that),
            # or the put succeeded and its answer was lost.
            with speaking():
                if self._client.exists(path):
                    return False
            raise
        return True

    def open(self, directory: str, name: str) -> BinaryIO:
        """Open an object for reading from its beginning."""
        with speaking():
            file = self._client.open(self._path(directory, name), "rb", block_size=BLOCK)
        return cast(BinaryIO, _Reader(file))

    def rename(self, directory: str, name: str, other: str) -> None:
        """Copy the object and remove the old one. `mv` of s3fs does not report when it may not remove."""
        old = self._path(directory, name)
        with speaking():
            self._client.cp_file(old, self._path(directory, other))
            self._client.rm_file(old)

    def remove(self, directory: str, names: Iterable[str]) -> None:
        """Remove these objects in this order."""
        for name in names:
            with speaking(), suppress(FileNotFoundError):
                self._client.rm_file(self._path(directory, name))
        with suppress(Exception):  # needed only in stores that have real directories
            self._client.rmdir(self._path(directory))

    def _path(self, *names: str) -> str:
        return "/".join((self._root.rstrip("/"), *filter(None, names)))

    def _list(self, path: str, prefix: str = "") -> Iterator[tuple[list[str], int]]:
        """The objects below `path`: path components and sizes in bytes. Some may lack `prefix`.

        Raises:
            FileNotFoundError: the bucket does not exist.
        """
        s3 = self.where.startswith(S3)
        # Without a prefix, s3fs looks for an object at `path` itself if it finds no objects below. An account
        # with rights below the path only is refused then.
        such = {"prefix": prefix} if s3 and prefix else {}
        with speaking():
            try:
                found = self._client.find(path, detail=True, **such)
            except FileNotFoundError:
                if s3:  # the bucket does not exist
                    raise
                return  # nothing has been written yet
        for full, about in found.items():
            if names := full.removeprefix(path).strip("/"):
                yield names.split("/"), int(about.get("size") or 0)


class _Reader:
    """An open object whose errors are raised as OSError."""

    def __init__(self, file: Any):
        self._file = file

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, most: int = -1) -> bytes:
        with speaking():
            return bytes(self._file.read(most))

    def readinto(self, room: memoryview) -> int:
        with speaking():
            data = self._file.read(len(room))
        room[: len(data)] = data
        return len(data)
