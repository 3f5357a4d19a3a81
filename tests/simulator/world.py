# SPDX-License-Identifier: Apache-2.0
"""One run of the simulator: its random choices, from its begin to its checks."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator
from typing import Any

from structlog.testing import capture_logs

from edl import config
from edl.checkpoints import Store
from edl.config import values
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.job import Job
from tests.simulator.checks import Checks
from tests.simulator.clock import Clock
from tests.simulator.faults import Faults
from tests.simulator.fleet import Fleet
from tests.simulator.master import Master
from tests.simulator.masters import Masters
from tests.simulator.rings import Rings
from tests.simulator.servers import GONE_COPIES, GONES, KINDS_OF_JOBS, STUCK_PS, STUCKS, Servers
from tests.simulator.store import Memory, stands_for
from tests.simulator.worker import MAX_EPOCHS
from tests.simulator.worker_stream import Crew
from tests.support.jobs.invariants import Watchdog

BASE = values.defaults()
MAX_EVENTS = 100_000
WITH_SERVERS = 10  # one of this many runs has parameter servers, of each kind in turn
# One of this many runs has two masters, because it takes as long as twelve others. Every second one of these
# has servers.
TWO_MASTERS = 40


class SimulationFailed(AssertionError):
    """A promise was broken. The text names the run, how to repeat it, and the last events."""


class World:
    """One run. `run` raises SimulationFailed when a promise is broken.

    Args:
        talk: print each event and its effects.
        masters: 1 for one master with stable connections; 2 for a leader and a standby on a network that
            breaks; None to let the seed decide.
        servers: the kind of the job with parameter servers; empty to let the seed decide.
        flips: flip bits of members' states, in a job that is long enough to have checkpoints.
        hours: how long the job trains, under faults that are no worker's own, until it is stopped; 0 to train
            to its end.
    """

    def __init__(
        self,
        seed: int,
        talk: bool = False,
        masters: int | None = None,
        hours: float = 0.0,
        servers: str = "",
        flips: bool = False,
    ):
        alone, chosen = bool(hours or servers or flips), masters is None
        masters = masters or (2 if seed % TWO_MASTERS == TWO_MASTERS - 1 and not alone else 1)
        chance = self.random = random.Random(seed)
        self.seed, self.talk, self.hours = seed, talk, hours
        self.size = chance.choice((0, 1, 3, 15, 16, 17, 60, 60, 200, 200, 400))
        others = random.Random(f"bad records of {seed}")  # so that a seed's other choices stay the same
        self.bad = set(others.sample(range(self.size), others.choice((0, 0, min(3, self.size)))))
        self.epochs = [chance.randint(1, 3)]  # all requested numbers of epochs
        self.refused = False  # whether a change came too late
        self.batch = chance.choice((1, 4, 16, 16, 64))
        self.sums = seed % 3 + 1  # the number of sums of a step
        self.pace = chance.choice((0.005, 0.05, 0.3))  # seconds of a step
        if masters == 2:  # a job that still trains when the second cut comes
            self.size, self.batch, self.epochs = max(self.size, 200), 4, [chance.randint(2, 4)]
            self.pace = chance.choice((0.1, 0.4))
        if hours:
            self.batch, self.pace, self.epochs = 4, 1.0, [MAX_EPOCHS]
            self.size, self.bad = round(hours * 3600 / self.pace * self.batch / MAX_EPOCHS), set()
        grace, join = chance.choice((0, 1, 3, 3)), chance.choice((0, 0.2, 1))
        self.silence = 2.0
        workers = chance.randint(1, 6)
        least = chance.choice((1, 1, 1, min(2, workers), workers))
        self.most_failures = chance.choice((0, 2, 10**6, 10**6, 10**6, 10**6))
        if masters == 2 or hours:
            self.most_failures = 10**6
        if hours:
            workers, least = 6, 1
        others = random.Random(f"checkpoints of {seed}")
        writes, full = others.random() < 0.7, others.choice((0.0, 0.0, 0.05, 0.3))
        self.store = Store(Memory(lambda: others.random() < full))
        reads = random.Random(f"slow reads of {seed}")
        self.reads = reads if reads.random() < 0.3 else None  # None: reads have returned when rings are left
        busy = random.Random(f"busy members of {seed}")
        self.busy = busy if busy.random() < 0.3 else None  # None: no code of the user outlasts a cut
        others = random.Random(f"evaluations of {seed}")
        self.held_out = 0 if hours else others.choice((0, 1, 10, 30))  # records
        self.values = values.merge(
            BASE,
            {
                "evaluation": {
                    "steps": others.choice((0, 0, 5)),
                    "epochs": others.choice((0, 1, 2)),
                    "batchSize": 8,
                },
                "checkpoint": {
                    "dir": "memory" if writes else "",
                    "seconds": others.choice((0.1, 1, 5)),
                    "steps": others.choice((0, 0, 7)),
                    "keep": 2,
                },
                "workers": workers,
                "minWorkers": least,
                "maxWorkers": 8,
                "training": {"epochs": self.epochs[0], "batchSize": self.batch},
                "data": {"maxBadRecords": len(self.bad)},
                "elastic": {
                    "heartbeatTimeoutSeconds": self.silence,
                    "startupTimeoutSeconds": 10,
                    "joinDelaySeconds": join,
                    "gracePeriodSeconds": grace,
                    "maxFailures": self.most_failures,
                },
            },
        )
        has_servers = not (hours or flips) and (
            seed % WITH_SERVERS == WITH_SERVERS - 4 if masters == 1 else chosen and seed // TWO_MASTERS % 2
        )
        kind = servers or (KINDS_OF_JOBS[seed // WITH_SERVERS % len(KINDS_OF_JOBS)] if has_servers else "")
        self.kind, self.flips = servers, flips
        if flips:
            others = random.Random(f"flips in {seed}")
            self.size, self.batch, self.pace, self.bad = others.choice((200, 400)), 4, 0.05, set()
            self.most_failures = others.choice((2, 10**6, 10**6))
            self.values = values.merge(
                self.values,
                {
                    "workers": others.randint(2, 6),
                    "minWorkers": 1,
                    "data": {"maxBadRecords": 0},
                    "training": {"batchSize": self.batch},
                    "elastic": {"maxFailures": self.most_failures},
                    "checkpoint": {"dir": "memory", "seconds": others.choice((0.1, 0.5, 2))},
                },
            )
        if kind:
            self._have_servers(kind)
        self.config = config.parse(self.values)
        self.clock = Clock()
        self.two = masters == 2
        self.servers = Servers(self, kind) if kind else None
        self.rings = Rings(self)
        self.master: Any = Masters(self) if self.two else Master(self)
        self.fleet: Any = Crew(self) if self.two else Fleet(self)
        self.checks = Checks(self)
        calm_at = chance.choice((0.0, chance.uniform(0, 12), chance.uniform(0, 25)))
        if self.two:
            calm_at = chance.uniform(20, 60)
        self.gone = kind in GONES
        if self.gone or flips:
            calm_at = chance.uniform(10, 30)
        self.faults = Faults(self, calm_at=hours * 3600 or calm_at, soak=bool(hours))
        self.ended: ef.End | None = None
        if self.servers is not None:
            self.master.find_servers()
            self.servers.schedule(calm_at)

    def _have_servers(self, kind: str) -> None:
        """Set the values of a job with rows, or all weights, on parameter servers."""
        others = random.Random(f"values of the servers of {self.seed}")
        ps: dict[str, Any] = {"servers": others.randint(1, 3)}
        job: dict[str, Any] = {"mode": "hybrid", "ps": ps}
        if kind in GONES:  # a job that is long enough to have checkpoints
            self.size, self.batch, self.pace = others.choice((40, 60, 120)), others.choice((1, 4)), 0.05
            self.bad, self.most_failures = set(), 10**6
            job |= {
                "mode": others.choice(("hybrid", "ps")),
                "data": {"maxBadRecords": 0},
                "elastic": {"maxFailures": self.most_failures},
                "training": {"batchSize": self.batch},
                "checkpoint": {
                    "dir": "memory",
                    "seconds": others.choice((0.1, 0.5)),
                    "steps": others.choice((0, 7)),
                },
            }
        if kind in STUCKS:  # a job that trains for some seconds
            self.size, self.batch, self.pace, self.bad = others.choice((60, 200)), 16, 0.3, set()
            job |= {"data": {"maxBadRecords": 0}, "training": {"batchSize": self.batch}}
        if kind in ("ps", "ps-copies", GONE_COPIES, STUCK_PS) or job["mode"] == "ps":
            self.bad = set()
            job |= {"mode": "ps", "data": {"maxBadRecords": 0}}
            ps |= {
                "gradsToWait": others.choice((1, 1, 1, 2, 3)),
                "maxStaleness": others.choice((0, 0, 1, 3)),
                "scaleRateByStaleness": others.random() < 0.3,
                "pullSteps": others.choice((1, 1, 3)),
            }
        copied = kind in ("copies", "ps-copies", GONE_COPIES)
        if copied or (kind in STUCKS and others.random() < 2 / 3):
            ps |= {"servers": others.randint(2, 4), "replicas": 2, "timeoutSeconds": 1.0}
        self.values = values.merge(self.values, job)

    def wants_servers(self, count: int) -> None:
        """Change the number of servers in the job's values; later masters start with it."""
        ps = self.config.ps.model_copy(update={"servers": count})
        self.config = self.config.model_copy(update={"ps": ps})

    def wants_epochs(self, epochs: int) -> None:
        """Change the number of epochs in the job's values; later masters start with it."""
        training = self.config.training.model_copy(update={"epochs": epochs})
        self.config = self.config.model_copy(update={"training": training})
        self.epochs.append(epochs)
        self.master.hear(ev.Live(self.job.target, self.job.min_size, self.job.suspended, epochs))

    @property
    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint; 0 without a checkpoint."""
        return max((c.step for c in self.store.checkpoints()), default=0)

    @property
    def job(self) -> Job:
        """The job of the present master."""
        return self.master.job

    @property
    def takeovers(self) -> int:
        """The number of takeovers by new masters."""
        return int(self.master.number)

    @property
    def watchdog(self) -> Watchdog:
        return self.master.watchdog

    def run(self) -> None:
        with self._quiet(), stands_for("memory", self.store):
            self._watched_run()

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Hide the logs of masters, workers and servers, unless the run is printed (`talk`)."""
        if self.talk or not (self.two or self.servers is not None):
            yield
            return
        with capture_logs() as told, contextlib.redirect_stderr(io.StringIO()):
            yield
        # The shipped code restarts failed parts of itself. Here none of them may fail.
        errors = [line for line in told if line["log_level"] == "error"]
        if errors:
            raise SimulationFailed(f"seed {self.seed}: an error was logged: {errors[0]}")

    def _watched_run(self) -> None:
        if self.two:
            random.seed(self.seed)  # the shipped code uses it for pauses after failures
        try:
            self._run()
        except Exception as error:
            which = f"--seed {self.seed}{' --masters 2' if self.two else ''}"
            which += f" --servers {self.kind}" if self.kind else ""
            which += " --flips" if self.flips else ""
            repeat = f"repeat with: python -m tests.simulator {which}"
            lines = [f"seed {self.seed}: {type(error).__name__}: {error}", repeat, "its last events:"]
            for now, event, effects in list(self.watchdog.history)[-30:]:
                lines.append(f"{now:9.3f} {event}")
                lines += [f"{'':12}-> {effect}" for effect in effects]
            raise SimulationFailed("\n".join(lines)) from error
        finally:
            for w in self.fleet.workers.values():
                w.buried()
            if self.servers is not None:
                self.servers.bury()
            if self.two:
                self.fleet.bury()
                self.master.bury()

    def _run(self) -> None:
        self.master.hear(ev.Begin())
        self.faults.schedule()
        steps = MAX_EPOCHS * (self.size // self.batch + 40)
        limit = (
            (150 if self.two else 60 if self.servers is not None else 0)
            + self.faults.calm_at
            + (60 * self.faults.kinds["restart"])
            + 90
            + 2 * steps * (self.pace + 0.02)
        )
        while self.ended is None:
            action = self.clock.go_on()
            too_long = self.clock.now > limit or len(self.watchdog.history) > MAX_EVENTS
            assert not too_long, f"the job does not end: {self.job.phase}, {self.job.reason}"
            action()
        self.checks.judge(self.ended)
