"""One checkpoint as it lies there: what is in it, and whether it is what was written.

Promise: reading and verifying are the same pass over the bytes. What is returned is what was written.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import BinaryIO, TypeVar, cast

from edl.checkpoints import manifest as manifests
from edl.checkpoints import tensors as files_of_tensors
from edl.checkpoints.manifest import Manifest, Part
from edl.checkpoints.place import Place, troubles
from edl.checkpoints.tensors import PIECE, Tensor
from edl.errors import CheckpointDamaged, CheckpointError

T = TypeVar("T")
SUPERSEDED = "manifest.superseded.json"
MOST_THREADS = 4  # that read and verify: each takes a part
SMALL = 64 << 10  # bytes that are hashed before another thread would have begun
PREFIX = "step-"
DIRECTORY = re.compile(rf"{PREFIX}([0-9]{{12}}|[1-9][0-9]{{12,17}})-({manifests.NAME.pattern})")


def directory_of(step: int, attempt: str) -> str:
    return f"{PREFIX}{step:012d}-{attempt}"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint as it lies there.

    Args:
        files: of its directory, with their bytes.
    """

    place: Place
    step: int
    attempt: str
    files: Mapping[str, int]

    @property
    def directory(self) -> str:
        return directory_of(self.step, self.attempt)

    @property
    def is_complete(self) -> bool:
        """Whether it was committed."""
        return manifests.FILE in self.files

    @property
    def created(self) -> str:
        """When it was committed, by the clock of who did; empty if that cannot be read."""
        try:
            return self.manifest.created
        except CheckpointError:
            return ""

    @cached_property
    def manifest(self) -> Manifest:
        """
        Raises:
            CheckpointDamaged: it is not what was written.
            CheckpointError: the store cannot be read.
        """
        if not self.is_complete:
            raise CheckpointDamaged(f"{self.directory}: was not completed")
        with self._reading(manifests.FILE) as file:
            raw = bytearray()
            while len(raw) <= manifests.MOST_BYTES and (piece := file.read(PIECE)):
                raw += piece
        with self._damage():
            found = manifests.decode(bytes(raw))
            if (found.step, found.attempt) != (self.step, self.attempt):
                raise CheckpointDamaged(f"holds the manifest of step {found.step}, attempt {found.attempt!r}")
        return found

    @property
    def is_superseded(self) -> bool:
        """Whether it was set aside, because the training went on from an earlier one."""
        return SUPERSEDED in self.files

    def wrong(self) -> str:
        """What is wrong with it as far as its manifest and the sizes of its files say; empty: nothing.

        Raises:
            CheckpointError: the store cannot be read, or a newer edl has written it.
        """
        try:
            for part in self.manifest.parts:
                self._check_size(part)
        except CheckpointDamaged as error:
            return str(error)
        return ""

    def verify(self) -> None:
        """Read all of it.

        Raises:
            CheckpointDamaged: it is not what was written.
            CheckpointError: the store cannot be read.
        """
        self._each_part(self._verify_part)

    def read(self) -> dict[str, Tensor]:
        """Its tensors, verified while they are read, in the order of the manifest.

        Raises:
            CheckpointDamaged: it is not what was written.
            CheckpointError: the store cannot be read.
        """
        read = self._each_part(self._read_part)
        return {v.name: Tensor(v.dtype, v.shape, read[v.part][v.name]) for v in self.manifest.variables}

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """One of its files, as it lies there: nothing of it is verified.

        Raises:
            CheckpointDamaged: it is missing.
            CheckpointError: the store cannot be read.
        """
        with self._reading(name) as file:
            yield file

    def _each_part(self, look: Callable[[int, Part], T]) -> list[T]:
        """What `look` finds in each; as many at once as there are processors."""
        parts = self.manifest.parts
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1, MOST_THREADS) or 1) as threads:
            return list(threads.map(look, range(len(parts)), parts))

    def _verify_part(self, index: int, part: Part) -> None:
        if part.name in self.manifest.of_servers:
            self._verify_rows(part)
            return
        rooms = cycle([memoryview(bytearray(PIECE)) for _ in range(2)])  # one is hashed, the other one filled
        with self._reading_part(index, part) as (names, read):
            for size in names.values():
                for start in range(0, size, PIECE):
                    read(next(rooms)[: min(PIECE, size - start)])

    def _verify_rows(self, part: Part) -> None:
        """Of a parameter server: which rows are in it only the servers know."""
        self._check_size(part)
        room = memoryview(bytearray(min(PIECE, part.nbytes)))
        found = hashlib.sha256()
        with self._reading(part.name) as file, self._damage(part.name):
            while count := cast(int, file.readinto(room)):  # type: ignore[attr-defined]
                found.update(room[:count])
            if found.hexdigest() != part.sha256:
                raise CheckpointDamaged("its SHA-256 is not the one in the manifest")

    def _read_part(self, index: int, part: Part) -> dict[str, memoryview]:
        data: dict[str, memoryview] = {}
        if part.name in self.manifest.of_servers:
            self._verify_rows(part)
            return data
        with self._reading_part(index, part) as (names, read):
            for name, size in names.items():
                data[name] = memoryview(bytearray(size))
                for start in range(0, size, PIECE):
                    read(data[name][start : start + PIECE])
        return data

    @contextmanager
    def _reading_part(
        self, index: int, part: Part
    ) -> Iterator[tuple[dict[str, int], Callable[[memoryview], None]]]:
        """What is in a part, in its order, and how to read it. At the end it was whole, or is damaged."""
        self._check_size(part)
        with self._reading(part.name) as file, ThreadPoolExecutor(1) as beside, self._damage(part.name):
            hashed = _Hashed(file, beside)
            names = self._layout(index, part, hashed.read)
            yield names, hashed.read
            if file.read(1) or hashed.hexdigest() != part.sha256:
                raise CheckpointDamaged("its SHA-256 is not the one in the manifest")

    def _layout(self, index: int, part: Part, read: Callable[[memoryview], None]) -> dict[str, int]:
        length = bytearray(8)
        read(memoryview(length))
        size = int.from_bytes(length, "little")
        if size > min(part.nbytes - 8, files_of_tensors.MOST_HEADER_BYTES):
            raise CheckpointDamaged(f"its header has {size} bytes")
        head = bytearray(size)
        read(memoryview(head))
        found = files_of_tensors.layout(bytes(head), part.nbytes - 8 - size)
        expected = {v.name: v for v in self.manifest.variables if v.part == index}
        if found.keys() != expected.keys():
            raise CheckpointDamaged("it does not hold the variables that the manifest names")
        for name, size in found.items():
            if wrong := files_of_tensors.misfit(expected[name].dtype, expected[name].shape, size):
                raise CheckpointDamaged(f"variable {name!r}: {wrong}")
        return found

    def _check_size(self, part: Part) -> None:
        if (size := self.files.get(part.name)) != part.nbytes:
            found = "is missing" if size is None else f"has {size} bytes, {part.nbytes} were written"
            raise CheckpointDamaged(f"{self.directory}: {part.name} {found}")

    @contextmanager
    def _reading(self, name: str) -> Iterator[BinaryIO]:
        with troubles(self.place, "read the checkpoint", self.step):
            try:
                with self.place.open(self.directory, name) as file:
                    yield file
            except OSError as error:
                if error.errno not in self.place.damage and not isinstance(error, FileNotFoundError):
                    raise
                why = "is missing" if isinstance(error, FileNotFoundError) else error.strerror
                raise CheckpointDamaged(f"{self.directory}: {name}: {why}") from error

    @contextmanager
    def _damage(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except CheckpointDamaged as error:
            raise CheckpointDamaged(": ".join(filter(None, (self.directory, name, str(error))))) from error


class _Hashed:
    """A file whose pieces are hashed beside the reading of the next ones.

    A piece must stay as it is until the one after the next is asked for.
    """

    def __init__(self, file: BinaryIO, beside: Executor):
        self._file, self._beside, self._digest = file, beside, hashlib.sha256()
        self._hashing: Future[None] | None = None

    def read(self, room: memoryview) -> None:
        """Fill it.

        Raises:
            CheckpointDamaged: the file ends before.
        """
        filled = 0
        while filled < len(room):
            count = cast(int, self._file.readinto(room[filled:]))  # type: ignore[attr-defined]
            if not count:
                raise CheckpointDamaged("it ends before its last tensor")
            filled += count
        self._wait()
        if len(room) < SMALL:
            self._digest.update(room)
        else:
            self._hashing = self._beside.submit(self._digest.update, room)

    def hexdigest(self) -> str:
        self._wait()
        return self._digest.hexdigest()

    def _wait(self) -> None:
        if self._hashing is not None:
            self._hashing.result()
            self._hashing = None
