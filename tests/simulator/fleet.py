"""The workers' processes: they start, speak, are told, and end. The backend is in here too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from edl.contract.ids import WorkerId
from master.core import events as ev
from tests.simulator.worker import NO_RING, Sim

if TYPE_CHECKING:
    from tests.simulator.world import World


class Fleet:
    """All workers that there ever were."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.clock = world, world.random, world.clock
        self.workers: dict[WorkerId, Sim] = {}

    def does(self, w: Sim, seconds: float, action: Callable[[], None]) -> None:
        """The worker does something by itself, a little later: not when it is dead by then, and when it
        is frozen, as soon as it thaws."""

        def now() -> None:
            if w.alive and w.frozen:
                w.to_do.append(now)
            elif w.alive:
                action()

        self.clock.later(seconds, now)

    # --- streams

    def say(self, w: Sim, event: ev.Event) -> None:
        """The worker says something; it arrives a little later, in order."""
        master = w.master
        at = w.outbox_at = max(self.clock.now + self.random.expovariate(200), w.outbox_at, w.audible_at)

        def arrives() -> None:
            if not w.fenced and master == self.world.master.number:
                self.world.master.hear(event)

        self.clock.later(at - self.clock.now, arrives)

    def order_to(self, worker: WorkerId, act: Callable[[Sim], None]) -> None:
        """The master says something; it arrives a little later, in order."""
        if w := self.workers.get(worker):
            master = self.world.master.number
            at = w.inbox_at = max(self.clock.now + self.random.expovariate(200), w.inbox_at)
            self.does(w, at - self.clock.now, lambda: act(w) if w.master == master else None)

    def lose_the_master(self) -> None:
        """Streams break, and whoever was kept out is so no longer."""
        for w in self.workers.values():
            w.fenced = False
            if w.greeted:
                self.does(w, self.random.uniform(0.001, 0.05), lambda w=w: self.seek(w))  # type: ignore[misc]

    def seek(self, w: Sim) -> None:
        """The worker looks for a master, and tells it what it is by now."""
        if w.stopping or w.failed or w.master == self.world.master.number:
            return
        if not self.world.master.lives:
            self.does(w, 0.5 * self.random.random(), lambda: self.seek(w))
            return
        w.master = self.world.master.number
        self.say(w, ev.Hello(w.id, resumes=w.is_ready))
        if w.is_ready:
            members, generation = (w.form.members, w.form.generation) if w.form else ((), NO_RING)
            left = w.ring is None and w.form is not None
            self.say(w, ev.Resume(w.id, self.world.size, generation, members, left, w.up, w.last_out))

    # --- a life

    def create(self, worker: WorkerId) -> None:
        w = self.workers[worker] = Sim(worker, np.zeros(self.world.size * self.world.epochs, np.int16))
        fate = self.random.random() if self.clock.now < self.world.faults.calm_at else 1.0
        placed = self.random.uniform(0.01, 3) if fate > 0.9 else 0.01
        takes = self.random.uniform(0.1, 2)
        if fate < 0.03:  # as long as is allowed, more or less
            takes = self.random.uniform(9.9, 10.1)
            self.world.faults.to_blame.add(worker)
        self.clock.later(placed, lambda: self.place(w) if w.alive else None)
        if fate < 0.06:
            self.world.faults.to_blame.add(worker)
            self.does(w, placed + takes / 2, lambda: self.exit(w, code=1, own=True))
        if 0.06 < fate < 0.09:
            self.world.faults.to_blame.add(worker)
            return  # it hangs before it has said a word
        self.does(w, placed + takes / 3, lambda: self.greet(w))
        if 0.09 < fate < 0.12:
            self.world.faults.to_blame.add(worker)
            return  # it hangs, and is never ready
        if 0.12 < fate < 0.15:
            self.does(w, placed + takes, lambda: self.fail(w, "ImportError: no such thing"))
        self.does(w, placed + takes, lambda: self.ready(w))

    def place(self, w: Sim) -> None:
        w.placed = True
        self.world.master.hear(ev.Seen(w.id, "pid"))

    def greet(self, w: Sim) -> None:
        if not self.world.master.lives:
            self.does(w, 0.1, lambda: self.greet(w))
            return
        w.greeted, w.master = True, self.world.master.number
        self.say(w, ev.Hello(w.id))
        self.world.faults.moment("starting")

    def ready(self, w: Sim) -> None:
        if not w.greeted:
            self.does(w, 0.1, lambda: self.ready(w))
            return
        w.is_ready = True
        self.say(w, ev.Ready(w.id, self.world.size))
        self.beats(w)
        if w.stopping:
            self.does(w, 0.01, lambda: self.exit(w, code=0))

    def beats(self, w: Sim) -> None:
        self.beat(w)
        self.does(w, self.world.silence / 6, lambda: self.beats(w))

    def beat(self, w: Sim) -> None:
        generation = w.ring.generation if w.ring and w.safe is not None else NO_RING
        rank_0 = w.ring is not None and w.ring.form.members[0] == w.id
        self.say(w, ev.Heartbeat(w.id, generation, w.step, applied=w.safe if rank_0 else None))

    # --- orders

    def fence(self, w: Sim, fence: ev.Fence) -> None:
        if fence.reason is ev.FenceReason.HeartbeatTimeout:
            self.world.checks.was_silent(w, fence.why)
        w.fenced = True
        self.order_to(w.id, lambda w: self.exit(w, code=3))

    def export(self, w: Sim) -> None:
        there = [o for o in self.workers.values() if o.alive and o.has_state and not o.fenced]
        self.world.checks.finals = [w, *(o for o in there if o.step == w.step and o is not w)]
        finished = ev.Finished(w.id, {"loss": 0.5}, "model.keras")
        self.does(w, self.random.uniform(0.05, 1), lambda: self.say(w, finished))

    def stop(self, w: Sim) -> None:
        w.stopping = True
        if not w.is_ready:  # its warm-up breaks off, or it does not notice
            if self.random.random() < 0.3:
                self.fail(w, "RingBroken: told to stop", blame=False)
            return
        if w.ring is not None:
            self.world.rings.fails(w)
            self.world.rings.break_ring(w.ring)
        self.does(w, 0.06, lambda: self.exit(w, code=0))

    def delete(self, w: Sim, grace: float) -> None:
        """As the backend does it: SIGTERM, and SIGKILL when that was not enough."""
        if grace > 0:
            self.clock.later(self.random.uniform(0, 0.05), lambda: self.terminate(w))
        self.clock.later(grace + self.random.uniform(0, 0.05), lambda: self.exit(w, signal="SIGKILL"))

    # --- an end

    def terminate(self, w: Sim) -> None:
        if not w.greeted:
            self.does(w, 0, lambda: self.exit(w, signal="SIGTERM"))
        else:
            self.does(w, 0, lambda: self.say(w, ev.Leaving(w.id, "SIGTERM")))

    def fail(self, w: Sim, why: str, fatal: bool = False, blame: bool = True) -> None:
        """It says its last words, and ends when they have been heard."""
        if blame:
            self.world.faults.to_blame.add(w.id)
        w.failed = True
        self.say(w, ev.Failed(w.id, why, "Traceback ...", fatal))
        self.does(w, w.outbox_at - self.clock.now, lambda: self.exit(w, code=1))
        if w.ring is not None:
            self.world.rings.break_ring(w.ring)
            w.ring, w.safe = None, None

    def exit(
        self, w: Sim, signal: str = "", code: int | None = None, free: bool = False, own: bool = False
    ) -> None:
        if not w.alive:
            return
        w.alive, w.own_end, self.world.faults.last = False, own, self.clock.now
        gone = ev.Gone(w.id, code=code, signal=signal, free=free)
        self.clock.later(self.random.uniform(0.001, 0.3), lambda: self.world.master.hear(gone))
        if w.greeted:
            w.audible_at = 0.0  # whoever kept its words back lets go of them
            self.say(w, ev.Closed(w.id, "its stream ended"))
        if w.ring is not None:
            ring = w.ring
            self.clock.later(self.random.uniform(0.0001, 0.03), lambda: self.world.rings.break_ring(ring))

    # --- a pause

    def freeze(self, w: Sim, seconds: float) -> None:
        w.frozen = True
        w.silent_since, w.audible_at = self.clock.now, max(w.audible_at, self.clock.now + seconds)
        self.clock.later(seconds, lambda: self.thaw(w))

    def thaw(self, w: Sim) -> None:
        w.frozen, self.world.faults.last = False, self.clock.now
        to_do, w.to_do = w.to_do, []
        for action in to_do:
            action()
