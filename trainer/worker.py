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

**The task** is to train up to a number of epochs. The master may change it at any time; the ring takes the
change up at one step: the one whose sum says that every rank knows of it.

The loop knows neither TensorFlow nor Horovod nor gRPC: a learner, a ring and a session are given to
it. The warm-up runs it in a ring of one, and the simulator a thousand times over in virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from edl.config import Config
from edl.contract.layout import Part
from edl.contract.proto import edl_pb2 as pb
from edl.errors import DataError, EdlError, ModelError
from trainer import control
from trainer.checkpointing import Checkpointing, Place
from trainer.data import BadRecord, Batch, Batches
from trainer.described import Described
from trainer.ledger import Ledger, LedgerBroken
from trainer.ring.base import Arrival, Ring, RingBroken, broadcast_parts
from trainer.session.orders import End, Export, FormRing, WriteCheckpoint
from trainer.session.state import Session
from trainer.telemetry import Telemetry

KEPT = 256 << 20  # bytes of sums that a member keeps, or as many as its state has, while that is on its way
AT_ONCE = 2  # steps that it applies in the time of one, so that nobody waits for it long


class NonFinite(EdlError):
    """A gradient or loss is not finite, and the job does not go on after one."""


class Learner(Protocol):
    """A model, as two halves of a step: its sums over the ring, and what they change."""

    def sums(
        self, batch: Batch | None, contribution: np.ndarray, step: int, rank: int, records: int
    ) -> control.Sums:
        """Take part in all sums of a step. Changes nothing.

        Args:
            batch: this rank's part; None: it has none, and takes part with weight zero.
            contribution: the control vector of this rank; what depends on the batch is added here.
            records: of the whole step, on all ranks, bad ones included.

        Raises:
            RingBroken: one of the sums did not come back here.
        """
        ...

    def apply(self, sums: control.Sums) -> None:
        """Apply what the sums have given to the model."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """The compiled metrics over the epoch that has ended; the next one begins with none."""
        ...

    @property
    def follows(self) -> bool:
        """Whether sums can be applied later than they are made, in another state."""
        ...

    @property
    def nbytes(self) -> int:
        """How large the state is."""
        ...

    def state(self) -> np.ndarray:
        """Everything that `apply` changes, uint8 [bytes]."""
        ...

    def parts(self) -> list[np.ndarray]:
        """The same, uint8 [bytes] for each variable: as it is now, whatever is applied later."""
        ...

    def prepared(self, parts: list[np.ndarray]) -> Any:
        """Another worker's `parts`, for `take_over`: what takes time, on any thread. Changes nothing; each
        part is dropped from the list as soon as it is used."""
        ...

    def take_over(self, values: Any) -> None:
        """Take over what was prepared."""
        ...

    def load(self, state: np.ndarray) -> None:
        """Take over another worker's `state`."""
        ...

    def described(self) -> list[Described]:
        """The variables of `parts`."""
        ...

    def fingerprint(self) -> str:
        """Of how the model is made: equal on two workers that can share a ring."""
        ...

    def digest(self) -> str:
        """Of the state: equal on two workers when their models are equal, bit for bit."""
        ...


class Worker:
    """One worker: a model, a ring, data, and a session with the master.

    Args:
        export: saves and evaluates the final model, and tells the master how that went.
        checkpoints: None: the job writes none.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        ring: Ring,
        learner: Learner,
        batches: Batches,
        report: Telemetry,
        export: Callable[[], None],
        checkpoints: Checkpointing | None = None,
    ):
        self.config, self.session, self.ring, self.learner = config, session, ring, learner
        self.batches, self.report, self.export = batches, report, export
        self.checkpoints = checkpoints
        self.steps = batches.steps
        # The state, which all members share: the learner's variables, and
        self.ledger = Ledger()
        # This worker's own:
        self.step = 0  # which the ring takes next
        self.epochs = 0  # to train: the task, as the ring has it
        self.holds_state = False  # whether its memory is a copy of the job's state
        self.is_up = False  # whether that is the state of the ring it is in
        self.place = Place(0, 0, 0, 1)  # in that ring
        self.in_flight = 0  # its records in a step that has not come back
        # Of a member that has entered the ring without its state:
        self.arrival: Arrival | None = None  # until the state is here
        self.kept: deque[control.Sums] = deque()  # steps that are not in the state yet
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
                    self.export()
                case WriteCheckpoint():
                    self.save_checkpoint()
                case End() as end:
                    return end

    def ride(self, form: FormRing) -> None:
        """One ring, from meeting the others to having left it."""
        rank, size = form.members.index(self.session.worker), len(form.members)
        self.epochs, self.is_up = form.epochs, False
        self.place = Place(form.generation, form.members[0], rank, size)
        self.report.ring_formed()
        broken = ""
        try:
            if self.session.was_cut(form.generation):
                raise RingBroken("the ring was cut before it was formed")
            self.ring.form(rank, size)
            in_flight_at = self.step
            if form.sync and form.root == self.session.worker and not self.holds_state:
                self.restore(form.step)
            if form.sync:
                self.sync(form.members.index(form.root), rank)
            self.take_part(form, rank)
            if not self.follows:
                self.hold(form.generation)
            self.report.ring_up(redone=self.in_flight if self.step <= in_flight_at else 0)
            while self.take_step(form.generation, rank, size):
                pass
        except RingBroken as error:
            broken = str(error)
            self.ring.cut()  # so that every other rank learns of it now
            if self.in_flight:
                self.report.step_breaks()
        self.ring.close()
        self.arrival, self.step = None, self.ledger.step  # what is kept is worth nothing without the others
        self.kept.clear()
        self.report.ring_left(self.step)
        self.say_out(form.generation, broken)

    def restore(self, expected: int) -> None:
        """Nobody holds the state: begin with that of the newest checkpoint, ledger and model together."""
        if self.checkpoints is not None and (found := self.checkpoints.restore(expected)) is not None:
            self.ledger, self.step = found, found.step

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
            self.ledger, self.step = found, found.step

    def take_part(self, form: FormRing, rank: int) -> None:
        """Which part of each step is this rank's. Those who join without the state have none yet: they take
        part in the sums, and are sent the state of this moment meanwhile."""
        joining = [form.members.index(worker) for worker in form.joining]
        holders = [r for r in range(len(form.members)) if r not in joining]
        now = Part(rank, tuple(0 if r in joining else share for r, share in enumerate(form.shares)))
        self.part_then = Part(rank, form.shares) if joining else None
        self.batches.take(form.layout, now)
        givers = {taker: holders[i % len(holders)] for i, taker in enumerate(joining)}
        if rank in givers:
            self.step, self.arrival = form.step, self.ring.take(givers[rank], self.prepared)
            if not self.learner.follows:
                self.take_over(self.arrival)  # all wait for it
        elif takers := list(givers.values()).count(rank):
            self.ring.give([self.ledger.pack(), *self.learner.parts()], takers)

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

    def hold(self, generation: int) -> None:
        """It has the state of the step that the ring is at."""
        self.holds_state = self.is_up = True
        self.session.say(generation, joined_ring=pb.JoinedRing(step=self.step))

    def say_out(self, generation: int, broken: str) -> None:
        """Report how the ring was left: the state that the master goes on from."""
        complete = self.holds_state and self.steps.ends_epoch(self.ledger.step)  # it may be the last
        digest = self.learner.digest() if complete else ""
        self.session.say(generation, left_ring=self.ledger.left_ring(self.holds_state, broken, digest))

    # --- checkpoints

    def can_write(self) -> bool:
        """Whether it can write its part of one after the next step; of rank 0: and one is due."""
        if self.checkpoints is None or self.follows:
            return False
        return self.checkpoints.ready(self.place, self.step + 1, self.steps, self.epochs)

    def save_checkpoint(self) -> None:
        """Of the state that this worker holds, by itself."""
        if self.checkpoints is not None:
            self.checkpoints.save(self.ledger, self.steps, self.batches.layout)

    def write(self) -> None:
        """All can, as all see at this step: begin to write the state that it has led to."""
        assert self.checkpoints is not None
        self.checkpoints.begin(self.place, self.ledger, self.steps, self.batches.layout)

    # --- one step

    def take_step(self, generation: int, rank: int, size: int) -> bool:
        """The sums of one step. False: all members leave the ring after it."""
        self.report.step_begins()
        end = self.steps.end(self.step, self.epochs)
        training = self.step < end
        batch = self.batches.of(self.step, end) if training else None
        self.in_flight = len(batch) if batch else 0
        bad = () if batch is None else batch.bad
        told = control.write(
            self.step,
            leave=self.session.must_leave(generation),
            change=self.session.task is not None,
            bad=len(bad),
            holds=not self.follows,
            checkpoint=training and self.can_write(),
        )
        start, stop = self.steps.positions(self.step) if training else (0, 0)
        # A rank without a record takes part all the same, with weight zero.
        part = batch if self.in_flight else None
        sums = self.learner.sums(part, told, self.step, rank, stop - start)
        # From here on the step has happened, for this rank. And all have the one before it.
        self.report.step_summed(sums.waited)
        agreed = sums.agreed
        self.check(agreed, size, stop - start)
        if agreed.nonfinite and self.config.training.non_finite == "stop":
            self.refuse_nonfinite(batch, sums)
        self.refuse_too_many_bad(agreed, bad)
        metrics = self.commit(generation, sums) if training else None
        if agreed.writers == size and not agreed.nonfinite:
            self.write()
        if bad:
            self.report.left_out(generation, self.steps.epoch(self.step - 1), bad)
        self.report.step_done(generation, rank, self.step, self.in_flight, agreed)
        if metrics is not None:
            self.report.epoch_ends(self.steps.epoch(self.step), metrics)
        self.in_flight = 0
        if self.part_then is not None and agreed.holders == size:  # likewise seen by all at this step
            self.batches.take(self.batches.layout, self.part_then)
            self.part_then = None
        if agreed.changes == size:  # every rank knows, and all see that it does at this step
            self.epochs = self.session.take_task()
        return not agreed.leave and (training or not self.steps.ended(self.step, self.epochs))

    def check(self, agreed: control.Agreed, size: int, records: int) -> None:
        """All ranks took one step, and all of its records are in it.

        Raises:
            LedgerBroken: it is not so.
        """
        if not agreed.all_at(self.step, size):
            raise LedgerBroken(f"the ranks take different steps (this one step {self.step + 1})")
        if (found := agreed.records + agreed.bad) != records:
            raise LedgerBroken(
                f"step {self.step + 1} has {found} records of {size} ranks, expected {records}"
            )

    def refuse_nonfinite(self, batch: Batch | None, sums: control.Sums) -> NoReturn:
        """A part of the step is not finite. No rank has changed anything.

        Raises:
            NonFinite: it is this rank's, and the job ends.
            RingBroken: it is another's, which says so; this one waits for what follows.
        """
        if batch is None or not sums.at_fault:
            raise RingBroken("the loss or a gradient of another worker is not finite")
        raise NonFinite(
            f"the loss or a gradient is not finite at step {self.step + 1}, on worker {self.session.worker}, "
            f"in the {batch}"
        )

    def refuse_too_many_bad(self, agreed: control.Agreed, mine: Sequence[BadRecord]) -> None:
        """Bad records are left out of the step, if the job allows as many in an epoch.

        Args:
            mine: those in this rank's part.

        Raises:
            DataError: some are this rank's, and they are too many: the job ends.
            RingBroken: they are others', who say so; this one waits for what follows.
        """
        epoch, most = self.steps.epoch(self.step), self.config.data.max_bad_records
        total = self.ledger.bad.get(epoch, 0) + agreed.bad
        if not agreed.bad or total <= most:
            return
        if not mine:
            raise RingBroken("another worker has found more bad records than data.maxBadRecords allows")
        raise DataError(
            f"record {mine[-1].index} is bad: {mine[-1].why}. With it, {total} records of epoch {epoch + 1} "
            f"are; data.maxBadRecords is {most}"
        )

    def commit(self, generation: int, sums: control.Sums) -> dict[str, float] | None:
        """Put the step into the state, or keep it until the state is here.

        Returns:
            the metrics of an epoch that ends with it, if one does.
        """
        self.kept.append(sums)
        self.step += 1
        if self.arrival is not None:
            # Beyond that all wait for the state.
            full = sum(s.nbytes for s in self.kept) > max(KEPT, self.learner.nbytes)
            if not self.arrival.here and not full:
                return None
            self.take_over(self.arrival)
        for _ in range(min(len(self.kept), AT_ONCE)):
            metrics = self.put(self.kept.popleft())
        if self.kept:
            return None
        if not self.is_up:
            self.hold(generation)
        return metrics

    def put(self, sums: control.Sums) -> dict[str, float] | None:
        """Model and ledger, one after the other, nothing in between that can fail."""
        agreed = sums.agreed
        if not agreed.nonfinite and agreed.records:
            self.learner.apply(sums)
        self.ledger = self.ledger.after(agreed, self.steps.epoch(self.ledger.step))
        return self.learner.take_metrics() if self.steps.ends_epoch(self.ledger.step) else None
