# SPDX-License-Identifier: Apache-2.0
"""Any events, in any order: hypothesis writes programs, and every invariant is checked after each event.

Workers are honest (what they say about their step is true) but may die, fall silent, repeat
themselves, report old rings, come with other data, and receive orders late. People scale the job, suspend
it and change its epochs.

A program is bytes; each pair is one happening: its kind, and its worker. Not rules of hypothesis, because
5,000 programs must fit into seconds; they shrink as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edl import config
from edl.config import values
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.steps import Steps
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.core.job import Job
from edl.master.core.workers import AWAY
from tests.support.jobs.invariants import Watchdog

BASE = values.defaults()
NO_RING = Generation(0)


@dataclass
class Replica:
    """What an honest worker has in memory."""

    id: WorkerId
    has_state: bool = False
    step: int = 0
    epochs: int = 0  # the task, as the ring has it
    generation: Generation = NO_RING  # the ring it is in
    up: bool = False


class Machine:
    """A job, the memory of its workers, and what may happen to them.

    A happening takes a number that selects the worker, or how. What makes no sense now does not happen.
    """

    def __init__(self, workers: int, least: int, size: int, epochs: int, batch: int, failures: int = 1000):
        self.layout, self.steps = Layout(size), Steps(size, batch)
        self.job = Job(
            config.parse(
                values.merge(
                    BASE,
                    {
                        "workers": workers,
                        "minWorkers": least,
                        "training": {"batchSize": batch, "epochs": epochs},
                        "elastic": {"maxFailures": failures},
                    },
                )
            )
        )
        self.watchdog = Watchdog(self.job)
        self.now = 0.0
        self.replicas: dict[WorkerId, Replica] = {}
        self.form: ef.Form | None = None
        self.broken = self.leaving = False
        self.told: int | None = None  # epochs that all members know, though their ring has not done it yet
        self.tell(ev.Begin())

    def tell(self, event: ev.Event, after: float = 0.01) -> None:
        self.now += after
        for effect in self.watchdog.handle(event, self.now):
            match effect:
                case ef.Create(worker):
                    self.replicas[worker] = Replica(worker)
                case ef.Form():
                    self.form, self.broken, self.leaving, self.told = effect, False, False, None
                    for member in effect.members:
                        r = self.replicas[member]
                        r.generation, r.up, r.epochs = effect.generation, False, effect.epochs
                case ef.Train(generation, _, epochs):
                    assert self.form is not None and generation == self.form.generation
                    self.told = epochs
                case ef.Leave():
                    self.leaving = True
                case ef.Cut():
                    self.broken = True
        for worker, r in self.replicas.items():
            if r.generation and self.job.pool.get(worker) is None:  # dead, or given up: its peers notice
                r.generation, self.broken = NO_RING, True

    def replica(self, pick: int) -> Replica:
        """One of the last six that were made, dead or alive."""
        return list(self.replicas.values())[-1 - pick % min(len(self.replicas), 6)]

    def inside(self) -> list[Replica]:
        return [r for r in self.replicas.values() if self.form and r.generation == self.form.generation]

    @property
    def whole(self) -> bool:
        """Every member is in the ring."""
        return self.form is not None and not self.broken and len(self.inside()) == len(self.form.members)

    @property
    def stepping(self) -> bool:
        return self.whole and all(r.up for r in self.inside())

    # --- what may happen

    def seen(self, pick: int) -> None:
        self.tell(ev.Seen(self.replica(pick).id, "pid"))

    def hello(self, pick: int) -> None:
        self.tell(ev.Hello(self.replica(pick).id))

    def ready(self, pick: int) -> None:
        """Each finds the same records, and would have them in blocks of its own size."""
        self.tell(ev.Ready(self.replica(pick).id, Layout(self.layout.records, 1 + pick % 3, 64)))

    def wrong_data(self, pick: int) -> None:
        self.tell(ev.Ready(self.replica(pick).id, Layout(self.layout.records + 1)))

    def synchronise(self, pick: int) -> None:
        """Members take the root's state: all, or only some before it breaks."""
        if not self.whole:
            return
        assert self.form is not None
        root = self.replicas[self.form.root]
        for i, r in enumerate(self.inside()):
            if not r.up and r.generation and (pick % 4 or pick >> i + 2 & 1):
                r.step, r.has_state, r.up = root.step, True, True
                self.tell(ev.JoinedRing(r.id, r.generation, r.step))

    def collective(self, pick: int) -> None:
        """A step of all, or the sum after the last one; perhaps they tell how far they are."""
        if not self.stepping:
            return
        assert self.form is not None
        members, generation = self.inside(), self.form.generation
        first, safe = self.form.members[0], members[0].step  # which all have now
        for r in members:
            trained = self.commit(r)
            if self.told is not None:
                r.epochs = self.told
            self.leaving = self.leaving or not (trained or self.to_train(r))
        self.told = None
        if safe and safe % self.steps.per_epoch == 0:
            epochs = safe // self.steps.per_epoch
            self.tell(ev.EpochEnded(first, generation, epochs, facts.EpochLoss(epochs - 1, 1, 0.5)))
        for r in members:
            self.tell(ev.Stepped(r.id, generation, r.step, 0.1, 1, 0.01))
        for i, r in enumerate(members):
            if r.generation and pick >> i & 1:
                loss = facts.EpochLoss(self.steps.epoch(max(r.step - 1, 0)), r.step, 0.5)
                self.tell(ev.Progress(generation, r.step, 0.5, loss, {r.id: 1.0 + pick % 5}))

    def part_of_a_collective(self, pick: int) -> None:
        """The ring breaks in a step: some have it, the others not."""
        if not self.stepping:
            return
        for i, r in enumerate(self.inside()):
            if pick >> i & 1:
                self.commit(r)
        self.broken = True

    def commit(self, r: Replica) -> bool:
        """Whether there was a step to make."""
        trains = self.to_train(r)
        r.step += trains
        return trains

    def to_train(self, r: Replica) -> bool:
        return not self.steps.ended(r.step, r.epochs)

    def out(self, pick: int) -> None:
        """Members leave the ring, if it is broken or they were asked to: all, or one."""
        for r in self.inside() if pick % 3 else self.inside()[:1]:
            if r.generation and (self.broken or (self.leaving and r.up)):
                generation, r.generation = r.generation, NO_RING
                digest = "same" if r.has_state and not self.to_train(r) else ""
                broken = "cut" if self.broken else ""
                self.tell(ev.LeftRing(r.id, generation, r.step, r.has_state, broken=broken, digest=digest))

    def killed(self, pick: int) -> None:
        self.tell(ev.Gone(self.replica(pick).id, signal="SIGKILL"))

    def exits(self, pick: int) -> None:
        ways = ((0, "", False), (1, "", False), (75, "", True), (None, "SIGSEGV", False), (None, "", False))
        self.tell(ev.Gone(self.replica(pick).id, *ways[pick // 6 % len(ways)]))

    def closed(self, pick: int) -> None:
        self.tell(ev.Closed(self.replica(pick).id, "its stream ended"))

    def failed(self, pick: int) -> None:
        self.tell(ev.Failed(self.replica(pick).id, "ValueError: no", "Traceback"))

    def leaves(self, pick: int) -> None:
        self.tell(ev.Leaving(self.replica(pick).id, "SIGTERM"))

    def finished(self, pick: int) -> None:
        r = self.replica(pick) if pick % 2 or self.job.exporter is None else self.replicas[self.job.exporter]
        self.tell(ev.Finished(r.id, {"accuracy": 1.0}, "model.keras"))

    def silence(self, pick: int) -> None:
        """Nothing is heard of a worker any more; or it is heard again, and leaves a ring that was cut."""
        r = self.replica(pick)
        if r.id not in self.job.silences:
            self.tell(ev.Silent(r.id, 3.0), after=3.0)
            return
        self.tell(ev.Heard(r.id))
        if r.generation and (w := self.job.pool.get(r.id)) is not None and w.place == AWAY:
            generation, r.generation = r.generation, NO_RING
            self.tell(ev.LeftRing(r.id, generation, r.step, r.has_state, broken="cut"))

    def time_passes(self, pick: int) -> None:
        """Up to the next deadline, or further."""
        for _ in range(pick % 4):
            deadline = self.job.next_deadline()
            if deadline is not None:
                self.tell(ev.Tick(), after=max(deadline - self.now, 0.0))

    def scaled(self, pick: int) -> None:
        self.tell(ev.Scale(max(self.job.config.min_workers, pick % 6)))

    def other_epochs(self, pick: int) -> None:
        """People change `training.epochs`, once in a while together with `suspend`."""
        job = self.job
        self.tell(ev.Live(job.target, job.min_size, pick % 16 == 15, 1 + pick // 16 % 4))

    def of_an_old_ring(self, pick: int) -> None:
        r = self.replica(pick)
        old = Generation(max(0, (r.generation or self.job.ring.generation) - 1 - pick // 6 % 2))
        self.tell(ev.LeftRing(r.id, old, r.step + 1, True, broken="late" if pick % 2 else ""))
        self.tell(ev.JoinedRing(r.id, old, r.step + 1))
        self.tell(ev.Stepped(r.id, old, r.step + 1, 9.0, 9, 9.0))
        self.tell(ev.Progress(old, r.step + 1))

    def never_heard_of(self, pick: int) -> None:
        stranger = WorkerId(1000 + pick)
        self.tell(ev.Hello(stranger))
        self.tell(ev.Ready(stranger, self.layout))
        self.tell(ev.Gone(stranger, code=1))


HAPPENINGS: list[tuple[int, Callable[[Machine, int], None]]] = [  # how often, what
    (1, Machine.seen),
    (2, Machine.hello),
    (4, Machine.ready),
    (1, Machine.wrong_data),
    (6, Machine.synchronise),
    (6, Machine.collective),
    (2, Machine.part_of_a_collective),
    (5, Machine.out),
    (1, Machine.other_epochs),
    (2, Machine.killed),
    (1, Machine.exits),
    (1, Machine.closed),
    (1, Machine.failed),
    (2, Machine.leaves),
    (2, Machine.finished),
    (2, Machine.silence),
    (1, Machine.time_passes),
    (1, Machine.scaled),
    (1, Machine.of_an_old_ring),
    (1, Machine.never_heard_of),
]
WHEEL = [happening for often, happening in HAPPENINGS for _ in range(often)]


@pytest.mark.thorough
@pytest.mark.timeout(600)  # a minute of CPU
@settings(max_examples=4_800, deadline=None, print_blob=True)
@given(
    workers=st.integers(1, 5),
    least=st.integers(1, 2),
    size=st.sampled_from((0, 1, 7, 40)),
    epochs=st.integers(1, 2),
    batch=st.sampled_from((1, 4, 8)),
    program=st.binary(min_size=30, max_size=50),
)
@example(  # the last step is on one worker alone, which dies while it exports
    workers=1,
    least=2,
    size=1,
    epochs=2,
    batch=4,
    program=bytes.fromhex("0e0021000000000000000e00e602ab0000004b0800007000f82740010000000070bc"),
)
@example(  # a worker is seen, for the second time, at the very moment at which it should have been ready
    workers=1,
    least=2,
    size=1,
    epochs=1,
    batch=1,
    program=bytes.fromhex("0000a3020000080008000800000000010000000025010000080000010000"),
)
@example(  # there are to be fewer epochs: one has them, and a different one has begun the next
    workers=1,
    least=2,
    size=7,
    epochs=2,
    batch=4,
    program=bytes.fromhex(
        "0000000000000000c90000000000000000000000000000000000000000000e001b009201000000006a01"
    ),
)
def test_no_order_of_events_breaks_a_promise(
    workers: int, least: int, size: int, epochs: int, batch: int, program: bytes
) -> None:
    machine = Machine(max(workers, least), least, size, epochs, batch)
    for worker in list(machine.replicas):  # most programs are about rings, so begin with one
        machine.tell(ev.Hello(worker))
        machine.tell(ev.Ready(worker, machine.layout))
    machine.synchronise(1)
    machine.collective(0)
    for what, pick in zip(program[::2], program[1::2], strict=False):
        WHEEL[what % len(WHEEL)](machine, pick)
        if machine.job.ended:
            break
