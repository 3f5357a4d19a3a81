"""Any events, in any order: hypothesis writes programs, and every invariant is checked after each event.

A program is a string of bytes; each pair of bytes is one happening: which, and to whom. Workers
are honest (what they say about step and ledger is true) but may die, fall silent, repeat
themselves, speak of old rings, and be told things late. Bytes, not hypothesis rules, because
5,000 programs must fit into seconds; they shrink as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from edl import config, values
from edl.ids import Generation, WorkerId
from edl.ranges import RangeSet
from edl.shares import local_batch
from master.core import events as ev
from master.core.job import Job
from tests.invariants import Watchdog

BASE = values.defaults()


@dataclass
class Replica:
    """What an honest worker has in memory."""

    id: WorkerId
    holds: bool = False
    step: int = 0
    applied: RangeSet = field(default_factory=RangeSet)
    leases: RangeSet = field(default_factory=RangeSet)
    generation: Generation = Generation(0)  # the ring it is in; 0: none  # noqa: RUF009
    up: bool = False


class Machine:
    """A job, the memory of its workers, and a program that happens to them."""

    def __init__(self, workers: int, least: int, size: int, epochs: int, batch: int):
        self.batch, self.size, self.epochs = batch, size, epochs
        self.config = config.parse(values.merge(BASE, {
            "workers": workers, "minWorkers": least,
            "training": {"batchSize": batch, "epochs": epochs},
            "elastic": {"maxFailures": 1000, "leaseBatches": 4},
        }))  # fmt: skip
        self.job = Job(self.config)
        self.watchdog = Watchdog(self.job)
        self.now = 0.0
        self.replicas: dict[WorkerId, Replica] = {}
        self.form: ev.Form | None = None
        self.broken = self.leaving = False
        self.tell(ev.Begin())

    def tell(self, event: ev.Event) -> None:
        self.now += 0.01
        for effect in self.watchdog.handle(event, self.now):
            match effect:
                case ev.Create(worker):
                    self.replicas[worker] = Replica(worker)
                case ev.Form():
                    self.form, self.broken, self.leaving = effect, False, False
                    for member, leases in zip(effect.members, effect.leases, strict=True):
                        r = self.replicas[member]
                        r.generation, r.up, r.leases = effect.generation, False, RangeSet.of(leases)
                case ev.Grant(worker, lease):
                    self.replicas[worker].leases = self.replicas[worker].leases.add(*lease)
                case ev.Leave():
                    self.leaving = True
                case ev.Cut():
                    self.broken = True

    def inside(self) -> list[Replica]:
        return [r for r in self.replicas.values() if self.form and r.generation == self.form.generation]

    def happen(self, what: int, whom: int) -> None:
        """One happening. What makes no sense now does not happen."""
        if not self.replicas:
            return
        r = list(self.replicas.values())[-1 - whom % min(len(self.replicas), 6)]
        g = r.generation or self.job.generation
        match what % 20:
            case 0:
                self.tell(ev.Seen(r.id, "pid"))
            case 1:
                self.tell(ev.Hello(r.id))
            case 2 | 3:
                self.tell(ev.Ready(r.id, self.size))
            case 4 | 5 | 6:
                self.synchronise()
            case 7 | 8 | 9:
                self.collective()
            case 10:
                self.part_of_a_collective(whom)
            case 11 | 12:
                for member in self.inside():
                    self.out(member)
            case 13:
                self.tell(ev.Want(r.id, g))
            case 14:
                self.die(
                    r,
                    ev.Gone(r.id, code=whom % 2 if whom % 3 else None, signal="" if whom % 3 else "SIGKILL"),
                )
            case 15:
                self.die(r, ev.Closed(r.id, "gone"))
            case 16:
                self.tell(ev.Leaving(r.id, "SIGTERM"))
            case 17:
                self.now += whom / 25
                self.tell(ev.Tick())
                for worker in [w for w in self.replicas if self.job.pool.get(w) is None]:
                    self.replicas[worker].generation = Generation(0)
            case 18:
                self.tell(ev.Scale(max(self.config.min_workers, whom % 6)))
            case 19:
                old = Generation(max(0, self.job.generation - 1 - whom % 2))
                self.tell(ev.Out(r.id, old, r.step, r.holds, r.applied, broken="late" if whom % 2 else ""))
                self.tell(ev.Up(r.id, old, r.step))

    def synchronise(self) -> None:
        """The ring forms: every member that is still there takes the root's state."""
        if self.form is None or self.broken or any(m not in self.alive() for m in self.form.members):
            return
        root = self.replicas[self.form.root]
        for r in self.inside():
            if not r.up:
                r.step, r.applied, r.holds, r.up = root.step, root.applied, True, True
                r.leases = r.leases.minus(r.applied)
                self.tell(ev.Up(r.id, r.generation, r.step))

    def alive(self) -> set[WorkerId]:
        return {w.id for w in self.job.pool}

    def batches(self) -> list[tuple[int, int]]:
        assert self.form is not None
        found = []
        for rank, member in enumerate(self.form.members):
            batch, _ = self.replicas[member].leases.take(
                local_batch(self.batch, rank, len(self.form.members))
            )
            if batch:
                found.append((batch[0], min(batch[1], (batch[0] // self.size + 1) * self.size)))
        return found

    def collective(self) -> None:
        members = self.inside()
        if not members or self.broken or not all(r.up for r in members) or self.form is None:
            return
        if len(members) < len(self.form.members):
            return
        safe, batches = members[0].applied, self.batches()
        for r in members:
            self.commit(r, batches)
            self.tell(ev.Want(r.id, r.generation))
        first = self.replicas[self.form.members[0]]
        if first.generation == self.form.generation:
            self.tell(ev.Beat(first.id, first.generation, first.step, applied=safe))
            if not batches:
                self.tell(ev.Beat(first.id, first.generation, first.step, applied=first.applied))

    def part_of_a_collective(self, which: int) -> None:
        """The ring breaks in a step: some have it, the others not."""
        members = self.inside()
        if not members or self.broken or self.form is None or not all(r.up for r in members):
            return
        if len(members) == len(self.form.members):
            batches = self.batches()
            for i, r in enumerate(members):
                if which >> i & 1:
                    self.commit(r, batches)
        self.broken = True

    def commit(self, r: Replica, batches: list[tuple[int, int]]) -> None:
        for start, stop in batches:
            r.applied = r.applied.add(start, stop)  # raises when it is there already
            r.leases = r.leases.minus(RangeSet(((start, stop),)))
        r.step += bool(batches)

    def out(self, r: Replica) -> None:
        if r.generation == 0 or not (self.broken or (self.leaving and r.up)):
            return
        generation, r.generation = r.generation, Generation(0)
        self.tell(ev.Out(r.id, generation, r.step, r.holds, r.applied, broken="cut" if self.broken else ""))

    def die(self, r: Replica, event: ev.Event) -> None:
        self.broken = self.broken or r.generation != 0
        r.generation = Generation(0)
        self.tell(event)


@settings(max_examples=5000, deadline=None)
@given(
    workers=st.integers(1, 5),
    least=st.integers(1, 2),
    size=st.sampled_from((0, 1, 7, 40)),
    epochs=st.integers(1, 2),
    batch=st.sampled_from((1, 4, 8)),
    program=st.binary(max_size=160),
)
def test_no_order_of_events_breaks_a_promise(
    workers: int, least: int, size: int, epochs: int, batch: int, program: bytes
) -> None:
    machine = Machine(max(workers, least), least, size, epochs, batch)
    for worker in list(machine.replicas):  # most programs are about rings, so begin with one
        machine.tell(ev.Hello(worker))
        machine.tell(ev.Ready(worker, size))
    for what, whom in zip(program[::2], program[1::2], strict=False):
        machine.happen(what, whom)
        if machine.job.ending is not None:
            break
