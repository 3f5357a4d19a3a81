"""Taking over from an earlier master: the workers are there, and what they do is learned from them.

The backend says which workers may live (`Adopted`). Each of those finds the new master and says
its present state (`Resume`): the ring it is in, or what it said when it left its last one. Once all
members of the newest ring are back, and all have its state, it trains on as if nothing had happened. If
one is missing, the new master has that ring left, and what its members say then is all that is needed to go
on. Until then they train on what they have, and no ring is formed.

Nobody starts anew while a worker that may hold the state can still come back.
"""

from __future__ import annotations

from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.master.core.ring import Ring
from edl.master.core.workers import IN, OUT, UP, Pool, WorkerRecord


class Failover:
    """Whom a new master waits for, and until when.

    Args:
        start_seconds: how long a worker may take until it is ready: one that was starting under the
            earlier master may do so under this one.
    """

    def __init__(self, pool: Pool, ring: Ring, startup_timeout_seconds: float) -> None:
        self._pool, self._ring, self._startup_timeout_seconds = pool, ring, startup_timeout_seconds
        self.until: float | None = None  # None: no worker is awaited
        self._within_seconds = self._prompt_seconds = 0.0  # they come back
        self._prompt: frozenset[WorkerId] = frozenset()  # those who need no more than the latter
        self._prompt_until = 0.0
        self._late: set[WorkerId] = set()  # of the awaited, who may need longer
        self._awaited: set[WorkerId] = set()  # of the newest ring; while none is known, all

    def begin(self, adopted: ev.Adopted, now: float) -> list[WorkerRecord]:
        """The workers that may live are known from now on."""
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
        """It has told its present state; or it has none to tell, or is gone."""
        self._awaited.discard(w.id)
        self._late.discard(w.id)
        self._hasten()

    def place(self, w: WorkerRecord, back: ev.Resume, now: float) -> list[WorkerRecord]:
        """Put a worker that is back where it says it is. Returns whom the earlier master had given up:
        who is in an older ring than others are.
        """
        if back.left_ring is not None:
            self._pool.left(w, back.left_ring)
        if not back.generation:
            w.from_copy = w.has_state
            return []
        self._pool.change(w, "placed", has_state=w.has_state or back.joined)
        other = back.generation == self._ring.generation and back.members != self._ring.members
        if back.generation < self._ring.generation or other:  # the other: formed before that one was known of
            return [] if back.left else [w]
        outdated: list[WorkerRecord] = []
        if back.generation > self._ring.generation:
            outdated = self._ring.inside
            for old in outdated:
                self._pool.change(old, place=OUT)
            self._ring.learn(back.generation, back.members, now)
            if self.until is None:  # nobody had told of it: it is to be left like one that was known in time
                self._wait(now)
            self._await({m for m in back.members if (o := self._pool.get(m)) is not None and o.expected})
        self._pool.change(w, place=OUT if back.left else UP if back.joined else IN)
        return outdated

    def may_hold(self, now: float) -> bool:
        """Whether there is a worker that has not come back, and still can: it may hold the state."""
        return any(w.expected and w.since + self._startup_timeout_seconds > now for w in self._pool)

    def missing(self, now: float) -> list[WorkerRecord] | None:
        """Who has not come back, once the wait is over; None: wait on."""
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
