# SPDX-License-Identifier: Apache-2.0
"""Invariants that must hold after every event. All tests of the core use them.

The watchdog keeps its own records, from events and effects alone: the members of each ring, and each worker's
report when it left a ring. It reads the core's state only to compare it with these records.

    at most one ring             generations grow by one, and no live worker is in a ring when one is formed
    the right root               a worker in sync with the highest step, which is the job's true step
    nothing is undone            a step that every member had is in the next ring, or a notice reports it lost
    the state is not let go      the last worker in sync is not asked to stop
    a failure is its own         counted once, never for a kill, a preemption or a requested end
    time goes on                 the next deadline is in the future, so no Tick is superfluous
"""

from __future__ import annotations

from typing import Any

from edl.contract.ids import Generation, WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.failures import OUTSIDE_SIGNALS
from edl.master.core.job import Job
from edl.master.core.timeouts import ends


class Watchdog:
    """Follows a job from its first event and checks, after each, what must always hold."""

    def __init__(self, job: Job):
        self.job = job
        self.now = 0.0
        self.history: list[tuple[float, ev.Event, list[ef.Effect]]] = []
        self.created: set[WorkerId] = set()
        self.form: ef.Form | None = None
        self.left: set[tuple[Generation, WorkerId]] = set()  # workers asked to leave a ring
        self.cut: set[tuple[Generation, WorkerId]] = set()
        self.up: set[tuple[WorkerId, Generation]] = set()
        self.outs: dict[WorkerId, ev.LeftRing] = {}  # the last report of each worker
        self.holders: set[WorkerId] = set()  # workers that ever synced, or have a valid copy
        self.safe = 0  # a step that every member of a ring had
        self.untrusted_up_to = 0  # state of this ring, or of an earlier one, is invalid
        self.checkpoint = 0  # the step of the newest checkpoint
        self.stopped: set[WorkerId] = set()
        self.exporter: WorkerId | None = None
        self.scripts_ended: set[WorkerId] = set()  # workers whose script has ended by itself
        # Silent and busy workers without which the ring goes on, by the ring that they have not left.
        self.away: dict[WorkerId, Generation] = {}
        self.silent: set[WorkerId] = set()
        self.ended = False

    def handle(self, event: ev.Event, now: float) -> list[ef.Effect]:
        """Call `Job.handle`, and check the invariants."""
        job = self.job
        assert now >= self.now, "time ran backwards"
        self.now = now
        worker = getattr(event, "worker", None)
        before = {w.id: (w.in_ring, w.has_state) for w in job.pool}
        failures, was_stopped = len(job.failures.charged), worker in self.stopped
        inside = worker in before and before[worker][0]
        generation = self.form.generation if self.form else Generation(0)
        starting = any(w.id == worker and w.is_starting for w in job.pool)
        warming = any(w.id == worker and w.state == "initializing" for w in job.pool)
        effects = job.handle(event, now)
        self.history.append((now, event, effects))
        match event:
            case ev.Adopted(_, born):
                self.created = {WorkerId(w) for w in range(born)}
                self.checkpoint = event.past.checkpoint if event.past is not None else 0
            case ev.Checkpointed() if worker in before:
                self.checkpoint = event.step
            case ev.Ready() if starting:
                self.checkpoint = max(self.checkpoint, event.checkpoint)
            case ev.Resume() if warming:
                self._note_back(event)
            case ev.JoinedRing() | ev.Progress() | ev.EpochEnded() if (
                event.generation <= self.untrusted_up_to
            ):
                pass
            case ev.JoinedRing(_, g) if inside and g == generation:
                if event.rolled_back:
                    self.safe = min(self.safe, event.step)
                self.up.add((event.worker, g))
                self.holders.add(event.worker)
            case ev.Progress(g, step) if g == generation and any(
                was_inside for was_inside, _ in before.values()
            ):
                self.safe = max(self.safe, step - 1)
            case ev.EpochEnded(_, g, epochs) if inside and g == generation and job.train is not None:
                self.safe = max(self.safe, epochs * job.train.steps.per_epoch)
            case ev.Finished() if worker in before and job.work.ends_by_itself:
                self.scripts_ended.add(event.worker)
            case ev.RowsLost() if worker == self.exporter:
                self.exporter = None
            case ev.LeftRing(_, g) if (inside and g == generation) or self.away.get(event.worker) == g:
                self.away.pop(event.worker, None)
                self.outs[event.worker] = event
                self.holders |= {event.worker} if event.has_state and g > self.untrusted_up_to else set()
        self._note_silence(event, generation, before)
        # The state of every worker is invalid.
        if any(isinstance(e, ef.Notice) and e.reason is Reason.ReplicaDivergence for e in effects) and any(
            "all go back" in e.text for e in effects if isinstance(e, ef.Notice)
        ):
            self.untrusted_up_to = job.ring.generation
            self.safe = min(self.safe, job.checkpoints.step)
            self.holders.clear()
        if self.ended:
            assert all(isinstance(e, ef.Fence | ef.Notice) for e in effects), "the job has ended"
        for effect in effects:
            self._check(effect, event, before, effects)
        self._check_failures(event, effects, failures, was_stopped)
        self._check_state()
        return effects

    def _note_silence(
        self, event: ev.Event, generation: Generation, before: dict[WorkerId, tuple[bool, bool]]
    ) -> None:
        """Record which workers are silent, and which of them the ring goes on without."""
        match event:
            case ev.Silent():
                self.silent |= {event.worker, *event.also}
            case ev.Heard():
                self.silent.discard(event.worker)
        self.away = {w: g for w, g in self.away.items() if self.job.pool.get(w) is not None}
        for w in self.job.pool:
            if w.place == "away" and w.id not in self.away:
                left = any(out.generation == generation for out in self.outs.values())
                busy = left and (generation, w.id) in self.cut
                assert busy or w.id in self.silent, f"worker {w.id} is away, and neither silent nor busy"
                assert before[w.id] == (True, True), f"worker {w.id} is away, but was no member in sync"
                assert any(o in self.holders and o != w.id for o in before), "no other worker has its state"
                self.away[w.id] = generation
                self.holders.discard(w.id)

    def _note_back(self, back: ev.Resume) -> None:
        """Record the report of an earlier master's worker, as if its events had been seen here."""
        if back.left_ring is not None:
            self.outs[back.worker] = back.left_ring
            self.holders |= {back.worker} if back.left_ring.has_state else set()
        if back.joined:
            self.holders.add(back.worker)
            self.up.add((back.worker, back.generation))
        if back.generation > (self.form.generation if self.form else 0):
            even = (1,) * len(back.members)
            self.form = ef.Form(back.generation, back.members, back.members[0], True, 0, even, back.layout)

    # --- effects

    def _check(
        self,
        effect: ef.Effect,
        event: ev.Event,
        before: dict[WorkerId, tuple[bool, bool]],
        effects: list[ef.Effect],
    ) -> None:
        job = self.job
        match effect:
            case ef.Create(worker):
                assert worker == len(self.created), f"worker {worker} is created out of turn, or again"
                self.created.add(worker)
                assert len(job.pool.staying) <= job.target, "more workers than wanted"
            case ef.Form():
                self._check_form(effect, event, before, effects)
            case ef.Train(generation, members, epochs):
                self._check_call(generation, members)
                assert epochs == job.epochs
            case ef.Leave(generation, members):
                self._check_call(generation, members)
                assert not {(generation, m) for m in members} & self.left, "asked to leave twice"
                self.left |= {(generation, m) for m in members}
            case ef.Cut(generation, members):
                self._check_call(generation, members)
                assert not {(generation, m) for m in members} & self.cut, "cut twice"
                self.cut |= {(generation, m) for m in members}
            case ef.Export(worker):
                self._check_export(worker)
            case ef.Stop(worker) if any(isinstance(e, ef.Fence) and e.worker == worker for e in effects):
                pass  # it is given up, and told why before
            case ef.Stop(worker):
                self._check_stop(worker, before)
            case ef.Delete(worker):
                assert worker in self.created
                if job.pool.get(worker) is not None:
                    self._check_stop(worker, before)
            case ef.Fence(worker):
                assert job.pool.get(worker) is None, "fenced, but not given up"
                assert worker in self.created or isinstance(event, ev.Hello)
            case ef.End(phase):
                assert not any(True for _ in job.pool), "the job has ended, but a worker is left"
                self.ended = True
                if phase == "Succeeded" and job.work.ends_by_itself:
                    last = set(self.form.members) if self.form else set()
                    assert last <= self.stopped, "Succeeded, but a member of the last ring was lost"
                    assert last & self.scripts_ended, "Succeeded, but no script has ended in the last ring"
                elif phase == "Succeeded":
                    assert job.train is not None
                    whole = job.train.steps.per_epoch * job.epochs
                    assert job.train.done >= whole, "Succeeded, but not every step is in the model"

    def _check_form(
        self,
        form: ef.Form,
        event: ev.Event,
        before: dict[WorkerId, tuple[bool, bool]],
        effects: list[ef.Effect],
    ) -> None:
        job = self.job
        assert form.generation == (self.form.generation if self.form else 0) + 1, "generations grow by one"
        assert 0 < len(form.members) == len(set(form.members)) == len(form.shares)
        assert min(form.shares) > 0 and form.epochs == job.epochs
        assert form.root in form.members
        for w, (in_ring, _) in before.items():
            out_now = isinstance(event, ev.LeftRing) and event.worker == w and self.outs.get(w) is event
            out_now |= w in self.away
            assert not in_ring or out_now or job.pool.get(w) is None, f"formed while {w} was in the old ring"
        members = [job.pool[m] for m in form.members]  # all of them live
        assert not any(w.stopped for w in members), "a member was ordered to end"
        assert not set(form.members) & self.away.keys(), "a member has not left an earlier ring"
        assert all(w.state == "member" or (w.state == "draining" and w.has_state) for w in members)
        assert job.train is not None
        # Only evaluation is left, or the end of a script.
        alone = job.train.complete or bool(self.scripts_ended)
        least = 1 if alone else job.config.min_workers
        assert len(members) >= min(least, max(job.target, 1)), f"{len(members)} members, {least} needed"

        if job.config.asynchronous:  # the state is on servers
            assert form.layout == job.train.layout and not form.sync and not form.joining
            self.form = form
            return
        holders = [w for w in job.pool if w.has_state and not w.stopped]
        root = job.pool[form.root]
        if holders:
            assert root.has_state, "the root lacks the state, though a worker holds it"
            assert root.step == max(w.step for w in holders), "the root is not the most advanced"
        truth = self.outs[root.id].step if root.has_state else self.checkpoint
        assert job.train is not None
        assert job.train.done == truth, "the truth is not the root's"
        assert form.layout == job.train.layout
        lost = any(isinstance(e, ef.Notice) and e.reason is Reason.StateLost for e in effects)
        assert not holders or truth >= self.safe or lost, "what every member had is missing"
        self.safe = min(self.safe, truth)
        if not form.sync:
            have = [w for w in members if w.id not in form.joining]
            assert have and all(w.has_state and self.outs[w.id].step == truth for w in have), (
                "they do not sync"
            )
        assert form.step == truth and not (form.sync and form.joining)
        self.form = form

    def _check_call(self, generation: Generation, members: tuple[WorkerId, ...]) -> None:
        """Check that a Leave or Cut is for this ring, and for workers that are in it."""
        assert self.form is not None and generation == self.form.generation, "a ring that is not this one"
        assert members and set(members) <= set(self.form.members)
        out = {w for w, said in self.outs.items() if said.generation == generation}
        assert not set(members) & out, "told to leave, but out already"

    def _check_export(self, worker: WorkerId) -> None:
        job = self.job
        assert job.train is not None and job.exporter == worker
        assert self.exporter is None or job.pool.get(self.exporter) is None, "two that export"
        assert not any(w.in_ring for w in job.pool), "exported beside a ring"
        self.exporter = worker
        steps = job.train.steps
        if steps.records:
            assert job.pool[worker].has_state
            assert steps.ended(self.outs[worker].step, job.epochs), "exported before the end"

    def _check_stop(self, worker: WorkerId, before: dict[WorkerId, tuple[bool, bool]]) -> None:
        job = self.job
        assert worker in self.created
        if worker in self.stopped:
            return  # a repeated request: the worker may have missed the first one
        self.stopped.add(worker)
        if job.ending is None and before.get(worker, (False, False))[1]:
            old = self.form is not None and worker in self.form.members
            heirs = [w for w in job.pool if w.has_state and w.id != worker and not w.stopped]
            w = job.pool.get(worker)
            if w is not None and job.checkpoints.has(w.step):
                return  # a checkpoint has its state
            if job.config.asynchronous:
                return  # the state is on servers
            if worker in self.scripts_ended:
                return  # nothing is left to train, and its process is about to exit
            if self.untrusted_up_to and w is not None and not w.has_state:
                return  # the state that it holds is invalid
            assert heirs, f"worker {worker}, the last holder, was let go"
            assert not old or any(not w.in_ring for w in heirs), "no heir has said that it is out and well"

    # --- the state

    def _check_failures(
        self, event: ev.Event, effects: list[ef.Effect], before: int, was_stopped: bool
    ) -> None:
        if before == len(self.job.failures.charged):
            return
        others = ef.FenceReason.StartupTimeout, ef.FenceReason.StateDiffers
        overdue = {e.worker for e in effects if isinstance(e, ef.Fence) and e.reason in others}
        charged = [f.worker for f in self.job.failures.charged]
        assert len(charged) == len(set(charged)), "charged twice"
        for failure in self.job.failures.charged[before:]:
            if failure.worker != getattr(event, "worker", None) or failure.worker in overdue:
                continue  # not caused by this event, but by the time of the event
            assert not was_stopped, f"worker {failure.worker} was ordered to end, and is charged for it"
            assert isinstance(event, ev.Gone | ev.Failed | ev.Ready), f"{event} is charged"
            if isinstance(event, ev.Gone):
                assert not event.free and event.signal not in OUTSIDE_SIGNALS, f"{event} is charged"

    def _check_state(self) -> None:
        job = self.job
        pool = list(job.pool)
        filed = [(kind, sorted(workers)) for kind, workers in sorted(job.pool._kinds.items())]
        kinds = sorted({w.kind for w in pool})
        assert filed == [(k, [w.id for w in pool if w.kind == k]) for k in kinds], "the kinds are out of date"
        missed = [
            w for w in pool if (end := ends(w, job.config.elastic)) and end < (job.timeouts.next() or end)
        ]
        assert not missed, "a timeout is not watched"
        in_ring = {w.id for w in pool if w.in_ring}
        assert job.ring.generation == (self.form.generation if self.form else 0)
        assert not in_ring or (self.form is not None and in_ring <= set(self.form.members))
        known = job.failover.until is None  # else an earlier master's ring is still being reported
        if job.ending is None and not job.ring.closing and known:
            assert set(job.ring.members) == in_ring, "a running ring has exactly its members"
        assert all(w.has_state == (w.id in self.holders) for w in pool), (
            "a worker is wrong about holding the state"
        )
        deadline = job.next_deadline()
        no_grace = deadline == self.now and any(w.kill_at == deadline for w in pool)
        assert deadline is None or deadline > self.now or no_grace, "a deadline that has passed already"
        if (began := job.lifetime.began_at) is not None:
            seconds, wall = job.goodput.at(self.now), self.now - began + job.lifetime.before
            if job.lifetime.ended_at is None:
                assert abs(sum(seconds.values()) - wall) < 1e-6, "seconds are missing from the goodput"
            assert min(seconds.values()) > -1e-9


def replayed(watchdog: Watchdog) -> Job:
    """Replay the events with a new job, and check that it decides the same."""
    again = Job(watchdog.job.config, watchdog.job.work)
    for now, event, effects in watchdog.history:
        decided: list[Any] = again.handle(event, now)
        assert decided == effects, f"{event} at {now}: {decided}, not {effects}"
    return again
