"""Taking over from an earlier master: the workers are there, and what they do is learned from them.

The backend says which workers may live (`Adopted`). Each of those finds the new master and says
its present state (`Resume`): the ring it is in, or what it said when it left its last one. Once all
members of the newest ring are back, the new master has that ring left, and what they say then is all
that is needed to go on. Until then they train on what they have, and no ring is formed.

Nobody starts anew while a worker that may hold the state can still come back.
"""

from __future__ import annotations

from master.core import events as ev
from master.core.ring import Ring
from master.core.workers import Pool, WorkerRecord


class Failover:
    """Whom a new master waits for, and until when.

    Args:
        start_seconds: how long a worker may take until it is ready: one that was starting under the
            earlier master may do so under this one.
    """

    def __init__(self, pool: Pool, ring: Ring, startup_timeout_seconds: float) -> None:
        self._pool, self._ring, self._startup_timeout_seconds = pool, ring, startup_timeout_seconds
        self.until: float | None = None  # None: no worker is awaited

    def begin(self, adopted: ev.Adopted, now: float) -> None:
        self._pool.next_id = max(self._pool.next_id, adopted.next_id)
        for worker, handle in adopted.workers:
            self._pool.adopt(worker, handle, now)
        if adopted.workers:
            self.until = now + adopted.within_seconds

    def place(self, w: WorkerRecord, back: ev.Resume, now: float) -> list[WorkerRecord]:
        """Put a worker that is back where it says it is. Returns whom the earlier master had given up:
        who is in an older ring than others are.
        """
        if back.left_ring is not None:
            w.left(back.left_ring)
        if not back.generation:
            return []
        w.transition("placed")
        w.has_state = w.has_state or back.joined
        if back.generation < self._ring.generation:
            return [] if back.left else [w]
        outdated: list[WorkerRecord] = []
        if back.generation > self._ring.generation:
            outdated = self._ring.inside
            for old in outdated:
                old.in_ring = False
            self._ring.learn(back.generation, back.members, now)
        w.in_ring = not back.left
        w.up_in = back.generation if back.joined else w.up_in
        return outdated

    def missing(self, now: float) -> list[WorkerRecord] | None:
        """Who has not come back, once the wait is over; None: wait on."""
        assert self.until is not None
        expected = [w for w in self._pool if w.expected]
        members = self._ring.members
        awaited = [w for w in expected if w.id in members] if members else expected
        if awaited and self.until > now:
            return None
        if expected and not any(w.has_state for w in self._pool):
            latest = max(w.since for w in expected) + self._startup_timeout_seconds
            if latest > now:
                self.until = latest
                return None
        self.until = None
        return awaited
