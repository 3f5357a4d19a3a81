# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a simulated job: the real store in memory, with occasional failures."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO
from unittest.mock import patch

from edl.checkpoints import Store


@contextmanager
def stands_for(url: str, store: Store) -> Iterator[None]:
    """Open this store at the address `url` inside the context: parameter servers know only an address."""
    opened = Store.open
    with patch.object(Store, "open", staticmethod(lambda other: store if other == url else opened(other))):
        yield


class Memory:
    """A place for checkpoints in memory (edl/checkpoints/place.py).

    Args:
        fails: called before each write; returns True if the place is full.
    """

    where, damage = "memory", frozenset({errno.ENOENT})

    def __init__(self, fails: Callable[[], bool]):
        self._fails = fails
        self._directories: dict[str, dict[str, bytes]] = {}

    def may_pass(self, error: OSError) -> bool:
        return False

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        return {directory: self.sizes(directory) for directory in self._directories if wanted(directory)}

    def sizes(self, directory: str, prefix: str = "") -> dict[str, int]:
        files = self._directories.get(directory, {})
        return {name: len(data) for name, data in files.items() if name.startswith(prefix)}

    def write(self, directory: str, name: str, pieces: Iterable[memoryview]) -> None:
        self._refuse()
        self._directories.setdefault(directory, {})[name] = b"".join(map(bytes, pieces))

    def create(self, directory: str, name: str, data: bytes) -> bool:
        self._refuse()
        files = self._directories.setdefault(directory, {})
        return files.setdefault(name, data) is data

    def open(self, directory: str, name: str) -> BinaryIO:
        try:
            return io.BytesIO(self._directories[directory][name])
        except KeyError as error:
            raise FileNotFoundError(name) from error

    def rename(self, directory: str, name: str, other: str) -> None:
        files = self._directories[directory]
        files[other] = files.pop(name)

    def remove(self, directory: str, names: Sequence[str]) -> None:
        for name in names:
            self._directories[directory].pop(name, None)
        if not self._directories[directory]:
            del self._directories[directory]

    def _refuse(self) -> None:
        if self._fails():
            raise OSError(errno.ENOSPC, "No space left on device")
