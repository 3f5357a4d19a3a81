# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, on one worker: its part of each. `reading` has the state that a job resumes from.

The ring agrees on the step (`ready` sets a field of the control vector). Right after it each rank snapshots
its variables, without a copy, and has them written in the background while it trains on: `begin`. Which rank
writes which variables is arithmetic. Each rank reports its part to the master. When all parts are there, the
master has one of the writers complete the checkpoint (`commit`), which may have left that ring already.

    ready ──all ranks──▶ begin ──background──▶ CheckpointPart ... CommitCheckpoint ──▶ Checkpointed

With its part each rank reports the digest of the whole state that it holds: a checkpoint of diverged states
is never completed. The digest is computed in the background, too.

Parameter servers write parts of their own, of the same step: rank 0 has all servers snapshot their rows
before it goes on, and reports their parts when they are written.

Promise: no function here changes the model while it trains, delays a step for longer than it takes to read
the variables' addresses, or ends the training. Failures are reported, and the next checkpoint is a new
attempt.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

import edl
from edl.checkpoints import (
    SERVERS,
    Best,
    CheckpointError,
    CheckpointFile,
    Manifest,
    Store,
    Tensor,
    Variable,
    utc_now,
)
from edl.config import Config, lineage
from edl.contract.artifacts import CLASSES
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.errors import CheckpointRemoved
from edl.trainer.agreement.epochs import MEMORY
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.checkpoint.reading import BOUNDARY, TASK, CheckpointReader
from edl.trainer.model.digests import digest, drained
from edl.trainer.model.state_owner import StateOwner
from edl.trainer.model.variable_spec import VariableSpec
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.interfaces import PartNotWritten
from edl.trainer.ring.base import RingBroken, RingSlot
from edl.trainer.runtime.log import log
from edl.trainer.session.state import Session

T = TypeVar("T")
NICE = 10  # of the writing thread
KEPT = 2  # attempts that this worker can still complete
TRIES = 3  # to write the last state, if servers go away meanwhile
BACK_SECONDS = 30.0  # in which such a server must be back
EPOCH_SHARE = 0.1  # of the interval: if the last checkpoint is older, an epoch's end makes one


class Checkpointing(CheckpointReader):
    """The checkpoints of one worker.

    Args:
        store: where the checkpoints are.
        run_id: the run ID of the job.
        background: runs work beside the training, one task at a time.
        servers: the parameter servers, which write a part each; None if the job has no servers.
        clock: monotonic time in seconds.
        classes: the names of the labels' classes by number, which each checkpoint has, too.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        learner: StateOwner,
        store: Store,
        run_id: str,
        background: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        servers: PsClient | None = None,
        classes: Sequence[str] = (),
    ):
        super().__init__(config, session, learner, store, run_id, servers, classes)
        self._clock = clock
        self._background = background or ThreadPoolExecutor(1, "checkpoints", _lower_priority).submit
        self._lock = threading.Lock()
        self._busy = 0  # number of unfinished pieces of work in the background
        self._begun_at = clock()  # when this worker last took part in one
        every = config.checkpoint
        self._best = Best(every.best, every.best_mode == "max") if every.best else None
        self._metrics: tuple[int, dict[str, float]] = 0, {}  # the last epoch's, and the step that ended it
        self._metric_reported = False  # whether the missing metric was reported
        self._saves = 0
        self._prune_failed = False  # whether it was reported that old ones cannot be removed
        self._pending: dict[tuple[int, str], Manifest] = {}  # to be completed, without the parts
        session.commits(self.commit)

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether a checkpoint of an epoch's end needs the metrics of its evaluation."""
        return self._best is not None and self._best.metric.startswith("val_")

    def ready(self, slot: RingSlot, step: int, steps: Steps, epochs: int, evaluated: bool = False) -> bool:
        """Whether this rank can take part in a checkpoint after the next step; for rank 0: and one is due.

        Args:
            step: the number of steps in the model then.
            epochs: to train. The final state is written by the worker that saves the model.
            evaluated: the checkpoint is that of an epoch's end, after its evaluation.
        """
        if self._busy or steps.ended(step, epochs):
            return False
        asked = self._session.checkpoint_is_due(slot.generation)
        return slot.rank != 0 or evaluated or asked or self._is_due(step, steps)

    def _is_due(self, step: int, steps: Steps) -> bool:
        every = self._config.checkpoint
        if every.steps and step % every.steps == 0:
            return True
        old = self._clock() - self._begun_at >= EPOCH_SHARE * every.seconds
        return steps.ends_epoch(step) and (old or self._best is not None)

    def epoch_ended(self, step: int, metrics: dict[str, float], evaluated: bool = False) -> None:
        """Record the metrics of the epoch that ends with this step, for its checkpoint."""
        self._metrics = step, metrics
        name = self._best.metric if self._best is not None else ""
        later = name.startswith("val_") and not evaluated
        if name and name not in metrics and not later and not self._metric_reported:
            self._metric_reported = True
            self._session.warn(
                f"checkpoint.best is {name!r}, and the metrics of an epoch are "
                f"{', '.join(metrics) or 'none'}: no checkpoint is the best one"
            )

    def begin(
        self, slot: RingSlot, ledger: Ledger, steps: Steps, layout: Layout, step: int | None = None
    ) -> None:
        """Have this rank's part of the present state written. All ranks begin at the same step.

        Args:
            step: the checkpoint's step, if servers are ahead of the ledger (mode=ps); None for the ledger's.
        """
        self._begun_at = self._clock()
        self._session.checkpoint_begins()
        # A new master may count generations from 1 again; worker ids are never reused.
        attempt = f"{self._run_id}-g{slot.generation}-w{slot.first}"
        key, ours, finite, all_ = self._take(attempt, slot, ledger, steps, layout, step)
        if not (compared := slot.size > 1 and not self._config.asynchronous):
            all_.clear()  # no other worker holds the state to compare with
        told = ledger.exact()
        theirs = self._take_parts(key, slot)

        def work() -> None:
            with theirs as written:
                state = digest(drained(all_), told) if compared else b""
                self._write(key, slot, ours, finite, written, state)

        self._do(key, work)

    def save(self, ledger: Ledger, steps: Steps, layout: Layout, step: int | None = None) -> None:
        """Write a whole checkpoint of the present state, and return when it is complete, or has failed.

        It is for a state that this worker alone saves: the last state of a training, or the only copy. No
        later checkpoint would replace it, and nothing is trained meanwhile. So if a server goes away, the
        worker waits for it, and all parts are written again. Args: as for `begin`.
        """
        at = ledger.step if step is None else step
        if (found := self._restored) is not None and at == found.step:
            self._session.say(checkpointed=_told(found))  # a new master may not know of this checkpoint
            return
        slot = RingSlot(0, self._session.worker, 0, 1)
        for tries in range(1, TRIES + 1):
            self._saves += 1
            attempt = f"{self._run_id}-w{slot.first}-alone{self._saves}"
            key, tensors, finite, _ = self._take(attempt, slot, ledger, steps, layout, at)
            again = self._attempt(key, partial(self._save, key, tensors, finite, slot, tries < TRIES))
            if not again:
                return

    def _save(
        self,
        key: tuple[int, str],
        tensors: dict[str, Tensor],
        finite: frozenset[str],
        slot: RingSlot,
        again: bool,
    ) -> bool:
        """Write a whole checkpoint.

        Args:
            again: whether a further attempt is allowed.

        Returns:
            whether to try again: a server went away before its part was written, and all servers answer now.

        Raises:
            PartNotWritten: a server became unreachable, and no further attempt is allowed or the server stays
                so.
        """
        try:
            with self._take_parts(key, slot) as theirs:
                part = self._store.begin(*key).write_part(0, 1 + self._of_servers(key), tensors, finite)
                parts = theirs()
        except PartNotWritten as error:
            assert self._servers is not None
            if not again or not self._servers.answer_within(BACK_SECONDS):
                raise
            log.warning(f"{error}; the checkpoint is written again")
            return True
        self._finish(key, self._whole(key, (part, *parts)))
        return False

    def _take(
        self, attempt: str, slot: RingSlot, ledger: Ledger, steps: Steps, layout: Layout, at: int | None
    ) -> tuple[tuple[int, str], dict[str, Tensor], frozenset[str], list[np.ndarray]]:
        """Snapshot the state.

        Returns:
            the checkpoint's key, this rank's part, the names in it that must be finite, and all values, uint8
            [bytes] each.
        """
        specs, parts = self._learner.variable_specs(), self._learner.parts()
        if memory := ledger.epochs.memory:
            specs = [*specs, VariableSpec(MEMORY, "uint8", (len(memory),))]
            parts = [*parts, np.frombuffer(memory, np.uint8)]
        parts_of = deal([part.nbytes for part in parts], slot.size)
        variables = [
            Variable(d.name, d.dtype, d.shape, part) for d, part in zip(specs, parts_of, strict=True)
        ]
        step = ledger.step if at is None else at
        key = step, attempt
        of_servers = {} if self._servers is None else {SERVERS: {"count": self._servers.count, "parts": []}}
        self._pending[key] = Manifest(
            step=step,
            run=self._run_id,
            attempt=attempt,
            epoch=steps.epoch(step),
            records=steps.begins_at(step),
            model=self.model,
            variables=tuple(variables),
            parts=(),
            skipped=tuple(ledger.skipped),
            bad=dict(ledger.bad),
            config=lineage.kept(self._config),
            edl=edl.__version__,
            metrics=self._metrics[1] if self._metrics[0] == step else {},
            state={
                "layout": asdict(layout),
                "forced": list(self.forced),
                "epochs": ledger.epochs.to_json(),
                TASK: self._config.training.epochs,
                **of_servers,
                **({CLASSES: self._classes} if self._classes else {}),
                **({} if step == ledger.step else {BOUNDARY: ledger.step}),
            },
        )
        while len(self._pending) > KEPT:
            del self._pending[next(iter(self._pending))]
        ours = {
            v.name: Tensor(v.dtype, v.shape, part.data)
            for v, part in zip(variables, parts, strict=True)
            if v.part == slot.rank
        }
        return key, ours, frozenset(d.name for d in specs if d.weight and d.name in ours), parts

    def _take_parts(
        self, key: tuple[int, str], slot: RingSlot
    ) -> AbstractContextManager[Callable[[], Sequence[CheckpointFile]]]:
        """Have the servers snapshot their rows, if this is rank 0.

        Returns:
            see `PsClient.take_parts`.
        """
        if self._servers is None or slot.rank:
            return nullcontext[Callable[[], Sequence[CheckpointFile]]](tuple)
        try:
            return self._servers.take_parts(*key, slot.size)
        except CheckpointError as error:
            return nullcontext(partial(_fail, error))

    def _write(
        self,
        key: tuple[int, str],
        slot: RingSlot,
        tensors: dict[str, Tensor],
        finite: frozenset[str],
        theirs: Callable[[], Sequence[CheckpointFile]],
        state: bytes,
    ) -> None:
        (step, attempt), of = key, slot.size + self._of_servers(key)
        ours = self._store.begin(*key).write_part(slot.rank, of, tensors, finite)
        for index, part in [(slot.rank, ours), *enumerate(theirs(), slot.size)]:
            self._session.say(
                slot.generation,
                checkpoint_part=pb.CheckpointPart(
                    step=step,
                    attempt=attempt,
                    index=index,
                    of=of,
                    name=part.name,
                    nbytes=part.nbytes,
                    sha256=bytes.fromhex(part.sha256),
                    state=state,
                ),
            )

    def _of_servers(self, key: tuple[int, str]) -> int:
        """The number of servers' parts in this checkpoint; the number of servers may have changed since."""
        pending = self._pending.get(key)
        return pending.state.get(SERVERS, {}).get("count", 0) if pending is not None else 0

    def _whole(self, key: tuple[int, str], parts: Sequence[CheckpointFile]) -> Manifest:
        """The manifest with all parts, those of the servers last."""
        manifest = replace(self._pending[key], parts=tuple(parts))
        if self._servers is None:
            return manifest
        names = [part.name for part in parts[len(parts) - self._of_servers(key) :]]
        return replace(manifest, state={**manifest.state, SERVERS: {"count": len(names), "parts": names}})

    def commit(self, order: pb.CommitCheckpoint) -> None:
        """Complete a checkpoint whose parts are all written. From any thread."""
        key = order.step, order.attempt
        if key in self._pending:
            manifest = self._whole(
                key, [CheckpointFile(p.name, p.nbytes, p.sha256.hex()) for p in order.parts]
            )
            self._do(key, lambda: self._finish(key, manifest))

    def _finish(self, key: tuple[int, str], manifest: Manifest) -> None:
        self._store.begin(*key).commit(replace(manifest, created=utc_now()))
        self._session.say(checkpointed=_told(manifest))
        if self._servers is not None:
            self._servers.committed(*key)
        self._prune()

    def _prune(self) -> None:
        """Remove old checkpoints. Failing to (no permission, no store) does not make the new one invalid."""
        try:
            self._store.prune(self._config.checkpoint.keep, self._best)
        except CheckpointError as error:
            if not self._prune_failed:
                self._session.warn(
                    f"old checkpoints are not removed, and take room: {error} (checkpoint.keep is "
                    f"{self._config.checkpoint.keep})"
                )
            self._prune_failed = True
        else:
            self._prune_failed = False

    def _do(self, key: tuple[int, str], work: Callable[[], None]) -> None:
        """Run work in the background; a failure ends only this attempt."""

        def beside() -> None:
            try:
                self._attempt(key, work)
            finally:
                with self._lock:
                    self._busy -= 1

        with self._lock:
            self._busy += 1
        self._background(beside)

    def _attempt(self, key: tuple[int, str], work: Callable[[], T]) -> T | None:
        """Return the result of the work; None if it failed, which is reported to the master."""
        try:
            return work()
        except CheckpointRemoved:  # that of a worker that saves alone is complete, and not older
            return None
        except Exception as error:  # a store's library may raise any error
            said = isinstance(error, (CheckpointError, RingBroken))
            why = str(error) if said else f"{type(error).__name__}: {error}"
            failed = pb.CheckpointFailed(step=key[0], attempt=key[1], why=why)
            self._session.say(checkpoint_failed=failed)
            return None


def _fail(error: CheckpointError) -> Sequence[CheckpointFile]:
    raise error


def _told(manifest: Manifest) -> pb.Checkpointed:
    return pb.Checkpointed(step=manifest.step, attempt=manifest.attempt, nbytes=manifest.nbytes)


def _lower_priority() -> None:
    """Lower the priority of this thread, so that training gets the cores first.

    On Linux each thread has a priority of its own.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def deal(sizes: Sequence[int], of: int) -> list[int]:
    """Divide variables over parts: the largest first, each into the part that is smallest so far.

    Returns:
        the part of each variable, the same on every rank.
    """
    parts, full = [0] * len(sizes), [0] * of
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        parts[i] = min(range(of), key=lambda part: (full[part], part))
        full[parts[i]] += sizes[i]
    return parts


def of_job(
    config: Config,
    session: Session,
    learner: Any,
    run_id: str,
    servers: PsClient | None = None,
    classes: Sequence[str] = (),
) -> Checkpointing | None:
    """The checkpoints of a worker; None if the job writes no checkpoints.

    Args:
        servers: the parameter servers, which write a part each; None if the job has no servers.
        classes: the names of the labels' classes by number; empty if labels are numbers.

    Raises:
        CheckpointError: the address of the store is invalid.
    """
    if not (where := config.checkpoint.dir):
        return None
    return Checkpointing(
        config, session, learner, Store.open(where), run_id, servers=servers, classes=classes
    )
