# SPDX-License-Identifier: Apache-2.0
"""How much of an hour of a spot fleet becomes training: a job that lives through it, and one begun again.

A public record of spot instances (data/spot.csv) is replayed at real speed. The job has six workers where the
fleet has all of its instances, and else its share of those that are there. Every second loss comes without
notice (kill -9), the others two minutes after a notice, as a spot instance's.

- ours: workers are killed and added as the record says. The hour passes in the simulator's virtual time
  (tests/simulator): the core and the workers' loops are those that ship, and so are the accounts of the time
  and the checks that each record is in the model once.
- restarted: the same job as one that cannot change its size. At each change all of it ends and is begun again
  with the workers that are there, from its newest checkpoint. Before a loss with notice, and before it takes
  in new workers, it writes a checkpoint.

What things cost is measured first, in real jobs of edl on this machine: a change of the ring after a loss and
at a join, the start of a worker, and the restart of a job from its checkpoint, until all have made a step.

As a check of the simulator, a real job lives through the ten minutes of the hour with most changes, and the
same ten minutes are simulated.
"""

from __future__ import annotations

import contextlib
import csv
import os
import random
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from benchmarks import report
from benchmarks.report import Row
from edl import config
from edl.checkpoints import Checkpoint, Store
from edl.config import values
from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from edl.trainer.ring.local import InProcessGroup, Slot
from tests.simulator.checks import Checks
from tests.simulator.faults import Faults
from tests.simulator.fleet import Fleet
from tests.simulator.master import Master
from tests.simulator.rings import Delivery, Rings
from tests.simulator.worker import Sim
from tests.simulator.world import World

HERE = Path(__file__).parent
RECORD, INSTANCES = HERE / "data" / "spot.csv", 32
MODEL = HERE.parent / "tests" / "models" / "counting_busy.py"
WORKERS = 6  # where the fleet has all of its instances
RECORDS, BATCH, RECORD_SECONDS = 20_000, 8, 0.00625  # of each worker: a step of all sleeps for 50 ms
STEP_SECONDS = 0.25  # of the simulated job
NOTICE = 120.0  # seconds from the notice to the loss
CHECKPOINT_SECONDS = 10.0, 600.0  # of the restarted job
SECONDS = 60.0  # to wait for anything
DENSE_HOUR = range(330, 390)  # minutes; Parcae's "high availability, dense"
CHECKED = 10  # minutes that a real job lives through


@dataclass(frozen=True)
class Change:
    """From this second of the replay on there are so many workers."""

    at: float
    workers: int


@dataclass(frozen=True)
class Costs:
    """Measured seconds.

    Args:
        loss, join: the longest that a survivor waits from step to step.
        start: from the loss of a worker until its replacement has made a step.
        restart: from the end of all processes of a job until a new one has made a step from the checkpoint.
        write: from the request for a checkpoint until it is written.
    """

    loss: float
    join: float
    start: float
    restart: float
    write: float


@dataclass(frozen=True)
class Outcome:
    """What came of one replay.

    Args:
        useful: share of its time in which steps were made that are in the model at its end.
        busy: the same of the seconds that the record offers workers.
        changes: of the ring, or restarts of the job.
    """

    useful: float
    busy: float
    changes: int


class Job(Protocol):
    """`benchmarks.jobs.OurJob`."""

    client: Any
    journal: Any
    master: Any

    def pid(self, worker: int) -> int: ...
    def __enter__(self) -> Job: ...
    def __exit__(self, *_: object) -> None: ...


def changes(minutes: range, fleet: int) -> list[Change]:
    """The workers of the job while the record runs over these minutes; the first from second 0 on."""
    lines = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
    told = {int(row["minute"]): int(row["available"]) for row in csv.DictReader(lines)}
    found: list[Change] = []
    for minute in minutes:
        available = told[max(m for m in told if m <= minute)]
        workers = int(available * fleet / INSTANCES + 0.5)
        if not found or workers != found[-1].workers:
            found.append(Change(60.0 * (minute - minutes.start), workers))
    return found


def offered(plan: list[Change], seconds: float) -> float:
    """Seconds of workers, over the whole replay."""
    ends = [*plan[1:], Change(seconds, 0)]
    return sum((b.at - a.at) * a.workers for a, b in zip(plan, ends, strict=True))


def with_notice(plan: list[Change]) -> list[bool]:
    """For each change, return whether it is an announced loss. Every second loss is announced."""
    losses = [b.workers < a.workers for a, b in pairwise(plan)]
    return [loss and sum(losses[: n + 1]) % 2 == 0 for n, loss in enumerate(losses)]


def until(happens: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """The first true value; the master is asked for its status now and again."""
    deadline = time.monotonic() + seconds
    while not (found := happens()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {seconds:g} s: {happens.__qualname__}")
        time.sleep(0.01)
    return found


def sets(fleet: int, directory: Path, *more: str) -> tuple[str, ...]:
    return (
        f"model.module={MODEL}",
        f"training.batchSize={BATCH * fleet}",
        "elastic.heartbeatTimeoutSeconds=3",
        f"checkpoint.dir={directory}",
        *more,
    )


def newest(directory: Path) -> Checkpoint | None:
    whole = [c for c in Store.open(str(directory)).checkpoints() if not c.wrong()]
    return whole[-1] if whole else None


def keep(job: Job, directory: Path, seconds: float = SECONDS) -> None:
    """Have the state of now written.

    Raises:
        TimeoutError: it took longer.
    """
    step = job.client.status()["step"]
    job.client.checkpoint()
    until(lambda: (job.client.status()["checkpoint"]["step"] or 0) >= step, seconds)


def check(directory: Path) -> None:
    """
    Raises:
        AssertionError: a record was lost, or counted twice.
    """
    found = newest(directory)
    assert found is not None, "no checkpoint was written"
    (counts,) = (
        np.frombuffer(tensor.data, np.float32)
        for tensor in found.read().values()
        if tensor.shape == (RECORDS,)
    )
    whole, part = divmod(found.manifest.records, RECORDS)
    assert set(counts.tolist()) <= {whole, whole + 1} and np.sum(counts == whole + 1) == part, (
        f"{found.manifest.records} records, and counts from {counts.min():g} to {counts.max():g}"
    )


# --- what things cost


def costs(job: Callable[..., Job], work: Path) -> Costs:
    """Measure what things cost in a job of three workers."""
    directory = work / f"costs-{time.monotonic_ns()}"
    with job(work, 3, *sets(3, directory, "elastic.joinDelaySeconds=0"), start="spawn") as running:
        before = running.journal.ring(3)
        began = time.monotonic()
        os.kill(running.pid(before.members[1]), signal.SIGKILL)
        loss = running.journal.ring(2, after=before.generation)
        join = running.journal.ring(3, after=loss.generation)
        asked = time.monotonic()
        keep(running, directory)
        written = time.monotonic()
        master = psutil.Process(running.master.pid)
        for process in [master, *master.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        ended = time.monotonic()
    with job(work, 3, *sets(3, directory, "checkpoint.resume=true"), start="spawn") as running:
        again = running.journal.ring(3)
    return Costs(loss.stall, join.stall, join.up_at - began, again.up_at - ended, written - asked)


# --- the two sides


class TimedFleet(Fleet):
    """Workers that start in the measured time."""

    world: Replay

    def create(self, worker: WorkerId) -> None:
        w = self.workers[worker] = Sim(worker, self)
        takes = self.world.costs.start
        self.does(w, 0.01, lambda: self.place(w))
        self.does(w, takes / 2, lambda: self.greet(w))
        self.does(w, takes, lambda: self.ready(w))


class TimedDelivery(Delivery):
    """Members of a ring that find each other in the measured time."""

    world: Replay

    def deliver(self, group: InProcessGroup, slots: list[Slot]) -> None:
        if slots[0].call != ("form",):
            super().deliver(group, slots)
            return
        new = any(not w.has_state for w in self.members)
        takes = self.world.costs.join if new else self.world.costs.loss
        self.clock.later(takes, lambda: self._comes_back(group, slots, 0.003))


class Replay(World):
    """A job of the simulator that lives through these changes, and is then stopped."""

    def __init__(self, plan: list[Change], seconds: float, measured: Costs, seed: int):
        super().__init__(seed, hours=seconds / 3600)
        self.size, self.pace = round(self.size * self.pace / STEP_SECONDS), STEP_SECONDS
        self.plan, self.seconds, self.costs = plan, seconds, measured
        workers = {"workers": plan[0].workers, "minWorkers": 1, "maxWorkers": max(c.workers for c in plan)}
        elastic = {"joinDelaySeconds": 1, "startupTimeoutSeconds": 60, "gracePeriodSeconds": 150}
        self.values = values.merge(self.values, {**workers, "elastic": elastic, "checkpoint": {"dir": ""}})
        self.config = config.parse(self.values)
        self.reads, self.busy = None, None
        self.rings, self.master, self.fleet = Rings(self), Master(self), TimedFleet(self)
        self.rings.delivery = TimedDelivery
        self.checks = Checks(self)
        self.faults = self.changes = Changes(self, seconds)
        self.master.watchdog.history = deque(maxlen=1000)


class Changes(Faults):
    """The changes of a replay, instead of random faults."""

    world: Replay
    outcome: Outcome

    def schedule(self) -> None:
        plan = self.world.plan
        chance = random.Random(self.world.seed)
        self.members = 0
        self.clock.later(1.0, self._await_the_first_ring)
        self.noticed = dict(zip(plan[1:], with_notice(plan), strict=True))
        self.chance = chance

    def _await_the_first_ring(self) -> None:
        """Count the time from the first step of the first ring."""
        job = self.world.job
        if job.goodput.kind != "useful":
            self.clock.later(0.1, self._await_the_first_ring)
            return
        self.before = job.goodput.at(self.clock.now)
        for change in self.world.plan[1:]:
            self.clock.later(change.at, partial(self._become, change))
        self.clock.later(0.5, self._count)
        self.clock.later(self.world.seconds, self._end)

    def _count(self) -> None:
        job = self.world.job
        self.members += len(job.ring.members) * (job.goodput.kind == "useful")
        self.clock.later(1.0, self._count)

    def _become(self, change: Change) -> None:
        world, fleet = self.world, self.world.fleet
        here = [w for w in fleet.workers.values() if w.alive and w.asked_at is None and not w.stopping]
        members = [w for w in here if w.has_state]
        lost = max(0, len(here) - change.workers)
        for victim in self.chance.sample(members if len(members) >= lost else here, lost):
            if self.noticed[change]:
                fleet.terminate(victim)
                self.clock.later(NOTICE, partial(fleet.exit, victim, "SIGKILL"))
            else:
                fleet.exit(victim, "SIGKILL")
        # A master that heard of the smaller fleet before it has heard of the loss would let others go for it.
        self.clock.later(0.5, lambda: world.master.hear(ev.Scale(change.workers)))

    def _end(self) -> None:
        now = self.world.job.goodput.at(self.clock.now)
        kinds = {kind: now[kind] - self.before[kind] for kind in now}
        seconds, changes = self.world.seconds, self.world.job.ring.generation - 1
        busy = self.members / offered(self.world.plan, seconds)
        told = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in kinds.items() if seconds)
        report.say(f"the simulated job: {told}")
        self.outcome = Outcome(kinds["useful"] / seconds, busy, changes)
        self.strike("stop", "now")


def ours(plan: list[Change], seconds: float, measured: Costs, seed: int) -> Outcome:
    """The job lives through the changes, in virtual time.

    Raises:
        SimulationFailed: a record was lost or counted twice, or another promise was broken.
    """
    world = Replay(plan, seconds, measured, seed)
    world.run()
    return world.changes.outcome


def restarted(plan: list[Change], seconds: float, measured: Costs, every: float) -> Outcome:
    """The job is begun again at each change; its checkpoints, every so many seconds, cost it nothing."""
    useful = busy = at = newest = 0.0
    warned, restarts, n = with_notice(plan), 0, 0
    while True:
        after = next((m for m in range(n + 1, len(plan)) if plan[m].at > at), None)
        end = seconds if after is None else plan[after].at
        known = after is None or warned[after - 1] or plan[after].workers > plan[n].workers
        # The newest checkpoint at its end: the one before it with notice, or else the last one that was due.
        newest = end - measured.write * (after is not None) if known else at + (end - at) // every * every
        kept = max(0.0, min(newest, end) - at)
        useful, busy = useful + kept, busy + kept * plan[n].workers
        if after is None:
            return Outcome(useful / seconds, busy / offered(plan, seconds), restarts)
        n, at, restarts = after, end + measured.restart, restarts + 1
        while n + 1 < len(plan) and plan[n + 1].at <= at:  # came while it was being begun again
            n += 1


# --- a check of the simulator


def really(job: Callable[..., Job], work: Path, plan: list[Change], seconds: float, seed: int) -> float:
    """A real job lives through the changes. Returns its share of useful time."""
    chance = random.Random(seed)
    directory = work / f"elastic-{time.monotonic_ns()}"
    with job(work, plan[0].workers, *sets(WORKERS, directory)) as running:
        running.journal.ring(plan[0].workers)
        began, before = time.monotonic(), running.client.status()
        due: list[tuple[float, psutil.Process]] = []  # when each process with a notice is killed
        for change, noticed in zip(plan[1:], with_notice(plan), strict=True):
            _pause(began + change.at, due)
            victims = _become(running, change.workers, chance, noticed)
            due += [(time.monotonic() + NOTICE, victim) for victim in victims if noticed]
        _pause(began + seconds, due)
        after = running.client.status()
        keep(running, directory)
    check(directory)
    kinds = {kind: after["goodput"][kind] - before["goodput"][kind] for kind in after["goodput"]}
    told = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in kinds.items() if seconds)
    report.say(f"a real job: {told}")
    return float(kinds["useful"] / sum(kinds.values()))


def _pause(end: float, due: list[tuple[float, psutil.Process]]) -> None:
    """Wait until that moment; processes whose notice is over meanwhile are killed."""
    while due and due[0][0] <= end:
        at, victim = due.pop(0)
        time.sleep(max(0.0, at - time.monotonic()))
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    time.sleep(max(0.0, end - time.monotonic()))


def _become(job: Job, workers: int, chance: random.Random, noticed: bool) -> list[psutil.Process]:
    """Make the fleet this large. Returns the lost workers."""
    here = _staying(job)
    lost = max(0, len(here) - workers)
    members = [w for w in here.values() if w["rank"] is not None]
    victims = chance.sample(members if len(members) >= lost else list(here.values()), lost)
    processes = [psutil.Process(int(victim["handle"])) for victim in victims]
    for process in processes:
        process.send_signal(signal.SIGTERM if noticed else signal.SIGKILL)
    # A master that heard of the smaller fleet before it has heard of the loss would let others go for it.
    gone = {victim["id"] for victim in victims}
    until(lambda: not gone & _staying(job).keys())
    job.client.scale(workers)
    return processes


def _staying(job: Job) -> dict[int, dict[str, Any]]:
    """The workers that are not about to leave."""
    return {w["id"]: w for w in job.client.status()["workers"] if w["state"] != "draining"}


def measure(job: Callable[..., Job], work: Path, rounds: int, minutes: range) -> list[Row]:
    """Both sides, and the check of the simulator."""
    environment = {
        "EDL_RECORD_SECONDS": RECORD_SECONDS,
        "EDL_COUNTING_RECORDS": RECORDS,
        "EDL_COUNTING_SLEEP": 0,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    found = []
    for _ in range(rounds):
        found.append(costs(job, work))
        report.say(str(found[-1]))
    rows = [
        Row(f"cost: {field.name}", [getattr(each, field.name) for each in found], [], "s", "")
        for field in fields(Costs)
    ]
    measured = Costs(*(statistics.median(row.ours) for row in rows))
    rows += _rows(minutes, measured)
    checked = max(windows(minutes), key=lambda some: len(changes(some, WORKERS)))
    plan, seconds = changes(checked, WORKERS), 60.0 * CHECKED
    real = [really(job, work, plan, seconds, seed) for seed in range(rounds)]
    simulated = [ours(plan, seconds, measured, seed).useful for seed in range(rounds)]
    name = f"check: {CHECKED} minutes of it, {len(plan) - 1} changes, at real speed; simulated"
    rows.append(Row(name, real, simulated, "", ""))
    return rows


def windows(minutes: range) -> list[range]:
    """All parts of these minutes that are as long as the check."""
    return [range(first, first + CHECKED) for first in minutes[: -CHECKED + 1]]


def _rows(minutes: range, measured: Costs) -> Iterator[Row]:
    plan, seconds = changes(minutes, WORKERS), 60.0 * len(minutes)
    us = ours(plan, seconds, measured, seed=0)
    name = f"{seconds / 3600:g} h of a spot fleet, {WORKERS} workers, {len(plan) - 1} changes"
    for every in CHECKPOINT_SECONDS:
        peer = restarted(plan, seconds, measured, every)
        yield Row(
            f"{name}: goodput; restarted, a checkpoint each {every:g} s", [us.useful], [peer.useful], "", ""
        )
        yield Row(f"{name}: of all workers' seconds, likewise", [us.busy], [peer.busy], "", "")
