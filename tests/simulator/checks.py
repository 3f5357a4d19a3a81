# SPDX-License-Identifier: Apache-2.0
"""Checks of a run. In addition, all of tests/support/jobs/invariants.py must hold after each event.

A run passes if

- every position counts exactly once, on every worker in sync with the final state (or the job ended for a
  valid reason: a requested stop, or too many failures of its own);
- every counted failure is the worker's own fault, and every such failure is counted;
- no worker is fenced that was alive and sent messages, and no state is dropped that a worker holds;
- a worker that has asked to leave is draining, whichever master has heard it, and its replacement stays;
- no master begins with fewer steps than one has known without reporting a loss, or trains after the end;
- the job ends soon after the faults have stopped (`World.run`), and until then no worker waits long to join
  or to leave;
- a replay decides the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from edl.contract.ids import WorkerId
from edl.contract.phases import Phase
from edl.contract.proto import edl_pb2 as pb
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.master.core.workers import OUT
from edl.trainer.agreement.metric_values import Value
from tests.simulator.worker import FLIP, Sim
from tests.support.jobs.invariants import replayed

if TYPE_CHECKING:
    from tests.simulator.world import World

PATIENCE_SECONDS = 8.0
HEARD_SECONDS = 1.0  # after which a message has arrived, if nothing delays it
# Notices that training is lost, or will be repeated.
LOSSES = (Reason.StateLost, Reason.RolledBack, Reason.ReplicaDivergence)
REPLAY_EVERY = 20  # runs: it takes as long as the run


class Checks:
    """The records of one run that neither the core nor the watchdog keeps."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting: dict[WorkerId, float] = {}  # workers that are ready or leaving, and since when
        self.evaluation_failed = False  # True after at least one failed evaluation
        self.states: dict[tuple[int, str], set[bytes]] = {}  # reported by the writers of a checkpoint
        self.mixed = ""  # the error of a completed checkpoint
        self.saved = False  # a master has recorded the saved model
        self.decided = ""  # the end of the job, once a master has decided it
        self.trained = 0  # steps that all members of a ring had, as any master has heard
        self.finals: list[Sim] = []  # the workers with the final state when it was exported

    def ought_to_be_charged(self, gone: ev.Gone) -> bool | None:
        """Whether this exit must count as a failure; None if either is right, or it is counted already."""
        job, fleet = self.world.job, self.world.fleet
        w = job.pool.get(gone.worker) or job.pool.lost.get(gone.worker)
        sim = fleet.workers[gone.worker]
        if w is None or self._charged(gone.worker):
            return None
        if w.stopped or w.leaves or w.failure_reason or w.expected or not sim.own_end:
            return False
        if gone.signal and any(not m.alive or m.fenced for m in self.world.rings.peers(gone.worker)):
            return None  # the death or fencing of a peer may have crashed it
        if gone.signal and self._was_cut(gone.worker):
            return None  # the cut may have crashed it
        return True

    def _was_cut(self, worker: WorkerId) -> bool:
        """Whether the last ring of this worker was cut while it lived: it was silent, or masters changed."""
        for _, _, effects in reversed(self.world.watchdog.history):
            for effect in reversed(effects):
                if isinstance(effect, ef.Cut | ef.Form) and worker in effect.members:
                    return isinstance(effect, ef.Cut)
        return False

    def is_charged(self, event: ev.Failed | ev.Gone, ought: bool) -> None:
        charged = self._charged(event.worker)
        assert charged == ought, f"{event} {'is' if charged else 'is not'} charged"

    def _charged(self, worker: WorkerId) -> bool:
        return any(f.worker == worker for f in self.world.job.failures.charged)

    def keeps_the_state(self, form: ef.Form, effects: list[ef.Effect]) -> None:
        """Check that the job does not start from scratch while a worker holds the state."""
        workers = self.world.fleet.workers
        if workers[form.root].has_state or self.world.config.asynchronous:  # the state is on servers
            return
        given_up = self.world.watchdog.stopped | {e.worker for e in effects if isinstance(e, ef.Fence)}
        there = [w for w in workers.values() if w.alive and not (w.fenced or w.failed)]
        there = [
            w
            for w in there
            if not form.untrusted_up_to or w.worker.state.synced_generation > form.untrusted_up_to
        ]
        kept = [w.id for w in there if w.has_state and w.id not in given_up]
        # Workers with broken streams are lost, and those that have not reconnected may be unknown.
        if self.world.two:
            known = self.world.job.pool
            kept = [w for w in kept if known.get(w) and workers[w].master == self.world.master.top.number]
        assert not kept, f"the job starts anew, but {kept} hold its state"

    def hears(self, said: ev.Event | facts.Heartbeat, generation: int) -> None:
        """Record the progress that the acting master has heard of; it outlives that master."""
        job = self.world.job
        known = isinstance(said, facts.Heartbeat | ev.Progress) and said.generation == generation > 0
        if known and generation > job.divergence.untrusted_up_to and job.ring.steps_whole:
            self.trained = max(self.trained, said.step - 1)

    def tells_losses(self, effects: list[ef.Effect]) -> None:
        """Check that a ring that begins with fewer steps than a master has known is reported as a loss.

        Check also that no ring is formed once a master has decided the end of the job.
        """
        job = self.world.job
        if job.ending is not None:
            self.decided = str(job.ending[0])
        self.saved |= any(isinstance(e, ef.Notice) and e.reason is Reason.Evaluating for e in effects)
        formed = any(isinstance(e, ef.Form) for e in effects)
        assert not (formed and self.decided), f"a ring is formed, although the job has {self.decided}"
        if self.world.config.asynchronous or job.train is None:  # the steps are on servers
            return
        if any(isinstance(e, ef.Notice) and e.reason in LOSSES for e in effects):
            self.trained = min(self.trained, job.train.done)
        for form in (e for e in effects if isinstance(e, ef.Form)):
            assert form.step >= self.trained, (
                f"a ring begins at step {form.step} after one had {self.trained}, and no loss is reported"
            )

    def keeps_replacements(self, effects: list[ef.Effect]) -> None:
        """Check that no worker is dropped as a surplus while others have asked to leave."""
        job, now = self.world.job, self.world.clock.now
        surplus = {e.worker for e in effects if isinstance(e, ef.Stop | ef.Delete)}
        if not any(isinstance(e, ef.Notice) and ": scaled to" in e.text for e in effects):
            return
        leaves = [
            w.id
            for w in self.world.fleet.workers.values()
            if w.alive and w.asked_at is not None and now - w.asked_at > HEARD_SECONDS
        ]
        stay = [w.id for w in job.pool.staying if w.id not in leaves]
        assert len(stay) >= job.target, (
            f"workers {sorted(surplus)} are dropped as a surplus while {leaves} leave, so only {stay} stay"
        )

    def leavers_leave(self) -> None:
        """Check that a worker that has asked to leave is draining, whichever master has heard it."""
        world, now = self.world, self.world.clock.now
        for w in world.fleet.workers.values():
            known = world.job.pool.get(w.id)
            if known is None or not w.alive or w.asked_at is None or w.frozen or w.fenced:
                continue
            since = max(w.asked_at, w.greeted_at, w.audible_at, world.master.hears_since)
            heard = w.master == world.master.greets_as and now - since > HEARD_SECONDS
            assert not heard or not known.kind.stays, (
                f"worker {w.id} has asked to leave at {w.asked_at:.3f} and is {known.state}"
            )

    def one_state(self, members: list[Sim], begins_at: int | None, at_least: int) -> None:
        """Check that all members that take part in sums have the same state: step, ledger and model.

        Also check that a ring begins at its root's step, or with the newest checkpoint.
        """
        # Members that are still catching up take no part in the sums.
        members = [w for w in members if not w.worker.state.catching_up]
        first = members[0]
        assert begins_at in (None, first.step), (
            f"the ring begins at step {first.step}, its root was at {begins_at}"
        )
        assert first.step >= at_least, (
            f"the ring begins at step {first.step}, there is a checkpoint of {at_least}"
        )
        for w in members:
            ledgers = [(o.step, o.worker.state.ledger) for o in (w, first)]
            assert ledgers[0] == ledgers[1] and np.array_equal(w.weights, first.weights), (
                f"workers {first.id} and {w.id} begin a step with two states"
            )

    def says_the_truth(self, w: Sim, message: pb.FromWorker) -> None:
        """Check that the worker's report of its state is true."""
        match message.WhichOneof("body"):
            case "evaluated":
                self.evaluated(message.evaluated)
            case "checkpoint_part" if message.checkpoint_part.state:
                part = message.checkpoint_part
                self.states.setdefault((part.step, part.attempt), set()).add(part.state)
            case "checkpointed":
                done = message.checkpointed
                told = self.states.get((done.step, done.attempt), set())
                if len(told) > 1:  # raised at the end: an error here would end only an attempt
                    self.mixed = f"the checkpoint of step {done.step} has parts of different states"
            case "joined_ring":
                w.has_state = True
            case "left_ring":
                forgot = self.world.faults.kinds[FLIP] and not w.worker.state.synced_generation
                assert message.left_ring.has_state or not w.has_state or forgot, (
                    f"worker {w.id} has forgotten its state"
                )
                w.has_state = message.left_ring.has_state  # later steps may be missing
                if w.async_loop is not None:
                    # Servers may have lost steps.
                    has = min(w.worker.state.ledger.step, w.async_loop.reached)
                    assert message.left_ring.step >= has
                    return  # its weights may be of any step
                assert message.left_ring.step == w.worker.state.ledger.step
                counted = self._counted(w)
                assert np.array_equal(counted, w.weights), f"worker {w.id}: model and ledger disagree"
            case "heartbeat" if (
                w.group is not None and message.generation and not self.world.config.asynchronous
            ):
                others = [o for o in self.world.fleet.workers.values() if o.alive and o.group is w.group]
                behind = [o.id for o in others if o.has_state and o.step < message.heartbeat.step - 1]
                assert not behind, (
                    f"worker {w.id} has step {message.heartbeat.step}, {behind} not the one before"
                )

    def _counted(self, w: Sim) -> np.ndarray:
        """The expected weights by the ledger: each position once, except those of bad records."""
        done = w.worker.state.steps.begins_at(w.worker.state.ledger.step)
        counted = np.zeros_like(w.weights)
        counted[:done] = ~np.isin(np.arange(done) % max(self.world.size, 1), list(self.world.bad))
        return counted

    def evaluated(self, found: pb.Evaluated) -> None:
        """Check that every record of the held-out data was evaluated once."""
        right = {"least": 1.0, "most": 1.0}
        assert dict(found.metrics) == right or (self.evaluation_failed and not found.metrics), found

    def exports(self, w: Sim, worth: Mapping[str, Value] | None) -> None:
        """Check that the ring has evaluated the model before it is exported."""
        task = self.world.job.train
        given_up = task is not None and task.evaluation is None  # too many evaluations have failed
        evaluated = not (self.world.held_out and self.world.size) or worth is not None or given_up
        assert evaluated or self.evaluation_failed, f"worker {w.id} is to save a model that was not evaluated"
        there = [o for o in self.world.fleet.workers.values() if o.alive and o.has_state and not o.fenced]
        self.finals = [w, *(o for o in there if o.step == w.step and o is not w)]

    def differs(self, w: Sim, fence: ef.Fence) -> None:
        """Check that workers are fenced for different states only after a bit flip."""
        if fence.reason is ef.FenceReason.StateDiffers:
            assert self.world.faults.kinds[FLIP], fence.why
            self.world.faults.to_blame.add(w.id)

    def was_silent(self, w: Sim, why: str) -> None:
        """Check that a worker fenced for missing heartbeats was silent."""
        now = self.world.clock.now
        unheard = w.silent_since is not None and w.audible_at > now - self.world.silence
        assert w.frozen or unheard or not w.alive, f"worker {w.id} spoke, but is given up: {why}"

    def says_its_phase(self) -> None:
        """Check that the phase agrees with the ring: idle phases without members, training with members."""
        job = self.world.job
        if job.failover.until is not None:
            return  # an earlier master's ring is still being reported
        inside = [w.id for w in job.pool if w.in_ring]
        idle = job.phase in (Phase.Starting, Phase.Suspended, Phase.Waiting)
        assert not (idle and inside), f"the phase is {job.phase}, and {inside} are in a ring"
        assert job.phase is not Phase.Training or inside or job.ring.closing, (
            "the phase is Training, and no worker trains"
        )

    def nobody_waits_long(self) -> None:
        """Check that, between faults, ready workers soon join the ring, and leaving workers soon leave it."""
        job, now = self.world.job, self.world.clock.now
        self.says_its_phase()
        self.leavers_leave()
        if self.world.servers is not None:
            self.world.servers.moves_end()
        few = sum(w.is_ready for w in job.pool) < job.min_size  # the ring may need the leaving workers
        waiting = [
            w.id
            for w in job.pool
            if w.state == "ready"
            or (w.state == "member" and w.place == OUT)  # it was away, and has come back
            or (w.state == "draining" and not w.stopped and not (few and w.in_ring))
        ]
        self.waiting = {w: self.waiting.get(w, now) for w in waiting}
        if job.failover.until is not None:
            self.waiting = {}  # no worker joins before the earlier master's ring is known
        elif job.ring.members and len(job.pool.staying) > 1:
            calm = self.world.faults.last
            late = [w for w, since in self.waiting.items() if now - max(since, calm) > PATIENCE_SECONDS]
            assert not late, f"{late} wait long to join the ring or to leave it"

    def judge(self, end: ef.End) -> None:
        """Check the end of the job and its result."""
        world, job = self.world, self.world.job
        assert not self.mixed, self.mixed
        charged = {f.worker for f in job.failures.charged}
        unjust = charged - world.faults.to_blame
        assert not unjust, f"{unjust} are charged, but are not to blame"
        summary = view.summary(job)
        json.dumps([summary, view.status(job, world.clock.now)], allow_nan=False)
        if world.seed % REPLAY_EVERY == 0 and not world.hours:
            assert view.summary(replayed(world.watchdog)) == summary
        if summary["failed_parts"]:
            # The model was saved, or no worker could save it. In both cases it is not trained again.
            assert end.phase == "Failed" and bool(summary["model"]) == self.saved, end
        elif end.phase == "Failed" and world.faults.kinds[FLIP] and "held different states" in end.reason:
            pass
        elif end.phase == "Failed" and "Failed" not in world.faults.ends:
            assert len(charged) > world.most_failures, end
        elif end.phase != "Succeeded":
            assert end.phase in world.faults.ends, end
        if end.phase != "Succeeded":
            return
        steps, epochs = Steps(world.size, world.batch), summary["task"]["epochs"]
        if world.size:
            assert epochs >= world.master.epochs or world.refused, (epochs, world.epochs)
        assert epochs <= max(world.epochs)
        assert summary["records"]["applied"] == world.size * epochs
        assert summary["task"]["steps_done"] == steps.per_epoch * epochs
        assert summary["records"]["bad"] == len(world.bad) * epochs
        assert len(set(summary["digests"].values())) == (1 if world.size else 0)
        assert self.finals
        for w in self.finals:
            assert np.array_equal(self._counted(w), w.weights), f"worker {w.id}: {w.weights.tolist()}"
            assert w.step == steps.per_epoch * epochs
