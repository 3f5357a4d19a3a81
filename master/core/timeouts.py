"""The timeouts of a worker: everything that time alone brings about for one is here, but its silence.

A worker that is pending for lack of capacity has no timeout. Who falls silent is noticed where the streams
are heard (`edl.master.telemetry`), and told as an event.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from edl.config import Elastic
from edl.contract.ids import WorkerId
from edl.master.core.workers import PENDING, Pool, WorkerRecord


def ends(w: WorkerRecord, elastic: Elastic) -> float | None:
    """When the worker's timeout passes; None: never."""
    if w.kill_at is not None:
        return w.kill_at
    if w.is_starting and w.state != PENDING:
        return w.since + elastic.startup_timeout_seconds
    return None


class Timeouts:
    """All of them, by time. What no longer holds is dropped when its time is the next one."""

    def __init__(self, pool: Pool, elastic: Elastic) -> None:
        self._pool, self._elastic = pool, elastic
        self._heap: list[tuple[float, WorkerId]] = []

    def watch(self, w: WorkerRecord) -> None:
        """The worker has another timeout than before."""
        if (end := ends(w, self._elastic)) is not None:
            heapq.heappush(self._heap, (end, w.id))

    def next(self) -> float | None:
        """When the next one passes."""
        while self._heap:
            end, worker = self._heap[0]
            w = self._pool.get(worker)
            if w is not None and ends(w, self._elastic) == end:
                return end
            heapq.heappop(self._heap)
        return None

    def passed(self, now: float) -> Iterator[WorkerRecord]:
        """Whose has passed. Each is to be given up at once."""
        while (end := self.next()) is not None and end <= now:
            yield self._pool[heapq.heappop(self._heap)[1]]

    def excuse(self, now: float) -> None:
        """After a stall of our own: that who starts is ready, or has ended, is still to be read."""
        moment = self._elastic.heartbeat_timeout_seconds / 4
        soon: list[WorkerRecord] = []
        while (end := self.next()) is not None and end < now + moment:
            soon.append(self._pool[heapq.heappop(self._heap)[1]])
        for w in soon:
            if w.kill_at is None:
                w.since = max(w.since, now - self._elastic.startup_timeout_seconds + moment)
            self.watch(w)
