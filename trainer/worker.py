"""Elastic training, from one worker's side. Read this file from top to bottom.

A worker lives through rings. The master says who is in the next one (`FormRing`); the
members meet, those who are new or behind take the state of the root, and then all of them
step until the ring is left together or breaks:

    train   wait for an order, ride the ring, say how it ended; again
    ride    form ─▶ sync ─▶ step, step, step ... ─▶ close
    step    one batch, one sum over the ring, one update, one entry in the ledger

The ledger (`applied`) is the set of positions whose gradients are in the model. Every rank
sees the ranges of all ranks in each sum and notes them together with the update. So model
and ledger are one state: they are taken over together, and they cannot disagree. What is
left of a lease is the lease minus the ledger, never a count of one's own: after a failure
the ring may go on from a state that has this worker's last range in it, or not, and either
is right.

A step is safe once the next sum has come back, for then every member has it. Only what is
safe is told to the master.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from edl.config import Config
from edl.proto import edl_pb2 as pb
from edl.ranges import Range, RangeSet
from edl.shares import local_batch
from trainer import control
from trainer.data import Batch, Leases, Source
from trainer.learner import Learner
from trainer.link import End, Export, FormRing, Link, Progress
from trainer.ring import Ring, RingBroken

IDLE_SECONDS = 0.05
LOG_SECONDS = 10.0
LOSS_MEMORY = 0.95  # how much of the loss that is told was there a step before


class NonFinite(Exception):
    """A gradient or loss is not finite, and the job does not go on after one."""


class Worker:
    """One worker: a model, a ring, data, and a link to the master.

    Args:
        size: records in one epoch.
        export: evaluates and saves the final model; returns (metrics, file name).
    """

    def __init__(
        self,
        config: Config,
        link: Link,
        ring: Ring,
        learner: Learner,
        source: Source,
        size: int,
        export: Callable[[], tuple[dict[str, float], str]],
    ):
        self.config, self.link, self.ring = config, link, ring
        self.learner, self.source, self.size, self.export = learner, source, size, export
        self.total = size * config.training.epochs
        # The replicated state, beside the learner's variables:
        self.step = 0
        self.applied = RangeSet()
        self.skipped = RangeSet()
        # This worker's own:
        self.holds = False  # whether its memory is a copy of the job's state
        self.leases = Leases()
        self.asked = False  # for a lease, and none has come yet
        self.records = 0  # trained here in this ring
        self.loss = (0.0, 0.0)  # decaying sums: of the loss, of the records
        self.told = RangeSet()  # the safe set that the master was last told of
        self.in_flight: Range | None = None  # the batch of a step that has not come back
        self.last_step_at: float | None = None
        self.log_at = 0.0  # when the loss is logged again
        self.step_began_at = 0.0
        self.wasted = 0.0  # seconds in a step that did not come back
        self.change: tuple[int, float] | None = None  # to tell after the first step: redone, wasted
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="read")
        self.next: tuple[Range, Future[Batch]] | None = None

    # --- rings, one after the other

    def train(self) -> End:
        """Follow the master's orders until it says stop, or is gone."""
        while True:
            match self.link.next_order():
                case FormRing() as form:
                    self.ride(form)
                case Export():
                    metrics, model = self.export()
                    self.link.say(finished=pb.Finished(metrics=metrics, model=model))
                case End() as end:
                    return end

    def ride(self, form: FormRing) -> None:
        """One ring, from meeting the others to having left it. The state outlives it."""
        rank, size = form.members.index(self.link.worker), len(form.members)
        self.link.new_leases()  # what came before this order is in it
        self.leases.replace(form.leases)
        self.asked, self.records, self.told = False, 0, RangeSet()
        broken = ""
        try:
            if self.link.was_cut(form.generation):
                raise RingBroken("a member was gone before the ring was formed")
            self.ring.form(rank, size)
            if form.sync:
                self.sync(form.members.index(form.root), rank)
            self.holds = True
            self.link.say(form.generation, up=pb.Up(step=self.step))
            self.change = len(RangeSet.of([self.in_flight or (0, 0)]).minus(self.applied)), self.wasted
            self.in_flight, self.wasted = None, 0.0
            while self.take_step(form.generation, rank, size):
                pass
        except RingBroken as error:
            broken = str(error)
            self.ring.cut()  # so that every other rank learns of it now
            if self.in_flight is not None:
                self.wasted = time.monotonic() - self.step_began_at
        self.ring.close()
        self.link.progress = Progress(step=self.step)
        complete = self.applied.covers(0, self.total)
        self.link.say(
            form.generation,
            out=pb.Out(
                step=self.step,
                holds=self.holds,
                applied=_ranges(self.applied),
                skipped=_ranges(self.skipped),
                broken=broken,
                digest=self.learner.digest() if self.holds and complete else "",
            ),
        )

    def sync(self, root: int, rank: int) -> None:
        """Take the root's state: ledger and model together, or neither."""
        ledgers = [np.array(s.ranges, np.int64).reshape(-1) for s in (self.applied, self.skipped)]
        state = self.learner.state() if rank == root else np.zeros(0, np.uint8)
        header = np.array([self.step, len(ledgers[0]), len(ledgers[1]), len(state)], np.int64)
        step, applied, skipped, length = self.ring.broadcast(header, root).tolist()
        if rank != root:
            ledgers = [np.zeros(applied, np.int64), np.zeros(skipped, np.int64)]
            state = np.zeros(length, np.uint8)
        ledger = self.ring.broadcast(np.concatenate([*ledgers, [0]]), root)
        state = self.ring.broadcast(state, root)
        if rank != root:
            self.learner.load(state)
            self.step = step
            self.applied = RangeSet.of(_pairs(ledger[:applied]))
            self.skipped = RangeSet.of(_pairs(ledger[applied : applied + skipped]))
            self.leases.applied(self.applied)

    # --- one step

    def take_step(self, generation: int, rank: int, size: int) -> bool:
        """One collective. False: all members leave the ring after it."""
        self.step_began_at = time.monotonic()
        batch = self.next_batch(generation, rank, size)
        positions = batch.positions if batch else None
        told = control.write(rank, size, positions, leave=self.link.must_leave(generation))
        if batch is None:
            vector = self.learner.nothing(told)
        else:
            vector = self.learner.gradients(batch, told, self.step, rank)
        self.in_flight = positions
        total = self.ring.reduce(vector)
        # From here on the step has happened, for this rank.
        agreed = self.learner.agreed(total)
        safe = self.applied
        self.commit(agreed, total)
        self.tell(generation, rank, agreed, safe)
        if agreed.idle and not agreed.leave:
            self.link.wait_for_news(IDLE_SECONDS)
        return not agreed.leave

    def commit(self, agreed: control.Agreed, total: object) -> None:
        """Put the step into the state: model and ledger, one after the other, nothing in between.

        Raises:
            NonFinite: a rank's gradients are not finite, and the policy is to stop. No rank
                has changed anything then.
        """
        if agreed.nonfinite and self.config.training.non_finite == "stop":
            raise NonFinite(
                f"the loss or a gradient is not finite at step {self.step + 1}, in the records at positions "
                + ", ".join(f"[{a}, {b})" for a, b in agreed.batches)
            )
        if agreed.records and not agreed.nonfinite:
            self.learner.update(total)
        for start, stop in agreed.batches:
            self.applied = self.applied.add(start, stop)
            if agreed.nonfinite:
                self.skipped = self.skipped.add(start, stop)
        if agreed.records:
            self.step += 1
        self.in_flight = None
        self.leases.applied(RangeSet.of(agreed.batches))

    def tell(self, generation: int, rank: int, agreed: control.Agreed, safe: RangeSet) -> None:
        """Say what the step brought: at once if somebody waits for it, else with the next beat."""
        now = time.monotonic()
        if self.change is not None:
            redone, wasted = self.change
            stall = now - self.last_step_at if self.last_step_at is not None else 0.0
            self.change = None
            self.link.say(
                generation,
                stepped=pb.Stepped(
                    step=self.step, stall_seconds=stall, redone_records=redone, wasted_seconds=wasted
                ),
            )
        self.last_step_at = now
        if (
            agreed.records and not agreed.nonfinite
        ):  # a mean over the last steps: one step alone, of a few records, says little
            self.loss = (LOSS_MEMORY * self.loss[0] + agreed.loss * agreed.records,
                         LOSS_MEMORY * self.loss[1] + agreed.records)  # fmt: skip
        loss = self.loss[0] / self.loss[1] if self.loss[1] else None
        if loss is not None and now >= self.log_at:
            self.log_at = now + LOG_SECONDS
            print(f"generation {generation}, rank {rank}, step {self.step}: Loss {loss:.4f}", file=sys.stderr)
        self.link.progress = Progress(generation, self.step, self.records, loss, safe if rank == 0 else None)
        if rank == 0 and agreed.idle and safe != self.told:
            self.told = safe
            self.link.beat_now()

    # --- batches

    def next_batch(self, generation: int, rank: int, size: int) -> Batch | None:
        """The next records of this worker's leases, at most its share of the global batch."""
        for lease in self.link.new_leases():
            self.leases.add(lease)
            self.asked = False
        share = local_batch(self.config.training.batch_size, rank, size)
        if share and len(self.leases) < 2 * share and not self.asked:
            self.asked = True
            self.link.say(generation, want=pb.Want())
        positions = self.leases.peek(share, self.size)
        if positions is None:
            return None
        batch = self._read(positions).result()
        self.records += len(batch)
        # While the ring is busy with this one, read the next.
        self.next = None
        following = self.leases.peek(share, self.size, after=positions[1])
        if following is not None:
            self.next = following, self._read(following)
        return batch

    def _read(self, positions: Range) -> Future[Batch]:
        if self.next is not None and self.next[0] == positions:
            return self.next[1]
        return self.reading.submit(self.source.batch, positions)


def _ranges(ranges: RangeSet) -> list[pb.Range]:
    return [pb.Range(start=start, stop=stop) for start, stop in ranges]


def _pairs(flat: np.ndarray) -> list[Range]:
    return [(int(start), int(stop)) for start, stop in flat.reshape(-1, 2)]
