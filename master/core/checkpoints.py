"""Checkpoints: when one is due, who finishes it, and what to do when one fails.

    due ──Checkpoint──▶ rank 0 has the ring agree on a step ──▶ each rank writes its part
        ──PartsWritten──▶ Commit: one of them writes the manifest ──Checkpointed──▶ it is whole

A ring that breaks in between, a worker that is lost, or a store that fails gives one checkpoint up, and the
next one is asked for: at once where the ring has changed, later and later while the store fails. Nothing of
that concerns the training. A ring may also begin one by itself (after so many steps, at the end of an epoch).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edl.config import Config
from edl.contract.ids import Generation, WorkerId
from edl.contract.phases import Phase
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.ring import Ring
from edl.master.core.workers import NO_RING, Pool, WorkerRecord

MOST_DOUBLINGS = 5
LONGEST_PAUSE_SECONDS = 300.0
UNDER_WAY_SECONDS = 60.0  # after which an order is given again that has led to nothing
STEPS_PAUSE_SECONDS = 10.0  # after a failure, where time makes no checkpoints


@dataclass(frozen=True, slots=True)
class PendingStop:
    """A stop that waits for a checkpoint of the state."""

    phase: Phase
    reason: str
    force: bool = False  # end the job even if the checkpoint fails
    until: float | None = None  # end the job at this time at the latest


@dataclass(slots=True)
class Checkpoints:
    """What the master knows of one job's checkpoints."""

    config: Config = field(repr=False)
    step: int = 0  # of the newest one that is whole, as far as is known; 0: there is none
    nbytes: int = 0
    written_at: float | None = None  # None: before this master
    due_at: float | None = None
    failures: int = 0  # in a row
    failed: tuple[int, str] = (0, "")  # step and attempt of the one that did
    refused: tuple[int, str] = (0, "")  # of the last one whose parts were of different states
    took: float = 0.0  # seconds, the last one, from the order to the manifest
    ordered_at: float | None = None  # the one that is under way
    restoring: Generation = NO_RING  # the ring whose root reads one: its step is not known yet
    _alone: WorkerId | None = None  # who is to write one by itself
    _hurried: Generation = NO_RING  # the ring of which all holders are to go
    _commit: ef.Commit | None = None
    _writers: tuple[WorkerId, ...] = ()

    @property
    def enabled(self) -> bool:
        return bool(self.config.checkpoint.dir)

    @property
    def _interval(self) -> float:
        """Between two orders, so that they are whole as often as people want."""
        seconds = self.config.checkpoint.seconds
        return max(seconds - self.took, seconds / 2)

    # --- when one is due

    def ring_is_up(self, now: float) -> None:
        """All members have one state. What was under way in the ring before is not, any more."""
        if self.ordered_at is not None:
            self.ordered_at, self.due_at = None, now
        elif self.due_at is None and self._interval:
            self.due_at = now + self._interval

    def ask(self, now: float) -> None:
        """People want one now."""
        self.due_at = now

    def next_deadline(self) -> float | None:
        return self.due_at if self.enabled else None

    def order(self, ring: Ring, now: float) -> list[ef.Effect]:
        """What is due now."""
        if not self.enabled or self.due_at is None or self.due_at > now or not (ring.running and ring.up):
            return []
        self.ordered_at, self.due_at = now, now + max(self._interval, UNDER_WAY_SECONDS)
        return [ef.Checkpoint(ring.generation, ring.members[0])]

    # --- the last copies of the state

    def hurry(self, ring: Ring, now: float) -> None:
        """All who hold the state are to go, and train on until they must: one is due at once."""
        if ring.running and ring.up and ring.generation != self._hurried:
            self._hurried, self.due_at = ring.generation, now

    def write_now(self, now: float) -> None:
        """The next `write` does not wait, whatever has failed before."""
        self.due_at, self._alone = now, None

    def has(self, step: int) -> bool:
        """Whether nothing is lost with a state of that step."""
        return self.enabled and step <= self.step

    def write(self, last: Sequence[WorkerRecord], now: float) -> list[ef.Effect]:
        """Have one of the last holders, all of which are to go, write the state: once, unless that fails."""
        waits = self.failures and self.due_at is not None and self.due_at > now
        if not self.enabled or not last or waits or any(w.id == self._alone for w in last):
            return []
        self._alone = max(last, key=lambda w: (w.step, -w.id)).id
        return [ef.WriteCheckpoint(self._alone)]

    # --- one that is under way

    def parts_written(self, event: ev.PartsWritten) -> list[ef.Effect]:
        """Who has written the last part finishes it, unless a newer one is whole by now."""
        if event.step < self.step:
            return []
        self._writers = event.writers
        self._commit = ef.Commit(event.worker, event.step, event.attempt)
        return [self._commit]

    def refuse(self, event: ev.PartsWritten, now: float) -> bool:
        """Its parts may be of different states: it is never finished, and another one is due. False: that
        was known."""
        if (event.step, event.attempt) == self.refused:
            return False
        self.refused = event.step, event.attempt
        self.ordered_at, self.due_at = None, now
        return True

    def replace_the_lost(self, pool: Pool) -> list[ef.Effect]:
        """Have another one finish what a worker that is gone was to finish: whoever has written a part."""
        if self._commit is None or pool.get(self._commit.worker) is not None:
            return []
        living = [w for w in self._writers if pool.get(w) is not None]
        if not living:
            self._commit = None
            return []
        self._commit = ef.Commit(living[0], self._commit.step, self._commit.attempt)
        return [self._commit]

    def is_whole(self, event: ev.Checkpointed, now: float) -> bool:
        """A checkpoint is written. Whether it is the first that this master hears of."""
        first = self.written_at is None
        taken_at = now - self.took if self.ordered_at is None else self.ordered_at
        if self.ordered_at is not None:
            self.took = now - self.ordered_at
        self.ordered_at, self._commit, self._alone, self.failures = None, None, None, 0
        self.step, self.nbytes, self.written_at = event.step, event.nbytes, now
        self.due_at = taken_at + self._interval if self._interval else None
        return first

    def fails(self, event: ev.CheckpointFailed, now: float) -> bool:
        """An attempt has failed, and the next one waits. False: that was known."""
        if (event.step, event.attempt) == self.failed or event.step < self.step:  # a newer one is whole
            return False
        self.failed = event.step, event.attempt
        self.ordered_at = self._commit = self._alone = None
        pause = (self.config.checkpoint.seconds or STEPS_PAUSE_SECONDS) * 2 ** min(
            self.failures, MOST_DOUBLINGS
        )
        self.failures += 1
        self.due_at = now + min(pause, LONGEST_PAUSE_SECONDS)
        return True
