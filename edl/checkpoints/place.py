"""Storage of checkpoint files: a directory on a disk, or a prefix of an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from edl.errors import CheckpointError, StoreUnavailable


class Place(Protocol):
    """Directories of files, one level deep. All methods raise OSError."""

    where: str
    damage: frozenset[int]  # errno values that reading a damaged file raises

    def may_pass(self, error: OSError) -> bool:
        """Whether the operation may succeed later without intervention."""
        ...

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """The files of each wanted directory whose name begins with `prefix`, with their sizes in bytes."""
        ...

    def sizes(self, directory: str) -> dict[str, int]:
        """The files of a directory, with their sizes in bytes; empty if the directory does not exist."""
        ...

    def write(self, directory: str, name: str, pieces: Iterator[memoryview]) -> None:
        """Write a file without other writers. It is durable when this returns, and absent if this fails."""
        ...

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Create a file atomically. Return False if it exists."""
        ...

    def open(self, directory: str, name: str) -> BinaryIO: ...
    def rename(self, directory: str, name: str, other: str) -> None: ...
    def remove(self, directory: str, names: Sequence[str]) -> None:
        """Remove these files in this order, and then the directory if it is empty."""
        ...


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
