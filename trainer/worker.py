# SPDX-License-Identifier: Apache-2.0
"""The training loop of one worker. Read this file from top to bottom.

A worker goes through rings, one after the other. The master names the members of the next ring (`FormRing`).
The members meet, and all of them step until they leave the ring together or the ring breaks. The process and
its model outlive the ring.

    train        wait for an order, run the ring, report how it ended; repeat
    run_ring     form ─▶ synchronize ─▶ step, step, step ... ─▶ leave
    synchronize  copy the root's state, or join without state and receive it while stepping
    step         this rank's gradients and an all-reduce ─▶ apply the result ─▶ tell the parts

What a job may have beside the loop, such as checkpoints or evaluations, are its parts (trainer/parts). The
loop calls all of them at fixed moments. One part is the source of the steps: it decides which steps this
worker makes, and makes them. What follows describes steps by arithmetic (trainer/parts/ring_steps.py), for
`mode=train` and `mode=hybrid`. With `mode=hybrid`, parameter servers hold the rows of embeddings, and the
ledger keeps the outcome of the last step for them (trainer/parts/rows.py). With `mode=ps` a server leases the
steps, and servers hold the state (trainer/parts/leased_steps.py).

The state is a model and its ledger (trainer/state.py).

**The ledger is a number.** Which records make up step k is arithmetic (edl/contract/steps.py), the same in
every ring and on every worker. So `step`, the number of steps in the model, identifies the records in the
model. Model and ledger are one state: they are always copied together, so they cannot disagree. A worker that
receives the state knows the next step without asking. That is why no record is lost or counted twice,
whichever worker dies.

**Each rank's part of a step** is arithmetic, too. The parts of all ranks are the whole step, for every
size of the ring. The all-reduce counts the records, and the loop stops if one is missing.

**If a worker dies in the middle of a step**, the all-reduce fails on the others (`RingBroken`). Computing
gradients changes nothing, so a survivor whose all-reduce failed still has the state before the step. All sums
may have come back to some survivors before the death: these apply the step. No survivor rolls back: the next
ring begins with a survivor that has applied the step, if there is one, and the others receive its state. Else
the next ring makes the step again, with the same records.

**If a parameter server dies** (`mode=hybrid`), calls to it are repeated until a new process has read its log.
The ring does not break, and the step counts once. With `ps.replicas=2` the ring breaks, and the next one uses
the other copies. If the rows are lost, the next ring rolls back to a checkpoint together with all servers
(`before_sync`). A new ring first brings all servers to its root's step, so a worker and a server may die
together.

**Members in sync do not wait for new workers.** A member that joins without the state takes part in the
all-reduce with weight zero and keeps the results. Meanwhile it receives the state. Then it applies the kept
results, and gets a part of each later step. (If no member has the state, or too many join at once, all copy
the root's state first: `sync`.)

**A member that waits for its records** does not hold a ring that is cut, or that all must leave: it gives the
step up (trainer/session/waits.py). A member whose reads have not returned joins a later ring when they have.
Its reader is slow, and the others would wait for it.

**A bad record**, one that cannot be read, is left out of its step, if the job allows that. The all-reduce
counts bad records, so that all ranks agree on them.

**A step is safe** once the sums of the next step have come back, because then every member has it. When
nothing is left to train, one more step without records makes the last step safe. All members leave the ring
after it.

**The ranks agree by a vote** that each all-reduce carries (trainer/agreement/control.py). So all of them act
on the same vote after the same step: they leave the ring, train more or fewer epochs, or write a checkpoint.

The loop does not import TensorFlow, Horovod or gRPC: it is given a state, a ring and a session. The warm-up
runs it in a ring of one, and the simulator runs it a thousand times in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

import numpy as np

from edl.contract.ids import ring_id
from edl.contract.layout import StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError
from edl.trainer.agreement import control
from edl.trainer.parts.part import LoopPart, StepSource
from edl.trainer.records.batches import Batch
from edl.trainer.ring.base import Ring, RingBroken, RingSlot
from edl.trainer.session.orders import End, Export, FormRing, WriteCheckpoint
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.session.waits import when_done
from edl.trainer.state import State

READ_SECONDS = 0.3  # for reads that have begun, when a ring is left; others are slow


class ReplicaDivergence(EdlError):
    """The members' states differ, and neither a majority nor a checkpoint says which one is the job's."""


class Worker:
    """One worker: a state, a ring, a source of steps, and a session with the master.

    Args:
        restore: gives the root of a ring the initial state, if no worker holds the job's state. It takes the
            step of a checkpoint that is known to exist, and returns whether there was a state to restore.
        steps: makes the steps; it is called before the other parts.
        parts: what else this job has beside the loop, in the order in which the loop calls them.
    """

    def __init__(
        self,
        session: Session,
        ring: Ring,
        state: State,
        report: Telemetry,
        steps: StepSource,
        restore: Callable[[int], bool] = lambda expected: False,
        parts: Sequence[LoopPart] = (),
    ):
        self.session, self.ring, self.state, self.report = session, ring, state, report
        self.steps, self.restore, self.parts = steps, restore, [steps, *parts]
        self.slow: Collection[Future[None]] = ()  # reads that had not returned when the last ring was left
        # In the present ring:
        self.has_joined = False  # whether it was reported that this worker has the ring's state
        self.in_flight = 0  # this rank's records in a step whose all-reduce has not completed
        self.next_share: StepSlice | None = None  # this rank's, once all members are in sync

    def ready(self) -> pb.Ready:
        """Return what the master must know of this worker before its first ring."""
        learner = self.state.learner
        message = pb.Ready(model=learner.fingerprint(), tables=len(learner.tables))
        for part in self.parts:
            part.ready(message)
        return message

    # --- successive rings

    def train(self) -> End:
        """Follow the master's orders until one of them ends this worker, or the stream to the master ends."""
        while True:
            match self.session.next_order():
                case FormRing() as form:
                    self.run_ring(form)
                case Export() | WriteCheckpoint() as order:
                    for part in self.parts:
                        part.carry_out(order)
                case End() as end:
                    return end

    def run_ring(self, form: FormRing) -> None:
        """Run one ring, from meeting the other members to having left it. A broken ring is no error here."""  # noqa: DOC501 (caught below)
        state, session, broken = self.state, self.session, ""
        here = RingSlot(
            form.generation, form.members[0], form.members.index(session.worker), len(form.members)
        )
        state.task, state.ring_id, self.has_joined = form.epochs, ring_id(form.generation, form.root), False
        self.report.ring_formed(session.worker in form.joining)
        session.waiting.enter(form.generation)
        if form.untrusted_up_to and state.synced_generation <= form.untrusted_up_to:
            state.forget()
        for part in self.parts:
            part.entering(form)
        try:
            if session.was_cut(here.generation):
                raise RingBroken("the ring was cut before it was formed")
            self.ring.form(here.rank, here.size)
            in_flight_at = state.step
            here = self.synchronize(form, here)
            self.report.ring_up(redone=self.in_flight if state.step <= in_flight_at else 0)
            for part in self.parts:
                part.ring_up(here)
            while self.advance(here):
                pass
        except RingBroken as error:
            broken = str(error)
            self.ring.cut()  # ends the others' all-reduce; the master ends their calls to servers
            if self.in_flight:
                self.report.step_breaks()
        self.ring.close()
        for part in self.parts:
            part.leaving()
        state.drop_pending()  # the results that a joining member has kept
        self.report.ring_left(state.step)
        gave_up, left = session.waiting.leave(), self.left_ring(broken)
        reads = [read for part in self.parts for read in part.idle()]
        slow = wait(reads, 0 if gave_up else READ_SECONDS).not_done
        left.reads = bool(slow)
        session.say(form.generation, left_ring=left)
        self.slow = slow
        if slow:  # the next ring need not wait for them
            when_done(slow, partial(self.records_read, slow))

    def records_read(self, reads: Collection[Future[None]]) -> None:
        """Report that these reads have returned, unless this worker has left a later ring since."""
        if self.slow is reads:
            self.session.say(records_read=pb.RecordsRead())

    def left_ring(self, broken: str) -> pb.LeftRing:
        """Describe the state that this worker holds outside of rings, and why the last one broke."""
        message = self.state.left_ring(broken)
        for part in self.parts:
            part.left(message)
        return message

    # --- before the first step

    def synchronize(self, form: FormRing, here: RingSlot) -> RingSlot:
        """Copy the root's state to this member, or join without state and receive it while stepping.

        Returns:
            this worker's position, with the rank that speaks for all.

        Raises:
            ReplicaDivergence: the members' states differ, and no checkpoint exists to roll back to.
            RingBroken: the ring broke meanwhile.
        """
        state, restored = self.state, False
        behind = not state.has_state or state.ledger.step < form.step  # has no state, or an old one
        if form.sync and form.root == self.session.worker and behind:
            with self.session.waiting.named(lambda: "its first state (checkpoint.dir, initFrom.path)"):
                restored = self.restore(form.step)
            if form.untrusted_reason and not restored:
                raise ReplicaDivergence(f"{form.untrusted_reason}. No checkpoint exists to roll back to")
            state.begin_history()
        rollback = "; ".join(why for part in self.parts if (why := part.before_sync(form, restored)))
        if rollback:
            self.report.rolled_back()
            state.begin_history()  # the root's; the others receive it
            form = replace(form, sync=True, joining=())  # the other members' states are obsolete
        if form.sync:
            state.sync(self.ring, form.members.index(form.root), here.rank)
        for part in self.parts:
            part.after_sync(form)
        self.share_records(form, here)
        state.pass_on(self.ring, form, here.rank)
        here = replace(here, speaker=min(r for r, w in enumerate(form.members) if w not in form.joining))
        if not state.catching_up:
            self.report_synced(here, rollback)
        return here

    def share_records(self, form: FormRing, here: RingSlot) -> None:
        """Assign to each rank its share of each step. Joining members get none until all are in sync."""
        self.next_share = StepSlice(here.rank, form.shares) if form.joining else None
        for part in self.parts:
            part.take(form.first_share(self.session.worker), self.state.step)

    def report_synced(self, here: RingSlot, rollback: str = "") -> None:
        """Report that this member has the state of the step that the ring is at.

        Args:
            rollback: why the ring has rolled back to this state; empty if it has not.
        """
        state, self.has_joined = self.state, True
        state.mark_synced(here.generation)
        message = pb.JoinedRing(
            step=state.step, round=state.round, callbacks_done=state.callbacks_done, rolled_back=rollback
        )
        for part in self.parts:
            part.joined(here, message)
        self.session.say(here.generation, joined_ring=message)

    # --- one step

    def advance(self, here: RingSlot) -> bool:
        """Do what comes next: what a part must do between two steps, or a step.

        Returns:
            False if all members leave the ring after it.

        Raises:
            RingBroken: the ring was cut.
        """
        if self.session.was_cut(here.generation):  # in a ring of one no all-reduce would fail
            raise RingBroken("the ring was cut")
        self.report.step_begins()
        for part in self.parts:
            if (update := part.between_steps(here, partial(self.vote, here))) is not None:
                self.state.apply(update)
                self.state_changed(here)
                if update.agreed is None:
                    return True
                for other in self.parts:
                    other.after(here, update, None)
                self.act_on(update.agreed, here)
                return not update.agreed.leave
        return self.train_step(here)

    def train_step(self, here: RingSlot) -> bool:
        """Make one step, or several that are leased. False: this worker leaves the ring after it."""
        state, step, end = self.state, self.state.step, self.state.end
        result = self.steps.compute(here, partial(self.begin_step, here))  # gradients and all-reduce
        if result is None:
            return False
        metrics = None
        if step < end:
            for part in self.parts:
                part.summed(here, result)
            metrics = self.steps.apply(result)
            self.state_changed(here)
        for part in self.parts:
            part.after(here, result, metrics)
        self.in_flight = 0
        self.act_on(result.agreed, here)
        return not result.agreed.leave and (step < end or not state.steps.ended(state.step, state.epochs))

    def begin_step(self, here: RingSlot, batch: Batch | None) -> np.ndarray:
        """Return this rank's control vector for a step, and let the parts prepare for the step.

        Args:
            batch: this rank's part of the step; None if it has none.
        """
        self.in_flight, bad = (len(batch), len(batch.bad)) if batch is not None else (0, 0)
        for part in self.parts:
            part.before_step(here, batch if self.in_flight else None)
        return self.vote(here, bad)

    def vote(self, here: RingSlot, bad: int = 0) -> np.ndarray:
        """Return this rank's control vector for the next all-reduce.

        Args:
            bad: the number of bad records in this rank's part of the step.
        """
        vector = control.write(
            self.state.step,
            leave=self.session.must_leave(here.generation),
            epochs=self._changed_epochs(here),
            bad=bad,
            in_sync=not self.state.catching_up,
            round=self.state.round,
        )
        for part in self.parts:
            part.vote(here, vector)
        return vector

    def _changed_epochs(self, here: RingSlot) -> int:
        """Return the changed number of epochs, which rank 0 alone proposes; 0 if it has not changed.

        Members may know different ones for a while: a master that takes over repeats its order.
        """
        epochs = self.session.epochs
        return epochs if here.rank == 0 and epochs != self.state.task else 0

    def state_changed(self, here: RingSlot) -> None:
        """Let the parts keep the changed state. If this member has just caught up, report it."""
        for part in self.parts:
            part.changed()
        if not self.has_joined and not self.state.catching_up:
            self.report_synced(here)

    def act_on(self, agreed: control.Agreed, here: RingSlot) -> None:
        """Act on what all ranks have learned from the same all-reduce."""
        if self.next_share is not None and agreed.synced_ranks == here.size:
            for part in self.parts:
                part.take(self.next_share, self.state.step + 1)  # the next step is being read already
            self.next_share = None
        if agreed.epochs:
            self.state.task = agreed.epochs
