"""The training loop of one worker. Read this file from top to bottom.

A worker goes through rings, one after the other. The master names the members of the next ring (`FormRing`).
The members meet, and all of them step until they leave the ring together or the ring breaks. The process and
its model outlive the ring.

    train        wait for an order, run the ring, report how it ended; repeat
    run_ring     form ─▶ synchronize ─▶ step, step, step ... ─▶ close
    synchronize  copy the root's state, or join without state and receive it while stepping
    step         this rank's part of a batch, an all-reduce, one update, one more step in the model

The collaborators have files of their own: the state (trainer/state.py), the initial state where no worker
holds one (trainer/restore.py), the servers of embedding rows (trainer/ps_setup.py).

**The ledger is a number.** Which records make up step k is arithmetic (edl/contract/steps.py), the same in
every ring and on every worker. So `step`, the number of steps in the model, identifies the records in the
model. Model and ledger are one state: they are always copied together, so they cannot disagree. A worker that
receives the state knows the next step without asking. That is why no record is lost or counted twice,
whichever worker dies.

**Each rank's part of a step** is arithmetic, too. The parts of all ranks are the whole step, whatever the
ring's size. The all-reduce counts the records, and the loop stops if one is missing.

**Steps are not rolled back.** When a member dies, each survivor either received all sums of the step in
flight, or did not. The next ring continues from a survivor that did, if there is one.

**Members in sync do not wait for new workers.** A member that joins without the state takes part in the
all-reduce with weight zero and keeps the results. Meanwhile it receives the state. Then it applies the kept
results, and gets a part of each later step. (Before the first step of a job all members copy the root's
state instead: `sync`.)

**A bad record**, one that cannot be read, is left out of its step, if the job allows that. The all-reduce
counts bad records, so that all ranks agree on them.

**A step is safe** once the sums of the next step have come back, because then every member has it. When
nothing is left to train, one more step without records makes the last step safe. All members leave the ring
after it.

**A checkpoint** is written by all ranks, each a part, in the background. It holds the state after the step at
which all ranks reported that they can write. If no worker holds the state any more, the root begins with the
newest checkpoint.

**An evaluation** is made by all ranks between two steps, in rounds. Each rank evaluates its part of the next
records, and the ledger keeps the sums. A round makes a new state with the same weights: members with the same
step and round have the same state, and members that are behind receive it.

**Callbacks** are called at the boundaries of epochs, after the evaluation, by one rank for all. Their changes
and their memory are broadcast as a `CallbackUpdate`, which makes a new state as a round does. After the last
epoch only the worker that saves the model calls them.

**Embedding rows** may be on parameter servers. Each rank pulls the rows of its part, and stages its
gradients
before the all-reduce. So once the all-reduce has come back anywhere, the servers can apply the step, too.

**All weights** may be on parameter servers (`mode=ps`). Training is asynchronous then, and a few methods of
this loop are replaced: trainer/async_worker.py.

**The task** is to train up to a number of epochs. The master may change it at any time. The ring applies the
change at the first step whose all-reduce shows that every rank knows of it.

The loop does not import TensorFlow, Horovod or gRPC: it is given a learner, a ring and a session. The warm-up
runs it in a ring of one, and the simulator runs it a thousand times in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from edl.config import Config
from edl.contract.evaluation import Pass
from edl.contract.layout import Part
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError
from edl.trainer.agreement import control
from edl.trainer.agreement.checks import check, refuse_nonfinite, refuse_too_many_bad
from edl.trainer.agreement.epochs import CallbackUpdate
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.callbacks.interfaces import Callbacks
from edl.trainer.checkpoint.checkpointing import Checkpointing, RingSlot
from edl.trainer.checkpoint.memory_copy import MemoryCopy
from edl.trainer.evaluation.rounds import Evaluation, Rounds
from edl.trainer.model.data import Batch, Batches
from edl.trainer.ps_client.interfaces import Servers, TrainedOn
from edl.trainer.ps_setup import RowServers
from edl.trainer.restore import Restore
from edl.trainer.ring.base import Ring, RingBroken
from edl.trainer.runtime.watchdog import Computing, uncounted
from edl.trainer.session.orders import End, Export, FormRing, WriteCheckpoint
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State
from edl.trainer.step.interfaces import Learner, SampleLoss


class StatesDiffer(EdlError):
    """The members' states differ, and neither a majority nor a checkpoint says which one is the job's."""


class Worker:
    """One worker: a model, a ring, data, and a session with the master.

    Args:
        export: saves the final model, and reports the result to the master; its argument is what the ring's
            evaluation has found, None if the model is still to be evaluated.
        evaluation: None if the ring does not evaluate the model.
        checkpoints: None if the job writes none.
        warm_start: loads what another training has learned into the model, and into the servers at their next
            `restore`; returns the ledger of the work that is already done. None: the model begins with its
            own weights.
        callbacks: None if the model has none.
        keep: saves a copy of the trained model of this step before the ring evaluates it.
        servers: hold the rows of the model's tables; None if it has no tables.
        history: receives the history of all whole epochs, again and again.
        memory: keeps a copy of each state in memory that outlives this process; None for no copies.
        computing: limits the time that this worker computes in a step.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        ring: Ring,
        learner: Learner,
        batches: Batches,
        report: Telemetry,
        export: Callable[[Mapping[str, Value] | None], None],
        checkpoints: Checkpointing | None = None,
        warm_start: Callable[[], Ledger | None] | None = None,
        evaluation: Evaluation | None = None,
        callbacks: Callbacks | None = None,
        history: Callable[[Sequence[Mapping[str, Value]]], None] = lambda history: None,
        memory: MemoryCopy | None = None,
        keep: Callable[[int], None] = lambda step: None,
        servers: Servers | None = None,
        computing: Computing = uncounted,
    ):
        self.computing = computing
        self.config, self.session, self.ring, self.learner = config, session, ring, learner
        self.batches, self.report, self.export = batches, report, export
        self.callbacks, self.history, self.keep = callbacks, history, keep
        self.checkpoints, self.servers, self.steps = checkpoints, servers, batches.steps
        self.rounds = Rounds(evaluation, config, session)
        # State that all members share:
        self.state = State(learner, self.steps, self.rounds, session, memory, servers)
        # Servers may lose their rows, and then the job may have to begin again with these weights.
        first = learner.parts() if servers is not None else []
        self.restore = Restore(self.state, checkpoints, warm_start, first, config.trains)
        self.rows: RowServers | None = None
        if servers is not None:
            servers.follow(learner.tables, lambda: self.state.ledger.commit)
            self.rows = RowServers(servers, session, self.state, self.restore)
        # State of this worker alone:
        self.sample_loss: SampleLoss | None = None  # of its model; None if the losses cannot be compared
        self.task = 0  # epochs to train, as the ring has agreed
        self.callback_rank = 0  # the rank that calls the callbacks for all
        self.ring_slot = RingSlot(0, 0, 0, 1)  # this worker's position
        self.in_sync = False  # whether this worker has the state of the step that this ring is at
        self.in_flight = 0  # this rank's records in a step whose sums are pending
        self.next_part: Part | None = None  # this rank's, once all members are in sync

    # --- successive rings

    def train(self) -> End:
        """Follow the master's orders until one of them ends this worker, or the stream to the master ends."""
        while True:
            match self.session.next_order():
                case FormRing() as form:
                    self.run_ring(form)
                case Export():
                    self.save_checkpoint()
                    self.save_model()
                case WriteCheckpoint():
                    self.save_checkpoint()
                case End() as end:
                    return end

    def run_ring(self, form: FormRing) -> None:
        """Run one ring, from meeting the other members to having left it."""
        state, rank, size = self.state, form.members.index(self.session.worker), len(form.members)
        self.task, self.in_sync = form.epochs, False
        self.ring_slot = RingSlot(form.generation, form.members[0], rank, size)
        self.report.ring_formed()
        if form.untrusted_up_to and state.synced_generation <= form.untrusted_up_to:
            state.forget()
        broken = ""
        self.enter_servers(form)
        self.prefetch(form, rank)
        try:
            if self.session.was_cut(form.generation):
                raise RingBroken("the ring was cut before it was formed")
            self.ring.form(rank, size)
            in_flight_at = state.step
            self.synchronize(form, rank)
            self.report.ring_up(redone=self.in_flight if state.step <= in_flight_at else 0)
            for split in state.ledger.evaluated if rank == 0 and not state.catching_up else ():
                self.rounds.say(
                    form.generation, state.ledger, split
                )  # the worker that found it may have died before reporting it
            while self.advance(form.generation, rank, size):
                pass
        except RingBroken as error:
            broken = self.why_broken(form.generation, error)
            self.ring.cut()  # so that all other ranks notice at once
            if self.in_flight:
                self.report.step_breaks()
        self.ring.close()
        self.leave_servers()
        state.drop_pending()
        self.report.ring_left(state.step)
        self.session.say(form.generation, left_ring=self.left_ring(broken))

    def prefetch(self, form: FormRing, rank: int) -> None:
        """Read this worker's records of the next step while the ring is formed.

        Only if this worker holds a state already: the state of a different member may be at a different step.
        """
        if self.state.has_state and form.layout == self.batches.layout and self.state.step < self.end:
            self.batches.take(form.layout, self.part_at_start(form, rank))
            self.batches.begin(self.state.step)

    def enter_servers(self, form: FormRing) -> None:
        """Allow calls to the servers, which from now on end when this ring is cut."""
        if self.servers is not None:
            self.servers.enter(form.addresses, form.servers)

    def leave_servers(self) -> None:
        """Allow calls to the servers outside of rings, however this ring has ended."""
        if self.servers is not None:
            self.servers.leave()

    def why_broken(self, generation: int, error: RingBroken) -> str:
        """The reason why the ring broke; "" if leaving it this way was planned."""
        return str(error)

    def synchronize(self, form: FormRing, rank: int) -> None:
        """Before the first step, copy the root's state to this member, or join without state and receive
        it while stepping."""
        state, begun = self.state, False
        behind = not state.has_state or state.ledger.step < form.step  # holds an old copy
        if form.sync and form.root == self.session.worker and behind:
            begun = self.restore.initial_state(form.step)
            if form.untrusted_reason and not begun:
                raise StatesDiffer(f"{form.untrusted_reason}. No checkpoint exists to roll back to")
        back = self.rows.join(self.ring, form, begun) if self.rows is not None else ""
        if back:
            self.report.went_back()
            form = replace(form, sync=True, joining=())  # the other members' states are obsolete
        if form.sync:
            state.sync(self.ring, form.members.index(form.root), rank)
        if self.rows is not None:
            self.rows.move(self.ring, form)
        self.assign_parts(form, rank)
        if not state.catching_up:
            self.report_synced(form.generation, back)

    @property
    def epochs(self) -> int:
        """The number of epochs to train."""
        return min(self.task, self.state.stop) if self.state.stop else self.task

    @property
    def end(self) -> int:
        """The step at which nothing is left to train."""
        return self.steps.end(self.state.step, self.epochs)

    def restore_from_memory(self) -> pb.LeftRing | None:
        """Restore the copy of the state that an earlier worker has left in this pod's memory.

        Returns:
            the state's description for the master; None if there is no copy.
        """
        return self.left_ring("") if self.state.restore_from_memory() else None

    def part_at_start(self, form: FormRing, rank: int) -> Part:
        """This rank's part of a step while the joining members have no state."""
        shares = zip(form.members, form.shares, strict=True)
        return Part(rank, tuple(0 if worker in form.joining else share for worker, share in shares))

    def assign_parts(self, form: FormRing, rank: int) -> None:
        """Assign each step's parts to ranks, and have the state sent to the members that join without it.

        Joining members get no part until all members are in sync.
        """
        joining = [form.members.index(worker) for worker in form.joining]
        synced_ranks = [r for r in range(len(form.members)) if r not in joining]
        self.callback_rank = synced_ranks[0]
        now = self.part_at_start(form, rank)
        self.next_part = Part(rank, form.shares) if joining else None
        self.batches.take(form.layout, now)
        self.rounds.take(now)
        # Each member sends to one other. Receivers forward the state, so that many joining members cost a
        # member in sync no more than one does.
        sources = dict(zip(joining, [*synced_ranks, *joining], strict=False))
        if rank in sources:
            self.state.begin_catch_up(self.ring, form, sources[rank], forward=rank in sources.values())
        elif rank in sources.values():
            self.ring.send_state(self.state.packed())

    def report_synced(self, generation: int, back: str = "") -> None:
        """Report that this member has the state of the step that the ring is at.

        Args:
            back: why the ring has rolled back to this state; empty if it has not.
        """
        state, self.in_sync = self.state, True
        state.mark_synced(generation)
        joined = pb.JoinedRing(step=state.step, round=state.round, turn=state.turn, went_back=back)
        if self.rows is not None:
            self.rows.tell(joined)
        self.session.say(generation, joined_ring=joined)

    def left_ring(self, broken: str) -> pb.LeftRing:
        """Describe the state that this worker holds outside of rings."""
        return self.state.left_ring(broken)

    # --- checkpoints

    def can_write(self, step: int, evaluated: bool = False) -> bool:
        """Whether this rank can write its part of a checkpoint after `step`; for rank 0: and one is due.

        Args:
            evaluated: the checkpoint is that of an epoch's end, after its evaluation.
        """
        if self.checkpoints is None or self.state.catching_up:
            return False
        waits = self.checkpoints.waits_for_evaluation and self.steps.ends_epoch(step)
        if evaluated != (waits and self.rounds.due(step, 0, self.epochs) is not None):
            return False
        return self.checkpoints.ready(self.ring_slot, step, self.steps, self.epochs, evaluated)

    def save_checkpoint(self) -> None:
        """Write a whole checkpoint of the state that this worker holds, without other workers."""
        if self.checkpoints is not None:
            self.checkpoints.save(self.state.ledger, self.steps, self.batches.layout)

    def save_model(self) -> None:
        """Save the final model.

        If servers have lost rows of it, report `RowsLost`; the master then forms a ring that rolls back to a
        checkpoint.
        """
        try:
            self.export_model()
        except RingBroken as error:
            if self.session.stopped or self.session.ended:
                return
            trained_on = isinstance(error, TrainedOn)
            self.session.say(rows_lost=pb.RowsLost(why=str(error), trained_on=trained_on))

    def export_model(self) -> None:
        """Evaluate and save the model.

        Raises:
            RingBroken: the servers' rows are not those of this worker's state.
        """
        self.export(self.rounds.worth(self.state.ledger))

    def epoch_ends(self, epochs: int, metrics: Mapping[str, Value]) -> None:
        """Report the metrics of the epoch that has just ended, and record them for its checkpoint."""
        found = self.state.ledger.epochs.history[-1]
        self.report.epoch_ends(epochs, self.state.ledger.epochs.last_loss, as_numbers(metrics))
        if self.checkpoints is not None:
            self.checkpoints.epoch_ended(self.state.step, as_numbers(found))

    def begin_checkpoint(self) -> None:
        """Begin to write the present state: the all-reduce has shown that all ranks can."""
        assert self.checkpoints is not None
        self.checkpoints.begin(self.ring_slot, self.state.ledger, self.steps, self.batches.layout)

    # --- one step

    def advance(self, generation: int, rank: int, size: int) -> bool:
        """Do what comes next: a round, the callbacks, or a step. False: all members leave the ring after
        it."""
        state = self.state
        if self.session.was_cut(generation):  # in a ring of one no all-reduce would fail
            raise RingBroken("the ring was cut")
        self.report.step_begins()
        if (now := self.rounds.due(state.step, state.round, self.epochs)) is not None:
            return self.run_round(now, generation, rank, size)
        end = self.end
        if rank == 0:
            self.report.to_go(end - state.step)
        if state.step < end and self.callbacks is not None and self.begins_epoch and not state.turn:
            return self.run_callbacks(self.callbacks, generation, rank)
        return self.train_step(generation, rank, size)

    def train_step(self, generation: int, rank: int, size: int) -> bool:
        """Make one step. False: all members leave the ring after it."""
        state, end = self.state, self.end
        training = state.step < end
        if rank == 0 and not state.catching_up:
            self.history(state.ledger.epochs.history)
        batch = self.batches.of(state.step, end) if training else None
        self.in_flight = len(batch) if batch else 0
        bad = () if batch is None else batch.bad
        contribution = control.write(
            state.step,
            leave=self.session.must_leave(generation),
            change=self.session.task is not None,
            bad=len(bad),
            in_sync=not state.catching_up,
            checkpoint=training and self.can_write(state.step + 1),
            round=state.round,
        )
        start, stop = self.steps.positions(state.step) if training else (0, 0)
        # A rank without records takes part with weight zero: an all-reduce needs every rank.
        part = batch if self.in_flight else None
        if self.servers is not None and part is None and not state.catching_up:
            # Servers learn with each call that the last step was made, also before a step without records.
            self.servers.pull(state.step, ())
        with self.watched(part, state.step):
            result = self.learner.allreduce_step(part, contribution, state.step, rank, stop - start)
        # From here on the step has happened for this rank, and all ranks have the step before it.
        self.report.step_summed(result.waited)
        agreed = result.agreed
        check(agreed, state.step, state.round, size, stop - start)
        if agreed.nonfinite and self.config.training.on_non_finite == "stop":
            refuse_nonfinite(batch, result, state.step, self.session.worker)
        epoch, most = self.steps.epoch(state.step), self.config.data.max_bad_records
        refuse_too_many_bad(agreed, bad, epoch, state.ledger.bad.get(epoch, 0), most)
        with self.watched(part, state.step, "the update of "):
            metrics = self.commit(generation, result) if training else None
        if bad:
            self.report.left_out(generation, self.steps.epoch(state.step - 1), bad)
        self.report.step_done(generation, rank, state.step, self.in_flight, agreed)
        if metrics is not None:
            self.epoch_ends(self.steps.epoch(state.step), metrics)
        if agreed.writers == size and not agreed.nonfinite:
            self.begin_checkpoint()
        self.in_flight = 0
        self.act_on(agreed, size)
        return not agreed.leave and (training or not self.steps.ended(state.step, self.epochs))

    def watched(self, batch: Batch | None, step: int, what: str = "") -> AbstractContextManager[object]:
        """Limit the time of the model's code in a step; without a batch, none of it runs."""
        if batch is None:
            return nullcontext()
        return self.computing(what or "step", lambda: f"{what}step {step + 1}, with the {batch},", len(batch))

    def act_on(self, agreed: control.Agreed, size: int) -> None:
        """Act on what all ranks have learned from the same all-reduce."""
        if self.next_part is not None and agreed.synced_ranks == size:
            self.batches.take_from(self.state.step + 1, self.next_part)
            self.rounds.take(self.next_part)
            self.next_part = None
        if agreed.changes == size:
            self.task = self.session.take_task()

    def commit(self, generation: int, update: control.StepResult | CallbackUpdate) -> dict[str, Value] | None:
        """Add a step, round or callback update to the state. If this member has just caught up, report it.

        Returns:
            the metrics of an epoch that ends with it; None if no epoch ends.
        """
        metrics = self.state.add(update)
        if not self.in_sync and not self.state.catching_up:
            self.report_synced(generation)
        return metrics

    # --- callbacks

    @property
    def begins_epoch(self) -> bool:
        """Whether the next step is the first one of an epoch."""
        return self.state.step == 0 or self.steps.ends_epoch(self.state.step)

    @property
    def facts(self) -> dict[str, float]:
        """Facts about the ring for callbacks that log them."""
        return {"ring_size": float(self.ring_slot.size), "goodput": self.report.goodput}

    def run_callbacks(self, callbacks: Callbacks, generation: int, rank: int) -> bool:
        """One rank calls the callbacks, and all ranks apply the same update. Returns True: the ring goes
        on."""
        mine: CallbackUpdate | None = None
        if rank == self.callback_rank:
            whole = self.steps.epoch(self.state.step)
            mine = callbacks.run(self.state.ledger.epochs, whole, self.task, self.facts)
        data = np.zeros(0, np.uint8) if mine is None else mine.pack()
        length = int(self.ring.broadcast(np.array([len(data)], np.int64), self.callback_rank)[0])
        data = data if mine is not None else np.zeros(length, np.uint8)
        data = self.ring.broadcast(data, self.callback_rank)
        self.commit(generation, mine if mine is not None else CallbackUpdate.unpack(data))
        return True

    def end_epoch(self) -> None:
        """Call the callbacks for the end of the last epoch, on the worker that saves the model."""
        whole = self.steps.epoch(self.state.ledger.step)
        if self.callbacks is not None and self.state.ledger.epochs.due(whole, more=False):
            self.state.change(self.callbacks.run(self.state.ledger.epochs, whole, whole, self.facts))

    # --- one round of an evaluation

    def run_round(self, now: Pass, generation: int, rank: int, size: int) -> bool:
        """Make one round of an evaluation. False: all members leave the ring after it."""
        state = self.state
        ended = self.config.trains and self.steps.ended(state.step, self.epochs)
        if ended and state.round == 0 and rank == self.callback_rank:
            self.keep(state.step)  # the trained model survives if its evaluation kills this worker
        last = state.round + 1 == now.end and self.is_of_epoch(now)
        contribution = control.write(
            state.step,
            leave=self.session.must_leave(generation),
            change=self.session.task is not None,
            in_sync=not state.catching_up,
            checkpoint=last and self.can_write(state.step, evaluated=True),
            round=state.round,
        )
        values = self.rounds.part(now, state.round, contribution, state.catching_up)
        summed = np.asarray(self.ring.reduce(np.concatenate([values, contribution])))
        agreed, given = control.read(summed[len(values) :]), (now, summed[: len(values)])
        failed, (start, stop) = agreed.nonfinite, now.positions(state.round)
        check(agreed, state.step, state.round, size, agreed.records if failed else stop - start)
        round = now.end if failed else state.round + 1
        self.commit(generation, control.StepResult(agreed, False, 0.0, summed.nbytes, given, round))
        self.report.round_done(generation, rank, state.step, now, state.round)
        if state.round == now.end and rank == 0 and not state.catching_up:
            self.rounds.say(generation, state.ledger, now.split)
        if last and self.checkpoints is not None and not state.catching_up:
            found = as_numbers(state.ledger.epochs.history[-1])
            self.checkpoints.epoch_ended(state.step, found, evaluated=True)
        if agreed.writers == size and not failed:
            self.begin_checkpoint()
        self.act_on(agreed, size)
        return not agreed.leave

    def is_of_epoch(self, now: Pass) -> bool:
        """Whether the pass evaluates an epoch that has ended, for its history."""
        return now.split == self.config.evaluation.split and self.steps.ends_epoch(self.state.step)
