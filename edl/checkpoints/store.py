# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one job: writing, finding and removing them.

One checkpoint is one directory, `step-000000001200-ATTEMPT`. It has the parts, each under a unique name, and
`manifest.json`, which is written last and atomically. Before that, the directory is an attempt and not a
checkpoint. So concurrent attempts of independent processes do no harm.

Promise: an existing checkpoint is not changed; only `prune` removes it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from edl.checkpoints import manifest as manifests
from edl.checkpoints import tensors as files_of_tensors
from edl.checkpoints.checkpoint import DIRECTORY, PREFIX, SUPERSEDED, Checkpoint, directory_of
from edl.checkpoints.files import Files
from edl.checkpoints.manifest import CheckpointFile, Manifest
from edl.checkpoints.objects import Objects
from edl.checkpoints.place import BoundedPlace, Place, troubles
from edl.checkpoints.tensors import Tensor
from edl.errors import CheckpointDamaged, CheckpointError, CheckpointRemoved

T = TypeVar("T")
MASTER = "master://"


@dataclass(frozen=True)
class Best:
    """Criterion for the best checkpoint: the smallest value of a metric, or the largest."""

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
        """Open a store.

        Args:
            url: a path, file://..., an address that fsspec supports (s3://bucket/prefix), or master://PLACE
                in a release's pods. It need not exist yet.

        Raises:
            CheckpointError: the address is invalid, or the client for this kind of store is not installed.
        """
        scheme, _, rest = url.partition("://")
        if not rest:
            return Store(BoundedPlace(Files(Path(url))))
        if scheme == "file":
            return Store(BoundedPlace(Files(Path(url2pathname(urlsplit(url).path)))))
        if url.startswith(MASTER):
            from edl.checkpoints.master import MasterPlace  # imports gRPC, which other stores do not need

            return Store(MasterPlace(url))
        return Store(Objects(url))  # whose client has time limits of its own

    def begin(self, step: int, attempt: str) -> Writing:
        """Begin to write a checkpoint. The store is not accessed yet.

        Args:
            attempt: an id that all writers of this checkpoint share and that is new for this step. It
                consists of letters, digits, '-', '_' and '.'.

        Raises:
            ValueError: the step or the attempt cannot be part of a directory's name.
        """
        if not manifests.NAME.fullmatch(attempt) or not 0 <= step < 10**18:
            raise ValueError(f"step {step}, attempt {attempt!r}: not the name of a checkpoint")
        return Writing(self.place, step, attempt)

    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, the newest last. Some may have been damaged since.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return [c for c in self._found() if c.is_complete]

    def unfinished(self) -> list[Checkpoint]:
        """The attempts that were not completed, the newest last: they have no manifest.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return [c for c in self._found() if not c.is_complete]

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest undamaged checkpoint. This reads all of its bytes; `load_newest` reads them only once.

        Args:
            warn: is called with a line for each checkpoint that is skipped.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return next((c for c, _ in _whole(self.checkpoints(), Checkpoint.verify, warn)), None)

    def load_newest(self, warn: Callable[[str], None]) -> Loaded | None:
        """Load the newest undamaged checkpoint; its tensors are verified while they are read.

        Args:
            warn: is called with a line for each checkpoint that is skipped.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return next((Loaded(c, t) for c, t in _whole(self.checkpoints(), Checkpoint.read, warn)), None)

    def supersede(self, after: int) -> list[Checkpoint]:
        """Set aside all checkpoints of later steps: training continues from `after`, so they are invalid.

        Their tensors stay until `prune` removes them.

        Raises:
            CheckpointError: the store cannot be changed.
        """
        later = [c for c in self.checkpoints() if c.step > after]
        for checkpoint in later:
            with troubles(self.place, "set aside the checkpoint", checkpoint.step):
                self.place.rename(checkpoint.directory, manifests.FILE, SUPERSEDED)
        return later

    def prune(self, keep: int, best: Best | None = None) -> list[Checkpoint]:
        """Remove all checkpoints but the newest and the best, and attempts older than the newest checkpoint.

        Damaged checkpoints are not counted among those to keep. The checkpoint that was completed last is
        kept, too: a checkpoint of a later step may have damage that only reading reveals, and training may
        have continued from before that step.

        Args:
            keep: number of newest checkpoints to keep; 0: all.

        Returns:
            The removed checkpoints and attempts.

        Raises:
            CheckpointError: the store cannot be changed.
        """
        found = self._found()
        whole: list[Checkpoint] = []  # the newest first
        for checkpoint in reversed([c for c in found if c.is_complete]):
            if not checkpoint.wrong():
                whole.append(checkpoint)
                if keep == 0:  # all others stay, damaged or not
                    break
        if not whole:  # the user may have nothing else left
            return []
        last = max(whole, key=lambda c: c.created)
        kept = {c.directory for c in (*whole[: keep or None], last)} | _best(whole, best)
        old = [c for c in found if c.is_complete or c.step <= last.step]
        old = [c for c in old if c.step <= whole[0].step and c.directory not in kept]
        if keep == 0:
            old = [c for c in old if not c.is_complete]
        for checkpoint in old:
            with troubles(self.place, "remove the checkpoint", checkpoint.step):
                # Remove the manifest first: a partly removed directory then does not count as a checkpoint.
                names = sorted(checkpoint.files, key=lambda name: name != manifests.FILE)
                self.place.remove(checkpoint.directory, names)
                # An attempt may have been committed after it was listed.
                if not checkpoint.is_complete and self.place.sizes(checkpoint.directory, manifests.FILE):
                    self.place.remove(checkpoint.directory, [manifests.FILE])
        return old

    def _found(self) -> list[Checkpoint]:
        with troubles(self.place, "list the checkpoints"):
            there = self.place.all(PREFIX, lambda name: DIRECTORY.fullmatch(name) is not None)
        named = [(DIRECTORY.fullmatch(name), files) for name, files in there.items()]
        found = [Checkpoint(self.place, int(name[1]), name[2], files) for name, files in named if name]
        times = Counter(c.step for c in found)
        # If two checkpoints have the same step, the later one is newer. Manifests are read only if necessary.
        return sorted(found, key=lambda c: (c.step, c.created if times[c.step] > 1 else "", c.attempt))


@dataclass(frozen=True)
class Writing:
    """A checkpoint that is being written, by this process and others."""

    place: Place
    step: int
    attempt: str

    @property
    def directory(self) -> str:
        """The name of the checkpoint's directory in the store."""
        return directory_of(self.step, self.attempt)

    def write_part(
        self, index: int, of: int, tensors: Mapping[str, Tensor], finite: Collection[str] = ()
    ) -> CheckpointFile:
        """Write one part. It is durable when this returns; if this fails, nothing is left of it.

        This may be repeated, also by a different process: each call writes a file of its own.

        Args:
            tensors: the tensors by the names of their variables. They must not change during the call.
            finite: names of tensors whose values must all be finite, such as the weights.

        Raises:
            CheckpointError: the disk is full, the store is unavailable, or a value is not finite.
        """
        name = f"part-{index:05d}-of-{of:05d}-{secrets.token_hex(4)}.safetensors"
        counted = _Counted(files_of_tensors.pieces(tensors, finite))
        with troubles(self.place, "write the checkpoint", self.step):
            self.place.write(self.directory, name, iter(counted))
        return CheckpointFile(name, counted.nbytes, counted.digest.hexdigest())

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Commit the checkpoint. This may be repeated with the same parts, also by a different process.

        Raises:
            CheckpointRemoved: a checkpoint of this step or a later one is complete, and `prune` has removed
                this attempt.
            CheckpointError: a part is missing, other parts have been committed already, or the store is
                unavailable.
            ValueError: the manifest is of a different checkpoint.
        """
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            raise ValueError(f"the manifest is of step {manifest.step}, attempt {manifest.attempt!r}")
        data = manifests.encode(manifest)
        with troubles(self.place, "commit the checkpoint", self.step):
            there = self.place.sizes(self.directory)
            for part in manifest.parts:
                if there.get(part.name) != part.nbytes:
                    why = (
                        f"{self.place.where}: cannot commit the checkpoint of step {self.step}: {part.name} "
                    )
                    why += f"has {there.get(part.name, 'no')} bytes, its writer has written {part.nbytes}"
                    newer = any(c.step >= self.step for c in Store(self.place).checkpoints())
                    raise CheckpointRemoved(why) if newer and not there else CheckpointError(why)
            created = self.place.create(self.directory, manifests.FILE, data)
            # If a later checkpoint exists, `prune` may have removed the parts meanwhile, and does not know of
            # this manifest.
            if {part.name for part in manifest.parts} - self.place.sizes(self.directory).keys():
                self.place.remove(self.directory, [manifests.FILE])
        made = Checkpoint(self.place, self.step, self.attempt, {**there, manifests.FILE: len(data)})
        if not created and not manifests.same_state(made.manifest, manifests.decode(data)):
            raise CheckpointError(
                f"{self.place.where}: the checkpoint of step {self.step} has been committed with other parts"
            )
        return made

    def abandon(self) -> None:
        """Remove the files of this attempt, unless it was committed.

        Raises:
            CheckpointError: the store cannot be changed.
        """
        with troubles(self.place, "give up the checkpoint", self.step):
            there = self.place.sizes(self.directory)
            if there and manifests.FILE not in there:
                self.place.remove(self.directory, list(there))


@dataclass(frozen=True, eq=False)
class Loaded:
    """A checkpoint with its tensors."""

    checkpoint: Checkpoint
    tensors: dict[str, Tensor]


def one_of(where: str, warn: Callable[[str], None] | None = None) -> Checkpoint:
    """The newest undamaged checkpoint in `where`, or the checkpoint whose own directory is `where`.

    Args:
        where: a path or an address, as for `Store.open`.
        warn: if given, all bytes are verified, and it is called with a line for each checkpoint that is
            skipped; else only manifests and sizes are checked.

    Raises:
        CheckpointDamaged: the named checkpoint is damaged.
        CheckpointError: no checkpoint was found, or the store cannot be read.
    """
    above, _, last = where.rstrip("/").rpartition("/")
    if not (above and DIRECTORY.fullmatch(last)):
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
    """An iterator over pieces that counts and hashes their bytes."""

    def __init__(self, pieces: Iterator[memoryview]):
        self._pieces, self.nbytes, self.digest = pieces, 0, hashlib.sha256()

    def __iter__(self) -> Iterator[memoryview]:
        for piece in self._pieces:
            self.nbytes += len(piece)
            self.digest.update(piece)
            yield piece


def _whole(
    checkpoints: Sequence[Checkpoint], look: Callable[[Checkpoint], T], warn: Callable[[str], None]
) -> Iterator[tuple[Checkpoint, T]]:
    """The undamaged checkpoints, the newest first, each with the result of `look`."""
    for checkpoint in reversed(checkpoints):
        try:
            found = look(checkpoint)
        except CheckpointRemoved:
            continue
        except CheckpointDamaged as error:
            warn(f"the checkpoint of step {checkpoint.step} is passed over: {error}")
        else:
            yield checkpoint, found


def _best(whole: Sequence[Checkpoint], best: Best | None) -> set[str]:
    """The directory of the best checkpoint: the first of several, as `whole` begins with the newest."""
    values = [
        (c.manifest.metrics[best.metric], c) for c in whole if best and best.metric in c.manifest.metrics
    ]
    values = [(value, c) for value, c in values if value == value]  # a NaN is never the best
    if not values or best is None:
        return set()
    top = (max if best.largest else min)(value for value, _ in values)
    return {next(c.directory for value, c in values if value == top)}
