"""Failures, charged to their cause.

Preemption, the loss of a node, and a person's delete are free and unlimited. A crash of the user's
code is charged; when the job's budget is spent, it fails. The collapse of a peer is not charged. Nor is a
kill from outside, but a job whose workers are killed again and again, and which gets nowhere, fails too.
So does a job whose rings break one after the other before their first step, although no worker is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.exit_codes import BLAME, WorkerExit
from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core.workers import WorkerRecord

# Sent from outside; the program is not to blame.
OUTSIDE_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
MOST_DOUBLINGS = 6  # more make no difference, and 2**1000 is no float
MOST_IN_VAIN = 10  # times in a row that workers are killed with no step in between; some two minutes
# Before the next ring, after 1, 2 and 3 or more that broke. With the default of elastic.maxFailures that is
# half a minute, in which a failure of the network may pass.
RING_PAUSES_SECONDS = (1.0, 5.0, 25.0)


@dataclass(slots=True)
class Failure:
    """One failure that was charged to the job."""

    worker: WorkerId
    why: str
    traceback: str


def own_fault(w: WorkerRecord, gone: ev.Gone) -> str:
    """What the worker is charged with for ending so; empty when that was not its own doing."""
    if w.stopped or w.failure_reason:
        return ""  # it was asked to; or it has said why itself, and was charged then
    if gone.free or gone.signal in OUTSIDE_SIGNALS:
        return ""
    if w.expected:
        return ""  # an earlier master knows why it ends
    if gone.code == WorkerExit.LOST:
        return ""  # it had no master any more: a network that breaks, or one that took it for dead
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
    """It was killed from outside, its peers broke its ring, or it had no master any more: free, but no
    reason to try again for ever."""
    if w.stopped or w.expected or w.failure_reason:
        return False
    killed = gone.signal in OUTSIDE_SIGNALS and not gone.free
    return killed or gone.code in (WorkerExit.PEER_BROKEN, WorkerExit.LOST)


class RestartBackoff:
    """The pause before workers are replaced that die again and again: twice as long each time.

    Two things are counted: those who die before they are ready, and the times that workers are killed with
    no step of the ring in between. Those who die in a pause are of the same time: a hundred that are
    killed at once mean no more than one.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self._early = 0  # deaths in a row
        self._in_vain = 0  # times in a row
        self._same_time_until = 0.0
        self.ring_until = 0.0  # no ring is formed before
        self._rings = 0  # broken in a row before their first step

    def died_early(self, now: float) -> None:
        self.until = now + _pause(self._early)
        self._early += 1

    def got_ready(self) -> None:
        self._early = 0

    def was_killed(self, now: float) -> int:
        """Nobody knows by whom; how often in a row without a step in between. 0: nothing new."""
        if now < self._same_time_until:
            return 0
        pause = _pause(self._in_vain)
        self._in_vain += 1
        self._same_time_until = now + pause
        if self._in_vain > 1:  # the first time there may well have been a step, and it is not told yet
            self.until = max(self.until, now + pause)
        return self._in_vain

    def ring_broke(self, now: float) -> int:
        """A ring broke before its first step. Return how many have, in a row; the next ring has to wait."""
        self.ring_until = now + RING_PAUSES_SECONDS[min(self._rings, len(RING_PAUSES_SECONDS) - 1)]
        self._rings += 1
        return self._rings

    def stepped(self) -> None:
        self._in_vain = self._rings = 0


def _pause(times: int) -> float:
    pause: float = FIRST_PAUSE_SECONDS * 2 ** min(times, MOST_DOUBLINGS)
    return min(pause, LONGEST_PAUSE_SECONDS)
