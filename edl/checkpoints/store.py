"""Where checkpoints lie: how they are written, found, read and removed.

One checkpoint is one directory, `step-000000001200-ATTEMPT`: its parts, each under a name that nobody else
chooses, and `manifest.json`, which is written last and whole. Before that the directory is an attempt, and no
checkpoint. So several attempts, of several processes that know nothing of each other, do no harm.

Promise: a checkpoint that is there is not changed; it is removed only by `prune`. Reading and verifying are
the same pass over the bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

from edl.checkpoints import manifest as manifests
from edl.checkpoints import tensors as files_of_tensors
from edl.checkpoints.files import Files
from edl.checkpoints.manifest import Manifest, Part
from edl.checkpoints.objects import Objects
from edl.checkpoints.tensors import PIECE, Tensor
from edl.errors import CheckpointDamaged, CheckpointError, StoreUnavailable

T = TypeVar("T")
SUPERSEDED = "manifest.superseded.json"
MOST_THREADS = 4  # that read and verify: each takes a part
SMALL = 64 << 10  # bytes that are hashed before another thread would have begun
_PREFIX = "step-"
_DIRECTORY = re.compile(rf"{_PREFIX}([0-9]{{12}}|[1-9][0-9]{{12,17}})-({manifests.NAME.pattern})")


class Place(Protocol):
    """Directories of files, one level deep. All methods raise OSError."""

    where: str
    damage: frozenset[int]  # what reading says of a file that is not as it was written

    def may_pass(self, error: OSError) -> bool:
        """Whether what was not possible may be later, without anybody doing something."""
        ...

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]: ...
    def sizes(self, directory: str) -> dict[str, int]: ...
    def write(self, directory: str, name: str, pieces: Iterator[memoryview]) -> None: ...
    def create(self, directory: str, name: str, data: bytes) -> bool: ...
    def open(self, directory: str, name: str) -> BinaryIO: ...
    def rename(self, directory: str, name: str, other: str) -> None: ...
    def remove(self, directory: str, names: Sequence[str]) -> None: ...


@dataclass(frozen=True)
class Best:
    """Which checkpoint is the best: the one with the smallest value of a metric, or the largest."""

    metric: str
    largest: bool = False


@dataclass(frozen=True)
class Store:
    """The checkpoints of one job.

    Open it in the process that uses it: the clients of object stores do not survive a fork.
    """

    place: Place

    @staticmethod
    def open(url: str) -> Store:
        """
        Args:
            url: a path, file://..., or an address that fsspec knows (s3://bucket/prefix). Nothing has to be
                there yet.

        Raises:
            CheckpointError: the address is invalid, or the client of such stores is not installed.
        """
        scheme, _, rest = url.partition("://")
        if not rest:
            return Store(Files(Path(url)))
        if scheme == "file":
            return Store(Files(Path(url2pathname(urlsplit(url).path))))
        return Store(Objects(url))

    def begin(self, step: int, attempt: str) -> Writing:
        """Begin to write a checkpoint. Touches nothing.

        Args:
            attempt: agreed on by all who write this one, and never used for this step before; of letters,
                digits, '-', '_' and '.'.
        """
        if not manifests.NAME.fullmatch(attempt) or not 0 <= step < 10**18:
            raise ValueError(f"step {step}, attempt {attempt!r}: not the name of a checkpoint")
        return Writing(self.place, step, attempt)

    def checkpoints(self) -> list[Checkpoint]:
        """All that were completed, the newest last. Some may be damaged since.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return [c for c in self._found() if c.is_complete]

    def unfinished(self) -> list[Checkpoint]:
        """All that were begun and not completed, the newest last: they have no manifest.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return [c for c in self._found() if not c.is_complete]

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole one; all of its bytes are read for that. `load_newest` reads them once only.

        Args:
            warn: is given a line for each that is passed over.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return next((c for c, _ in _whole(self.checkpoints(), Checkpoint.verify, warn)), None)

    def load_newest(self, warn: Callable[[str], None]) -> Loaded | None:
        """The newest whole one and its tensors, verified while they are read.

        Args:
            warn: is given a line for each that is passed over.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return next((Loaded(c, t) for c, t in _whole(self.checkpoints(), Checkpoint.read, warn)), None)

    def supersede(self, after: int) -> list[Checkpoint]:
        """Set aside all of later steps: the training goes on from this step, and they are no part of it.

        Their tensors stay until `prune` removes them.

        Raises:
            CheckpointError: the store cannot be changed.
        """
        later = [c for c in self.checkpoints() if c.step > after]
        for checkpoint in later:
            with _troubles(self.place, "set aside the checkpoint", checkpoint.step):
                self.place.rename(checkpoint.directory, manifests.FILE, SUPERSEDED)
        return later

    def prune(self, keep: int, best: Best | None = None) -> list[Checkpoint]:
        """Remove all but the newest, and the best; and attempts that are older than the newest.

        Damaged ones are not counted among those to keep. The one that was completed last is kept, too: there
        may be a later one whose damage only reading shows, and before which the training has gone on.

        Args:
            keep: so many of the newest. 0: all.

        Returns:
            Those that were removed.

        Raises:
            CheckpointError: the store cannot be changed.
        """
        found = self._found()
        whole: list[Checkpoint] = []  # the newest first
        for checkpoint in reversed([c for c in found if c.is_complete]):
            if not checkpoint.wrong():
                whole.append(checkpoint)
                if keep == 0:  # the others stay, whatever they are
                    break
        if not whole:  # whatever is there may be all that somebody has left
            return []
        last = max(whole, key=lambda c: c.created)
        kept = {c.directory for c in (*whole[: keep or None], last)} | _best(whole, best)
        old = [c for c in found if c.is_complete or c.step <= last.step]
        old = [c for c in old if c.step <= whole[0].step and c.directory not in kept]
        if keep == 0:
            old = [c for c in old if not c.is_complete]
        for checkpoint in old:
            with _troubles(self.place, "remove the checkpoint", checkpoint.step):
                # The manifest first: what is removed in part is no checkpoint.
                names = sorted(checkpoint.files, key=lambda name: name != manifests.FILE)
                self.place.remove(checkpoint.directory, names)
        return old

    def _found(self) -> list[Checkpoint]:
        with _troubles(self.place, "list the checkpoints"):
            there = self.place.all(_PREFIX, lambda name: _DIRECTORY.fullmatch(name) is not None)
        named = [(_DIRECTORY.fullmatch(name), files) for name, files in there.items()]
        found = [Checkpoint(self.place, int(name[1]), name[2], files) for name, files in named if name]
        times = Counter(c.step for c in found)
        # Of two of the same step the later one is the newer; reading no manifest where there is no need.
        return sorted(found, key=lambda c: (c.step, c.created if times[c.step] > 1 else "", c.attempt))


@dataclass(frozen=True)
class Writing:
    """A checkpoint that is being written, by this process and others."""

    place: Place
    step: int
    attempt: str

    @property
    def directory(self) -> str:
        return f"{_PREFIX}{self.step:012d}-{self.attempt}"

    def write_part(
        self, index: int, of: int, tensors: Mapping[str, Tensor], finite: Collection[str] = ()
    ) -> Part:
        """Write one part; it is durable when this returns. Nothing is left of it when it fails.

        May be repeated, also by another process: each has a file of its own.

        Args:
            tensors: by the names of their variables. They must not change meanwhile.
            finite: names of those that are kept only if all their values are finite, such as the weights.

        Raises:
            CheckpointError: there is no room, the store is unavailable, or a value is not finite.
        """
        name = f"part-{index:05d}-of-{of:05d}-{secrets.token_hex(4)}.safetensors"
        counted = _Counted(files_of_tensors.pieces(tensors, finite))
        with _troubles(self.place, "write the checkpoint", self.step):
            self.place.write(self.directory, name, iter(counted))
        return Part(name, counted.nbytes, counted.digest.hexdigest())

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Make it a checkpoint. May be repeated, with the same parts, also by another process.

        Raises:
            CheckpointError: a part is not there, somebody has committed other parts, or the store is
                unavailable.
        """
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            raise ValueError(f"the manifest is of step {manifest.step}, attempt {manifest.attempt!r}")
        data = manifests.encode(manifest)
        with _troubles(self.place, "commit the checkpoint", self.step):
            there = self.place.sizes(self.directory)
            for part in manifest.parts:
                if there.get(part.name) != part.nbytes:
                    raise CheckpointError(
                        f"{self.place.where}: cannot commit the checkpoint of step {self.step}: {part.name} "
                        f"has {there.get(part.name, 'no')} bytes, its writer has written {part.nbytes}"
                    )
            created = self.place.create(self.directory, manifests.FILE, data)
        made = Checkpoint(self.place, self.step, self.attempt, {**there, manifests.FILE: len(data)})
        if not created and not manifests.same_state(made.manifest, manifests.decode(data)):
            raise CheckpointError(
                f"{self.place.where}: the checkpoint of step {self.step} has been committed with other parts"
            )
        return made

    def abandon(self) -> None:
        """Remove what was written, unless it was committed.

        Raises:
            CheckpointError: the store cannot be changed.
        """
        with _troubles(self.place, "give up the checkpoint", self.step):
            there = self.place.sizes(self.directory)
            if there and manifests.FILE not in there:
                self.place.remove(self.directory, list(there))


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
        return f"{_PREFIX}{self.step:012d}-{self.attempt}"

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
        with _troubles(self.place, "read the checkpoint", self.step):
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


@dataclass(frozen=True, eq=False)
class Loaded:
    """A checkpoint that was read."""

    checkpoint: Checkpoint
    tensors: dict[str, Tensor]


def one_of(where: str, warn: Callable[[str], None] | None = None) -> Checkpoint:
    """The newest whole checkpoint of a directory, or the one whose own directory this is.

    Args:
        where: a path or an address, as of `Store.open`.
        warn: if given, all bytes are read, and it is given a line for each that is passed over; else only
            manifests and sizes are looked at.

    Raises:
        CheckpointDamaged: the one that was named is not whole.
        CheckpointError: there is none, or the store cannot be read.
    """
    above, _, last = where.rstrip("/").rpartition("/")
    if not (above and _DIRECTORY.fullmatch(last)):
        store = Store.open(where)
        found = store.newest(warn) if warn is not None else _sound(store.checkpoints())
        if found is None:
            raise CheckpointError(f"{where}: no whole checkpoint found")
        return found
    named = next((c for c in Store.open(above).checkpoints() if c.directory == last), None)
    if named is None:
        raise CheckpointError(f"{where}: no checkpoint found")
    if wrong := named.wrong():
        raise CheckpointDamaged(wrong)
    return named


def _sound(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    return next((c for c in reversed(checkpoints) if not c.wrong()), None)


class _Counted:
    """Pieces on their way, counted and hashed."""

    def __init__(self, pieces: Iterator[memoryview]):
        self._pieces, self.nbytes, self.digest = pieces, 0, hashlib.sha256()

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            self.nbytes += len(piece)
            self.digest.update(piece)
            yield piece


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


def _whole(
    checkpoints: Sequence[Checkpoint], look: Callable[[Checkpoint], T], warn: Callable[[str], None]
) -> Iterator[tuple[Checkpoint, T]]:
    """Those that are whole, the newest first, with what `look` has found in them."""
    for checkpoint in reversed(checkpoints):
        try:
            found = look(checkpoint)
        except CheckpointDamaged as error:
            warn(f"the checkpoint of step {checkpoint.step} is passed over: {error}")
        else:
            yield checkpoint, found


def _best(whole: Sequence[Checkpoint], best: Best | None) -> set[str]:
    """The directory of the best one, the newest of several. They come the newest first."""
    values = [
        (c.manifest.metrics[best.metric], c) for c in whole if best and best.metric in c.manifest.metrics
    ]
    values = [(value, c) for value, c in values if value == value]  # a NaN is never the best
    if not values or best is None:
        return set()
    top = (max if best.largest else min)(value for value, _ in values)
    return {next(c.directory for value, c in values if value == top)}


@contextmanager
def _troubles(place: Place, doing: str, step: int | None = None) -> Iterator[None]:
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
