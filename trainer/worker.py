"""Elastic training, from one worker's side. Read this file from top to bottom.

A worker lives through rings. The master says who is in the next one (`FormRing`); the members
meet, and then all of them step until they leave the ring together or it breaks. The process and its
model outlive the ring.

    train   wait for an order, ride the ring, say how it ended; again
    ride    form ─▶ meet ─▶ step, step, step ... ─▶ close
    meet    who has the state has that of the root, or takes part without it
    step    a part of a batch, its sums over the ring, one update, one more step in the model

What it rides with has files of its own: the state (trainer/state.py), what a root begins with where nobody
has one (trainer/restore.py), the servers of rows (trainer/ps_setup.py).

**The ledger is a number.** Which records make up step k is arithmetic (edl/contract/steps.py), the same for
every ring and on every worker; so `step`, the number of steps that are in the model, says which records are.
Model and number are one state: they are taken over together, and they cannot disagree. Who takes them over
knows what comes next without asking. That is why no record is lost or counted twice, whoever dies.

**A part of each step** is this rank's, also by arithmetic. The parts of all ranks are the whole step,
whatever the ring's size: the sums say how many records there were, and the loop does not go on if one was
missing.

**Nothing is rolled back.** When a member dies, each survivor has the step in flight, or has it
not: all of its sums came back, or not all. The ring goes on from one who has it, if one lives.

**Nobody waits for a newcomer.** Who enters a ring without the state takes part in its sums with weight zero
and keeps them, is sent the state meanwhile, applies what it has kept, and gets its part of each step from
then on. (Where nobody trains yet, all take the root's state before the first step: `sync`.)

**A bad record**, one that cannot be read, is left out of its step, if the job allows some: the sums say how
many, so that all ranks agree on what is missing.

**A step is safe** once the sums of the next one have come back, for then every member has it. When there is
nothing left to train, one more step, without records, makes the last one safe, and all leave the ring after
it.

**A checkpoint** is written by all ranks, each a part, in the background: of the state after the step at which
all said that they can. Where nobody holds the state any more, the root begins with that of the newest one.

**An evaluation** is made by all ranks between two steps, in rounds: each evaluates its part of the next
records, and the sums are kept in the ledger. A round is one more state, with the same weights: who has step
and round in common has the same state, and who is behind is sent it.

**Callbacks** are called at the boundaries of epochs, after the evaluation, by one rank for all. What they
change and remember is broadcast, and all take it over: one more state, as a round is. After the last epoch
nobody calls them but who saves the model.

**Rows of embeddings** may be on parameter servers. Each rank pulls the rows of its part, and its gradients
are there before it takes part in the sums; so their coming back is the step for the servers, too.

**All weights** may be on parameter servers (`mode=ps`). Then training is asynchronous, and this loop another
one in a few places: trainer/async_worker.py.

**The task** is to train up to a number of epochs. The master may change it at any time; the ring takes the
change up at one step: the one whose sum says that every rank knows of it.

The loop knows neither TensorFlow nor Horovod nor gRPC: a learner, a ring and a session are given to
it. The warm-up runs it in a ring of one, and the simulator a thousand times over in virtual time.
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
from edl.trainer.agreement.epochs import Turn
from edl.trainer.agreement.interfaces import Callbacks, Evaluation, Learner, SampleLoss, Servers, TrainedOn
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.checkpoint.checkpointing import Checkpointing, Place
from edl.trainer.checkpoint.memory_copy import MemoryCopy
from edl.trainer.evaluation.rounds import Rounds
from edl.trainer.model.data import Batch, Batches
from edl.trainer.ps_setup import RowServers
from edl.trainer.restore import Beginning
from edl.trainer.ring.base import Ring, RingBroken
from edl.trainer.runtime.watchdog import Computing, uncounted
from edl.trainer.session.orders import End, Export, FormRing, WriteCheckpoint
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State


class StatesDiffer(EdlError):
    """Nobody knows which member's state is the job's, and no checkpoint does."""


class Worker:
    """One worker: a model, a ring, data, and a session with the master.

    Args:
        export: saves the final model, and tells the master how that went; it is given what the ring has found
            the model to be worth, None: the model is still to be evaluated.
        evaluation: None: the ring makes none.
        checkpoints: None: the job writes none.
        warm_start: has the model, and the next `restore` of its servers, begin with what another training has
            learned, and returns what of the job is done already; None: with its own weights.
        callbacks: None: there are none.
        keep: saves a copy of the trained model, whose step this is, before the ring evaluates it.
        servers: have the rows of the model's tables; None: it has none.
        history: takes the history of all whole epochs, again and again.
        memory: takes a copy of each state; None: nobody keeps one.
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
        # What all members share:
        self.state = State(learner, self.steps, self.rounds, session, memory, servers)
        # With what it begins, if it has to begin again: the servers may.
        first = learner.parts() if servers is not None else []
        self.beginning = Beginning(self.state, checkpoints, warm_start, first, config.trains)
        self.rows: RowServers | None = None
        if servers is not None:
            servers.follow(learner.tables, lambda: self.state.ledger.commit)
            self.rows = RowServers(servers, session, self.state, self.beginning)
        # This worker's own:
        self.sample_loss: SampleLoss | None = None  # of its model; None: it has none that could be compared
        self.task = 0  # epochs to train, as the ring has it
        self.caller = 0  # the rank that calls the callbacks
        self.place = Place(0, 0, 0, 1)  # in the ring
        self.is_up = False  # whether it has the state of the step that this ring is at
        self.in_flight = 0  # its records in a step that has not come back
        self.part_then: Part | None = None  # this rank's, once all members have the state

    # --- rings, one after the other

    def train(self) -> End:
        """Follow the master's orders until one of them ends this worker, or there is no master any more."""
        while True:
            match self.session.next_order():
                case FormRing() as form:
                    self.ride(form)
                case Export():
                    self.save_checkpoint()
                    self.save_model()
                case WriteCheckpoint():
                    self.save_checkpoint()
                case End() as end:
                    return end

    def ride(self, form: FormRing) -> None:
        """One ring, from meeting the others to having left it."""
        state, rank, size = self.state, form.members.index(self.session.worker), len(form.members)
        self.task, self.is_up = form.epochs, False
        self.place = Place(form.generation, form.members[0], rank, size)
        self.report.ring_formed()
        if form.distrusted and state.held_in <= form.distrusted:
            state.forget()
        broken = ""
        self.enter(form)
        self.read_ahead(form, rank)
        try:
            if self.session.was_cut(form.generation):
                raise RingBroken("the ring was cut before it was formed")
            self.ring.form(rank, size)
            in_flight_at = state.step
            self.meet(form, rank)
            self.report.ring_up(redone=self.in_flight if state.step <= in_flight_at else 0)
            for split in state.ledger.evaluated if rank == 0 and not state.follows else ():
                self.rounds.say(form.generation, state.ledger, split)  # who found it may not have told it
            while self.take_step(form.generation, rank, size):
                pass
        except RingBroken as error:
            broken = self.why_broken(form.generation, error)
            self.ring.cut()  # so that every other rank learns of it now
            if self.in_flight:
                self.report.step_breaks()
        self.ring.close()
        self.leave()
        state.drop_kept()
        self.report.ring_left(state.step)
        self.session.say(form.generation, left_ring=self.left(broken))

    def read_ahead(self, form: FormRing, rank: int) -> None:
        """While the ring is formed, its records of the next step are read, if that is the step it is at."""
        if self.state.is_held and form.layout == self.batches.layout and self.state.step < self.end:
            self.batches.take(form.layout, self.part_at_first(form, rank))
            self.batches.begin(self.state.step)

    def enter(self, form: FormRing) -> None:
        """Its servers may be called again, from now on for this ring."""
        if self.servers is not None:
            self.servers.enter(form.addresses, form.servers)

    def leave(self) -> None:
        """Its servers may be called, whatever became of the ring."""
        if self.servers is not None:
            self.servers.leave()

    def why_broken(self, generation: int, error: RingBroken) -> str:
        """Of a ring that was left so; empty: that was planned."""
        return str(error)

    def meet(self, form: FormRing, rank: int) -> None:
        """Before the first step: who has the state has that of the root, or takes part without it."""
        state, begun = self.state, False
        behind = not state.is_held or state.ledger.step < form.step  # with a copy that is too old
        if form.sync and form.root == self.session.worker and behind:
            begun = self.beginning.restore(form.step)
            if form.distrust and not begun:
                raise StatesDiffer(f"{form.distrust}. There is no checkpoint that they could go back to")
        back = self.rows.join(self.ring, form, begun) if self.rows is not None else ""
        if back:
            self.report.went_back()
            form = replace(form, sync=True, joining=())  # what anybody else has is not the state any more
        if form.sync:
            state.sync(self.ring, form.members.index(form.root), rank)
        if self.rows is not None:
            self.rows.move(self.ring, form)
        self.take_part(form, rank)
        if not state.follows:
            self.hold(form.generation, back)

    @property
    def epochs(self) -> int:
        """How many are to be trained."""
        return min(self.task, self.state.stop) if self.state.stop else self.task

    @property
    def end(self) -> int:
        """The step at which nothing is left to train."""
        return self.steps.end(self.state.step, self.epochs)

    def begin_from_memory(self) -> pb.LeftRing | None:
        """Take over what a worker before this one has left in the memory of their place.

        Returns:
            which state it is; None: none is there.
        """
        return self.left("") if self.state.begin_from_memory() else None

    def part_at_first(self, form: FormRing, rank: int) -> Part:
        """Which part of a step is this rank's, until all members have the state."""
        shares = zip(form.members, form.shares, strict=True)
        return Part(rank, tuple(0 if worker in form.joining else share for worker, share in shares))

    def take_part(self, form: FormRing, rank: int) -> None:
        """Which part of each step is this rank's. Those who join without the state have none yet: they take
        part in the sums, and are sent the state of this moment meanwhile."""
        joining = [form.members.index(worker) for worker in form.joining]
        holders = [r for r in range(len(form.members)) if r not in joining]
        self.caller = holders[0]
        now = self.part_at_first(form, rank)
        self.part_then = Part(rank, form.shares) if joining else None
        self.batches.take(form.layout, now)
        self.rounds.take(now)
        # Each gives to one: who takes it passes it on, so that many who join cost a holder no more than one.
        givers = dict(zip(joining, [*holders, *joining], strict=False))
        if rank in givers:
            self.state.follow(self.ring, form, givers[rank], passes_on=rank in givers.values())
        elif rank in givers.values():
            self.ring.give(self.state.packed())

    def hold(self, generation: int, back: str = "") -> None:
        """It has the state of the step that the ring is at.

        Args:
            back: why the ring has gone back to it, if it has.
        """
        state, self.is_up = self.state, True
        state.hold(generation)
        joined = pb.JoinedRing(step=state.step, round=state.round, turn=state.turn, went_back=back)
        if self.rows is not None:
            self.rows.tell(joined)
        self.session.say(generation, joined_ring=joined)

    def left(self, broken: str) -> pb.LeftRing:
        """The state that it has outside of rings."""
        return self.state.left_ring(broken)

    # --- checkpoints

    def can_write(self, step: int, evaluated: bool = False) -> bool:
        """Whether it can write its part of one of the state of that step; of rank 0: and one is due.

        Args:
            evaluated: after the evaluation of that state.
        """
        if self.checkpoints is None or self.state.follows:
            return False
        waits = self.checkpoints.waits_for_evaluation and self.steps.ends_epoch(step)
        if evaluated != (waits and self.rounds.due(step, 0, self.epochs) is not None):
            return False
        return self.checkpoints.ready(self.place, step, self.steps, self.epochs, evaluated)

    def save_checkpoint(self) -> None:
        """Of the state that this worker holds, by itself."""
        if self.checkpoints is not None:
            self.checkpoints.save(self.state.ledger, self.steps, self.batches.layout)

    def save_model(self) -> None:
        """The last thing that is done in a job, unless servers have lost rows of which the model is made: the
        master has a ring formed then, which goes back with them."""
        try:
            self.export_model()
        except RingBroken as error:
            if self.session.stopped or self.session.ended:
                return
            trained_on = isinstance(error, TrainedOn)
            self.session.say(rows_lost=pb.RowsLost(why=str(error), trained_on=trained_on))

    def export_model(self) -> None:
        """Raises: RingBroken, if servers have other rows than it has."""
        self.export(self.rounds.worth(self.state.ledger))

    def epoch_ends(self, epochs: int, metrics: Mapping[str, Value]) -> None:
        """So many epochs are whole: tell how good the last one was, and have a checkpoint of it say so."""
        found = self.state.ledger.epochs.history[-1]
        self.report.epoch_ends(epochs, self.state.ledger.epochs.last_loss, as_numbers(metrics))
        if self.checkpoints is not None:
            self.checkpoints.epoch_ended(self.state.step, as_numbers(found))

    def write(self) -> None:
        """All can, as all see at this step: begin to write the state that it has led to."""
        assert self.checkpoints is not None
        self.checkpoints.begin(self.place, self.state.ledger, self.steps, self.batches.layout)

    # --- one step

    def take_step(self, generation: int, rank: int, size: int) -> bool:
        """What comes next: a round, a turn, or a step. False: all members leave the ring after it."""
        state = self.state
        if self.session.was_cut(generation):  # a ring of one sums nothing that could break
            raise RingBroken("the ring was cut")
        self.report.step_begins()
        if (now := self.rounds.due(state.step, state.round, self.epochs)) is not None:
            return self.take_round(now, generation, rank, size)
        end = self.end
        if rank == 0:
            self.report.to_go(end - state.step)
        if state.step < end and self.callbacks is not None and self.begins_epoch and not state.turn:
            return self.take_turn(self.callbacks, generation, rank)
        return self.train_on(generation, rank, size)

    def train_on(self, generation: int, rank: int, size: int) -> bool:
        """The sums of one step. False: all members leave the ring after it."""
        state, end = self.state, self.end
        training = state.step < end
        if rank == 0 and not state.follows:
            self.history(state.ledger.epochs.history)
        batch = self.batches.of(state.step, end) if training else None
        self.in_flight = len(batch) if batch else 0
        bad = () if batch is None else batch.bad
        told = control.write(
            state.step,
            leave=self.session.must_leave(generation),
            change=self.session.task is not None,
            bad=len(bad),
            holds=not state.follows,
            checkpoint=training and self.can_write(state.step + 1),
            round=state.round,
        )
        start, stop = self.steps.positions(state.step) if training else (0, 0)
        # A rank without a record takes part all the same, with weight zero.
        part = batch if self.in_flight else None
        if self.servers is not None and part is None and not state.follows:
            # All servers hear of each step, also before one without a record.
            self.servers.pull(state.step, ())
        with self.watched(part, state.step):
            sums = self.learner.sums(part, told, state.step, rank, stop - start)
        # From here on the step has happened, for this rank. And all have the one before it.
        self.report.step_summed(sums.waited)
        agreed = sums.agreed
        check(agreed, state.step, state.round, size, stop - start)
        if agreed.nonfinite and self.config.training.non_finite == "stop":
            refuse_nonfinite(batch, sums, state.step, self.session.worker)
        epoch, most = self.steps.epoch(state.step), self.config.data.max_bad_records
        refuse_too_many_bad(agreed, bad, epoch, state.ledger.bad.get(epoch, 0), most)
        with self.watched(part, state.step, "the update of "):
            metrics = self.commit(generation, sums) if training else None
        if bad:
            self.report.left_out(generation, self.steps.epoch(state.step - 1), bad)
        self.report.step_done(generation, rank, state.step, self.in_flight, agreed)
        if metrics is not None:
            self.epoch_ends(self.steps.epoch(state.step), metrics)
        if agreed.writers == size and not agreed.nonfinite:
            self.write()
        self.in_flight = 0
        self.start_generation(agreed, size)
        return not agreed.leave and (training or not self.steps.ended(state.step, self.epochs))

    def watched(self, batch: Batch | None, step: int, what: str = "") -> AbstractContextManager[object]:
        """Limits the time of the model's code in a step; without a batch, none of it runs."""
        if batch is None:
            return nullcontext()
        return self.computing(what or "step", lambda: f"{what}step {step + 1}, with the {batch},", len(batch))

    def start_generation(self, agreed: control.Agreed, size: int) -> None:
        """What all ranks know at the same step, they act on together."""
        if self.part_then is not None and agreed.holders == size:
            self.batches.take_from(self.state.step + 1, self.part_then)
            self.rounds.take(self.part_then)
            self.part_then = None
        if agreed.changes == size:
            self.task = self.session.take_task()

    def commit(self, generation: int, sums: control.Sums | Turn) -> dict[str, Value] | None:
        """The ring has taken one more. Who followed it, and has all of it now, says so.

        Returns:
            the metrics of an epoch that ends with it, if one does.
        """
        metrics = self.state.add(sums)
        if not self.is_up and not self.state.follows:
            self.hold(generation)
        return metrics

    # --- callbacks

    @property
    def begins_epoch(self) -> bool:
        """Whether the next step is the first one of an epoch."""
        return self.state.step == 0 or self.steps.ends_epoch(self.state.step)

    @property
    def facts(self) -> dict[str, float]:
        """Of the ring, for callbacks that show them."""
        return {"ring_size": float(self.place.size), "goodput": self.report.goodput}

    def take_turn(self, callbacks: Callbacks, generation: int, rank: int) -> bool:
        """One rank calls the callbacks, and all take over what they have changed. True: the ring goes on."""
        mine: Turn | None = None
        if rank == self.caller:
            whole = self.steps.epoch(self.state.step)
            mine = callbacks.turn(self.state.ledger.epochs, whole, self.task, self.facts)
        data = np.zeros(0, np.uint8) if mine is None else mine.pack()
        length = int(self.ring.broadcast(np.array([len(data)], np.int64), self.caller)[0])
        data = data if mine is not None else np.zeros(length, np.uint8)
        data = self.ring.broadcast(data, self.caller)
        turn = mine if mine is not None else Turn.unpack(data)
        self.commit(generation, turn)
        return True

    def end_epoch(self) -> None:
        """Callbacks are told of the end of the last epoch, by who saves the model."""
        whole = self.steps.epoch(self.state.ledger.step)
        if self.callbacks is not None and self.state.ledger.epochs.due(whole, more=False):
            self.state.change(self.callbacks.turn(self.state.ledger.epochs, whole, whole, self.facts))

    # --- one round of an evaluation

    def take_round(self, now: Pass, generation: int, rank: int, size: int) -> bool:
        """The sums of one round. False: all members leave the ring after it."""
        state = self.state
        ended = self.config.trains and self.steps.ended(state.step, self.epochs)
        if ended and state.round == 0 and rank == self.caller:
            self.keep(state.step)  # what is trained is kept, whoever dies of its evaluation
        last = state.round + 1 == now.end and self.is_of_epoch(now)
        told = control.write(
            state.step,
            leave=self.session.must_leave(generation),
            change=self.session.task is not None,
            holds=not state.follows,
            checkpoint=last and self.can_write(state.step, evaluated=True),
            round=state.round,
        )
        values = self.rounds.part(now, state.round, told, state.follows)
        summed = np.asarray(self.ring.reduce(np.concatenate([values, told])))
        agreed, given = control.read(summed[len(values) :]), (now, summed[: len(values)])
        failed, (start, stop) = agreed.nonfinite, now.positions(state.round)
        check(agreed, state.step, state.round, size, agreed.records if failed else stop - start)
        round = now.end if failed else state.round + 1
        self.commit(generation, control.Sums(agreed, False, 0.0, summed.nbytes, given, round))
        self.report.round_done(generation, rank, state.step, now, state.round)
        if state.round == now.end and rank == 0 and not state.follows:
            self.rounds.say(generation, state.ledger, now.split)
        if last and self.checkpoints is not None and not state.follows:
            found = as_numbers(state.ledger.epochs.history[-1])
            self.checkpoints.epoch_ended(state.step, found, evaluated=True)
        if agreed.writers == size and not failed:
            self.write()
        self.start_generation(agreed, size)
        return not agreed.leave

    def is_of_epoch(self, now: Pass) -> bool:
        """Whether the pass is the evaluation of an epoch that has ended, as its history has it."""
        return now.split == self.config.evaluation.split and self.steps.ends_epoch(self.state.step)
