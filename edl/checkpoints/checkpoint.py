# SPDX-License-Identifier: Apache-2.0
"""One stored checkpoint: reading and verifying it.

Promise: reading and verifying are the same pass over the bytes. The data returned are the data written.
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
from edl.checkpoints.manifest import CheckpointFile, Manifest
from edl.checkpoints.place import Place, troubles
from edl.checkpoints.tensors import PIECE, Tensor
from edl.errors import CheckpointDamaged, CheckpointError, CheckpointRemoved

T = TypeVar("T")
SUPERSEDED = "manifest.superseded.json"
MAX_THREADS = 4  # threads that read and verify, each a part
SMALL = 64 << 10  # bytes; hashing fewer takes less time than starting it in a different thread
PREFIX = "step-"
DIRECTORY = re.compile(rf"{PREFIX}([0-9]{{12}}|[1-9][0-9]{{12,17}})-({manifests.NAME.pattern})")


def directory_of(step: int, attempt: str) -> str:
    """Return the name of the checkpoint's directory; names sort by step."""
    return f"{PREFIX}{step:012d}-{attempt}"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A stored checkpoint.

    Args:
        files: names of the files in its directory, with their sizes in bytes.
    """

    place: Place
    step: int
    attempt: str
    files: Mapping[str, int]

    @property
    def directory(self) -> str:
        """The name of the checkpoint's directory in the store."""
        return directory_of(self.step, self.attempt)

    @property
    def is_complete(self) -> bool:
        """Whether it was committed."""
        return manifests.FILE in self.files

    @property
    def created(self) -> str:
        """Time of its commit, by the clock of the committing process; empty if it cannot be read."""
        try:
            return self.manifest.created
        except CheckpointError:
            return ""

    @cached_property
    def manifest(self) -> Manifest:
        """Read its manifest.

        Raises:
            CheckpointDamaged: the manifest differs from what was written.
            CheckpointError: the store cannot be read.
        """
        if not self.is_complete:
            raise CheckpointDamaged(f"{self.directory}: was not completed")
        with self._reading(manifests.FILE) as file:
            raw = bytearray()
            while len(raw) <= manifests.MAX_BYTES and (piece := file.read(PIECE)):
                raw += piece
        with self._damage():
            found = manifests.decode(bytes(raw))
            if (found.step, found.attempt) != (self.step, self.attempt):
                raise CheckpointDamaged(f"holds the manifest of step {found.step}, attempt {found.attempt!r}")
        return found

    @property
    def is_superseded(self) -> bool:
        """Whether it was set aside, because the training continued from an earlier checkpoint."""
        return SUPERSEDED in self.files

    def wrong(self) -> str:
        """Check its manifest and the sizes of its files. Return a description of the damage, or "".

        Raises:
            CheckpointError: the store cannot be read, or a newer edl has written the checkpoint.
        """
        try:
            for part in self.manifest.parts:
                self._check_size(part)
        except CheckpointDamaged as error:
            return str(error)
        return ""

    def was_removed(self) -> bool:
        """Whether it was complete, and was removed or set aside since.

        A job removes its old checkpoints while others list and read them, the manifest first.

        Raises:
            CheckpointError: the store cannot be read.
        """
        with troubles(self.place, "read the checkpoint", self.step):
            return self.is_complete and manifests.FILE not in self.place.sizes(self.directory, manifests.FILE)

    def verify(self) -> None:
        """Verify all of its bytes.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written.
            CheckpointRemoved: it was removed meanwhile.
            CheckpointError: the store cannot be read.
        """
        with self._removal():
            self._each_part(self._verify_part)

    def read(self) -> dict[str, Tensor]:
        """Read its tensors in the order of the manifest, and verify them in the same pass.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was written.
            CheckpointRemoved: it was removed meanwhile.
            CheckpointError: the store cannot be read.
        """
        with self._removal():
            read = self._each_part(self._read_part)
        return {v.name: Tensor(v.dtype, v.shape, read[v.part][v.name]) for v in self.manifest.variables}

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Open one of its files without verifying it.

        Raises:
            CheckpointDamaged: the file is missing.
            CheckpointError: the store cannot be read.
        """
        with self._reading(name) as file:
            yield file

    def _each_part(self, look: Callable[[int, CheckpointFile], T]) -> list[T]:
        """Call `look` for each part, for as many at once as there are processors, at most `MAX_THREADS`."""
        parts = self.manifest.parts
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1, MAX_THREADS) or 1) as threads:
            return list(threads.map(look, range(len(parts)), parts))

    def _verify_part(self, index: int, part: CheckpointFile) -> None:
        if part.name in self.manifest.of_servers:
            self._verify_rows(part)
            return
        rooms = cycle([memoryview(bytearray(PIECE)) for _ in range(2)])  # one is hashed while one is filled
        with self._reading_part(index, part) as (names, read):
            for size in names.values():
                for start in range(0, size, PIECE):
                    read(next(rooms)[: min(PIECE, size - start)])

    def _verify_rows(self, part: CheckpointFile) -> None:
        """Verify size and hash of a parameter server's part. Only the servers know which rows it holds.

        Raises:
            CheckpointDamaged: the part's size or hash is not the one in the manifest.
        """
        self._check_size(part)
        room = memoryview(bytearray(min(PIECE, part.nbytes)))
        found = hashlib.sha256()
        with self._reading(part.name) as file, self._damage(part.name):
            while count := cast(int, file.readinto(room)):  # type: ignore[attr-defined]
                found.update(room[:count])
            if found.hexdigest() != part.sha256:
                raise CheckpointDamaged("its SHA-256 is not the one in the manifest")

    def _read_part(self, index: int, part: CheckpointFile) -> dict[str, memoryview]:
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
        self, index: int, part: CheckpointFile
    ) -> Iterator[tuple[dict[str, int], Callable[[memoryview], None]]]:
        """Open a part: the tensors in it, in order, and a function that reads. Verify its hash at the end.

        Raises:
            CheckpointDamaged: the part's size or hash is not the one in the manifest, or it is no file of
                tensors.
        """
        self._check_size(part)
        with self._reading(part.name) as file, ThreadPoolExecutor(1) as beside, self._damage(part.name):
            hashed = _Hashed(file, beside)
            names = self._layout(index, part, hashed.read)
            yield names, hashed.read
            if file.read(1) or hashed.hexdigest() != part.sha256:
                raise CheckpointDamaged("its SHA-256 is not the one in the manifest")

    def _layout(self, index: int, part: CheckpointFile, read: Callable[[memoryview], None]) -> dict[str, int]:
        length = bytearray(8)
        read(memoryview(length))
        size = int.from_bytes(length, "little")
        if size > min(part.nbytes - 8, files_of_tensors.MAX_HEADER_BYTES):
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

    def _check_size(self, part: CheckpointFile) -> None:
        if (size := self.files.get(part.name)) != part.nbytes:
            found = "is missing" if size is None else f"has {size} bytes, {part.nbytes} were written"
            raise CheckpointDamaged(f"{self.directory}: {part.name} {found}")

    @contextmanager
    def _removal(self) -> Iterator[None]:
        try:
            yield
        except CheckpointDamaged as error:
            if not self.was_removed():
                raise
            raise CheckpointRemoved(f"{self.directory}: was removed while it was read") from error

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
    """A file whose pieces are hashed while the next ones are read.

    A piece must not change until the read after the next one begins.
    """

    def __init__(self, file: BinaryIO, beside: Executor):
        self._file, self._beside, self._digest = file, beside, hashlib.sha256()
        self._hashing: Future[None] | None = None

    def read(self, room: memoryview) -> None:
        """Fill `room` from the file.

        Raises:
            CheckpointDamaged: the file ends before `room` is full.
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
