"""The timeouts of a worker: everything that time alone brings about for one is here.

A worker that is pending for lack of capacity has no timeout.
"""

from __future__ import annotations

from collections.abc import Iterable

from edl.config import Elastic
from master.core.workers import PENDING, WorkerRecord


def ends(w: WorkerRecord, elastic: Elastic) -> float | None:
    """When the worker's timeout passes; None: never."""
    if w.kill_at is not None:
        return w.kill_at
    if w.state == PENDING:
        return None
    if w.is_starting:
        return w.since + elastic.startup_timeout_seconds
    return w.heard + elastic.heartbeat_timeout_seconds


def excuse_the_unheard(
    workers: Iterable[WorkerRecord], listened: float, now: float, elastic: Elastic
) -> None:
    """After a stall of our own, what the workers said meanwhile is still to be read.

    Beats come every sixth of the silence, so that nobody at all was heard for half of it
    means that we did not listen, or that everybody is silent: then a moment more costs little.

    Args:
        listened: when the last event came.
    """
    silence = elastic.heartbeat_timeout_seconds
    moment = silence / 4
    if now - listened > silence / 2:
        for w in workers:
            w.heard = max(w.heard, now - silence + moment)
            if w.is_starting:  # it may have got ready, or ended
                w.since = max(w.since, now - elastic.startup_timeout_seconds + moment)
