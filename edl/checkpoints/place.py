"""Where files of checkpoints lie: a directory of a disk, or a prefix of an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from edl.errors import CheckpointError, StoreUnavailable


class Place(Protocol):
    """Directories of files, one level deep. All methods raise OSError."""

    where: str
    damage: frozenset[int]  # what reading says of a file that is not as it was written

    def may_pass(self, error: OSError) -> bool:
        """Whether what was not possible may be later, without anybody doing something."""
        ...

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """Of each directory that is wanted and whose name begins so, the files with their bytes."""
        ...

    def sizes(self, directory: str) -> dict[str, int]:
        """Of its files, with their bytes; none: there is no such directory."""
        ...

    def write(self, directory: str, name: str, pieces: Iterator[memoryview]) -> None:
        """A file that nobody else writes. It is durable when this returns, and not there if this fails."""
        ...

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """A file, whole, unless it is there already: then False."""
        ...

    def open(self, directory: str, name: str) -> BinaryIO: ...
    def rename(self, directory: str, name: str, other: str) -> None: ...
    def remove(self, directory: str, names: Sequence[str]) -> None:
        """These files, in this order; and the directory, if nothing else is in it."""
        ...


@contextmanager
def troubles(place: Place, doing: str, step: int | None = None) -> Iterator[None]:
    """Say what of the store failed.

    Raises:
        StoreUnavailable: it did, and may do better later.
        CheckpointError: it did.
    """
    try:
        yield
    except OSError as error:
        what = doing if step is None else f"{doing} of step {step}"
        why = error.strerror or str(error) or type(error).__name__
        kind = StoreUnavailable if place.may_pass(error) else CheckpointError
        raise kind(f"{place.where}: cannot {what}: {why}") from error
