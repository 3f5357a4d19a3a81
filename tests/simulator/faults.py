# SPDX-License-Identifier: Apache-2.0
"""Faults and their times: at any time, or in ambush for a moment at which they are most harmful."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.errors import ModelError
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.core.workers import AWAY
from tests.simulator import masters
from tests.simulator.worker import FLIP, MAX_EPOCHS, Sim

if TYPE_CHECKING:
    from tests.simulator.world import World

KINDS = (
    "kill",
    "kill",
    "kill",
    "kill two",
    "kill all but one",
    "kill all",
    "freeze",
    "freeze",
    "mute",
    "term",
    "term",
    "term now",
    "exit 0",
    "crash",
    "raise",
    "scale",
    "scale",
    "epochs",
    "epochs",
    "late",
    "twice",
    "stall",
    "preempt",
    "new master",
    "new master",
    "to zero",
)
DRAIN = "drain"  # of the master's node, with some or all workers
DRAIN_SECONDS = 15.0  # from the requests to leave until the workers are killed
# Faults whose messages are outside of any stream, for runs with one master.
ONE_MASTERS = ("late", "twice", "mute", "stall", "new master", "wrong data", "to zero")
SOAK = ("kill", "kill", "freeze", "mute", "term", "term now", "late", "twice", "stall", "preempt", "scale")
RARE = ("fatal", "stop", "wrong data")
MOMENTS = (
    "now",
    "now",
    "now",
    "forming",
    "syncing",
    "stepping",
    "breaking",
    "draining",
    "exporting",
    "starting",
    "sending",
    "writing",
)


class Faults:
    """The faults of one run. After `calm_at` no further faults occur.

    Args:
        soak: schedule only faults that are no worker's own and lose no state, three a minute.
    """

    def __init__(self, world: World, calm_at: float, soak: bool = False) -> None:
        self.world, self.random, self.clock = world, world.random, world.clock
        self.calm_at, self.soak = calm_at, soak
        self.ambushes: dict[str, list[str]] = {}
        self.kinds = Counter[str]()
        self.moments = Counter[str]()
        self.last = 0.0
        self.to_blame: set[WorkerId] = set()  # workers that failed by their own fault
        self.ends: set[str] = set()  # phases in which the job may end because of a fault

    def schedule(self) -> None:
        at, rate = 0.0, self.random.choice((0.5, 1.5, 4.0))
        kinds: tuple[str, ...] = (*KINDS, *RARE) if self.random.random() < 0.1 else KINDS
        if self.world.two:
            kinds = (*(kind for kind in kinds if kind not in ONE_MASTERS), *masters.KINDS, *masters.KINDS)
            rate = 0.1 + rate / 16  # so that the job makes progress in between
        if self.world.gone or self.world.flips:  # leave time for checkpoints
            rate /= 8
        if self.soak:
            kinds, rate = SOAK, 0.05
            self.clock.later(self.calm_at, lambda: self.strike("stop", "now"))
        while (at := at + self.random.expovariate(rate)) < self.calm_at:
            kind, moment = self.random.choice(kinds), self.random.choice(MOMENTS)
            self.clock.later(at, lambda kind=kind, moment=moment: self.plan(kind, moment))  # type: ignore[misc]
        self._schedule_flips()
        self._schedule_drains()

    def _schedule_flips(self) -> None:
        """Schedule bit flips in a third of the runs with checkpoints, or in all of them (`World.flips`)."""
        chance = random.Random(f"flips of {self.world.seed}")
        job = self.world.config
        if not job.checkpoint.dir or job.asynchronous or self.soak:
            return
        if self.world.flips or chance.random() < 0.33:
            for _ in range(chance.choice((1, 1, 2, 5))):
                self.clock.later(chance.uniform(0, self.calm_at), lambda: self._flip(chance))

    def _flip(self, chance: random.Random) -> None:
        """Flip a bit that no step reads, in a worker that has the state, so that all sums stay right."""
        holders = [w for w in self.world.fleet.workers.values() if w.alive and w.worker.state.has_state]
        if holders and self.world.ended is None:
            self.kinds[FLIP] += 1
            chance.choice(holders).learner.flip()

    def plan(self, kind: str, moment: str) -> None:
        """Plan a fault: strike now, or wait in ambush for a moment."""
        if moment == "now":
            self.strike(kind, moment)
        else:
            self.ambushes.setdefault(moment, []).append(kind)

    def _scale_back(self) -> None:
        if self.world.ended:
            return
        if self.world.master.lives:
            self.world.master.hear(ev.Scale(self.random.randint(self.world.config.min_workers, 6)))
        else:
            self.clock.later(0.5, self._scale_back)

    def moment(self, name: str) -> None:
        """Strike with a fault that waits for this moment."""
        if self.clock.now < self.calm_at and (waiting := self.ambushes.get(name)):
            kind = waiting.pop()
            self.clock.later(self.random.random() ** 3 * 0.3, lambda: self.strike(kind, name))

    def strike(self, kind: str, moment: str) -> None:
        world, fleet = self.world, self.world.fleet
        alive = [w for w in fleet.workers.values() if w.alive and not w.stopping]
        if not alive or world.ended:
            return
        w = self.random.choice(alive)
        if moment == "exporting":  # the exporter; when a ring breaks, the worker that alone has the last step
            w = next((o for o in alive if o.id == world.job.exporter), w)
        elif moment == "breaking":
            w = max(alive, key=lambda o: o.step)
        self.kinds[kind] += 1
        self.moments[moment] += 1
        self.last = self.clock.now
        match kind:
            case "kill":
                fleet.exit(w, "SIGKILL")
            case "kill two":
                for victim in self.random.sample(alive, min(2, len(alive))):
                    fleet.exit(victim, "SIGKILL")
            case "kill all but one":
                for victim in alive:
                    if victim is not w:
                        fleet.exit(victim, "SIGKILL")
            case "kill all":
                for victim in alive:
                    at = self.random.uniform(0, 0.05)
                    self.clock.later(at, lambda v=victim: fleet.exit(v, "SIGKILL"))  # type: ignore[misc]
            case "preempt":
                fleet.exit(w, code=143, free=True)
            case "freeze":
                fleet.freeze(w, self.random.choice((0.3, 1.9, 2.1, 3, 8)))
            case "mute":  # it continues to work, but its messages are delayed
                w.silent_since = self.clock.now
                w.audible_at = self.last = self.clock.now + self.random.choice((0.5, 1.5, 2.5, 6))
            case "term" | "term now":
                fleet.terminate(w)
                self.clock.later(0.3 if kind == "term now" else 10, lambda: fleet.exit(w, "SIGKILL"))
            case "scale":
                world.master.hear(ev.Scale(self.random.randint(world.config.min_workers, 6)))
            case "to zero":  # and back after some time
                world.master.hear(ev.Scale(0))
                self.clock.later(self.random.choice((0.2, 2, 6)), self._scale_back)
            case "epochs":
                world.wants_epochs(self.random.randint(1, MAX_EPOCHS))
            case "late":
                self._repeat_of_old(w)
            case "twice" if w.is_ready:
                self._repeat(w)
            case "new master" if world.master.lives:
                world.master.dies()
            case "stall":
                world.master.stall(self.random.choice((0.5, 1.1, 1.9, 2.1, 5)))
            case _ if kind in masters.KINDS:
                world.master.strikes(kind)
            case "stop":
                self.ends.add("Stopped")
                world.master.hear(ev.StopAsked("enough"))
            case _:
                self._fail(kind, w)

    def _schedule_drains(self) -> None:
        """Schedule drains of the master's node in a quarter of the runs, from a chance of their own."""
        chance = random.Random(f"drains of {self.world.seed}")
        if not self.soak and chance.random() < 0.25:
            for _ in range(chance.choice((1, 1, 2))):
                self.clock.later(chance.uniform(0, self.calm_at), lambda: self._drain(chance))

    def _drain(self, chance: random.Random) -> None:
        """Drain the master's node: it dies before, between or after the requests of its workers to leave."""
        fleet = self.world.fleet
        alive = [w for w in fleet.workers.values() if w.alive and not w.stopping]
        if not alive or self.world.ended is not None:
            return
        self.kinds[DRAIN] += 1
        self.last = self.clock.now
        self.clock.later(chance.uniform(0, 0.1), self._lose_the_master)
        for victim in alive if chance.random() < 0.5 else chance.sample(alive, chance.randint(1, len(alive))):
            self.clock.later(chance.uniform(0, 0.1), lambda v=victim: fleet.terminate(v))  # type: ignore[misc]
            self.clock.later(DRAIN_SECONDS, lambda v=victim: fleet.exit(v, "SIGKILL"))  # type: ignore[misc]

    def _lose_the_master(self) -> None:
        if self.world.ended is None and self.world.master.lives:
            self.world.master.dies()

    def _fail(self, kind: str, w: Sim) -> None:
        """Let a worker fail by its own fault."""
        fleet = self.world.fleet
        speaks = w.greeted and not w.frozen
        match kind:
            case "exit 0":
                self.to_blame.add(w.id)
                fleet.exit(w, code=0, own=True)
            case "crash":
                self.to_blame.add(w.id)
                fleet.exit(w, self.random.choice(("SIGABRT", "SIGSEGV")), own=True)
            case "raise" if speaks:
                fleet.fail(w, ConnectionError("no"))  # one that may pass
            case "fatal" if speaks:
                self.ends.add("Failed")
                fleet.fail(w, ModelError("the model is not compiled"))
            case "wrong data" if w.greeted and not w.is_ready and self.world.job.train is not None:
                self.to_blame.add(w.id)
                layout, of_job = self.world.job.train.layout, self.world.job.reference
                ready = ev.Ready(w.id, Layout(self.world.size + 1))
                if w.id % 2 and of_job.sample_loss is not None:  # the same records with different contents
                    loss = facts.SampleLoss(2 * of_job.sample_loss.loss, 0.01)
                    ready = ev.Ready(w.id, layout, held_out=of_job.held_out, sample_loss=loss)
                fleet.say(w, ready)

    def _repeat_of_old(self, w: Sim) -> None:
        """Deliver messages of a generation that this worker has left."""
        known = self.world.job.pool.get(w.id)
        last = known.away_from if known and known.place == AWAY else self.world.job.ring.generation
        say, old = self.world.fleet.say, Generation(max(0, last - 1))
        say(w, ev.LeftRing(w.id, old, w.step + 1, True, broken="late"))
        say(w, ev.JoinedRing(w.id, old, w.step + 1))
        say(w, facts.Heartbeat(w.id, old, w.step + 1))

    def _repeat(self, w: Sim) -> None:
        """Let a worker repeat its messages."""
        say = self.world.fleet.say
        say(w, ev.Ready(w.id, Layout(self.world.size)))
        say(w, ev.Hello(w.id))
        if self.world.size and not w.has_state:
            say(w, ev.Finished(w.id, {}, ""))
