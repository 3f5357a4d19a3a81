"""One run: what chance has chosen for it, from its begin to its judgement."""

from __future__ import annotations

import random

from edl import config
from edl.checkpoints import Store
from edl.config import values
from master.core import events as ev
from master.core.job import Job
from tests.invariants import Watchdog
from tests.simulator.checks import Checks
from tests.simulator.clock import Clock
from tests.simulator.faults import Faults
from tests.simulator.fleet import Fleet
from tests.simulator.master import Master
from tests.simulator.rings import Rings
from tests.simulator.store import Memory
from tests.simulator.worker import MOST_EPOCHS

BASE = values.defaults()
MOST_EVENTS = 100_000


class SimulationFailed(AssertionError):
    """A promise was broken; the text says in which run, how to repeat it, and what came before."""


class World:
    """One run. `run` raises SimulationFailed when a promise is broken.

    Args:
        talk: print each event and what follows from it.
    """

    def __init__(self, seed: int, talk: bool = False):
        chance = self.random = random.Random(seed)
        self.seed, self.talk = seed, talk
        self.size = chance.choice((0, 1, 3, 15, 16, 17, 60, 60, 200, 200, 400))
        others = random.Random(f"bad records of {seed}")  # so that a seed's other choices stay what they were
        self.bad = set(others.sample(range(self.size), others.choice((0, 0, min(3, self.size)))))
        self.epochs = [chance.randint(1, 3)]  # that were ever wanted
        self.refused = False  # whether a change came too late
        self.batch = chance.choice((1, 4, 16, 16, 64))
        self.sums = seed % 3 + 1  # that make up a step
        self.pace = chance.choice((0.005, 0.05, 0.3))  # seconds of a step
        grace, join = chance.choice((0, 1, 3, 3)), chance.choice((0, 0.2, 1))
        self.silence = 2.0
        workers = chance.randint(1, 6)
        least = chance.choice((1, 1, 1, min(2, workers), workers))
        self.most_failures = chance.choice((0, 2, 10**6, 10**6, 10**6, 10**6))
        others = random.Random(f"checkpoints of {seed}")
        writes, full = others.random() < 0.7, others.choice((0.0, 0.0, 0.05, 0.3))
        self.store = Store(Memory(lambda: others.random() < full))
        self.config = config.parse(values.merge(BASE, {
            "checkpoint": {"dir": "memory" if writes else "", "seconds": others.choice((0.1, 1, 5)),
                           "steps": others.choice((0, 0, 7)), "keep": 2},
            "workers": workers, "minWorkers": least, "maxWorkers": 8,
            "training": {"epochs": self.epochs[0], "batchSize": self.batch},
            "data": {"maxBadRecords": len(self.bad)},
            "elastic": {"heartbeatTimeoutSeconds": self.silence, "startupTimeoutSeconds": 10,
                        "joinDelaySeconds": join, "gracePeriodSeconds": grace,
                        "maxFailures": self.most_failures},
        }))  # fmt: skip
        self.clock = Clock()
        self.fleet = Fleet(self)
        self.rings = Rings(self)
        self.master = Master(self)
        self.checks = Checks(self)
        self.faults = Faults(self, calm_at=chance.choice((0.0, chance.uniform(0, 12), chance.uniform(0, 25))))
        self.ended: ev.End | None = None

    def wants_epochs(self, epochs: int) -> None:
        """Somebody changes the job's values; a master that comes later begins with these."""
        training = self.config.training.model_copy(update={"epochs": epochs})
        self.config = self.config.model_copy(update={"training": training})
        self.epochs.append(epochs)
        self.master.hear(ev.Live(self.job.target, self.job.min_size, self.job.suspended, epochs))

    @property
    def newest_checkpoint(self) -> int:
        """Its step; 0: there is none."""
        return max((c.step for c in self.store.checkpoints()), default=0)

    @property
    def job(self) -> Job:
        """Of the master that there is now."""
        return self.master.job

    @property
    def watchdog(self) -> Watchdog:
        return self.master.watchdog

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
        finally:
            for w in self.fleet.workers.values():
                w.buried()

    def _run(self) -> None:
        self.master.hear(ev.Begin())
        self.faults.schedule()
        steps = MOST_EPOCHS * (self.size // self.batch + 40)
        limit = self.faults.calm_at + 90 + 2 * steps * (self.pace + 0.02)
        while self.ended is None:
            action = self.clock.go_on()
            too_long = self.clock.now > limit or len(self.watchdog.history) > MOST_EVENTS
            assert not too_long, f"the job does not end: {self.job.phase}, {self.job.reason}"
            action()
        self.checks.judge(self.ended)
