# SPDX-License-Identifier: Apache-2.0
"""The startup and exit timeouts of workers.

A worker that is pending for lack of capacity has no timeout. Missing heartbeats are detected outside the core
(`edl.master.telemetry`), and reported as an event.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from edl.config import Elastic
from edl.contract.ids import WorkerId
from edl.master.core.workers import PENDING, Pool, WorkerRecord


def ends(w: WorkerRecord, elastic: Elastic) -> float | None:
    """Return when the worker's timeout passes; None if it has no timeout."""
    if w.kill_at is not None:
        return w.kill_at
    if w.is_starting and w.state != PENDING:
        return w.since + elastic.startup_timeout_seconds
    return None


class Timeouts:
    """The timeouts of all workers, in a heap by time. Obsolete entries are dropped when they come first."""

    def __init__(self, pool: Pool, elastic: Elastic) -> None:
        self._pool, self._elastic = pool, elastic
        self._heap: list[tuple[float, WorkerId]] = []

    def watch(self, w: WorkerRecord) -> None:
        """Add a worker's new or changed timeout."""
        if (end := ends(w, self._elastic)) is not None:
            heapq.heappush(self._heap, (end, w.id))

    def next(self) -> float | None:
        """Return when the next timeout passes; None if no timeout is running."""
        while self._heap:
            end, worker = self._heap[0]
            w = self._pool.get(worker)
            if w is not None and ends(w, self._elastic) == end:
                return end
            heapq.heappop(self._heap)
        return None

    def passed(self, now: float) -> Iterator[WorkerRecord]:
        """Yield the workers whose timeouts have passed. The caller must remove each at once."""
        while (end := self.next()) is not None and end <= now:
            yield self._pool[heapq.heappop(self._heap)[1]]

    def excuse(self, now: float) -> None:
        """Extend startup timeouts after a stall of the master, as messages of workers wait to be read."""
        moment = self._elastic.heartbeat_timeout_seconds / 4
        soon: list[WorkerRecord] = []
        while (end := self.next()) is not None and end < now + moment:
            soon.append(self._pool[heapq.heappop(self._heap)[1]])
        for w in soon:
            if w.kill_at is None:
                w.since = max(w.since, now - self._elastic.startup_timeout_seconds + moment)
            self.watch(w)
