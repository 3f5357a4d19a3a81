"""What must hold after every event, whatever came before. Used by all tests of the core."""

from __future__ import annotations

from edl.ids import WorkerId
from edl.ranges import RangeSet
from master.core import events as ev
from master.core.job import Job


class Watchdog:
    """Follows a job's effects and checks, after each event, what must always hold."""

    def __init__(self, job: Job):
        self.job = job
        self.created: set[WorkerId] = set()
        self.generation = 0
        self.now = 0.0

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """`Job.handle`, watched."""
        assert now >= self.now
        self.now = now
        before_in_ring = {w.id for w in self.job.pool if w.in_ring}
        before_generation = self.job.generation
        held = {w.id for w in self.job.pool if w.holds}
        effects = self.job.handle(event, now)
        for effect in effects:
            self._check(effect, event, before_in_ring, held)
        self._check_state(before_generation)
        return effects

    def _check(
        self, effect: ev.Effect, event: ev.Event, before_in_ring: set[WorkerId], held: set[WorkerId]
    ) -> None:
        job = self.job
        match effect:
            case ev.Create(worker):
                assert worker not in self.created, f"worker {worker} is created twice"
                self.created.add(worker)
            case ev.Form(generation, members, root, sync, leases):
                assert generation == self.generation + 1, "generations grow by one"
                self.generation = generation
                assert len(set(members)) == len(members) == len(leases) > 0
                alive = {w.id for w in job.pool}
                inside = (before_in_ring & alive) - {getattr(event, "worker", None)}
                assert not inside, f"formed while {inside} were in the old ring"
                assert root in members
                holders = [w for w in job.pool if w.holds and not w.stopped]
                if holders:
                    best = max(w.step for w in holders)
                    assert job.pool[root].holds, "a root that holds nothing, though somebody does"
                    assert job.pool[root].step == best, "the root is not the most advanced"
                if not sync:
                    states = {(job.pool[m].holds, job.pool[m].step) for m in members}
                    assert len(states) == 1, "members differ but do not sync"
                    assert next(iter(states))[0]
            case ev.Grant(worker, (start, stop)):
                assert job.leases is not None
                size, applied = job.leases.size, job.leases.applied
                assert start // size == (stop - 1) // size, "a lease spans two epochs"
                assert applied.covers(0, start // size * size), "a lease of an epoch that is not open"
                assert job.pool[worker].in_ring
            case ev.Stop(worker) if job.ending is None and worker in held:
                others = [w for w in job.pool if w.holds and w.id != worker and not w.stopped]
                assert others, f"worker {worker}, the last holder, was let go"
            case ev.End(phase) if phase == "Succeeded":
                assert job.leases is not None
                size, epochs = job.leases.size, job.leases.epochs
                assert job.leases.applied == RangeSet.of([(0, size * epochs)])

    def _check_state(self, before_generation: int) -> None:
        job = self.job
        assert job.generation >= before_generation
        deadline = job.next_deadline()
        assert deadline is None or deadline > self.now, "a deadline that has passed already"
        if job.leases is None:
            return
        held = RangeSet()
        for w in job.pool:
            for lease in w.leases:
                left = RangeSet((lease,)).minus(job.leases.applied)
                assert left.minus(held) == left, f"worker {w.id} and another hold {lease}"
                held = held.union(left)
        todo = job.leases.todo
        assert todo.minus(held) == todo, "what is held is handed out again"
        assert todo.minus(job.leases.applied) == todo, "what is applied is handed out again"
        if job.members and not job.closing:
            everything = todo.union(held).union(job.leases.applied)
            assert everything == RangeSet.of([job.leases.open]), "a position is nobody's"
