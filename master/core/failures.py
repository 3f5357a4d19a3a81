# SPDX-License-Identifier: Apache-2.0
"""Failures, charged to their cause.

Preemption, the loss of a node, deletion by a user, and every end after a request to leave are free and
unlimited. A crash of the user's code is charged, and the job fails when its budget is spent. The crash of a
peer is not charged. A kill from outside is not charged either, but a job fails if its workers are killed
again and again without progress. It also fails if its rings break one after the other before their first
step, although no worker is lost. A GPU with too little free memory is not charged, because a different
process may hold the rest of it. The job fails if this happens again and again without progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from edl.contract.exit_codes import BLAME, WorkerExit
from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core.workers import WorkerRecord

# Sent from outside, so the program is not the cause.
OUTSIDE_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
MAX_DOUBLINGS = 6  # more make no difference, and 2**1000 is too large for a float
MAX_IN_VAIN = 10  # kills in a row without a step in between; some two minutes
# Pauses before the next ring, after 1, 2 and 3 or more broken ones. With the default of elastic.maxFailures
# they add up to half a minute, in which a failure of the network may pass.
RING_PAUSES_SECONDS = (1.0, 5.0, 25.0)


@dataclass(slots=True)
class Failure:
    """One failure that was charged to the job."""

    worker: WorkerId
    why: str
    traceback: str
    step: int = 0  # of the job at that time


@dataclass(slots=True)
class FailureLog:
    """The failures that were charged to the job.

    Args:
        charged: without old ones of earlier masters.
        count: under all masters.
        traceback: of the failure that ended the job.
    """

    charged: list[Failure] = field(default_factory=list)
    count: int = 0
    traceback: str = ""

    def charge(self, failure: Failure) -> None:
        """Add a failure."""
        self.charged.append(failure)
        self.count += 1

    def charges(self, worker: WorkerId) -> bool:
        """Whether a failure of this worker was charged, by this master or an earlier one."""
        return any(failure.worker == worker for failure in self.charged)

    def ends_with(self, traceback: str) -> None:
        """Record the traceback of the failure that ends the job."""
        self.traceback = traceback

    def restore(self, charged: Iterable[tuple[WorkerId, str]], count: int) -> None:
        """Continue with the failures under an earlier master."""
        self.charged = [Failure(worker, why, "") for worker, why in charged]
        self.count = max(count, len(self.charged))


def own_fault(w: WorkerRecord, gone: ev.Gone) -> str:
    """Return the failure that is charged for the worker's exit; empty if the worker did not cause it."""
    if gone.limit and not w.failure_reason:
        # Its successor would exceed the limit again, even if this worker has left in time at SIGTERM.
        return f"worker {w.id} exceeded a limit of its pod: {gone.limit}"
    if w.stopped or w.leaves or w.failure_reason:
        return ""  # it was asked to leave or to exit, or it reported the failure itself and was charged then
    if gone.free or gone.signal in OUTSIDE_SIGNALS:
        return ""
    if w.expected:
        return ""  # the cause is known to an earlier master only
    if gone.code == WorkerExit.LOST:
        return ""  # it had lost its master, by a network failure or because it was removed as dead
    if gone.signal and w.in_broken_ring:
        return ""  # crashed inside a ring that a peer's death had broken: not charged
    if gone.signal:
        how = f"crashed ({gone.signal})"
    elif gone.code is not None:
        how = f"exited unexpectedly with exit code {gone.code}"
    else:
        how = "failed"
    if why := gone.why or BLAME.get(gone.code or 0, ""):
        how += f": {why}"
    return f"worker {w.id} {how}"


def cause_unknown(w: WorkerRecord, gone: ev.Gone) -> bool:
    """True if it was killed from outside, its peers broke its ring, or it had lost its master.

    Such an exit is free, but must not be retried for ever.
    """
    if w.stopped or w.leaves or w.expected or w.failure_reason:
        return False
    killed = gone.signal in OUTSIDE_SIGNALS and not gone.free
    return killed or gone.code in (WorkerExit.PEER_BROKEN, WorkerExit.LOST)


class RestartBackoff:
    """Exponential backoff before workers are replaced that die again and again.

    Two things are counted: workers that die before they are ready, and kills with no step of the ring in
    between. Kills within one pause count as one, so a hundred workers that are killed at once count once.
    """

    def __init__(self) -> None:
        self.until = 0.0  # no worker is replaced earlier
        self.why = ""  # the reason for that pause
        self._early = 0  # deaths in a row
        self._in_vain = 0  # kills in a row
        self._same_time_until = 0.0
        self.ring_until = 0.0  # no ring is formed earlier
        self._rings = 0  # rings in a row that broke before their first step
        self._starved = 0  # workers in a row that found too little memory on their GPU
        self._starved_at = 0  # the job's step at the last of them
        self._starved_until = 0.0  # the end of the pause after it

    def died_early(self, now: float) -> None:
        """Pause: a worker has died before it was ready. Each further one doubles the pause."""
        pause = _pause(self._early)
        self._early += 1
        several = f"{self._early} workers in a row ended before they were ready"
        self._pause_until(now + pause, several if self._early > 1 else "a worker ended before it was ready")

    def got_ready(self) -> None:
        """End the pauses for early deaths: a worker has become ready."""
        self._early = 0

    def was_killed(self, now: float) -> int:
        """Count a kill from outside; return how many occurred in a row without a step. 0 within a pause."""
        if now < self._same_time_until:
            return 0
        pause = _pause(self._in_vain)
        self._in_vain += 1
        self._same_time_until = now + pause
        if self._in_vain > 1:  # before the first kill there may have been a step that is not reported yet
            times = f"{self._in_vain} times in a row"
            self._pause_until(now + pause, f"workers were lost {times} before the ring made a step")
        return self._in_vain

    def ring_broke(self, now: float) -> int:
        """Count a ring that broke before its first step, and delay the next; return the count in a row."""
        self.ring_until = now + RING_PAUSES_SECONDS[min(self._rings, len(RING_PAUSES_SECONDS) - 1)]
        self._rings += 1
        return self._rings

    def lacked_gpu_memory(self, now: float, step: int) -> int:
        """Count a worker whose GPU has too little memory; return the count in a row, without a step between.

        Workers that fail within one pause count as one.

        Args:
            step: the number of steps that the job has made.
        """
        if now >= self._starved_until or step > self._starved_at:
            self._starved = 1 if step > self._starved_at else self._starved + 1
            self._starved_at, self._starved_until = step, now + _pause(self._starved)
            workers = f"{self._starved} workers in a row" if self._starved > 1 else "a worker"
            self._pause_until(self._starved_until, f"{workers} found too little free memory on a GPU")
        return self._starved

    def stepped(self) -> None:
        """End the pauses for rings without progress: a member has completed a step."""
        self._in_vain = self._rings = 0

    def _pause_until(self, until: float, why: str) -> None:
        if until > self.until:
            self.until, self.why = until, why


def _pause(times: int) -> float:
    pause: float = FIRST_PAUSE_SECONDS * 2 ** min(times, MAX_DOUBLINGS)
    return min(pause, LONGEST_PAUSE_SECONDS)
