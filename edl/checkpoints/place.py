# SPDX-License-Identifier: Apache-2.0
"""Storage of checkpoint files: a directory on a disk, or a prefix of an object store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO, Protocol, TypeVar

from edl.contract.hangs import bounded
from edl.errors import CheckpointError, StoreUnavailable

T = TypeVar("T")
UNFINISHED = ".unfinished"


class Place(Protocol):
    """Directories of files, one level deep.

    Raises (every method):
        OSError: the storage failed; `may_pass` tells whether for good.
    """

    where: str
    damage: frozenset[int]  # errno values that reading a damaged file raises

    def may_pass(self, error: OSError) -> bool:
        """Whether the operation may succeed later without intervention."""
        ...

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """The files of each wanted directory whose name begins with `prefix`, with their sizes in bytes."""
        ...

    def sizes(self, directory: str, prefix: str = "") -> dict[str, int]:
        """The files of a directory whose name begins with `prefix`, with their sizes in bytes.

        Args:
            directory: "" for the files beside the directories.

        Returns:
            The sizes by the names of the files; empty if the directory does not exist.
        """
        ...

    def write(self, directory: str, name: str, pieces: Iterator[memoryview]) -> None:
        """Write a file without other writers. It is durable when this returns, and absent if this fails."""
        ...

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Create a file atomically. Return False if it exists."""
        ...

    def open(self, directory: str, name: str) -> BinaryIO:
        """Open a file for reading."""
        ...

    def rename(self, directory: str, name: str, other: str) -> None:
        """Rename a file in its directory; an existing `other` is replaced."""
        ...

    def remove(self, directory: str, names: Sequence[str]) -> None:
        """Remove these files in this order, and then the directory if it is empty."""
        ...


class BoundedPlace:
    """A `Place` whose calls fail if the storage makes no progress for long (edl/contract/hangs.py).

    An open file is read without a time limit: the readers of checkpoints have their own.
    """

    def __init__(self, place: Place):
        self._place = place
        self.where, self.damage, self.may_pass = place.where, place.damage, place.may_pass

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        return self._call(partial(self._place.all, prefix, wanted))

    def sizes(self, directory: str, prefix: str = "") -> dict[str, int]:
        return self._call(partial(self._place.sizes, directory, prefix))

    def write(self, directory: str, name: str, pieces: Iterator[memoryview]) -> None:
        self._call(partial(self._place.write, directory, name, pieces))

    def create(self, directory: str, name: str, data: bytes) -> bool:
        return self._call(partial(self._place.create, directory, name, data))

    def open(self, directory: str, name: str) -> BinaryIO:
        return self._call(partial(self._place.open, directory, name))

    def rename(self, directory: str, name: str, other: str) -> None:
        self._call(partial(self._place.rename, directory, name, other))

    def remove(self, directory: str, names: Sequence[str]) -> None:
        self._call(partial(self._place.remove, directory, names))

    def _call(self, act: Callable[[], T]) -> T:
        return bounded(f"the store {self.where}", act)


def replace(place: Place, directory: str, name: str, pieces: Iterator[memoryview]) -> None:
    """Write a file under a name of its own, and give it its name when it is complete.

    Raises:
        OSError: the storage failed. The name is that of the previous file, or of the new one.
    """
    unfinished = f".{secrets.token_hex(4)}{UNFINISHED}"
    place.write(directory, unfinished, pieces)
    place.rename(directory, unfinished, name)


@contextmanager
def troubles(place: Place, doing: str, step: int | None = None) -> Iterator[None]:
    """Turn OSError of the store into an error that names the operation.

    Raises:
        StoreUnavailable: the operation failed, and may succeed later.
        CheckpointError: the operation failed permanently.
    """
    try:
        yield
    except OSError as error:
        what = doing if step is None else f"{doing} of step {step}"
        why = error.strerror or str(error) or type(error).__name__
        kind = StoreUnavailable if place.may_pass(error) else CheckpointError
        raise kind(f"{place.where}: cannot {what}: {why}") from error
