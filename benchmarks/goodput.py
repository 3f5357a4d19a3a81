# SPDX-License-Identifier: Apache-2.0
"""How much of a spot fleet's time becomes training: a job that lives through it, and one begun again.

A public record of spot instances (data/spot.csv) is replayed, one of its minutes in a second. The job has
as many workers as FLEETS says where the fleet has all of its instances, and else its share of those that are
there: the fewer they are, the more of the record's changes are none for it.

- ours: workers are killed and added as the record says. Every second loss comes without notice (kill -9), the
  others with one: SIGTERM, and kill -9 two seconds later; a spot instance gets two minutes.
- restarted: the same job as one that cannot change its size. At each change all of it ends by kill -9, and is
  begun again with the workers that are there, from its newest checkpoint. Before a loss with notice, and
  before it takes in new workers, it has a checkpoint written (within two seconds), and loses nothing then.

Both write checkpoints every ten seconds: ten minutes of the record. A step's work is sleep, in proportion to
its records, so the workers do not compete for the cores of one machine. What a start takes is not compressed.
Both are counted from the first step of the first ring. There is a figure only if the weights of the last
checkpoint say that each record was counted as often as the number of its step tells.
"""

from __future__ import annotations

import contextlib
import csv
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from benchmarks import report
from benchmarks.report import Row
from edl.checkpoints import Checkpoint, Store

HERE = Path(__file__).parent
RECORD, INSTANCES = HERE / "data" / "spot.csv", 32
MODEL = HERE.parent / "tests" / "models" / "counting_busy.py"
FLEETS = (6, 10)  # workers
RECORDS, BATCH, RECORD_SECONDS = 20_000, 8, 0.00625  # of each worker: a step of all sleeps for 50 ms
NOTICE_SECONDS = 2.0
CHECKPOINT_SECONDS = 10
SECONDS = 60.0  # to wait for anything
DENSE_HOUR, WHOLE = range(330, 390), range(720)  # minutes; the first is Parcae's "high availability, dense"


@dataclass(frozen=True)
class Change:
    """From this second of the replay on there are so many workers."""

    at: float
    workers: int


@dataclass(frozen=True)
class Outcome:
    """What came of one replay.

    Args:
        useful: share of its time in which steps were made that are in the model at its end.
        busy: seconds of work that are in the model, of each second that the record offers a worker.
        kinds: the master's account of the time.
    """

    useful: float
    busy: float
    kinds: dict[str, float]


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
            found.append(Change(float(minute - minutes.start), workers))
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
        f"checkpoint.seconds={CHECKPOINT_SECONDS}",
        *more,
    )


def newest(directory: Path) -> Checkpoint | None:
    whole = [c for c in Store.open(str(directory)).checkpoints() if not c.wrong()]
    return whole[-1] if whole else None


def records_in(directory: Path) -> int:
    """Return how many records the newest checkpoint has been trained on."""
    found = newest(directory)
    return found.manifest.records if found else 0


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


# --- the two sides


def ours(job: Callable[..., Job], work: Path, minutes: range, fleet: int, seed: int) -> Outcome:
    """The job lives through the changes."""
    plan, chance = changes(minutes, fleet), random.Random(seed)
    directory = work / f"elastic-{time.monotonic_ns()}"
    with job(work, plan[0].workers, *sets(fleet, directory)) as running:
        running.journal.ring(plan[0].workers)
        began, before = time.monotonic(), running.client.status()
        due: list[tuple[float, psutil.Process]] = []  # when each process with a notice is killed
        for change, noticed in zip(plan[1:], with_notice(plan), strict=True):
            _pause(began + change.at, due)
            victims = _become(running, change.workers, chance, noticed)
            due += [(time.monotonic() + NOTICE_SECONDS, victim) for victim in victims if noticed]
        _pause(began + len(minutes), due)
        after = running.client.status()
        keep(running, directory)
    check(directory)
    kinds = {kind: after["goodput"][kind] - before["goodput"][kind] for kind in after["goodput"]}
    records = after["records"]["applied"] - before["records"]["applied"]
    return _outcome(kinds["useful"] / sum(kinds.values()), records, plan, minutes, kinds)


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


@dataclass(frozen=True)
class Life:
    """One of the job that is restarted, as far as the model at the end has something of it.

    Args:
        useful: seconds of steps that the next life began with.
        records: of these steps.
    """

    useful: float
    records: int


def restarted(job: Callable[..., Job], work: Path, minutes: range, fleet: int) -> Outcome:
    """The job is begun again at each change."""
    plan = changes(minutes, fleet)
    warned = with_notice(plan)
    directory = work / f"restarted-{time.monotonic_ns()}"
    lives: list[Life] = []
    began, n = 0.0, 0
    while n < len(plan):
        last = n + 1 == len(plan)
        end = float(len(minutes)) if last else plan[n + 1].at
        known = last or warned[n] or plan[n + 1].workers > plan[n].workers  # that it is about to end
        with job(work, plan[n].workers, *sets(fleet, directory, "checkpoint.resume=true")) as running:
            try:
                first, useful = records_in(directory), 0.0
                if not lives:
                    running.journal.ring(plan[0].workers)
                    began, status = time.monotonic(), running.client.status()
                    first, useful = status["records"]["applied"], status["goodput"]["useful"]
                time.sleep(max(0.0, began + end - time.monotonic()))
                status = running.client.status()
                if known and status["goodput"]["useful"]:
                    with contextlib.suppress(TimeoutError):  # then it begins with the one before
                        keep(running, directory, SECONDS if last else NOTICE_SECONDS)
                    status = status if last else running.client.status()
            finally:
                _kill(running)
        made = max(0, status["records"]["applied"] - first)
        kept = min(max(0, records_in(directory) - first), made)
        lives.append(Life((status["goodput"]["useful"] - useful) * kept / max(made, 1), kept))
        # What came while it was being ended and begun is one change with what came last of it.
        late = time.monotonic() - began
        n = max([n + 1, *(m for m, change in enumerate(plan) if change.at <= late)])
    check(directory)
    useful = sum(life.useful for life in lives)
    kinds = {"useful": useful, "restarts": float(len(lives) - 1)}
    return _outcome(useful / len(minutes), sum(life.records for life in lives), plan, minutes, kinds)


def _kill(job: Job) -> None:
    """All of it at once: the master, and all that it has started."""
    master = psutil.Process(job.master.pid)
    for process in [master, *master.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.master.wait()


def _outcome(
    useful: float, records: int, plan: list[Change], minutes: range, kinds: dict[str, float]
) -> Outcome:
    busy = records * RECORD_SECONDS / offered(plan, len(minutes))
    told = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in kinds.items() if seconds)
    report.say(f"useful {useful:.3f}, busy {busy:.3f} ({told})")
    return Outcome(useful, busy, kinds)


def measure(job: Callable[..., Job], work: Path, pairs: int, minutes: range) -> list[Row]:
    """Both sides in turns."""
    environment = {
        "EDL_RECORD_SECONDS": RECORD_SECONDS,
        "EDL_COUNTING_RECORDS": RECORDS,
        "EDL_COUNTING_SLEEP": 0,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    rows: list[Row] = []
    for fleet in FLEETS:
        us, peer = [], []
        for pair in range(pairs):
            us.append(ours(job, work, minutes, fleet, seed=pair))
            peer.append(restarted(job, work, minutes, fleet))
        rows += _rows(us, peer, minutes, fleet)
    return rows


def _rows(us: list[Outcome], peer: list[Outcome], minutes: range, fleet: int) -> Iterator[Row]:
    found = len(changes(minutes, fleet)) - 1
    name = f"{len(minutes) / 60:g} h of a spot fleet in {len(minutes)} s, {fleet} workers, {found} changes"
    useful = [o.useful for o in us], [o.useful for o in peer]
    row = Row(f"{name}: goodput of the job", *useful, "", ">= 0.95")
    row.met = min(row.ours) >= 0.95
    yield row
    yield Row(f"{name}: to that of the restarted one", *useful, "", "ratio >= 3", (row.ratio or 0) >= 3)
    busy = [o.busy for o in us], [o.busy for o in peer]
    yield Row(f"{name}: of all workers' seconds", *busy, "", "")
