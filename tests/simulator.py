"""A whole job in a moment: the real core, with simulated workers, clock, delays, losses and deaths.

    python -m tests.simulator --seed 17        one run, told event by event
    python -m tests.simulator --seeds 20000    many

A simulated worker follows the protocol of trainer/worker.py. Its "weights" count the records
that were applied to it, so the oracle is the same as for real workers: at the end every record
must count exactly `epochs` times, on every worker that holds the final state.

All chance comes from the seed. A stream is ordered; different streams are not.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from edl import config, values
from edl.ids import WorkerId
from edl.ranges import Range, RangeSet
from edl.shares import local_batch
from master.core import events as ev
from master.core.job import Job
from tests.invariants import Watchdog

BASE = values.defaults()


@dataclass
class Sim:
    """One simulated worker: what a real one keeps, and what is happening to it."""

    id: WorkerId
    alive: bool = True
    frozen: bool = False
    fenced: bool = False
    stopping: bool = False
    holds: bool = False
    step: int = 0
    applied: RangeSet = field(default_factory=RangeSet)
    weights: Counter[int] = field(default_factory=Counter)
    leases: RangeSet = field(default_factory=RangeSet)
    asked: bool = False
    leave: int = -1
    ring: Collective | None = None
    stepped: bool = False
    inbox_at: float = 0.0  # its stream is ordered: nothing arrives before what was sent earlier
    outbox_at: float = 0.0
    unread: list[Callable[[Sim], None]] = field(default_factory=list)


@dataclass
class Collective:
    """A ring among simulated workers: everybody is in it, or it is broken."""

    form: ev.Form
    entered: set[WorkerId] = field(default_factory=set)
    broken: bool = False
    out: set[WorkerId] = field(default_factory=set)


class World:
    """One run. `run` raises AssertionError when a promise is broken."""

    def __init__(self, seed: int, talk: bool = False):
        self.random = random.Random(seed)
        self.seed, self.talk = seed, talk
        chance = self.random
        self.size = chance.choice((0, 1, 3, 15, 16, 17, 60, 200))
        self.epochs = chance.randint(1, 3)
        self.batch = chance.choice((1, 4, 16))
        workers = chance.randint(1, 5)
        least = chance.choice((1, 1, 1, min(2, workers)))
        self.config = config.parse(values.merge(BASE, {
            "workers": workers, "minWorkers": least, "maxWorkers": 8,
            "training": {"epochs": self.epochs, "batchSize": self.batch},
            "elastic": {"silenceSeconds": 2, "startSeconds": 30, "joinSeconds": chance.choice((0, 0.2)),
                        "graceSeconds": 3, "leaseBatches": chance.choice((1, 4, 32)), "maxFailures": 10**6},
        }))  # fmt: skip
        self.job = Job(self.config)
        self.watchdog = Watchdog(self.job)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.workers: dict[WorkerId, Sim] = {}
        self.finals: list[Sim] = []
        self.ended: ev.End | None = None
        self.history: list[tuple[float, ev.Event]] = []
        self.tick_at: float | None = None
        self.faults = Counter[str]()
        self.calm_at = chance.uniform(0, 25)
        self.pace = chance.choice((0.005, 0.05, 0.3))  # seconds of a step

    # --- the run

    def run(self) -> None:
        self.tell(ev.Begin())
        at = 0.0
        chance_rate = self.random.choice((0.5, 1.5, 4.0))
        for _ in range(self.random.randint(0, 40)):
            at += self.random.expovariate(chance_rate)
            if at < self.calm_at:
                self.later(at, self.fault)
        events = 0
        while self.ended is None:
            assert self.heap, "nothing more will happen, and the job has not ended"
            self.now, _, action = heapq.heappop(self.heap)
            action()
            events += 1
            assert self.now < 5000 and events < 200_000, f"the job does not end: {self.job.reason}"
        assert self.ended.phase == "Succeeded", self.ended
        for w in self.finals:
            expected = dict.fromkeys(range(self.size * self.epochs), 1)
            assert w.weights == expected, f"worker {w.id}: {w.weights} is not every position once"
            assert w.applied == RangeSet.of([(0, self.size * self.epochs)])

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + seconds, next(self.order), action))

    def tell(self, event: ev.Event) -> None:
        """An event reaches the core."""
        self.history.append((self.now, event))
        effects = self.watchdog.handle(event, self.now)
        if self.talk:
            print(f"{self.now:9.3f} {event}")
            for effect in effects:
                print(f"{'':12}-> {effect}")
        for effect in effects:
            self.perform(effect)
        deadline = self.job.next_deadline()
        if deadline is not None and (
            self.tick_at is None or deadline < self.tick_at or self.tick_at <= self.now
        ):
            self.tick_at = deadline
            self.later(deadline - self.now, lambda: self.tell(ev.Tick()))

    # --- streams

    def say(self, w: Sim, event: ev.Event) -> None:
        """The worker says something; it arrives a little later, in order."""
        at = w.outbox_at = max(self.now + self.random.expovariate(200), w.outbox_at)
        self.later(at - self.now, lambda: None if w.fenced else self.tell(event))

    def order_to(self, worker: WorkerId, act: Callable[[Sim], None]) -> None:
        """The master says something; it arrives a little later, in order. The frozen hear when they thaw."""
        w = self.workers.get(worker)
        if w is None:
            return
        at = w.inbox_at = max(self.now + self.random.expovariate(200), w.inbox_at)

        def arrive() -> None:
            w.unread.append(act)
            self.read(w)

        self.later(at - self.now, arrive)

    def read(self, w: Sim) -> None:
        """The worker acts on what has arrived, in order; a frozen one when it thaws."""
        while w.unread and w.alive and not w.frozen:
            w.unread.pop(0)(w)

    def thaw(self, w: Sim) -> None:
        w.frozen = False
        self.read(w)

    def perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Create(worker):
                self.create(worker)
            case ev.Delete(worker, grace):
                self.later(self.random.uniform(0, 0.05) + grace, lambda: self.kill(worker, "SIGKILL"))
            case ev.Form():
                ring = Collective(effect)
                for member, leases in zip(effect.members, effect.leases, strict=True):
                    self.order_to(member, lambda w, left=leases: self.enter(w, ring, left))  # type: ignore[misc]
                dead = [m for m in effect.members if not self.workers[m].alive]
                ring.broken = bool(dead)
            case ev.Leave(generation, members):
                for member in members:
                    self.order_to(member, lambda w: setattr(w, "leave", generation))
            case ev.Cut(generation, members):
                for member in members:
                    self.order_to(member, lambda w: self.cut(w, generation))
            case ev.Grant(worker, lease):
                self.order_to(worker, lambda w: self.granted(w, lease))
            case ev.Export(worker):
                self.order_to(worker, self.export)
            case ev.Stop(worker):
                self.order_to(worker, self.stop)
            case ev.Fence(worker):
                if worker in self.workers:
                    self.workers[worker].fenced = True
                    self.order_to(worker, lambda w: self.kill(w.id, "", code=3))
            case ev.End():
                self.ended = effect

    # --- a worker's life

    def create(self, worker: WorkerId) -> None:
        w = self.workers[worker] = Sim(worker)
        start = self.random.uniform(0.2, 2)
        fate = self.random.random() if self.now < self.calm_at else 1.0
        self.later(0.01, lambda: self.tell(ev.Seen(worker, "pid")))
        if fate < 0.03:
            return  # it hangs, and is never ready
        if fate < 0.06:
            self.later(start / 2, lambda: self.kill(worker, "", code=1))
        self.later(start / 3, lambda: w.alive and self.say(w, ev.Hello(worker)))
        self.later(start, lambda: w.alive and not w.stopping and self.warm(w))

    def warm(self, w: Sim) -> None:
        self.say(w, ev.Ready(w.id, self.size))
        self.beat(w)

    def beat(self, w: Sim) -> None:
        if not w.alive:
            return
        if not w.frozen and not w.fenced:
            self.say(w, ev.Beat(w.id, w.ring.form.generation if w.ring else ev.Generation(0), w.step))
        self.later(0.35, lambda: self.beat(w))

    def enter(self, w: Sim, ring: Collective, leases: tuple[Range, ...]) -> None:
        """hvd.init: nobody is through before everybody is there."""
        w.ring, w.leases, w.asked, w.stepped = ring, RangeSet.of(leases), False, False
        ring.entered.add(w.id)
        if ring.broken:
            self.leave_broken(w)
        elif ring.entered >= set(ring.form.members):
            self.later(self.random.uniform(0.02, 0.2), lambda: self.synced(ring))

    def members(self, ring: Collective) -> list[Sim]:
        return [self.workers[m] for m in ring.form.members]

    def synced(self, ring: Collective) -> None:
        """The broadcast: taken over by each rank at its own moment, so some may have it when it breaks."""
        if ring.broken:
            return
        root = self.workers[ring.form.root]
        state = (root.step, root.applied, Counter(root.weights))
        late = self.random.random() * 0.05
        for w in self.members(ring):
            self.later(self.random.uniform(0, late), lambda w=w: self.take_over(w, ring, state))  # type: ignore[misc]
        self.later(late + 0.001, lambda: self.collective(ring))

    def take_over(self, w: Sim, ring: Collective, state: tuple[int, RangeSet, Counter[int]]) -> None:
        if ring.broken or w.ring is not ring or not w.alive or w.frozen:
            return
        if ring.form.sync and w.id != ring.form.root:
            w.step, w.applied, w.weights = state[0], state[1], Counter(state[2])
            w.leases = w.leases.minus(w.applied)
        w.holds = True
        self.say(w, ev.Up(w.id, ring.form.generation, w.step))

    def collective(self, ring: Collective) -> None:
        """One step of everybody. When somebody dies in it, any part of the others may have it."""
        if ring.broken:
            return
        members = self.members(ring)
        if any(w.frozen for w in members):
            self.later(0.05, lambda: self.collective(ring))  # it hangs until it is cut
            return
        size = len(members)
        batches = []
        for rank, w in enumerate(members):
            share = local_batch(self.batch, rank, size)
            if share and len(w.leases) < 2 * share and not w.asked:
                w.asked = True
                self.say(w, ev.Want(w.id, ring.form.generation))
            batch, _ = w.leases.take(share)
            if batch is not None:
                end_of_epoch = (batch[0] // self.size + 1) * self.size
                batches.append((batch[0], min(batch[1], end_of_epoch)))
        leave = any(w.leave == ring.form.generation for w in members)
        took = self.pace if batches else 0.02
        self.later(self.random.uniform(0.5, 1.5) * took, lambda: self.came_back(ring, batches, leave))

    def came_back(self, ring: Collective, batches: list[Range], leave: bool) -> None:
        if ring.broken:  # some may have it nevertheless
            if self.random.random() < 0.5:
                for w in self.members(ring):
                    if w.alive and w.ring is ring and self.random.random() < 0.5:
                        self.commit(w, batches)
            return
        members = self.members(ring)
        if any(w.frozen for w in members):
            self.later(0.05, lambda: self.came_back(ring, batches, leave))
            return
        for rank, w in enumerate(members):
            safe = w.applied
            self.commit(w, batches)
            generation = ring.form.generation
            if not w.stepped:
                w.stepped = True
                self.say(w, ev.Stepped(w.id, generation, w.step, 0.1, 0, 0.0))
            if rank == 0:
                self.say(w, ev.Beat(w.id, generation, w.step, applied=safe))
        if leave:
            for w in members:
                self.out(w, "")
        else:
            self.collective(ring)

    def commit(self, w: Sim, batches: list[Range]) -> None:
        for start, stop in batches:
            w.applied = w.applied.add(start, stop)  # raises when it is there: counted twice
            w.weights.update(range(start, stop))
            w.leases = w.leases.minus(RangeSet(((start, stop),)))
        w.step += bool(batches)

    def out(self, w: Sim, broken: str) -> None:
        ring = w.ring
        if ring is None or not w.alive:
            return
        w.ring = None
        complete = w.applied.covers(0, self.size * self.epochs)
        digest = str(hash(frozenset(w.weights.items()))) if w.holds and complete else ""
        self.say(
            w, ev.Out(w.id, ring.form.generation, w.step, w.holds, w.applied, broken=broken, digest=digest)
        )

    def leave_broken(self, w: Sim) -> None:
        """Its collective fails, sooner or later; a frozen one finds out when it thaws."""

        def fails() -> None:
            if w.frozen and w.alive:
                self.later(0.3, fails)
            else:
                self.out(w, "a peer is gone")

        self.later(self.random.uniform(0.001, 0.05), fails)

    def cut(self, w: Sim, generation: int) -> None:
        if w.ring is not None and w.ring.form.generation == generation:
            self.break_ring(w.ring)

    def break_ring(self, ring: Collective) -> None:
        if ring.broken:
            return
        ring.broken = True
        for m in ring.entered:
            if self.workers[m].ring is ring:
                self.leave_broken(self.workers[m])

    def granted(self, w: Sim, lease: Range) -> None:
        w.leases, w.asked = w.leases.add(*lease), False

    def export(self, w: Sim) -> None:
        self.finals = [w, *(o for o in self.workers.values() if o.alive and o.holds and not o.frozen
                            and not o.fenced and o.step == w.step)]  # fmt: skip
        self.later(0.3, lambda: w.alive and self.say(w, ev.Finished(w.id, {}, "model.keras")))

    def stop(self, w: Sim) -> None:
        w.stopping = True
        if w.ring is not None:
            self.break_ring(w.ring)
        self.later(0.02, lambda: self.kill(w.id, "", code=0))

    def kill(self, worker: WorkerId, signal: str, code: int | None = None) -> None:
        w = self.workers.get(worker)
        if w is None or not w.alive:
            return
        w.alive = False
        gone = ev.Gone(worker, code=code, signal=signal)
        self.later(self.random.uniform(0.001, 0.3), lambda: self.tell(gone))
        if not w.fenced:
            self.say(w, ev.Closed(worker, "its stream ended"))
        if w.ring is not None:
            ring = w.ring
            self.later(self.random.uniform(0.0001, 0.03), lambda: self.break_ring(ring))

    # --- faults

    def fault(self) -> None:
        alive = [w for w in self.workers.values() if w.alive and not w.stopping]
        if not alive or self.ended:
            return
        w = self.random.choice(alive)
        kind = self.random.choice(
            (
                "kill",
                "kill",
                "kill two",
                "kill all but one",
                "kill all",
                "freeze",
                "freeze",
                "term",
                "term",
                "exit 0",
                "crash",
                "scale",
                "late",
                "twice",
            )
        )
        self.faults[kind] += 1
        generation = self.job.generation
        match kind:
            case "kill":
                self.kill(w.id, "SIGKILL")
            case "kill two":
                for victim in self.random.sample(alive, min(2, len(alive))):
                    self.kill(victim.id, "SIGKILL")
            case "kill all but one":
                for victim in alive[1:]:
                    self.kill(victim.id, "SIGKILL")
            case "kill all":
                for victim in alive:
                    self.later(self.random.uniform(0, 0.05), lambda v=victim: self.kill(v.id, "SIGKILL"))  # type: ignore[misc]
            case "freeze":
                w.frozen = True
                self.later(self.random.choice((0.3, 1.9, 2.1, 8)), lambda: self.thaw(w))
            case "term":
                self.say(w, ev.Leaving(w.id, "SIGTERM"))
                self.later(10, lambda: self.kill(w.id, "SIGKILL"))
            case "exit 0":
                self.kill(w.id, "", code=0)
            case "crash":
                self.kill(w.id, self.random.choice(("SIGABRT", "SIGSEGV")))
            case "scale":
                workers = self.random.randint(self.config.min_workers, 6)
                self.tell(ev.Scale(workers))
            case "late":  # something of an old generation arrives now
                old = ev.Generation(max(0, generation - 1))
                self.say(w, ev.Out(w.id, old, w.step, w.holds, w.applied, broken="late"))
            case "twice":
                self.say(w, ev.Want(w.id, generation))
                self.say(w, ev.Ready(w.id, self.size) if w.holds else ev.Hello(w.id))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    faults = Counter[str]()
    for seed in range(args.seed, args.seed + args.seeds):
        world = World(seed, talk=args.seeds == 1)
        try:
            world.run()
        except Exception:
            print(f"repeat with: python -m tests.simulator --seed {seed}", file=sys.stderr)
            raise
        faults += world.faults
    print(f"{args.seeds} runs, {faults.total()} faults: {dict(faults.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
