# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench horovod_scripts`: an elastic Horovod script under `edl horovod` and stock horovodrun.

The two run in turns, pair by pair. Stock is Horovod 0.28.1 with its newest TensorFlow; after a kill also with
a Gloo timeout of 5 s in place of 30 s. A measurement, no test.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.report import Row, p95
from benchmarks.stock import OurScript, Stock, Watched

ROOT = Path(__file__).parents[1]
TIMEOUT = 5  # of Gloo, in seconds: stock's default is 30
SECONDS = 3.0  # of steady steps that are measured
SOONEST = 1.0  # seconds between the last change of a ring and a kill


def killed(job: Watched) -> float:
    """Kill the second of three workers; from a survivor's last commit to its next one, in seconds."""
    workers = job.wait(3)
    time.sleep(SOONEST)
    since = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    return job.stall(since, 2)


def kills(peer: str, work: Path, pairs: int) -> list[Row]:
    ours: list[float] = []
    theirs: dict[str, list[float]] = {"": [], str(TIMEOUT): []}
    for _ in range(pairs):
        with OurScript(work, 3) as job:
            ours.append(killed(job))
        for timeout, found in theirs.items():
            with Stock(
                peer, work, 3, **({"HOROVOD_GLOO_TIMEOUT_SECONDS": timeout} if timeout else {})
            ) as stock:
                found.append(killed(stock))
    return [
        Row(
            f"kill -9 of one of 3, to the next commit (stock: Gloo timeout {timeout or 30} s)",
            ours,
            found,
            "s",
            "p95 <= 0.5 s",
            p95(ours) <= 0.5,
        )
        for timeout, found in theirs.items()
    ]


def joins(peer: str, work: Path, pairs: int) -> list[Row]:
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(pairs):
        for found in (ours, theirs):
            with OurScript(work, 2) if found is ours else Stock(peer, work, 2) as job:
                job.wait(2)
                since = time.monotonic()
                job.set_hosts(3)
                found.append(job.stall(since, 3))
    return [Row("join 2 -> 3: stall of running workers", ours, theirs, "s", "p95 <= 0.5 s", p95(ours) <= 0.5)]


def commits(peer: str, work: Path, pairs: int) -> list[Row]:
    """Milliseconds of a step and of its commit, of two workers, over some seconds."""
    steps: tuple[list[float], list[float]] = ([], [])
    commits: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for side in (0, 1):
            with Stock(peer, work, 2) if side else OurScript(work, 2) as job:
                job.wait(2)
                time.sleep(SECONDS)
                slowest = [tail(rows) for rows in job.rows().values()]
                steps[side].append(max(step for step, _ in slowest))
                commits[side].append(max(commit for _, commit in slowest))
    ratio = statistics.median(steps[0]) / statistics.median(steps[1])
    return [
        Row("commit(), over the step", *commits, "ms", "<= 0.5 ms", statistics.median(commits[0]) <= 0.5),
        Row("a step with DistributedGradientTape", *steps, "ms", "ratio <= 1.05", ratio <= 1.05),
    ]


def tail(rows: list[tuple[float, int, int, float, float]]) -> tuple[float, float]:
    """Milliseconds of a step, the median, and of its commit, the mean: edl's workers vote in every tenth.

    The first steps and commits, in which all was new, are left out.
    """
    late = [row for row in rows if row[0] > rows[-1][0] - SECONDS]
    return statistics.median(row[3] for row in late) * 1e3, statistics.fmean(row[4] for row in late) * 1e3


PARTS = {"kill": kills, "join": joins, "commit": commits}


def measure(only: list[str], pairs: int) -> Iterator[list[Row]]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    told = subprocess.run([ROOT / "scripts/dev/bench-peer"], check=True, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        for name in only:
            report.say(name)
            yield PARTS[name](told.stdout.strip(), Path(directory), pairs)


if __name__ == "__main__":
    sys.exit(report.main("scripts/bench horovod_scripts", __doc__, list(PARTS), measure))
