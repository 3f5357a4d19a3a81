# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: when one is due, which worker completes it, and what happens after a failure.

    due ──Checkpoint──▶ rank 0 lets the ring agree on a step ──▶ each rank writes its part
        ──PartsWritten──▶ Commit: one worker writes the manifest ──Checkpointed──▶ complete

An attempt is given up if the ring breaks, a worker is lost, or the storage fails. The next attempt is due at
once after a change of the ring, and with increasing pauses while the storage fails. Training is not affected.
A ring may also start an attempt by itself (after a number of steps, or at the end of an epoch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edl.config import Config
from edl.contract.ids import NO_RING, Generation, WorkerId
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.ring import Ring
from edl.master.core.workers import Pool, WorkerRecord

MAX_DOUBLINGS = 5
LONGEST_PAUSE_SECONDS = 300.0
UNDER_WAY_SECONDS = 60.0  # after which an order without a result is repeated
HURRIED_SECONDS = 2.0  # between checkpoints of draining workers, which may be killed at any moment
STEPS_PAUSE_SECONDS = 10.0  # after a failure, if checkpoints are not due by time


@dataclass(slots=True)
class Checkpoints:
    """The master's state of one job's checkpoints."""

    config: Config = field(repr=False)
    step: int = 0  # of the newest complete checkpoint that is known; 0: no checkpoint
    nbytes: int = 0
    written_at: float | None = None  # None: before this master
    due_at: float | None = None
    failures: int = 0  # in a row
    failed: tuple[int, str] = (0, "")  # step and attempt of the last failure
    refused: tuple[int, str] = (0, "")  # step and attempt of the last one with parts of different states
    took: float = 0.0  # seconds of the last one, from the order to the manifest
    ordered_at: float | None = None  # of the present attempt
    restoring: Generation = NO_RING  # the ring whose root reads a checkpoint with a step still unknown
    _alone: WorkerId | None = None  # the worker that writes a whole checkpoint by itself
    _hurried: Generation = NO_RING  # the ring in which all holders of the state are draining
    _commit: ef.Commit | None = None
    _writers: tuple[WorkerId, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether the job writes checkpoints."""
        return bool(self.config.checkpoint.dir)

    @property
    def _interval(self) -> float:
        """Seconds between two orders, so that checkpoints complete as often as requested."""
        seconds = self.config.checkpoint.seconds
        return max(seconds - self.took, seconds / 2)

    def know(self, step: int) -> None:
        """Record a complete checkpoint that a worker has found, or that an earlier master knew."""
        self.step = max(self.step, step)

    def go_back(self, step: int) -> None:
        """Record that later checkpoints are damaged or void."""
        self.step = step

    def restore(self, ring: Generation) -> None:
        """Record the ring whose root reads a checkpoint with a step still unknown; NO_RING: none does."""
        self.restoring = ring

    # --- when one is due

    def ring_is_up(self, now: float) -> None:
        """Schedule checkpoints of a ring that is up. An attempt of the previous ring is given up."""
        if self.ordered_at is not None:
            self.ordered_at, self.due_at = None, now
        elif self.due_at is None and self._interval:
            self.due_at = now + self._interval

    def ask(self, now: float) -> None:
        """Request a checkpoint now."""
        self.due_at = now

    def next_deadline(self) -> float | None:
        """Time at which the next checkpoint is due; None if the job writes none."""
        return self.due_at if self.enabled else None

    def order(self, ring: Ring, now: float) -> list[ef.Effect]:
        """Return the order of a checkpoint if one is due."""
        if not self.enabled or self.due_at is None or self.due_at > now or not (ring.running and ring.up):
            return []
        self.ordered_at, self.due_at = now, now + max(self._interval, UNDER_WAY_SECONDS)
        return [ef.Checkpoint(ring.generation, ring.members[0])]

    # --- the last copies of the state

    def hurry(self, ring: Ring, now: float) -> None:
        """Make checkpoints due at once and every few seconds, as all holders of the state are draining.

        They train on, since a new worker may come before they are killed.
        """
        if not (ring.running and ring.up):
            return
        if ring.generation != self._hurried:
            self._hurried, self.due_at = ring.generation, now
        elif self.written_at is not None and self.ordered_at is None and not self.failures:
            soon = self.written_at + HURRIED_SECONDS
            self.due_at = soon if self.due_at is None else min(self.due_at, soon)

    def write_now(self, now: float) -> None:
        """Let the next `write` ignore pauses after earlier failures."""
        self.due_at, self._alone = now, None

    def has(self, step: int) -> bool:
        """True if a complete checkpoint contains a state of that step or a later one."""
        return self.enabled and step <= self.step

    def write(self, last: Sequence[WorkerRecord], now: float) -> list[ef.Effect]:
        """Order one of the last holders, all draining, to write the state; only again after a failure."""
        waits = self.failures and self.due_at is not None and self.due_at > now
        if not self.enabled or not last or waits or any(w.id == self._alone for w in last):
            return []
        self._alone = max(last, key=lambda w: (w.step, -w.id)).id
        return [ef.WriteCheckpoint(self._alone)]

    # --- one that is under way

    def parts_written(self, event: ev.PartsWritten) -> list[ef.Effect]:
        """Order the writer of the last part to complete the checkpoint, unless one as new is complete."""
        if 0 < event.step <= self.step:
            return []
        self._writers = event.writers
        self._commit = ef.Commit(event.worker, event.step, event.attempt)
        return [self._commit]

    def refuse(self, event: ev.PartsWritten, now: float) -> bool:
        """Refuse a checkpoint whose parts may be of different states; the next one is due at once.

        False if it was refused before.
        """
        if (event.step, event.attempt) == self.refused:
            return False
        self.refused = event.step, event.attempt
        self.ordered_at, self.due_at = None, now
        return True

    def replace_the_lost(self, pool: Pool) -> list[ef.Effect]:
        """If the worker that completes a checkpoint is gone, order a different writer of a part to do it."""
        if self._commit is None or pool.get(self._commit.worker) is not None:
            return []
        living = [w for w in self._writers if pool.get(w) is not None]
        if not living:
            self._commit = None
            return []
        self._commit = ef.Commit(living[0], self._commit.step, self._commit.attempt)
        return [self._commit]

    def is_whole(self, event: ev.Checkpointed, now: float) -> bool:
        """Record a complete checkpoint. True if it is the first one under this master."""
        first = self.written_at is None
        taken_at = now - self.took if self.ordered_at is None else self.ordered_at
        if self.ordered_at is not None:
            self.took = now - self.ordered_at
        self.ordered_at, self._commit, self._alone, self.failures = None, None, None, 0
        self.step, self.nbytes, self.written_at = event.step, event.nbytes, now
        self.due_at = taken_at + self._interval if self._interval else None
        return first

    def fails(self, event: ev.CheckpointFailed, now: float) -> bool:
        """Record a failed attempt, and delay the next one. False if the failure is known or obsolete."""
        if (event.step, event.attempt) == self.failed or 0 < event.step <= self.step:
            return False
        self.failed = event.step, event.attempt
        self.ordered_at = self._commit = self._alone = None
        pause = (self.config.checkpoint.seconds or STEPS_PAUSE_SECONDS) * 2 ** min(
            self.failures, MAX_DOUBLINGS
        )
        self.failures += 1
        self.due_at = now + min(pause, LONGEST_PAUSE_SECONDS)
        return True
