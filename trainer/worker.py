"""Elastic training, from one worker's side. Read this file from top to bottom.

A worker lives through rings. The master says who is in the next one (`FormRing`); the members
meet, those who are new or behind take the state of one of them, the root, and then all of them
step until they leave the ring together or it breaks. The process and its model outlive the ring.

    train   wait for an order, ride the ring, say how it ended; again
    ride    form ─▶ sync ─▶ step, step, step ... ─▶ close
    step    one batch, one sum over the ring, one update, one entry in the ledger

**What a record's place is called.** All epochs lie on one line of positions. The master leases
ranges of it to workers: only the holder of a lease trains on it.

**The ledger** (`applied`) is the set of positions whose gradients are in the model. Each step's sum
carries, beside the gradients, the ranges that all ranks have just trained on; so every rank notes
all of them, together with the update. Model and ledger are one state: they are taken over
together, and they cannot disagree. That is why no record is lost or counted twice, whoever dies.

**Nothing is rolled back.** When a member dies, each survivor has the step in flight, or has it
not: its sum came back, or it did not. The ring goes on from one who has it, if one lives. What is
left of a lease is therefore the lease minus the ledger, never a count of one's own: the state
that is taken over may have this worker's last batch in it, or not, and either is right.

**A step is safe** once the next sum has come back, for then every member has it. Only what is
safe is reported to the master: a step that one rank alone has may die with it.

The loop knows neither TensorFlow nor Horovod nor gRPC: a learner, a ring and a session are given to
it. The warm-up runs it in a ring of one, and the simulator a thousand times over in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

import numpy as np

from edl.config import Config
from edl.contract.batching import local_batch
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import Range, RangeSet
from edl.errors import EdlError
from trainer import control
from trainer.data import Batch, Batches, HeldLeases
from trainer.ring.base import Ring, RingBroken, Vector
from trainer.session.orders import End, Export, FormRing
from trainer.session.state import Session
from trainer.telemetry import Telemetry

IDLE_SECONDS = 0.05


class NonFinite(EdlError):
    """A gradient or loss is not finite, and the job does not go on after one."""


class Learner(Protocol):
    """A model, as two halves of a step with the ring's sum in between."""

    def gradients(self, batch: Batch, contribution: np.ndarray, step: int, rank: int) -> Vector:
        """This rank's part of the sum, with the control vector `contribution` at its end. Changes nothing.

        Raises:
            RingBroken: it takes sums of its own, and one of them did not come back.
        """
        ...

    def nothing(self, contribution: np.ndarray) -> Vector:
        """The part of a rank that has no batch. Raises as `gradients` does."""
        ...

    def agreed(self, total: Vector) -> control.Agreed:
        """What the control vector at the end of the sum says."""
        ...

    def update(self, total: Vector) -> None:
        """Apply the sum to the model."""
        ...

    def state(self) -> np.ndarray:
        """Everything that `update` changes, uint8 [bytes]."""
        ...

    def load(self, state: np.ndarray) -> None:
        """Take over another worker's `state`."""
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
    ):
        self.config, self.session, self.ring, self.learner = config, session, ring, learner
        self.batches, self.report, self.export = batches, report, export
        self.positions = batches.epoch_size * config.training.epochs  # of the whole job
        # The state that all members share, beside the learner's variables:
        self.step = 0
        self.applied = RangeSet()
        self.skipped = RangeSet()  # the part of it that was left out: its gradients were not finite
        # This worker's own:
        self.holds_state = False  # whether its memory is a copy of the job's state
        self.leases = HeldLeases()
        self.asked = False  # for a lease that has not come yet
        self.in_flight: Range | None = None  # its batch in a step that has not come back

    # --- rings, one after the other

    def train(self) -> End:
        """Follow the master's orders until one of them ends this worker, or there is no master any more."""
        while True:
            match self.session.next_order():
                case FormRing() as form:
                    self.ride(form)
                case Export():
                    self.export()
                case End() as end:
                    return end

    def ride(self, form: FormRing) -> None:
        """One ring, from meeting the others to having left it."""
        rank, size = form.members.index(self.session.worker), len(form.members)
        self.session.new_leases()  # what came before this order is in it
        self.leases.replace(form.leases)
        self.asked = False
        self.report.ring_formed()
        broken = ""
        try:
            if self.session.was_cut(form.generation):
                raise RingBroken("the ring was cut before it was formed")
            self.ring.form(rank, size)
            if form.sync:
                self.sync(form.members.index(form.root), rank)
            self.holds_state = True
            self.session.say(form.generation, joined_ring=pb.JoinedRing(step=self.step))
            self.report.ring_up(redone=self.lost_records())
            self.in_flight = None
            while self.take_step(form.generation, rank, size):
                pass
        except RingBroken as error:
            broken = str(error)
            self.ring.cut()  # so that every other rank learns of it now
            if self.in_flight is not None:
                self.report.step_breaks()
        self.ring.close()
        self.report.ring_left(self.step)
        self.say_out(form.generation, broken)

    def sync(self, root: int, rank: int) -> None:
        """Take the root's state: ledger and model together, or neither."""
        ledgers = [np.array(s.ranges, np.int64).reshape(-1) for s in (self.applied, self.skipped)]
        state = self.learner.state() if rank == root else np.zeros(0, np.uint8)
        # First how long everything is, so that the others can make room for it.
        header = np.array([self.step, len(ledgers[0]), len(ledgers[1]), len(state)], np.int64)
        step, applied, skipped, length = self.ring.broadcast(header, root).tolist()
        if rank != root:
            ledgers = [np.zeros(applied, np.int64), np.zeros(skipped, np.int64)]
            state = np.zeros(length, np.uint8)
        ledger = self.ring.broadcast(np.concatenate([*ledgers, [0]]), root)  # never empty
        state = self.ring.broadcast(state, root)
        # Nothing is taken over before all of it is here.
        if rank != root:
            self.learner.load(state)
            self.step = step
            self.applied = RangeSet.of(_pairs(ledger[:applied]))
            self.skipped = RangeSet.of(_pairs(ledger[applied : applied + skipped]))
            self.leases.applied(self.applied)

    def lost_records(self) -> int:
        """Records of the step that broke which are in no state that goes on: they are trained again."""
        return len(RangeSet.of([self.in_flight or (0, 0)]).minus(self.applied))

    def say_out(self, generation: int, broken: str) -> None:
        """Report how the ring was left: the state that the master goes on from."""
        complete = self.holds_state and self.applied.covers(0, self.positions)
        out = pb.LeftRing(
            step=self.step,
            has_state=self.holds_state,
            applied=_ranges(self.applied),
            skipped=_ranges(self.skipped),
            broken=broken,
            digest=self.learner.digest() if complete else "",
        )
        self.session.say(generation, left_ring=out)

    # --- one step

    def take_step(self, generation: int, rank: int, size: int) -> bool:
        """One collective. False: all members leave the ring after it."""
        self.report.step_begins()
        batch = self.next_batch(generation, rank, size)
        positions = batch.positions if batch else None
        told = control.write(rank, size, positions, leave=self.session.must_leave(generation))
        self.in_flight = positions
        if batch is None:
            vector = self.learner.nothing(told)  # it takes part all the same, with weight zero
        else:
            vector = self.learner.gradients(batch, told, self.step, rank)
        total = self.ring.reduce(vector)
        # From here on the step has happened, for this rank. And all have the one before it.
        safe = self.applied
        agreed = self.learner.agreed(total)
        if agreed.nonfinite and self.config.training.non_finite == "stop":
            self.refuse_nonfinite(batch, vector)
        self.commit(agreed, total)
        self.report.step_done(generation, rank, self.step, len(batch) if batch else 0, agreed, safe)
        if agreed.idle and not agreed.leave:
            self.session.wait_for_news(IDLE_SECONDS)
        return not agreed.leave

    def next_batch(self, generation: int, rank: int, size: int) -> Batch | None:
        """The next records of this worker's leases, at most its share of the global batch."""
        for lease in self.session.new_leases():
            self.leases.add(lease)
            self.asked = False
        share = local_batch(self.config.training.batch_size, rank, size)
        if share and len(self.leases) < 2 * share and not self.asked:  # early: a step need not wait for it
            self.asked = True
            self.session.say(generation, lease_request=pb.LeaseRequest())
        return self.batches.first(self.leases, share)

    def refuse_nonfinite(self, batch: Batch | None, vector: Vector) -> NoReturn:
        """A part of the sum is not finite. No rank has changed anything.

        Args:
            vector: this rank's part.

        Raises:
            NonFinite: it is this rank's, and the job ends.
            RingBroken: it is another's, which says so; this one waits for what follows.
        """
        if batch is None or not self.learner.agreed(vector).nonfinite:
            raise RingBroken("the loss or a gradient of another worker is not finite")
        raise NonFinite(
            f"the loss or a gradient is not finite at step {self.step + 1}, on worker {self.session.worker}, "
            f"in the {batch}"
        )

    def commit(self, agreed: control.Agreed, total: Vector) -> None:
        """Put the step into the state: model and ledger, one after the other, nothing in between."""
        if agreed.records and not agreed.nonfinite:
            self.learner.update(total)
        for start, stop in agreed.batches:
            self.applied = self.applied.add(start, stop)  # refuses what is there: nothing enters twice
            if agreed.nonfinite:
                self.skipped = self.skipped.add(start, stop)
        if agreed.records:
            self.step += 1
        self.in_flight = None
        self.leases.applied(RangeSet.of(agreed.batches))


def _ranges(ranges: RangeSet) -> list[pb.Range]:
    return [pb.Range(start=start, stop=stop) for start, stop in ranges]


def _pairs(flat: np.ndarray) -> list[Range]:
    return [(int(start), int(stop)) for start, stop in flat.reshape(-1, 2)]
