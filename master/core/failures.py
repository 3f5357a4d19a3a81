"""Failures, charged to their cause.

Preemption, the loss of a node, and a person's delete are free and unlimited. A crash of the user's
code is charged; when the job's budget is spent, it fails. The collapse of a peer is not charged.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.ids import WorkerId
from master.core import events as ev
from master.core.workers import WorkerRecord

# Sent from outside; the program is not to blame.
OUTSIDE_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
MOST_DOUBLINGS = 6  # more make no difference, and 2**1000 is no float


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
    if gone.signal and w.in_broken_ring:
        return ""  # crashed inside a ring that a peer's death had broken: not charged
    if gone.signal:
        how = f"crashed ({gone.signal})"
    elif gone.code is not None:
        how = f"exited unexpectedly with exit code {gone.code}"
    else:
        how = "failed"
    if gone.why:
        how += f": {gone.why}"
    return f"worker {w.id} {how}"


class RestartBackoff:
    """The pause before those are replaced who die before they are ready: twice as long each time."""

    def __init__(self) -> None:
        self.until = 0.0
        self._deaths = 0  # in a row

    def died_early(self, now: float) -> None:
        pause = FIRST_PAUSE_SECONDS * 2 ** min(self._deaths, MOST_DOUBLINGS)
        self._deaths += 1
        self.until = now + min(pause, LONGEST_PAUSE_SECONDS)

    def got_ready(self) -> None:
        self._deaths = 0
