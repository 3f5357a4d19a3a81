"""A whole job in a moment: the real core, with simulated workers, clock, delays, losses and deaths.

    python -m tests.simulator --seed 17        one run, told event by event
    python -m tests.simulator --seeds 20000    many

A simulated worker follows the protocol of trainer/worker.py: what its main thread, its link and
its ring do and in which order, but no tensor. Its "weights" count what was applied to them, so
the oracle is the same as for real workers. A run passes when

- every position counts exactly once, on every worker that holds the final state (or the job
  ended as it had to: asked to stop, or failed by failures that were its own);
- every failure that is charged was somebody's own, and such a failure is charged;
- nobody is given up who was there and spoke, and no state is given up that somebody holds;
- the job ends soon after the faults have stopped, and until then nobody waits long to join or to go;
- all of tests/invariants.py held after each event, and a replay decides the same.

All chance comes from the seed. A stream is ordered; different streams are not.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edl import config, values
from edl.ids import Generation, WorkerId
from edl.ranges import Range, RangeSet
from edl.shares import local_batch
from master.core import events as ev
from master.core import view
from master.core.job import Job
from tests.invariants import Watchdog, replayed

BASE = values.defaults()
NOTHING = RangeSet()
NO_RING = Generation(0)
KINDS = ("kill", "kill", "kill", "kill two", "kill all but one", "kill all", "freeze", "freeze", "mute",
         "term", "term", "term now", "exit 0", "crash", "raise", "scale", "scale", "late", "twice", "stall",
         "preempt", "new master", "new master")  # fmt: skip
RARE = ("fatal", "stop", "wrong data")
MOMENTS = (
    "now",
    "now",
    "now",
    "forming",
    "syncing",
    "stepping",
    "breaking",
    "leaving",
    "exporting",
    "starting",
)


class SimulationFailed(AssertionError):
    """A promise was broken; the text says in which run, how to repeat it, and what came before."""


@dataclass(eq=False)
class Collective:
    """A ring among simulated workers. Once broken it stays so."""

    form: ev.Form
    entered: set[WorkerId] = field(default_factory=set)
    broken: bool = False

    @property
    def generation(self) -> Generation:
        return self.form.generation


@dataclass(eq=False)
class Sim:
    """One simulated worker: what a real one keeps, and what is happening to it."""

    id: WorkerId
    weights: np.ndarray
    # its process
    alive: bool = True
    placed: bool = False
    frozen: bool = False
    greeted: bool = False  # its stream is open
    warm: bool = False
    stopping: bool = False
    failed: bool = False  # it has said its last words
    own_end: bool = False  # it ended by its own doing
    fenced: bool = False  # by the master: nothing that it says is heard
    silent_since: float | None = None  # it could not be heard, until
    audible_at: float = 0.0
    to_do: list[Callable[[], None]] = field(default_factory=list)  # when it thaws
    # its streams, both ordered
    master: int = 0  # which master it speaks to
    inbox_at: float = 0.0
    outbox_at: float = 0.0
    # what the trainer keeps
    holds: bool = False
    step: int = 0
    applied: RangeSet = NOTHING
    leases: RangeSet = NOTHING
    asked: bool = False
    stepped: bool = False
    failing: bool = False  # its collective has failed, it is on its way out
    leave: Generation = NO_RING
    was_cut: Generation = NO_RING
    ring: Collective | None = None
    safe: RangeSet | None = None  # what a beat tells; rank 0 only
    told: RangeSet = NOTHING
    # what its link remembers for another master
    form: ev.Form | None = None
    up: bool = False
    last_out: ev.Out | None = None


class World:
    """One run. `run` raises SimulationFailed when a promise is broken."""

    def __init__(self, seed: int, talk: bool = False):
        chance = self.random = random.Random(seed)
        self.seed, self.talk = seed, talk
        self.size = chance.choice((0, 1, 3, 15, 16, 17, 60, 60, 200, 200, 400))
        self.epochs = chance.randint(1, 3)
        self.batch = chance.choice((1, 4, 16, 16, 64))
        self.pace = chance.choice((0.005, 0.05, 0.3))  # seconds of a step
        grace, join = chance.choice((0, 1, 3, 3)), chance.choice((0, 0.2, 1))
        self.silence = 2.0
        workers = chance.randint(1, 6)
        least = chance.choice((1, 1, 1, min(2, workers), workers))
        self.most_failures = chance.choice((0, 2, 10**6, 10**6, 10**6, 10**6))
        self.config = config.parse(values.merge(BASE, {
            "workers": workers, "minWorkers": least, "maxWorkers": 8,
            "training": {"epochs": self.epochs, "batchSize": self.batch},
            "elastic": {"silenceSeconds": self.silence, "startSeconds": 10,
                        "joinSeconds": join, "graceSeconds": grace,
                        "leaseBatches": chance.choice((1, 4, 32)), "maxFailures": self.most_failures},
        }))  # fmt: skip
        self.job = Job(self.config)
        self.watchdog = Watchdog(self.job)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.workers: dict[WorkerId, Sim] = {}
        self.tick_at: float | None = None
        self.master = 0  # counts up with each that takes over
        self.master_lives = True
        self.forms: list[ev.Form] = []
        self.inbox: list[ev.Event] = []  # what waits while the master does not listen
        self.awake_at = 0.0
        self.calm_at = chance.choice((0.0, chance.uniform(0, 12), chance.uniform(0, 25)))
        self.ambushes: dict[str, list[str]] = {}
        self.faults = Counter[str]()
        self.moments = Counter[str]()
        self.to_blame: set[WorkerId] = set()  # who failed by its own doing
        self.last_fault = 0.0
        self.waiting: dict[WorkerId, float] = {}  # who is ready or leaving, since when
        self.asked_to_end: set[str] = set()  # the phases in which somebody wants the job to end
        self.finals: list[Sim] = []
        self.ended: ev.End | None = None

    # --- the run

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            repeat = f"repeat with: python -m tests.simulator --seed {self.seed}"
            lines = [f"seed {self.seed}: {type(error).__name__}: {error}", repeat, "its last events:"]
            for now, event, effects in self.watchdog.history[-30:]:
                lines.append(f"{now:9.3f} {event}")
                lines += [f"{'':12}-> {effect}" for effect in effects]
            raise SimulationFailed("\n".join(lines)) from error

    def _run(self) -> None:
        self.hear(ev.Begin())
        at, rate = 0.0, self.random.choice((0.5, 1.5, 4.0))
        kinds = (*KINDS, *RARE) if self.random.random() < 0.1 else KINDS
        while (at := at + self.random.expovariate(rate)) < self.calm_at:
            kind, moment = self.random.choice(kinds), self.random.choice(MOMENTS)
            self.later(at, lambda kind=kind, moment=moment: self.plan(kind, moment))  # type: ignore[misc]
        steps = self.epochs * (self.size // self.batch + 40)
        limit = self.calm_at + 90 + 2 * steps * (self.pace + 0.02)
        while self.ended is None:
            assert self.heap, "nothing more will happen, and the job has not ended"
            self.now, _, action = heapq.heappop(self.heap)
            too_long = self.now > limit or len(self.watchdog.history) > 100_000
            assert not too_long, f"the job does not end: {self.job.phase}, {self.job.reason}"
            action()
        self.judge(self.ended)

    def judge(self, end: ev.End) -> None:
        """The job has ended: was it right, and is what came out?"""
        charged = {f.worker for f in self.job.failures}
        assert charged <= self.to_blame, f"{charged - self.to_blame} are charged, but are not to blame"
        summary = view.summary(self.job)
        json.dumps([summary, view.status(self.job, self.now)])
        if self.seed % 20 == 0:
            assert view.summary(replayed(self.watchdog)) == summary
        if end.phase == "Failed" and "Failed" not in self.asked_to_end:
            assert len(charged) > self.most_failures, end
        elif end.phase != "Succeeded":
            assert end.phase in self.asked_to_end, end
        if end.phase != "Succeeded":
            return
        whole = self.size * self.epochs
        assert summary["records"]["per_epoch"] == [self.size] * self.epochs
        assert len(set(summary["digests"].values())) == (1 if whole else 0)
        assert self.finals
        for w in self.finals:
            assert (w.weights == 1).all(), f"worker {w.id}: {w.weights.tolist()}: not every position once"
            assert w.applied == RangeSet.of([(0, whole)])

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + seconds, next(self.order), action))

    def does(self, w: Sim, seconds: float, action: Callable[[], None]) -> None:
        """The worker does something by itself, a little later: not when it is dead by then, and when it
        is frozen, as soon as it thaws."""

        def now() -> None:
            if w.alive and w.frozen:
                w.to_do.append(now)
            elif w.alive:
                action()

        self.later(seconds, now)

    # --- the master

    def hear(self, event: ev.Event) -> None:
        """An event reaches the master's inbox."""
        if not self.master_lives:
            return
        if self.now < self.awake_at:
            self.inbox.append(event)
        else:
            self.tell(event)

    def tell(self, event: ev.Event) -> None:
        """The core handles an event, and what it wants is done."""
        w = self.job.pool.get(getattr(event, "worker", WorkerId(-1)))
        heard = w is not None and not w.stopped
        if isinstance(event, ev.Gone):
            fair = self.expect(event)
        effects = self.watchdog.handle(event, self.now)
        if self.talk:
            print(f"{self.now:9.3f} {event}")
            for effect in effects:
                print(f"{'':12}-> {effect}")
        if isinstance(event, ev.Failed) and heard and not event.fatal:
            assert any(f.worker == event.worker for f in self.job.failures), "a failure is not charged"
        if isinstance(event, ev.Gone) and fair is not None:
            charged = any(f.worker == event.worker for f in self.job.failures)
            assert charged == fair, f"{event} {'is' if charged else 'is not'} charged"
        for effect in effects:
            if isinstance(effect, ev.Form) and not self.workers[effect.root].holds:
                given_up = self.watchdog.stopped | {e.worker for e in effects if isinstance(e, ev.Fence)}
                there = [w for w in self.workers.values() if w.alive and not (w.fenced or w.failed)]
                kept = [w.id for w in there if w.holds and w.id not in given_up]
                assert not kept, f"the job starts anew, but {kept} hold its state"
            self.perform(effect)
        self.check_patience()
        self.set_timer()

    def check_patience(self) -> None:
        """Between faults, who is ready is soon in the ring, and who is to leave is soon let go."""
        waiting = [
            w.id for w in self.job.pool if w.state == "ready" or (w.state == "leaving" and not w.stopped)
        ]
        self.waiting = {w: self.waiting.get(w, self.now) for w in waiting}
        if self.job.ring.members and len(self.job.pool.staying) > 1:
            late = [w for w, since in self.waiting.items() if self.now - max(since, self.last_fault) > 8]
            assert not late, f"{late} wait long to join the ring or to leave it"

    def set_timer(self) -> None:
        deadline = self.job.next_deadline()
        if deadline is not None and (self.tick_at is None or deadline < self.tick_at):
            self.tick_at = deadline
            self.later(max(deadline - self.now, 0.0), lambda: self.tick(deadline))

    def tick(self, at: float) -> None:
        if self.tick_at != at or self.now < self.awake_at or not self.master_lives:
            return  # another came in between, or the master does not listen
        self.tick_at = None
        self.tell(ev.Tick())

    def stall(self, seconds: float) -> None:
        """The master does not run for a while. What it is told meanwhile, it reads afterwards."""
        self.awake_at = max(self.awake_at, self.now + seconds)
        self.later(self.awake_at - self.now, self.wake)

    def wake(self) -> None:
        if self.now < self.awake_at or not self.master_lives:
            return
        self.tick_at = None
        if self.random.random() < 0.5:  # the timer comes first, or a message
            self.tell(ev.Tick())
        some = self.random.randint(1, 20)
        read, self.inbox = self.inbox[:some], self.inbox[some:]
        for event in read:
            self.tell(event)
        if self.inbox:
            self.stall(0.01)
        else:
            self.set_timer()

    def new_master(self) -> None:
        """The master dies, and with it what it knew. Streams break; the workers go on. Another one comes,
        finds who lives, and is found by them."""
        self.master += 1
        self.master_lives, self.inbox, self.awake_at, self.tick_at = False, [], 0.0, None
        for w in self.workers.values():
            w.fenced = False  # nobody keeps it out any more
            if w.greeted:
                self.does(w, self.random.uniform(0.001, 0.05), lambda w=w: self.seek(w))  # type: ignore[misc]
        self.later(self.random.choice((0.05, 1, 5)) * self.random.random(), self.take_over)

    def take_over(self) -> None:
        if self.master_lives:
            return
        self.job = Job(self.config)
        self.watchdog = Watchdog(self.job)
        self.master_lives, self.waiting, self.last_fault = True, {}, self.now
        found = tuple((w.id, "pid" if w.placed else "") for w in self.workers.values() if w.alive)
        self.tell(ev.Adopted(found, len(self.workers)))
        self.tell(ev.Begin())

    def seek(self, w: Sim) -> None:
        """The worker looks for a master, and tells it what it is by now."""
        if w.stopping or w.failed or w.master == self.master:
            return
        if not self.master_lives:
            self.does(w, 0.5 * self.random.random(), lambda: self.seek(w))
            return
        w.master = self.master
        self.say(w, ev.Hello(w.id, back=w.warm))
        if w.warm:
            members, generation = (w.form.members, w.form.generation) if w.form else ((), NO_RING)
            left = w.ring is None and w.form is not None
            self.say(w, ev.Back(w.id, self.size, generation, members, left, w.up, w.last_out))

    def expect(self, gone: ev.Gone) -> bool | None:
        """Whether this end ought to be charged; None when either would do, or it is charged already."""
        w = self.job.pool.get(gone.worker) or self.job.pool.lost.get(gone.worker)
        sim = self.workers[gone.worker]
        if w is None or any(f.worker == gone.worker for f in self.job.failures):
            return None
        if w.stopped or w.last_words or w.expected or not sim.own_end:
            return False
        if gone.signal and any(not m.alive for m in self.peers(gone.worker)):
            return None  # it may have crashed because they died
        return True

    def peers(self, worker: WorkerId) -> list[Sim]:
        """All others that were ever in a ring with it."""
        return [self.workers[m] for f in self.forms if worker in f.members for m in f.members if m != worker]

    # --- streams

    def say(self, w: Sim, event: ev.Event) -> None:
        """The worker says something; it arrives a little later, in order."""
        master = w.master
        at = w.outbox_at = max(self.now + self.random.expovariate(200), w.outbox_at, w.audible_at)
        self.later(at - self.now, lambda: None if w.fenced or master != self.master else self.hear(event))

    def order_to(self, worker: WorkerId, act: Callable[[Sim], None]) -> None:
        """The master says something; it arrives a little later, in order."""
        if w := self.workers.get(worker):
            master = self.master
            at = w.inbox_at = max(self.now + self.random.expovariate(200), w.inbox_at)
            self.does(w, at - self.now, lambda: act(w) if w.master == master else None)

    def perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Create(worker):
                self.create(worker)
            case ev.Delete(worker, grace):
                self.delete(self.workers[worker], grace)
            case ev.Form():
                ring = Collective(effect)
                self.forms.append(effect)
                for member, leases in zip(effect.members, effect.leases, strict=True):
                    self.order_to(member, lambda w, left=leases: self.enter(w, ring, left))  # type: ignore[misc]
                self.moment("forming")
            case ev.Leave(generation, members):
                for member in members:
                    self.order_to(member, lambda w: setattr(w, "leave", generation))
                self.moment("leaving")
            case ev.Cut(generation, members):
                for member in members:
                    self.order_to(member, lambda w: self.cut(w, generation))
            case ev.Grant(worker, lease):
                self.order_to(worker, lambda w: self.granted(w, lease))
            case ev.Export(worker):
                self.order_to(worker, self.export)
                self.moment("exporting")
            case ev.Stop(worker):
                self.order_to(worker, self.stop)
            case ev.Fence(worker, why):
                self.fence(self.workers[worker], why)
            case ev.End():
                self.ended = effect

    def fence(self, w: Sim, why: str) -> None:
        if why.startswith("not heard"):
            unheard = w.silent_since is not None and w.audible_at > self.now - self.silence
            assert w.frozen or unheard or not w.alive, f"worker {w.id} spoke, but is given up: {why}"
        w.fenced = True
        self.order_to(w.id, lambda w: self.exit(w, code=3))

    # --- a worker's life

    def create(self, worker: WorkerId) -> None:
        w = self.workers[worker] = Sim(worker, np.zeros(self.size * self.epochs, np.int16))
        fate = self.random.random() if self.now < self.calm_at else 1.0
        placed = self.random.uniform(0.01, 3) if fate > 0.9 else 0.01
        takes = self.random.uniform(0.1, 2)
        if fate < 0.03:  # as long as is allowed, more or less
            takes = self.random.uniform(9.9, 10.1)
            self.to_blame.add(worker)
        self.later(placed, lambda: self.place(w) if w.alive else None)
        if fate < 0.06:
            self.to_blame.add(worker)
            self.does(w, placed + takes / 2, lambda: self.exit(w, code=1, own=True))
        if 0.06 < fate < 0.09:
            self.to_blame.add(worker)
            return  # it hangs before it has said a word
        self.does(w, placed + takes / 3, lambda: self.greet(w))
        if 0.09 < fate < 0.12:
            self.to_blame.add(worker)
            return  # it hangs, and is never ready
        if 0.12 < fate < 0.15:
            self.does(w, placed + takes, lambda: self.fail(w, "ImportError: no such thing"))
        self.does(w, placed + takes, lambda: self.ready(w))

    def place(self, w: Sim) -> None:
        w.placed = True
        self.hear(ev.Seen(w.id, "pid"))

    def greet(self, w: Sim) -> None:
        if not self.master_lives:
            self.does(w, 0.1, lambda: self.greet(w))
            return
        w.greeted, w.master = True, self.master
        self.say(w, ev.Hello(w.id))
        self.moment("starting")

    def ready(self, w: Sim) -> None:
        if not w.greeted:
            self.does(w, 0.1, lambda: self.ready(w))
            return
        w.warm = True
        self.say(w, ev.Ready(w.id, self.size))
        self.beats(w)
        if w.stopping:
            self.does(w, 0.01, lambda: self.exit(w, code=0))

    def beats(self, w: Sim) -> None:
        self.beat(w)
        self.does(w, self.silence / 6, lambda: self.beats(w))

    def beat(self, w: Sim) -> None:
        generation = w.ring.generation if w.ring and w.safe is not None else NO_RING
        rank_0 = w.ring is not None and w.ring.form.members[0] == w.id
        self.say(w, ev.Beat(w.id, generation, w.step, applied=w.safe if rank_0 else None))

    def enter(self, w: Sim, ring: Collective, leases: tuple[Range, ...]) -> None:
        """hvd.init: nobody is through before everybody is there."""
        assert w.ring is None, "ordered into a ring while in another"
        w.ring, w.leases, w.asked = ring, RangeSet.of(leases), False
        w.form, w.up = ring.form, False
        w.stepped, w.failing, w.safe, w.told = False, False, None, NOTHING
        ring.entered.add(w.id)
        if w.was_cut == ring.generation or w.stopping or (ring.broken and self.random.random() < 0.5):
            self.fails(w)  # or, if it finds no peer to notice that it is broken, when the master says so
        elif ring.entered >= set(ring.form.members) and not ring.broken:
            self.later(self.random.uniform(0.02, 0.2), lambda: self.synced(ring))

    def members(self, ring: Collective) -> list[Sim]:
        return [self.workers[m] for m in ring.form.members]

    def inside(self, ring: Collective) -> list[Sim]:
        return [w for w in self.members(ring) if w.alive and w.ring is ring]

    def synced(self, ring: Collective) -> None:
        """The broadcast: taken over by each rank at its own moment, so some may have it when it breaks."""
        if ring.broken:
            return
        self.moment("syncing")
        root = self.workers[ring.form.root]
        state = (root.step, root.applied, root.weights.copy())
        have: set[WorkerId] = set()
        late = self.random.random() * 0.1

        def take_over(w: Sim) -> None:
            if w.ring is not ring or w.failing:
                return
            if ring.form.sync and w is not root:
                w.step, w.applied, w.weights = state[0], state[1], state[2].copy()
                w.leases = w.leases.minus(w.applied)
            elif not ring.form.sync:
                assert (w.step, w.applied) == state[:2] and (w.weights == state[2]).all(), "not one state"
            w.holds = w.up = True
            self.say(w, ev.Up(w.id, ring.generation, w.step))
            have.add(w.id)
            if have == set(ring.form.members):
                self.collective(ring)

        for w in self.members(ring):
            self.does(w, self.random.uniform(0, late), lambda w=w: take_over(w))  # type: ignore[misc]

    def collective(self, ring: Collective) -> None:
        """One step of everybody. When somebody dies in it, any part of the others may have it."""
        if ring.broken:
            return
        batches: list[Range] = []
        for rank, w in enumerate(self.members(ring)):
            share = local_batch(self.batch, rank, len(ring.form.members))
            if share and len(w.leases) < 2 * share and not w.asked:
                w.asked = True
                self.does(w, 0, lambda w=w: self.say(w, ev.Want(w.id, ring.generation)))  # type: ignore[misc]
            batch, _ = w.leases.take(share)
            if batch is not None:
                assert batch[1] <= (batch[0] // self.size + 1) * self.size, "a batch of two epochs"
                batches.append(batch)
        leave = any(w.leave == ring.generation for w in self.members(ring))
        took = self.random.uniform(0.5, 1.5) * self.pace if batches else 0.02
        self.later(took, lambda: self.came_back(ring, batches, leave))

    def came_back(self, ring: Collective, batches: list[Range], leave: bool) -> None:
        """The sum is there, for each rank at its own moment, or it never comes."""
        if any(w.frozen for w in self.inside(ring)) and not ring.broken:
            self.later(0.05, lambda: self.came_back(ring, batches, leave))  # it hangs until it is cut
            return
        if ring.broken and self.random.random() < 0.5:
            return  # it broke before the sum was made: nobody has it
        back: set[WorkerId] = set()

        def arrives(w: Sim) -> None:
            if w.ring is not ring or w.failing or (ring.broken and self.random.random() < 0.5):
                return
            self.commit(w, ring, batches)
            back.add(w.id)
            if leave:
                self.out(w, "")
            elif back == set(ring.form.members):
                self.collective(ring)

        for w in self.inside(ring):
            self.does(w, self.random.random() * 0.003, lambda w=w: arrives(w))  # type: ignore[misc]
        self.moment("stepping")

    def commit(self, w: Sim, ring: Collective, batches: list[Range]) -> None:
        w.safe = w.applied
        for start, stop in batches:
            w.applied = w.applied.add(start, stop)  # raises when it is there: counted twice
            w.weights[start:stop] += 1
        w.leases = w.leases.minus(RangeSet.of(batches))
        w.step += bool(batches)
        if not w.stepped:
            w.stepped = True
            self.say(w, ev.Stepped(w.id, ring.generation, w.step, self.random.random(), 3, 0.01))
        if not batches and w.safe != w.told and w.id == ring.form.members[0]:
            w.told = w.safe
            self.beat(w)

    def out(self, w: Sim, broken: str) -> None:
        ring, w.ring, w.safe = w.ring, None, None
        assert ring is not None
        complete = w.applied.covers(0, self.size * self.epochs)
        digest = w.weights.tobytes().hex()[:64] + str(w.weights.sum()) if w.holds and complete else ""
        w.last_out = ev.Out(w.id, ring.generation, w.step, w.holds, w.applied, broken=broken, digest=digest)
        self.say(w, w.last_out)

    def fails(self, w: Sim) -> None:
        """Its collective fails: it cuts its connections and leaves; a frozen one when it thaws."""
        if w.failing:
            return
        w.failing = True
        ring = w.ring
        self.does(w, self.random.uniform(0.001, 0.05),
                  lambda: self.out(w, "a peer is gone") if w.ring is ring else None)  # fmt: skip

    def cut(self, w: Sim, generation: Generation) -> None:
        w.was_cut = generation
        if w.ring is not None and w.ring.generation == generation:
            self.fails(w)
            self.break_ring(w.ring)

    def break_ring(self, ring: Collective) -> None:
        if ring.broken:
            return
        ring.broken = True
        self.moment("breaking")
        for w in self.inside(ring):
            self.later(self.random.uniform(0, 0.03), lambda w=w: self.fails(w) if w.ring is ring else None)  # type: ignore[misc]

    def granted(self, w: Sim, lease: Range) -> None:
        w.leases, w.asked = w.leases.add(*lease), False

    def export(self, w: Sim) -> None:
        self.finals = [w, *(o for o in self.workers.values() if o.alive and o.holds and not o.fenced
                            and o.step == w.step and o is not w)]  # fmt: skip
        finished = ev.Finished(w.id, {"loss": 0.5}, "model.keras")
        self.does(w, self.random.uniform(0.05, 1), lambda: self.say(w, finished))

    def stop(self, w: Sim) -> None:
        w.stopping = True
        if not w.warm:  # its warm-up breaks off, or it does not notice
            if self.random.random() < 0.3:
                self.fail(w, "RingBroken: told to stop", blame=False)
            return
        if w.ring is not None:
            self.fails(w)
            self.break_ring(w.ring)
        self.does(w, 0.06, lambda: self.exit(w, code=0))

    # --- its end

    def delete(self, w: Sim, grace: float) -> None:
        """As the backend does it: SIGTERM, and SIGKILL when that was not enough."""
        if grace > 0:
            self.later(self.random.uniform(0, 0.05), lambda: self.terminate(w))
        self.later(grace + self.random.uniform(0, 0.05), lambda: self.exit(w, signal="SIGKILL"))

    def terminate(self, w: Sim) -> None:
        if not w.greeted:
            self.does(w, 0, lambda: self.exit(w, signal="SIGTERM"))
        else:
            self.does(w, 0, lambda: self.say(w, ev.Leaving(w.id, "SIGTERM")))

    def fail(self, w: Sim, why: str, fatal: bool = False, blame: bool = True) -> None:
        """It says its last words, and ends when they have been heard."""
        if blame:
            self.to_blame.add(w.id)
        w.failed = True
        self.say(w, ev.Failed(w.id, why, "Traceback ...", fatal))
        self.does(w, w.outbox_at - self.now, lambda: self.exit(w, code=1))
        if w.ring is not None:
            self.break_ring(w.ring)
            w.ring, w.safe = None, None

    def exit(
        self, w: Sim, signal: str = "", code: int | None = None, free: bool = False, own: bool = False
    ) -> None:
        if not w.alive:
            return
        w.alive, w.own_end, self.last_fault = False, own, self.now
        gone = ev.Gone(w.id, code=code, signal=signal, free=free)
        self.later(self.random.uniform(0.001, 0.3), lambda: self.hear(gone))
        if w.greeted:
            w.audible_at = 0.0  # whoever kept its words back lets go of them
            self.say(w, ev.Closed(w.id, "its stream ended"))
        if w.ring is not None:
            ring = w.ring
            self.later(self.random.uniform(0.0001, 0.03), lambda: self.break_ring(ring))

    # --- faults

    def plan(self, kind: str, moment: str) -> None:
        """Something will go wrong: now, or when it hurts."""
        if moment == "now":
            self.strike(kind, moment)
        else:
            self.ambushes.setdefault(moment, []).append(kind)

    def moment(self, name: str) -> None:
        if self.now < self.calm_at and (waiting := self.ambushes.get(name)):
            kind = waiting.pop()
            self.later(self.random.random() ** 3 * 0.3, lambda: self.strike(kind, name))

    def strike(self, kind: str, moment: str) -> None:
        alive = [w for w in self.workers.values() if w.alive and not w.stopping]
        if not alive or self.ended:
            return
        w = self.random.choice(alive)
        if moment == "exporting":  # the exporter; when a ring breaks, the one that alone has the last step
            w = next((o for o in alive if o.id == self.job.exporter), w)
        elif moment == "breaking":
            w = max(alive, key=lambda o: o.step)
        self.faults[kind] += 1
        self.moments[moment] += 1
        self.last_fault = self.now
        generation = self.job.ring.generation
        match kind:
            case "kill":
                self.exit(w, "SIGKILL")
            case "kill two":
                for victim in self.random.sample(alive, min(2, len(alive))):
                    self.exit(victim, "SIGKILL")
            case "kill all but one":
                for victim in alive:
                    if victim is not w:
                        self.exit(victim, "SIGKILL")
            case "kill all":
                for victim in alive:
                    self.later(self.random.uniform(0, 0.05), lambda v=victim: self.exit(v, "SIGKILL"))  # type: ignore[misc]
            case "preempt":
                self.exit(w, code=143, free=True)
            case "freeze":
                self.freeze(w, self.random.choice((0.3, 1.9, 2.1, 8)))
            case "mute":  # it works on, but its words are held up on the way
                w.silent_since = self.now
                w.audible_at = self.last_fault = self.now + self.random.choice((0.5, 1.5, 2.5, 6))
            case "term" | "term now":
                self.terminate(w)
                self.later(0.3 if kind == "term now" else 10, lambda: self.exit(w, "SIGKILL"))
            case "exit 0":
                self.to_blame.add(w.id)
                self.exit(w, code=0, own=True)
            case "crash":
                self.to_blame.add(w.id)
                self.exit(w, self.random.choice(("SIGABRT", "SIGSEGV")), own=True)
            case "raise" if w.greeted and not w.frozen:
                self.fail(w, "ValueError: no")
            case "scale":
                self.hear(ev.Scale(self.random.randint(self.config.min_workers, 6)))
            case "late":  # something of an old generation arrives now
                old = Generation(max(0, generation - 1))
                self.say(w, ev.Out(w.id, old, w.step + 1, True, NOTHING, broken="late"))
                self.say(w, ev.Up(w.id, old, w.step + 1))
                self.say(w, ev.Beat(w.id, old, w.step + 1, applied=NOTHING))
            case "twice" if w.warm:
                self.say(w, ev.Want(w.id, generation))
                self.say(w, ev.Ready(w.id, self.size))
                self.say(w, ev.Hello(w.id))
                if self.size and not w.holds:
                    self.say(w, ev.Finished(w.id, {}, ""))
            case "new master" if self.master_lives:
                self.new_master()
            case "stall":
                self.stall(self.random.choice((0.5, 1.1, 1.9, 2.1, 5)))
            case "fatal" if w.greeted and not w.frozen:
                self.asked_to_end.add("Failed")
                self.fail(w, "the model is not compiled", fatal=True)
            case "wrong data" if w.greeted and not w.warm and self.job.leases is not None:
                self.to_blame.add(w.id)
                self.say(w, ev.Ready(w.id, self.size + 1))
            case "stop":
                self.asked_to_end.add("Stopped")
                self.hear(ev.StopAsked("enough"))

    def freeze(self, w: Sim, seconds: float) -> None:
        w.frozen = True
        w.silent_since, w.audible_at = self.now, max(w.audible_at, self.now + seconds)
        self.later(seconds, lambda: self.thaw(w))

    def thaw(self, w: Sim) -> None:
        w.frozen, self.last_fault = False, self.now
        to_do, w.to_do = w.to_do, []
        for action in to_do:
            action()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs")
    args = parser.parse_args()
    faults, moments, ends = Counter[str](), Counter[str](), Counter[str]()
    losses = events = wrong = 0
    for seed in range(args.seed, args.seed + args.seeds):
        world = World(seed, talk=args.seeds == 1)
        try:
            world.run()
        except SimulationFailed as failure:
            print(failure, file=sys.stderr)
            wrong += 1
            if wrong == 3:
                break
            continue
        faults += world.faults
        moments += world.moments
        losses += world.job.restarts
        events += len(world.watchdog.history)
        ends[world.job.phase] += 1
    print(f"{args.seeds} runs, {events} events, {faults.total()} faults: {dict(faults.most_common())}")
    print(
        f"at {dict(moments.most_common())}; all state lost {losses} times; ended {dict(ends)}; {wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
