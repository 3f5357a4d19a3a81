"""What must hold after every event, whatever came before. Used by all tests of the core.

The watchdog keeps books of its own, from events and effects alone: who was told of which ring,
who holds which lease, what each worker said when it left a ring. Where the core's state is read,
it is to be compared with these books.

    at most one ring          a generation is one more than the last, formed when nobody living is in one
    the right root            a holder with the highest step, and its applied set is the truth
    a position is once        todo, leases and applied set are disjoint and cover what is open
    the state is not let go   the last holder is not told to stop
    a failure is its own      charged once, never for a kill, a preemption or an end that was asked for
    time goes on              the next deadline is ahead, so no Tick is for nothing
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from edl.contract.batching import local_batch
from edl.contract.ids import Generation, WorkerId
from edl.contract.ranges import Range, RangeSet
from master.core import events as ev
from master.core.failures import OUTSIDE_SIGNALS
from master.core.job import Job

NOTHING = RangeSet()


class Watchdog:
    """Follows a job from its first event and checks, after each, what must always hold."""

    def __init__(self, job: Job):
        self.job = job
        self.now = 0.0
        self.history: list[tuple[float, ev.Event, list[ev.Effect]]] = []
        self.created: set[WorkerId] = set()
        self.form: ev.Form | None = None
        self.left: set[Generation] = set()  # rings that were asked to leave
        self.cut: set[Generation] = set()
        self.up: set[tuple[WorkerId, Generation]] = set()
        self.outs: dict[WorkerId, ev.LeftRing] = {}  # the last of each worker
        self.holders: set[WorkerId] = set()  # who has synced, ever
        self.held: dict[WorkerId, RangeSet] = {}  # leases, as their holders were told
        self.stopped: set[WorkerId] = set()
        self.exporter: WorkerId | None = None
        self.checked: tuple[object, ...] = ()  # the books as they were checked last
        self.ended = False

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """`Job.handle`, watched."""
        job = self.job
        assert now >= self.now, "time goes back"
        self.now = now
        worker = getattr(event, "worker", None)
        before = {w.id: (w.in_ring, w.has_state) for w in job.pool}
        failures, was_stopped = len(job.failures), worker in self.stopped
        inside = before.get(worker, (False, False))[0]
        generation = self.form.generation if self.form else Generation(0)
        warming = any(w.id == worker and w.state == "initializing" for w in job.pool)
        effects = job.handle(event, now)
        self.history.append((now, event, effects))
        match event:
            case ev.Adopted(_, born):
                self.created = {WorkerId(w) for w in range(born)}
            case ev.Resume() if warming:
                self._note_back(event)
            case ev.JoinedRing(_, g) if inside and g == generation:
                self.up.add((event.worker, g))
                self.holders.add(event.worker)
            case ev.LeftRing(_, g) if inside and g == generation:
                self.outs[event.worker] = event
                self.holders |= {event.worker} if event.has_state else set()
        if self.ended:
            assert all(isinstance(e, ev.Fence | ev.Notice) for e in effects), "the job has ended"
        for effect in effects:
            self._check(effect, event, before)
        self._check_failures(event, effects, failures, was_stopped)
        self._check_state()
        return effects

    def _note_back(self, back: ev.Resume) -> None:
        """What an earlier master's worker tells goes into the books, as if it had been seen here."""
        if back.left_ring is not None:
            self.outs[back.worker] = back.left_ring
            self.holders |= {back.worker} if back.left_ring.has_state else set()
        if back.joined:
            self.holders.add(back.worker)
            self.up.add((back.worker, back.generation))
        if back.generation > (self.form.generation if self.form else 0):
            nothing: tuple[tuple[Range, ...], ...] = ((),) * len(back.members)
            self.form = ev.Form(back.generation, back.members, back.members[0], True, nothing)
            self.held = dict.fromkeys(back.members, NOTHING)

    # --- effects

    def _check(self, effect: ev.Effect, event: ev.Event, before: dict[WorkerId, tuple[bool, bool]]) -> None:
        job = self.job
        match effect:
            case ev.Create(worker):
                assert worker == len(self.created), f"worker {worker} is created out of turn, or again"
                self.created.add(worker)
                assert len(job.pool.staying) <= job.target, "more workers than wanted"
            case ev.Form():
                self._check_form(effect, event, before)
            case ev.Grant():
                self._check_grant(effect)
            case ev.Leave(generation, members):
                self._check_call(generation, members)
                assert generation not in self.left, "asked to leave twice"
                self.left.add(generation)
            case ev.Cut(generation, members):
                self._check_call(generation, members)
                assert generation not in self.cut, "cut twice"
                self.cut.add(generation)
            case ev.Export(worker):
                self._check_export(worker)
            case ev.Stop(worker):
                self._check_stop(worker, before)
            case ev.Delete(worker):
                assert worker in self.created
                if job.pool.get(worker) is not None:
                    self._check_stop(worker, before)
            case ev.Fence(worker):
                assert job.pool.get(worker) is None, "fenced, but not given up"
                assert worker in self.created or isinstance(event, ev.Hello)
            case ev.End(phase):
                assert not any(True for _ in job.pool), "the job has ended, but a worker is left"
                self.ended = True
                if phase == "Succeeded":
                    assert job.leases is not None
                    whole = RangeSet.of([(0, job.leases.size * job.leases.epochs)])
                    assert job.leases.applied == whole, "Succeeded, but not every position is applied"

    def _check_form(self, form: ev.Form, event: ev.Event, before: dict[WorkerId, tuple[bool, bool]]) -> None:
        job = self.job
        assert form.generation == (self.form.generation if self.form else 0) + 1, "generations grow by one"
        assert 0 < len(form.members) == len(set(form.members)) == len(form.leases)
        assert form.root in form.members
        for w, (in_ring, _) in before.items():
            out_now = isinstance(event, ev.LeftRing) and event.worker == w and self.outs.get(w) is event
            assert not in_ring or out_now or job.pool.get(w) is None, f"formed while {w} was in the old ring"
        members = [job.pool[m] for m in form.members]  # all of them live
        assert not any(w.stopped for w in members), "a member that was told to end"
        assert all(w.state == "member" or (w.state == "draining" and w.has_state) for w in members)
        least = job.config.min_workers
        assert len(members) >= min(least, max(job.target, 1)), f"{len(members)} members, {least} needed"

        holders = [w for w in job.pool if w.has_state and not w.stopped]
        root = job.pool[form.root]
        if holders:
            assert root.has_state, "the root holds nothing, though somebody does"
            assert root.step == max(w.step for w in holders), "the root is not the most advanced"
        truth = self.outs[root.id].applied if root.has_state else NOTHING
        assert job.leases is not None
        assert job.leases.applied == truth, "the applied set is not the root's"
        if not form.sync:
            assert all(w.has_state and w.step == root.step for w in members), "members differ but do not sync"
            assert all(self.outs[w.id].applied == truth for w in members), "equal steps, other applied sets"

        held = {}
        for rank, (w, left) in enumerate(zip(members, form.leases, strict=True)):
            held[w.id] = RangeSet(left)
            assert held[w.id] == RangeSet.of(left), "not as ranges are written"
            mine = local_batch(job.config.training.batch_size, rank, len(members)) > 0
            expected = self.held.get(w.id, NOTHING).minus(truth) if mine else NOTHING
            assert held[w.id] == expected, f"worker {w.id} keeps {held[w.id]}, should keep {expected}"
        self.form, self.held = form, held

    def _check_grant(self, grant: ev.Grant) -> None:
        job, worker = self.job, grant.worker
        start, stop = grant.lease
        assert self.form is not None and job.leases is not None
        assert worker in self.form.members and job.pool[worker].in_ring, "a lease for one outside the ring"
        assert (worker, self.form.generation) in self.up, "a lease for one that is not up"
        assert self.form.generation not in self.left | self.cut, "a lease in a ring that is being left"
        size, lease = job.leases.size, RangeSet((grant.lease,))
        assert start // size == (stop - 1) // size, "a lease spans two epochs"
        assert stop <= size * job.leases.epochs, "a lease beyond the last epoch"
        assert job.leases.applied.covers(0, start // size * size), "a lease of an epoch that is not open"
        assert lease.minus(job.leases.applied) == lease, "granted, but applied"
        for other, held in self.held.items():
            if other == worker or (job.pool.get(other) and job.pool[other].in_ring):
                assert lease.minus(held.minus(job.leases.applied)) == lease, f"granted, but {other} holds it"
        share = local_batch(
            job.config.training.batch_size, self.form.members.index(worker), len(self.form.members)
        )
        assert 0 < stop - start <= share * job.config.elastic.max_lease_batches, "a lease out of measure"
        self.held[worker] = self.held[worker].union(lease)

    def _check_call(self, generation: Generation, members: tuple[WorkerId, ...]) -> None:
        """Leave or Cut: for this ring, for those that are in it."""
        assert self.form is not None and generation == self.form.generation, "a ring that is not this one"
        assert members and set(members) <= set(self.form.members)
        out = {w for w, said in self.outs.items() if said.generation == generation}
        assert not set(members) & out, "told to leave, but out already"

    def _check_export(self, worker: WorkerId) -> None:
        job = self.job
        assert job.leases is not None and job.exporter == worker
        assert self.exporter is None or job.pool.get(self.exporter) is None, "two that export"
        assert not any(w.in_ring for w in job.pool), "exported beside a ring"
        self.exporter, self.held = worker, {}
        whole = job.leases.size * job.leases.epochs
        if whole:
            assert job.pool[worker].has_state
            assert self.outs[worker].applied == RangeSet.of([(0, whole)]), "exported before the end"

    def _check_stop(self, worker: WorkerId, before: dict[WorkerId, tuple[bool, bool]]) -> None:
        job = self.job
        assert worker in self.created
        if worker in self.stopped:
            return  # it is told again: it may not have heard
        self.stopped.add(worker)
        if job.ending is None and before.get(worker, (False, False))[1]:
            old = self.form is not None and worker in self.form.members
            heirs = [w for w in job.pool if w.has_state and w.id != worker and not w.stopped]
            assert heirs, f"worker {worker}, the last holder, was let go"
            assert not old or any(not w.in_ring for w in heirs), "no heir has said that it is out and well"

    # --- the state

    def _check_failures(
        self, event: ev.Event, effects: list[ev.Effect], before: int, was_stopped: bool
    ) -> None:
        if before == len(self.job.failures):
            return
        startup = ev.FenceReason.StartupTimeout
        overdue = {e.worker for e in effects if isinstance(e, ev.Fence) and e.reason is startup}
        charged = [f.worker for f in self.job.failures]
        assert len(charged) == len(set(charged)), "charged twice"
        for failure in self.job.failures[before:]:
            if failure.worker != getattr(event, "worker", None) or failure.worker in overdue:
                continue  # not this event, but the time at which it came
            assert not was_stopped, f"worker {failure.worker} was told to end, and is charged for it"
            assert isinstance(event, ev.Gone | ev.Failed | ev.Ready), f"{event} is charged"
            if isinstance(event, ev.Gone):
                assert not event.free and event.signal not in OUTSIDE_SIGNALS, f"{event} is charged"

    def _check_state(self) -> None:
        job = self.job
        pool = list(job.pool)
        in_ring = {w.id for w in pool if w.in_ring}
        assert job.ring.generation == (self.form.generation if self.form else 0)
        assert not in_ring or (self.form is not None and in_ring <= set(self.form.members))
        known = job.failover.until is None  # else the ring of an earlier master is just being learned of
        if job.ending is None and not job.ring.closing and known:
            assert set(job.ring.members) == in_ring, "a running ring has exactly its members"
        assert all(w.has_state == (w.id in self.holders) for w in pool), "who holds the state is mistaken"
        deadline = job.next_deadline()
        no_grace = deadline == self.now and any(w.kill_at == deadline for w in pool)
        assert deadline is None or deadline > self.now or no_grace, "a deadline that has passed already"
        if job.began_at is not None:
            seconds = job.goodput.at(self.now)
            wall = (job.ended_at if job.ended_at is not None else self.now) - job.began_at
            if job.ended_at is None:
                assert abs(sum(seconds.values()) - wall) < 1e-6, "seconds are missing from the goodput"
            assert min(seconds.values()) > -1e-9
        if job.leases is not None and known:
            closing = bool(job.ring.members and job.ring.closing)
            books = (job.leases.applied, job.leases.todo, closing,
                     *[(w.id, w.in_ring, w.leases) for w in pool])  # fmt: skip
            if books != self.checked:
                self.checked = books
                self._check_leases()

    def _check_leases(self) -> None:
        job = self.job
        assert job.leases is not None
        applied, todo = job.leases.applied, job.leases.todo
        left = {w.id: RangeSet.of(w.leases).minus(applied) for w in job.pool if w.leases}
        held = RangeSet.of(lease for leases in left.values() for lease in leases)
        assert len(held) == sum(len(leases) for leases in left.values()), f"held twice: {left}"
        if not job.ring.members or job.ring.closing:
            return  # computed anew when the next ring is formed
        together = sorted([*todo, *held, *applied])
        assert all(a[1] <= b[0] for a, b in pairwise(together)), "a position is in two places"
        assert RangeSet.of(together) == RangeSet.of([job.leases.open]), "a position is nobody's"
        for w in job.pool:
            told = self.held.get(w.id, NOTHING).minus(applied) if w.in_ring else NOTHING
            mine = left.get(w.id, NOTHING)
            assert mine == told, f"worker {w.id} was told of {told}, the master thinks {mine}"


def replayed(watchdog: Watchdog) -> Job:
    """A fresh job that has seen the same events, and decided the same."""
    again = Job(watchdog.job.config)
    for now, event, effects in watchdog.history:
        decided: list[Any] = again.handle(event, now)
        assert decided == effects, f"{event} at {now}: {decided}, not {effects}"
    return again
