# SPDX-License-Identifier: Apache-2.0
"""The master: the real core with simulated surroundings: inbox, timer, orders, and its death."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, past
from edl.master.core.job import Job
from edl.master.jobs import new_job
from edl.master.rpc.checkpoint_parts import CheckpointParts
from edl.master.rpc.messages import message_of
from edl.master.telemetry import Telemetry
from tests.support.jobs.invariants import Watchdog

if TYPE_CHECKING:
    from tests.simulator.world import World


def left_by(job: Job, now: float) -> tuple[facts.Past, float]:
    """What a master leaves to the next one, and the time, as in its journal or in the status of a release."""
    active = job.lifetime.seconds(now)
    return past.until(past.of(job), active), now


class Master:
    """The present master; not alive between its death and the next takeover."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.clock = world, world.random, world.clock
        self.number = 0  # the number of takeovers so far
        self.lives = True
        self.job, self.epochs = new_job(world.config), world.config.training.epochs  # the requested epochs
        self.watchdog, self.telemetry = Watchdog(self.job), Telemetry(world.config)
        self.parts = CheckpointParts()
        self._inbox: list[ev.Event | facts.Heartbeat] = []  # messages received while stalled
        self._awake_at = 0.0
        self._tick_at: float | None = None
        self._left = left_by(self.job, self.clock.now)

    @property
    def hears_since(self) -> float:
        """When this master was stalled last: it may not have heard messages sent before."""
        return self._awake_at

    @property
    def greets_as(self) -> int:
        """The number by which workers know this master once they have greeted it."""
        return self.number

    def find_servers(self) -> None:
        """Watch the parameter servers, if the job has any."""
        if self.world.servers is not None:
            number = self.number
            self.world.servers.another_master(self.hear, lambda: self.lives and self.number == number)

    # --- events

    def hear(self, said: ev.Event | facts.Heartbeat) -> None:
        """Receive an event or a heartbeat."""
        if not self.lives:
            return
        if self.clock.now < self._awake_at:
            self._inbox.append(said)
        else:
            self._hear(said)

    def _hear(self, said: ev.Event | facts.Heartbeat) -> None:
        self.world.checks.hears(said, self.job.ring.generation)
        for event in self.telemetry.hears(said, self.clock.now):
            self._tell(event)
        self._set_timer()

    def _tell(self, event: ev.Event) -> None:
        """Let the core handle an event, and perform its effects."""
        checks = self.world.checks
        w = self.job.pool.get(getattr(event, "worker", WorkerId(-1)))
        ought = None  # whether this event must count as a failure
        if isinstance(event, ev.Gone):
            ought = checks.ought_to_be_charged(event)
        elif isinstance(event, ev.Failed) and not event.fatal and w is not None and not w.stopped:
            ought = not w.leaves
        if isinstance(event, ev.Live):
            self.epochs = event.epochs
        effects = self.watchdog.handle(event, self.clock.now)
        if self.world.talk:
            print(f"{self.clock.now:9.3f} {event}")
            for effect in effects:
                print(f"{'':12}-> {effect}")
        if isinstance(event, ev.Gone | ev.Failed) and ought is not None:
            checks.is_charged(event, ought)
        for effect in effects:
            if isinstance(effect, ef.Form):
                checks.keeps_the_state(effect, effects)
            self._perform(effect)
        checks.tells_losses(effects)
        checks.keeps_replacements(effects)
        checks.nobody_waits_long()

    def _perform(self, effect: ef.Effect) -> None:
        fleet, rings, faults = self.world.fleet, self.world.rings, self.world.faults
        match effect:
            case ef.Create(worker):
                fleet.create(worker)
            case ef.Delete(worker, grace):
                fleet.delete(fleet.workers[worker], grace)
            case ef.Form():
                rings.form(effect, self.number)
                faults.moment("forming")
            case ef.Leave():
                faults.moment("draining")
            case ef.Export():
                faults.moment("exporting")
            case ef.Fence(worker):
                fleet.fence(fleet.workers[worker], effect)
            case ef.Commit(worker) if (commit := self.parts.order(effect)) is not None:
                fleet.order_to(worker, lambda w: rings.hears(w, commit))
            case ef.Notice(Reason.SpecRefused):
                self.world.refused = True
            case ef.End():
                self.world.ended = effect
        if self.world.servers is not None and isinstance(effect, ef.ForServers):
            self.world.servers.perform(effect)
        if isinstance(effect, ef.ForWorkers) and (order := message_of(effect)) is not None:
            workers, message = order
            for worker in workers:
                fleet.order_to(worker, lambda w: rings.hears(w, message))

    # --- its time

    def _set_timer(self) -> None:
        times = (self.job.next_deadline(), self.telemetry.next_deadline())
        deadline = min((at for at in times if at is not None), default=None)
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self.clock.later(max(deadline - self.clock.now, 0.0), lambda: self._tick(deadline))

    def _tick(self, at: float) -> None:
        if self._tick_at != at or self.clock.now < self._awake_at or not self.lives:
            return  # a different timer was set meanwhile, or the master is stalled or dead
        self._tick_at = None
        self._time_passes()

    def _time_passes(self) -> None:
        for event in self.telemetry.passes(self.clock.now):
            self._tell(event)
        if (deadline := self.job.next_deadline()) is not None and deadline <= self.clock.now:
            self._tell(ev.Tick())
        self._set_timer()

    def stall(self, seconds: float) -> None:
        """Stop running for a while. Messages received meanwhile are handled afterwards."""
        self._awake_at = max(self._awake_at, self.clock.now + seconds)
        self.clock.later(self._awake_at - self.clock.now, self._wake)

    def _wake(self) -> None:
        if self.clock.now < self._awake_at or not self.lives:
            return
        self._tick_at = None
        if self.random.random() < 0.5:  # the timer comes first, or a message
            self._time_passes()
        some = self.random.randint(1, 20)
        read, self._inbox = self._inbox[:some], self._inbox[some:]
        for said in read:
            if self.world.ended is None:  # like the loop of a master, which ends with its job
                self._hear(said)
        if self._inbox:
            self.stall(0.01)
        else:
            self._set_timer()

    # --- its death

    def dies(self) -> None:
        """Kill the master, and lose its memory. Streams break, but the workers continue.

        A new master takes over later, lists the live workers, and these find it.
        """
        self.number += 1
        self.lives, self._inbox, self._awake_at, self._tick_at = False, [], 0.0, None
        self._left = left_by(self.job, self.clock.now)
        self.world.fleet.lose_the_master()
        self.clock.later(self.random.choice((0.05, 1, 5)) * self.random.random(), self._take_over)

    def _take_over(self) -> None:
        if self.lives:
            return
        world = self.world
        self.job, self.epochs = new_job(world.config), world.config.training.epochs
        self.watchdog, self.telemetry = Watchdog(self.job), Telemetry(world.config)
        self.parts = CheckpointParts()
        self.lives, world.checks.waiting, world.faults.last = True, {}, self.clock.now
        self.find_servers()
        workers = world.fleet.workers
        found = tuple((w.id, "pid" if w.placed else "") for w in workers.values() if w.alive)
        known, at = self._left
        active = sum(known.seconds.values()) + self.clock.now - at
        self._hear(ev.Adopted(found, len(workers), active_seconds=active, past=known))
        self._hear(ev.Begin())
