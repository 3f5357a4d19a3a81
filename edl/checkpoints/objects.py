"""Checkpoints as objects of a store that fsspec speaks to: S3, Google's, Azure's, memory.

Promise: `create` is one conditional put, so an object appears whole or not at all, and once, whoever else
tries. What a store's client raises is an OSError here: only this module knows that there are such clients.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

from edl.errors import CheckpointError

BLOCK = 8 << 20  # bytes of one request; S3 takes 10,000 of them for an object, and s3fs makes them larger
MOST_WORDS = 300  # characters of a client's error
_S3 = ("s3://", "s3a://")
# s3fs asks five times for what botocore asks five times for: a store that hangs would be told after minutes.
_S3_RETRIES = 3
_BOTOCORE_RETRIES = {"config_kwargs": {"retries": {"max_attempts": 1}}}
_LASTING = (PermissionError, FileNotFoundError)  # of what a store refuses


class Objects:
    """Directories of objects, one level deep. All methods raise OSError.

    Raises:
        CheckpointError: no client of such a store is installed, or it refuses the address.
    """

    damage = frozenset({errno.ENOENT})

    def __init__(self, url: str):
        import fsspec  # only who has such an address needs it

        self.where = url.rstrip("/")
        try:
            # What others have changed is to be seen.
            options = _options(self.where)
            self._client, self._root = fsspec.core.url_to_fs(self.where, use_listings_cache=False, **options)
            if self.where.startswith(_S3):
                self._client.retries = _S3_RETRIES
        except Exception as error:  # whatever the client says; that it is not installed, for one
            raise CheckpointError(f"{url}: {_short(error)}") from error

    def may_pass(self, error: OSError) -> bool:
        """Whether the store may answer later: it has not said that it refuses."""
        return not isinstance(error, _LASTING)

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """The objects of each directory that begins so and is wanted, with their bytes."""
        found: dict[str, dict[str, int]] = {}
        for (directory, *names), size in self._list(self._root, prefix):
            if len(names) == 1 and wanted(directory):
                found.setdefault(directory, {})[names[0]] = size
        return found

    def sizes(self, directory: str) -> dict[str, int]:
        """The objects of a directory, with their bytes."""
        return {name: size for (name, *more), size in self._list(self._path(directory)) if not more}

    def write(self, directory: str, name: str, pieces: Iterable[memoryview]) -> None:
        """A new object. There is none before all of it has come."""
        path = self._path(directory, name)
        with _speaking():
            file = self._client.open(path, "wb", block_size=BLOCK)
        try:
            for piece in pieces:
                with _speaking():
                    file.write(piece)
            with _speaking():
                file.close()
        except BaseException:
            with suppress(Exception):  # the store may be what has failed
                file.discard()
            with suppress(AttributeError):  # of a file in memory
                file.closed = True  # else it would be completed when it is collected
            with suppress(Exception):  # where what was written so far is there at once
                self._client.rm_file(path)
            raise

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Let an object appear whole. False: there is one of that name."""
        path = self._path(directory, name)
        try:
            with _speaking():
                self._client.pipe_file(path, data, mode="create")
        except OSError:
            # Refused because it is there, in words that differ from client to client; or the answer to a put
            # that has succeeded was lost.
            with _speaking():
                if self._client.exists(path):
                    return False
            raise
        return True

    def open(self, directory: str, name: str) -> BinaryIO:
        """An object to be read from its beginning."""
        with _speaking():
            file = self._client.open(self._path(directory, name), "rb", block_size=BLOCK)
        return cast(BinaryIO, _Reader(file))

    def rename(self, directory: str, name: str, other: str) -> None:
        """A copy, and the old one removed: not by `mv`, for s3fs' says nothing when it may not remove."""
        old = self._path(directory, name)
        with _speaking():
            self._client.cp_file(old, self._path(directory, other))
            self._client.rm_file(old)

    def remove(self, directory: str, names: Iterable[str]) -> None:
        """These objects, in this order."""
        for name in names:
            with _speaking(), suppress(FileNotFoundError):
                self._client.rm_file(self._path(directory, name))
        with suppress(Exception):  # where directories are more than names
            self._client.rmdir(self._path(directory))

    def _path(self, *names: str) -> str:
        return "/".join((self._root.rstrip("/"), *names))

    def _list(self, path: str, prefix: str = "") -> Iterator[tuple[list[str], int]]:
        """The objects below it: their names, and their bytes. There may be some that begin otherwise."""
        s3 = self.where.startswith(_S3)
        # Without it s3fs, where it finds none, asks for an object of the path's own name, and an account that
        # has rights below the path only is refused.
        such = {"prefix": prefix} if s3 and prefix else {}
        with _speaking():
            try:
                found = self._client.find(path, detail=True, **such)
            except FileNotFoundError:
                if s3:  # there it is the bucket
                    raise
                return  # nothing was written yet
        for full, about in found.items():
            if names := full.removeprefix(path).strip("/"):
                yield names.split("/"), int(about.get("size") or 0)


class _Reader:
    """An open object whose troubles are OSErrors."""

    def __init__(self, file: Any):
        self._file = file

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, most: int) -> bytes:
        with _speaking():
            return bytes(self._file.read(most))

    def readinto(self, room: memoryview) -> int:
        with _speaking():
            data = self._file.read(len(room))
        room[: len(data)] = data
        return len(data)


@contextmanager
def _speaking() -> Iterator[None]:
    """
    Raises:
        OSError: what the store's client said.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of botocore, aiohttp, asyncio, ...: there is no list
        raise OSError(f"{type(error).__name__}: {_short(error)}") from error


def _options(url: str) -> dict[str, Any]:
    """For the store's client, unless the environment says otherwise."""
    is_ours = url.startswith(_S3) and not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys()
    return _BOTOCORE_RETRIES if is_ours else {}


def _short(error: Exception) -> str:
    """What it says, without the pages that some add."""
    return str(error).partition("\n")[0][:MOST_WORDS]
