# SPDX-License-Identifier: Apache-2.0
"""Failover: a new master learns the state of the job from the workers of an earlier one.

The backend reports which workers may live (`Adopted`). Each of them finds the new master and reports its
present state (`Resume`): the ring that it is in, or its state when it left its last ring. If all members of
the newest ring reconnect and hold its state, that ring continues. If a member is missing, the new master
closes that ring, and the members' reports are sufficient to continue. Until then the members train on, and no
ring is formed.

Training does not restart from scratch while a worker that may hold the state can still reconnect.
"""

from __future__ import annotations

from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core.ring import Ring
from edl.master.core.workers import IN, OUT, UP, Pool, WorkerRecord


class Failover:
    """The workers that a new master waits for, and until when.

    Args:
        startup_timeout_seconds: how long a worker may take to become ready, also if it was started under the
            earlier master.
    """

    def __init__(self, pool: Pool, ring: Ring, startup_timeout_seconds: float) -> None:
        self._pool, self._ring, self._startup_timeout_seconds = pool, ring, startup_timeout_seconds
        self.until: float | None = None  # None: no worker is awaited
        self._within_seconds = self._prompt_seconds = 0.0  # time for workers to reconnect
        self._prompt: frozenset[WorkerId] = frozenset()  # workers that reconnect within _prompt_seconds
        self._prompt_until = 0.0
        self._late: set[WorkerId] = set()  # awaited workers that may need longer
        self._awaited: set[WorkerId] = set()  # members of the newest ring; all while no ring is known

    def begin(self, adopted: ev.Adopted, now: float) -> list[WorkerRecord]:
        """Adopt the possibly live workers of an earlier master, and start to wait for them."""
        self._pool.next_id = max(self._pool.next_id, adopted.next_id)
        found = [self._pool.adopt(worker, handle, now) for worker, handle in adopted.workers]
        self._within_seconds, self._prompt_seconds = adopted.within_seconds, adopted.prompt_seconds
        self._prompt = frozenset(adopted.prompt)
        if found:
            self._wait(now)
        self._await({w.id for w in found if w.expected})
        return found

    def _wait(self, now: float) -> None:
        self.until, self._prompt_until = now + self._within_seconds, now + self._prompt_seconds

    def _await(self, workers: set[WorkerId]) -> None:
        self._awaited, self._late = workers, workers - self._prompt
        self._hasten()

    def _hasten(self) -> None:
        if self.until is not None and not self._late:
            self.until = min(self.until, self._prompt_until)

    def awaits_no_longer(self, w: WorkerRecord) -> None:
        """Stop waiting for a worker that has reported its state, has no state to report, or is gone."""
        self._awaited.discard(w.id)
        self._late.discard(w.id)
        self._hasten()

    def place(self, w: WorkerRecord, back: ev.Resume, now: float) -> list[WorkerRecord]:
        """Record the reported state of a reconnected worker.

        Returns the workers in older rings, which the earlier master had removed.
        """
        if back.left_ring is not None:
            self._pool.left(w, back.left_ring)
        if not back.generation:
            return []
        self._pool.change(w, "placed", has_state=w.has_state or back.joined)
        other = back.generation == self._ring.generation and back.members != self._ring.members
        if back.generation < self._ring.generation or other:  # other: a ring formed before that one was known
            return [] if back.left else [w]
        outdated: list[WorkerRecord] = []
        if back.generation > self._ring.generation:
            outdated = self._ring.inside
            for old in outdated:
                self._pool.change(old, place=OUT)
            self._ring.learn(back.generation, back.members, now)
            if self.until is None:  # a ring that is reported late is handled like one reported in time
                self._wait(now)
            self._await({m for m in back.members if (o := self._pool.get(m)) is not None and o.expected})
        self._pool.change(w, place=OUT if back.left else UP if back.joined else IN)
        return outdated

    def may_hold(self, now: float) -> bool:
        """True if a worker that may hold the state has not reconnected and still can."""
        return any(w.expected and w.since + self._startup_timeout_seconds > now for w in self._pool)

    def missing(self, now: float) -> list[WorkerRecord] | None:
        """Return the workers that have not reconnected, once the wait is over; None while it lasts."""
        assert self.until is not None
        if self._awaited and self.until > now:
            return None
        expected = [w for w in self._pool if w.expected]
        if expected and not self._pool.any(lambda kind: kind.has_state):
            latest = max(w.since for w in expected) + self._startup_timeout_seconds
            if latest > now:
                self.until = latest
                return None
        self.until = None
        return [self._pool[worker] for worker in sorted(self._awaited)]
