# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench soak`: does the memory of a job stay as it is? A measurement, no test.

A job of three workers trains, evaluates, writes checkpoints, its history and its journal, while workers are
killed, asked to leave, added and taken away, one of these twice a minute. What its processes have in memory
and how many descriptors they have open is looked at all the time: the master, the process that workers are
forked from, and the worker that is never killed.

How fast memory grows is the slope of a straight line by least squares, through what was seen after the first
third of the time. Neighbouring samples are not independent, so its uncertainty (95 %) is that of a line
through the means of BLOCKS blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.goodput import until
from benchmarks.jobs import OurJob
from benchmarks.report import say

MODEL = Path(__file__).parents[1] / "tests" / "models" / "soaked.py"
MINUTES, QUICK = 30.0, 3.0
WORKERS = 3
CHANGE_SECONDS, SAMPLE_SECONDS = 30.0, 2.0
BLOCKS = 12
STUDENT = 2.23  # of 95 %, with 10 degrees of freedom
MAXIMUM = 1.0  # MiB an hour
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Sample:
    """One process at one moment.

    Args:
        mib: resident.
        own: of these, those that are no pages of files: libraries are read page by page, as they are used.
    """

    seconds: float
    mib: float
    own: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Line:
    """What the samples of a process say.

    Args:
        slope, uncertainty: MiB an hour.
        own: the slope of what is no page of a file.
    """

    name: str
    first: Sample
    last: Sample
    slope: float
    uncertainty: float
    own: float

    @property
    def verdict(self) -> str:
        if self.slope + self.uncertainty <= MAXIMUM:
            return "yes"
        return "NO" if self.slope - self.uncertainty > MAXIMUM else "too short to tell"


def line(name: str, samples: Sequence[Sample]) -> Line:
    """
    Args:
        samples: of all the time, the first third included.
    """
    late = samples[len(samples) // 3 :]
    slope, own = (_slope([s.seconds for s in late], [getattr(s, of) for s in late]) for of in ("mib", "own"))
    size = len(late) // BLOCKS
    blocks = [late[n * size : (n + 1) * size] for n in range(BLOCKS)]
    at, mib = ([statistics.fmean(getattr(s, of) for s in b) for b in blocks] for of in ("seconds", "mib"))
    through = _slope(at, mib)
    middle, height = statistics.fmean(at), statistics.fmean(mib)
    off = sum((m - height - through / 3600 * (t - middle)) ** 2 for t, m in zip(at, mib, strict=True))
    error = math.sqrt(off / (BLOCKS - 2) / sum((t - middle) ** 2 for t in at))
    return Line(name, late[0], late[-1], slope, STUDENT * error * 3600, own)


def _slope(seconds: Sequence[float], mib: Sequence[float]) -> float:
    return statistics.linear_regression(seconds, mib).slope * 3600


class Soaked:
    """The job, and what is done to it."""

    def __init__(self, job: OurJob, seed: int):
        self._job, self._chance = job, random.Random(seed)
        ring = job.journal.ring(WORKERS, seconds=120)
        self.survivor = min(ring.members)  # a worker that came later is scaled away
        worker = psutil.Process(job.pid(self.survivor))
        master = psutil.Process(job.master.pid)
        parent = worker.parent()
        assert parent is not None
        self.processes = {"master": master, f"worker {self.survivor}, which is never killed": worker}
        if parent != master:
            self.processes["the process that workers are forked from"] = parent
        self._sizes = itertools.cycle([WORKERS + 1, WORKERS, WORKERS - 1, WORKERS])
        self.done: dict[str, int] = {}

    def change(self) -> None:
        """Do to it what comes next."""
        do = self._chance.choice((self._kill, self._ask, self._scale))
        do()
        self.done[do.__name__.lstrip("_")] = self.done.get(do.__name__.lstrip("_"), 0) + 1

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _ask(self) -> None:
        self._signal(signal.SIGTERM)

    def _scale(self) -> None:
        self._job.client.scale(next(self._sizes))

    def _signal(self, number: signal.Signals) -> None:
        def others() -> list[dict[str, Any]]:
            workers = self._job.client.status()["workers"]
            return [w for w in workers if w["rank"] is not None and w["id"] != self.survivor]

        victim = self._chance.choice(until(others))
        psutil.Process(int(victim["handle"])).send_signal(number)

    def sample(self, seconds: float) -> Iterator[tuple[str, Sample]]:
        for name, process in self.processes.items():
            with process.oneshot():
                memory = process.memory_info()
                mib, own = memory.rss / MEBIBYTE, (memory.rss - memory.shared) / MEBIBYTE
                yield name, Sample(seconds, mib, own, process.num_fds(), process.num_threads())


def soak(work: Path, minutes: float, seed: int, start: str) -> dict[str, list[Sample]]:
    """What was seen of each process."""
    samples: dict[str, list[Sample]] = {}
    sets = (
        f"model.module={MODEL}",
        "training.batchSize=48",
        "evaluation.steps=200",
        "checkpoint.keep=3",
        f"checkpoint.dir={work / 'checkpoints'}",
        "checkpoint.seconds=10",
        "elastic.heartbeatTimeoutSeconds=5",
    )
    with OurJob(work, WORKERS, *sets, start=start) as job:
        soaked = Soaked(job, seed)
        began = time.monotonic()
        change_at = began + CHANGE_SECONDS
        while (now := time.monotonic()) < began + minutes * 60:
            for name, sample in soaked.sample(now - began):
                samples.setdefault(name, []).append(sample)
            if now >= change_at:
                soaked.change()
                change_at += CHANGE_SECONDS
            time.sleep(SAMPLE_SECONDS)
        status = job.client.status()
        done = ", ".join(f"{what} {times} times" for what, times in sorted(soaked.done.items()))
        say(f"{minutes:g} minutes: {status['step']:,} steps, ring {job.journal.generation}; {done}")
    return samples


HEAD = """\
| process | memory after a third | at the end | in an hour | without files | descriptors | threads | <= 1 |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"{MINUTES:g}")
    parser.add_argument("--quick", action="store_true", help="three minutes: to see that it runs")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="local.startMethod")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the lines, and all samples")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `with`s: nothing is left behind
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as work:
        samples = soak(Path(work), QUICK if args.quick else args.minutes, args.seed, args.start)
    lines = [line(name, of_one) for name, of_one in samples.items()]
    print(HEAD)
    for x in lines:
        a, b = x.first, x.last
        slope = f"{x.slope:+.2f} +- {x.uncertainty:.2f} MiB"
        opened = f"{a.descriptors} -> {b.descriptors} | {a.threads} -> {b.threads}"
        slope += f" | {x.own:+.2f} MiB"
        print(f"| {x.name} | {a.mib:.1f} MiB | {b.mib:.1f} MiB | {slope} | {opened} | {x.verdict} |")
    if args.json:
        seen = {name: [list(astuple(s)) for s in of_one] for name, of_one in samples.items()}
        args.json.write_text(json.dumps({"lines": [asdict(x) for x in lines], "samples": seen}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
