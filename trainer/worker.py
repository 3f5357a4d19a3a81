"""Elastic training, from one worker's side. Read this file from top to bottom.

A worker lives through rings. The master says who is in the next one (`FormRing`); the members
meet, and then all of them step until they leave the ring together or it breaks. The process and its
model outlive the ring.

    train   wait for an order, ride the ring, say how it ended; again
    ride    form ─▶ step, step, step ... ─▶ close
    step    a part of a batch, its sums over the ring, one update, one more step in the model

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

**Rows of embeddings** may be on parameter servers. Ring and servers are at the same step: the root of a new
ring tells the servers where it is (`join_servers`) before anything is summed. Each rank pulls the rows of its
part, and its gradients are there before it takes part in the sums; so their coming back is the step for
the servers, too. What became of it is told to them with the next call, and is a part of the ledger: who has
the state can tell it. Where a server has lost its rows, or has more than the ring, both go back together.
Where another number of servers is wanted, the root has the rows moved when all have the state (`move_rows`).

**All weights** may be on parameter servers (`mode=ps`). Then training is asynchronous, and this loop another
one in a few places: trainer/served_worker.py.

**The task** is to train up to a number of epochs. The master may change it at any time; the ring takes the
change up at one step: the one whose sum says that every rank knows of it.

The loop knows neither TensorFlow nor Horovod nor gRPC: a learner, a ring and a session are given to
it. The warm-up runs it in a ring of one, and the simulator a thousand times over in virtual time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edl.config import Config
from edl.contract.arrangement import Arrangement
from edl.contract.evaluation import Pass
from edl.contract.layout import Part
from edl.contract.modes import MOST_SERVERS
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError, ModelError
from trainer import control
from trainer.checkpointing import Checkpointing, Place
from trainer.data import Batches
from trainer.epochs import Turn
from trainer.ledger import Ledger
from trainer.memory_copy import MemoryCopy
from trainer.refusals import check, refuse_nonfinite, refuse_too_many_bad
from trainer.ring.base import Arrival, Ring, RingBroken, broadcast_bytes, broadcast_parts, broadcast_text
from trainer.roles import Callbacks, Commit, Evaluation, Learner, Servers
from trainer.rounds import Rounds
from trainer.session.orders import End, Export, FormRing, WriteCheckpoint
from trainer.session.state import Session
from trainer.telemetry import Telemetry

KEPT = 256 << 20  # bytes of sums that a member keeps, or as many as its state has, while that is on its way
AT_ONCE = 2  # steps that it applies in the time of one, so that nobody waits for it long


class StatesDiffer(EdlError):
    """Nobody knows which member's state is the job's, and no checkpoint does."""


def adopt(ring: Ring, root: int, servers: Any, arrangement: Arrangement) -> None:
    """All members call the servers of this arrangement, where the root knows them: members whom different
    masters have told of servers know different ones."""
    addresses = broadcast_bytes(ring, json.dumps(servers.addresses).encode(), root)
    servers.adopt(arrangement, json.loads(addresses))


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
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        ring: Ring,
        learner: Learner,
        batches: Batches,
        report: Telemetry,
        export: Callable[[Mapping[str, float] | None], None],
        checkpoints: Checkpointing | None = None,
        warm_start: Callable[[], Ledger | None] | None = None,
        evaluation: Evaluation | None = None,
        callbacks: Callbacks | None = None,
        history: Callable[[Sequence[Mapping[str, float]]], None] = lambda history: None,
        memory: MemoryCopy | None = None,
        keep: Callable[[int], None] = lambda step: None,
        servers: Servers | None = None,
    ):
        self.config, self.session, self.ring, self.learner = config, session, ring, learner
        self.batches, self.report, self.export = batches, report, export
        self.checkpoints, self.warm_start = checkpoints, warm_start
        self.rounds = Rounds(evaluation, config, session)
        self.callbacks, self.history, self.memory, self.keep = callbacks, history, memory, keep
        self.steps = batches.steps
        self.servers = servers
        # What it begins with, if it has to begin again: the servers may.
        self.beginning = learner.parts() if servers is not None else []
        # The state, which all members share: the learner's variables, and
        self.ledger = Ledger()
        # This worker's own:
        self.step, self.round, self.turn = 0, 0, 0  # which the ring takes next
        self.task = 0  # epochs to train, as the ring has it
        self.stop = 0  # with so many the training ends, because a callback wants it; 0: none does
        self.stays = ""  # why the rows have not moved to where they are to be
        self.caller = 0  # the rank that calls the callbacks
        self.holds_state = False  # whether its memory is a copy of the job's state
        self.held_in = 0  # the last ring whose state it had
        self.is_up = False  # whether that is the state of the ring it is in
        self.place = Place(0, 0, 0, 1)  # in that ring
        self.in_flight = 0  # its records in a step that has not come back
        # Of a member that has entered the ring without its state:
        self.arrival: Arrival | None = None  # until the state is here
        self.kept: deque[control.Sums | Turn] = deque()  # steps that are not in the state yet
        self.part_then: Part | None = None  # this rank's, once all members have the state
        if servers is not None:
            servers.follow(learner.tables, lambda: self.ledger.commit)

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
        rank, size = form.members.index(self.session.worker), len(form.members)
        self.task, self.is_up = form.epochs, False
        self.place = Place(form.generation, form.members[0], rank, size)
        self.report.ring_formed()
        if form.distrusted and self.held_in <= form.distrusted:
            self.forget()
        broken = ""
        self.enter(form)
        self.read_ahead(form, rank)
        try:
            if self.session.was_cut(form.generation):
                raise RingBroken("the ring was cut before it was formed")
            self.ring.form(rank, size)
            in_flight_at = self.step
            self.meet(form, rank)
            self.report.ring_up(redone=self.in_flight if self.step <= in_flight_at else 0)
            for split in self.ledger.evaluated if rank == 0 and not self.follows else ():
                self.rounds.say(form.generation, self.ledger, split)  # who found it may not have told it
            while self.take_step(form.generation, rank, size):
                pass
        except RingBroken as error:
            broken = self.why_broken(form.generation, error)
            self.ring.cut()  # so that every other rank learns of it now
            if self.in_flight:
                self.report.step_breaks()
        self.ring.close()
        self.leave()
        self.arrival = None  # what is kept is worth nothing without the others
        self.kept.clear()
        self.go_on_from(self.ledger)
        self.report.ring_left(self.step)
        self.say_out(form.generation, broken)

    def forget(self) -> None:
        """What it holds may not be the job's state: it counts for nothing, whatever becomes of this ring."""
        self.holds_state, self.held_in = False, 0
        if self.memory is not None:
            self.memory.forget()

    def read_ahead(self, form: FormRing, rank: int) -> None:
        """While the ring is formed, its records of the next step are read, if that is the step it is at."""
        if self.holds_state and form.layout == self.batches.layout and self.step < self.end:
            self.batches.take(form.layout, self.part_at_first(form, rank))
            self.batches.begin(self.step)

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
        behind = not self.holds_state or self.ledger.step < form.step  # with a copy that is too old
        begun = False
        if form.sync and form.root == self.session.worker and behind:
            begun = self.restore(form.step)
            if form.distrust and not begun:
                raise StatesDiffer(f"{form.distrust}. There is no checkpoint that they could go back to")
        if back := self.join_servers(form, begun):
            form = replace(form, sync=True, joining=())  # what anybody else has is not the state any more
        if form.sync:
            self.sync(form.members.index(form.root), rank)
        self.move_rows(form)
        self.take_part(form, rank)
        if not self.follows:
            self.hold(form.generation, back)

    def restore(self, expected: int) -> bool:
        """Nobody holds the state: begin with that of the newest checkpoint, ledger and model together; where
        there is none, with a warm start. Returns whether there is either."""
        if self.restore_checkpoint(expected):
            return True
        if self.warm_start is not None:
            if (begun := self.warm_start()) is not None:
                self.go_on_from(begun)
            return True
        return False

    def restore_checkpoint(self, expected: int) -> bool:
        """Begin with the newest one. False: there is none."""
        if self.checkpoints is None or (found := self.checkpoints.restore(expected)) is None:
            return False
        self.go_on_from(found)
        return True

    def join_servers(self, form: FormRing, begun: bool) -> str:
        """Ring and servers are at the same step, as all ranks know when this returns. The root sees to it,
        before anybody else is given its state or sums with it.

        Args:
            begun: the root has just begun with a checkpoint, or with a warm start.

        Returns:
            why both had to go back, to what the root has now; empty: they had not.
        """
        if self.servers is None:
            return ""
        why = ""
        if form.root == self.session.worker:
            self.servers.speak_of(self.servers.claim(self.session.worker))
            # Rows may be another training's at the beginning, too: then that is a state like any other.
            there = self.ledger.step or self.warm_start is not None
            if there and not begun and (why := self.servers.settle(self.ledger.step)):
                begun = True
                if not self.go_back():
                    self.session.warn(f"{why}: the servers read the rows again, and what was done stands")
                    why = ""
            if begun or not there:
                attempt = self.checkpoints.attempt if self.checkpoints is not None else ""
                self.servers.restore(self.ledger.step, attempt if self.ledger.step else "")
        root = form.members.index(form.root)
        generation = np.array([self.servers.generation], np.int64)
        self.servers.speak_of(int(self.ring.broadcast(generation, root)[0]))
        self.stays = ""
        if why := broadcast_text(self.ring, why, root):
            self.report.went_back()
        return why

    def move_rows(self, form: FormRing) -> None:
        """The servers' rows are where the master wants them, or stay where they are, as all ranks know when
        this returns. All who hold the state have the same one, so that any of them can go on with them."""
        if self.servers is None:
            return
        why, root = "", form.members.index(form.root)
        told = np.zeros(3 + MOST_SERVERS, np.int64)
        if form.root == self.session.worker:
            why = self.servers.move(self.ledger.step) if self.servers.moves else ""
            of = self.servers.arrangement
            told[:3] = of.servers, of.replicas, bool(why)
            told[[3 + index for index in of.out]] = 1
        servers, replicas, stays, *out = self.ring.broadcast(told, root).tolist()
        away = tuple(index for index, is_out in enumerate(out) if is_out)
        adopt(self.ring, root, self.servers, Arrangement(servers, replicas, away))
        self.stays = broadcast_text(self.ring, why, root) if stays else ""

    def go_back(self) -> bool:
        """To the newest checkpoint; where there is none, to the beginning.

        Returns:
            whether the state is another one then: not where nothing is trained, and the same rows and weights
            are there again.
        """
        before, digest = self.ledger, "" if self.config.trains else self.learner.digest()
        self.learner.take_over(self.learner.prepared(list(self.beginning)))
        self.go_on_from(Ledger())
        self.restore(self.checkpoints.known if self.checkpoints is not None else 0)
        if digest and self.learner.digest() == digest:
            self.go_on_from(before)
            return False
        return True

    def go_on_from(self, ledger: Ledger) -> None:
        """That is what is in this worker's state."""
        self.ledger, self.step, self.round, self.turn = ledger, ledger.step, ledger.round, ledger.turn
        self.stop = ledger.epochs.stop

    @property
    def epochs(self) -> int:
        """How many are to be trained."""
        return min(self.task, self.stop) if self.stop else self.task

    @property
    def end(self) -> int:
        """The step at which nothing is left to train."""
        return self.steps.end(self.step, self.epochs)

    def begin_from_memory(self) -> pb.LeftRing | None:
        """Take over what a worker before this one has left in the memory of their place.

        Returns:
            which state it is; None: none is there.
        """
        if self.memory is None or (found := self.memory.newest()) is None:
            return None
        ledger, parts = found
        self.learner.take_over(self.learner.prepared(parts))
        self.go_on_from(ledger)
        self.holds_state = True
        return self.left("")

    def sync(self, root: int, rank: int) -> None:
        """All take the root's state: ledger and model together, or neither."""
        ledger = self.ledger.pack() if rank == root else np.zeros(0, np.uint8)
        parts = self.learner.parts()  # of the root; of the others, as long as those
        # First how long everything is, so that the others can make room for it.
        header = np.array([len(ledger), sum(map(len, parts))], np.int64)
        lengths = self.ring.broadcast(header, root).tolist()
        if rank != root:
            ledger = np.zeros(lengths[0], np.uint8)
        if lengths[1] != header[1]:
            raise ModelError(f"the ring's state has {lengths[1]} bytes, this worker's model has {header[1]}")
        ledger = self.ring.broadcast(ledger, root)
        parts = broadcast_parts(self.ring, parts, root)
        # Nothing is taken over before all of it is here.
        if rank != root:
            found = Ledger.unpack(ledger)
            self.learner.take_over(self.learner.prepared(parts))
            self.go_on_from(found)

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
            self.step, self.round, self.turn = form.step, form.round, form.turn
            self.arrival = self.ring.take(givers[rank], self.prepared, rank in givers.values())
            if not self.learner.follows:
                self.take_over(self.arrival)  # all wait for it
        elif rank in givers.values():
            self.ring.give([self.ledger.pack(), *self.learner.parts()])

    # --- a member that has entered the ring without the state

    @property
    def follows(self) -> bool:
        """Whether steps of the ring are not in its state yet."""
        return self.arrival is not None or bool(self.kept)

    def prepared(self, parts: list[np.ndarray]) -> tuple[Ledger, Any]:
        """A state that comes, for `take_over`: on the thread that receives it, and nothing is changed yet."""
        return Ledger.unpack(parts.pop(0)), self.learner.prepared(parts)

    def take_over(self, arrival: Arrival) -> None:
        """Take over the state that comes: ledger and model together."""
        ledger, values = arrival.state()
        self.learner.take_over(values)
        self.ledger, self.holds_state, self.arrival = ledger, True, None
        self.held_in = self.place.generation
        self.stop = self.stop or ledger.epochs.stop

    def hold(self, generation: int, back: str = "") -> None:
        """It has the state of the step that the ring is at.

        Args:
            back: why the ring has gone back to it, if it has.
        """
        self.holds_state = self.is_up = True
        self.held_in = generation
        joined = pb.JoinedRing(step=self.step, round=self.round, turn=self.turn, went_back=back)
        if self.servers is not None:
            of = self.servers.arrangement
            joined.servers, joined.out[:], joined.servers_stay = of.servers, of.out, self.stays
        self.session.say(generation, joined_ring=joined)

    def say_out(self, generation: int, broken: str) -> None:
        """Report how the ring was left: the state that the master goes on from."""
        self.session.say(generation, left_ring=self.left(broken))

    def left(self, broken: str) -> pb.LeftRing:
        """The state that it has outside of rings."""
        complete = self.holds_state and self.steps.ends_epoch(self.ledger.step)  # it may be the last
        digest = self.learner.digest() if complete else ""
        return self.ledger.left_ring(self.holds_state, broken, digest)

    # --- checkpoints

    def can_write(self, step: int, evaluated: bool = False) -> bool:
        """Whether it can write its part of one of the state of that step; of rank 0: and one is due.

        Args:
            evaluated: after the evaluation of that state.
        """
        if self.checkpoints is None or self.follows:
            return False
        waits = self.checkpoints.waits_for_evaluation and self.steps.ends_epoch(step)
        if evaluated != (waits and self.rounds.due(step, 0, self.epochs) is not None):
            return False
        return self.checkpoints.ready(self.place, step, self.steps, self.epochs, evaluated)

    def save_checkpoint(self) -> None:
        """Of the state that this worker holds, by itself."""
        if self.checkpoints is not None:
            self.checkpoints.save(self.ledger, self.steps, self.batches.layout)

    def save_model(self) -> None:
        """The last thing that is done in a job, unless servers have lost rows of which the model is made: the
        master has a ring formed then, which goes back with them."""
        try:
            self.export(self.rounds.worth(self.ledger))
        except RingBroken as error:
            if self.session.stopped or self.session.ended:
                return
            self.session.say(rows_lost=pb.RowsLost(why=str(error)))

    def epoch_ends(self, epochs: int, metrics: dict[str, float]) -> None:
        """So many epochs are whole: tell how good the last one was, and have a checkpoint of it say so."""
        found = self.ledger.epochs.history[-1]
        self.report.epoch_ends(epochs, found.get("loss"), metrics)
        if self.checkpoints is not None:
            self.checkpoints.epoch_ended(self.step, dict(found))

    def write(self) -> None:
        """All can, as all see at this step: begin to write the state that it has led to."""
        assert self.checkpoints is not None
        self.checkpoints.begin(self.place, self.ledger, self.steps, self.batches.layout)

    # --- one step

    def take_step(self, generation: int, rank: int, size: int) -> bool:
        """What comes next: a round, a turn, or a step. False: all members leave the ring after it."""
        if self.session.was_cut(generation):  # a ring of one sums nothing that could break
            raise RingBroken("the ring was cut")
        self.report.step_begins()
        if (now := self.rounds.due(self.step, self.round, self.epochs)) is not None:
            return self.take_round(now, generation, rank, size)
        end = self.end
        if rank == 0:
            self.report.to_go(end - self.step)
        if self.step < end and self.callbacks is not None and self.begins_epoch and not self.turn:
            return self.take_turn(self.callbacks, generation, rank)
        return self.train_on(generation, rank, size)

    def train_on(self, generation: int, rank: int, size: int) -> bool:
        """The sums of one step. False: all members leave the ring after it."""
        end = self.end
        training = self.step < end
        if rank == 0 and not self.follows:
            self.history(self.ledger.epochs.history)
        batch = self.batches.of(self.step, end) if training else None
        self.in_flight = len(batch) if batch else 0
        bad = () if batch is None else batch.bad
        told = control.write(
            self.step,
            leave=self.session.must_leave(generation),
            change=self.session.task is not None,
            bad=len(bad),
            holds=not self.follows,
            checkpoint=training and self.can_write(self.step + 1),
            round=self.round,
        )
        start, stop = self.steps.positions(self.step) if training else (0, 0)
        # A rank without a record takes part all the same, with weight zero.
        part = batch if self.in_flight else None
        if self.servers is not None and part is None and not self.follows:
            # All servers hear of each step, also before one without a record.
            self.servers.pull(self.step, ())
        sums = self.learner.sums(part, told, self.step, rank, stop - start)
        # From here on the step has happened, for this rank. And all have the one before it.
        self.report.step_summed(sums.waited)
        agreed = sums.agreed
        check(agreed, self.step, self.round, size, stop - start)
        if agreed.nonfinite and self.config.training.non_finite == "stop":
            refuse_nonfinite(batch, sums, self.step, self.session.worker)
        epoch, most = self.steps.epoch(self.step), self.config.data.max_bad_records
        refuse_too_many_bad(agreed, bad, epoch, self.ledger.bad.get(epoch, 0), most)
        metrics = self.commit(generation, sums) if training else None
        if bad:
            self.report.left_out(generation, self.steps.epoch(self.step - 1), bad)
        self.report.step_done(generation, rank, self.step, self.in_flight, agreed)
        if metrics is not None:
            self.epoch_ends(self.steps.epoch(self.step), metrics)
        if agreed.writers == size and not agreed.nonfinite:
            self.write()
        self.in_flight = 0
        self.settle(agreed, size)
        return not agreed.leave and (training or not self.steps.ended(self.step, self.epochs))

    def settle(self, agreed: control.Agreed, size: int) -> None:
        """What all ranks know at the same step, they act on together."""
        if self.part_then is not None and agreed.holders == size:
            self.batches.take_from(self.step + 1, self.part_then)
            self.rounds.take(self.part_then)
            self.part_then = None
        if agreed.changes == size:
            self.task = self.session.take_task()

    def commit(self, generation: int, sums: control.Sums) -> dict[str, float] | None:
        """Put the step into the state, or keep it until the state is here.

        Returns:
            the metrics of an epoch that ends with it, if one does.
        """
        self.kept.append(sums)
        self.step, self.round = self.step + (not sums.round), sums.round
        if not sums.round:
            self.turn = 0
        return self.catch_up(generation)

    def catch_up(self, generation: int) -> dict[str, float] | None:
        """Put what is kept into the state, as far as the state is here. Returns as `commit` does."""
        if self.arrival is not None:
            # Beyond that all wait for the state.
            full = sum(s.nbytes for s in self.kept) > max(KEPT, self.learner.nbytes)
            if not self.arrival.here and not full:
                return None
            self.take_over(self.arrival)
        for _ in range(min(len(self.kept), AT_ONCE)):
            metrics = self.put(self.kept.popleft())
        self.copy()
        if self.kept:
            return None
        if not self.is_up:
            self.hold(generation)
        return metrics

    def copy(self) -> None:
        """Into the memory of its place: before the next step, which is then proof that all have this one
        twice. The rounds of a pass that is not over are not worth a copy of all weights."""
        if self.memory is not None and not self.ledger.totals:
            self.memory.put(self.ledger, self.learner.parts())
            if self.memory.full:
                self.session.warn(f"no second copy of the state is kept in memory: {self.memory.full}")
                self.memory = None

    def put(self, sums: control.Sums | Turn) -> dict[str, float] | None:
        """Model and ledger, one after the other, nothing in between that can fail."""
        if isinstance(sums, Turn):
            self.learner.change(sums.changed)
            self.ledger = replace(self.ledger, turn=1, epochs=sums.after)
            return None
        if sums.round:
            ends_epoch = self.steps.ends_epoch(self.ledger.step)
            self.ledger = self.rounds.put(self.ledger, sums, ends_epoch)
            return None
        agreed = sums.agreed
        commit: Commit | None = None
        if self.servers is not None:
            made = self.learner.commit(self.ledger.step, sums)
            commit = replace(made, generation=self.servers.generation)
        if not agreed.nonfinite and agreed.records:
            self.learner.apply(sums)
        self.ledger = self.ledger.after(agreed, self.steps.epoch(self.ledger.step), commit)
        metrics: dict[str, float] | None = None
        if self.steps.ends_epoch(self.ledger.step):
            metrics = self.learner.take_metrics()
            self.ledger = replace(self.ledger, epochs=self.ledger.epochs.whole(metrics))
        return metrics

    # --- callbacks

    @property
    def begins_epoch(self) -> bool:
        """Whether the next step is the first one of an epoch."""
        return self.step == 0 or self.steps.ends_epoch(self.step)

    @property
    def facts(self) -> dict[str, float]:
        """Of the ring, for callbacks that show them."""
        return {"ring_size": float(self.place.size), "goodput": self.report.goodput}

    def take_turn(self, callbacks: Callbacks, generation: int, rank: int) -> bool:
        """One rank calls the callbacks, and all take over what they have changed. True: the ring goes on."""
        mine: Turn | None = None
        if rank == self.caller:
            whole = self.steps.epoch(self.step)
            mine = callbacks.turn(self.ledger.epochs, whole, self.task, self.facts)
        data = np.zeros(0, np.uint8) if mine is None else mine.pack()
        length = int(self.ring.broadcast(np.array([len(data)], np.int64), self.caller)[0])
        data = data if mine is not None else np.zeros(length, np.uint8)
        data = self.ring.broadcast(data, self.caller)
        turn = mine if mine is not None else Turn.unpack(data)
        self.turn, self.stop = 1, turn.after.stop
        self.kept.append(turn)
        self.catch_up(generation)
        return True

    def end_epoch(self) -> None:
        """Callbacks are told of the end of the last epoch, by who saves the model."""
        whole = self.steps.epoch(self.ledger.step)
        if self.callbacks is not None and self.ledger.epochs.due(whole, more=False):
            turn = self.callbacks.turn(self.ledger.epochs, whole, whole, self.facts)
            self.learner.change(turn.changed)
            self.ledger = replace(self.ledger, epochs=turn.after)

    # --- one round of an evaluation

    def take_round(self, now: Pass, generation: int, rank: int, size: int) -> bool:
        """The sums of one round. False: all members leave the ring after it."""
        ended = self.config.trains and self.steps.ended(self.step, self.epochs)
        if ended and self.round == 0 and rank == self.caller:
            self.keep(self.step)  # what is trained is kept, whoever dies of its evaluation
        last = self.round + 1 == now.end and self.is_of_epoch(now)
        told = control.write(
            self.step,
            leave=self.session.must_leave(generation),
            change=self.session.task is not None,
            holds=not self.follows,
            checkpoint=last and self.can_write(self.step, evaluated=True),
            round=self.round,
        )
        values = self.rounds.part(now, self.round, told, self.follows)
        summed = np.asarray(self.ring.reduce(np.concatenate([values, told])))
        agreed, given = control.read(summed[len(values) :]), (now, summed[: len(values)])
        failed, (start, stop) = agreed.nonfinite, now.positions(self.round)
        check(agreed, self.step, self.round, size, agreed.records if failed else stop - start)
        round = now.end if failed else self.round + 1
        self.commit(generation, control.Sums(agreed, False, 0.0, summed.nbytes, given, round))
        self.report.round_done(generation, rank, self.step, now, self.round)
        if self.round == now.end and rank == 0 and not self.follows:
            self.rounds.say(generation, self.ledger, now.split)
        if last and self.checkpoints is not None and not self.follows:
            self.checkpoints.epoch_ended(self.step, dict(self.ledger.epochs.history[-1]), evaluated=True)
        if agreed.writers == size and not failed:
            self.write()
        self.settle(agreed, size)
        return not agreed.leave

    def is_of_epoch(self, now: Pass) -> bool:
        """Whether the pass is the evaluation of an epoch that has ended, as its history has it."""
        return now.split == self.config.evaluation.split and self.steps.ends_epoch(self.step)
