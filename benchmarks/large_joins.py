# SPDX-License-Identifier: Apache-2.0
"""Joins at real size: how long do the members' steps take while the state travels to others?"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lines import Seen
from benchmarks.memory import AtHand
from benchmarks.report import Row

MODEL = Path(__file__).parents[1] / "tests" / "models" / "large.py"
TRAINING = 2  # workers that are there before
STEPS = 8  # that are awaited before a change, and after it
SECONDS = 300.0  # to wait for anything
BYTES = 12  # of state for each parameter: the value and two slots
BESIDE = 500 << 20  # bytes that a newcomer touches beside its state and the sums that it keeps


@dataclass(frozen=True)
class Case:
    millions: int  # of parameters
    joining: int = 1
    giver_killed: bool = False  # while it gives

    @property
    def name(self) -> str:
        size = f"{self.millions * BYTES} MB of state"
        return f"join {TRAINING} -> {TRAINING + self.joining}, {size}{', giver killed' * self.giver_killed}"


CASES = (Case(25), Case(83), Case(25, joining=8), Case(25, giver_killed=True))


@dataclass(frozen=True)
class Step:
    """A worker's, from when the one before it was done to when it was."""

    seconds: float
    generation: int
    holders: int


def steps(marks: Path, pid: int) -> list[Step]:
    lines = [
        line.split()
        for line in (marks / str(pid)).read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    done = [(float(when), int(generation), int(holders)) for when, generation, holders in lines]
    return [Step(b[0] - a[0], b[1], b[2]) for a, b in pairwise(done)]


def until(happens: Callable[[], Any]) -> None:
    """Workers write their marks into files: they are looked at now and again."""
    deadline = time.monotonic() + SECONDS
    while not happens():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def join(job: Callable[..., Any], work: Path, case: Case) -> tuple[float, float]:
    """The longest step of the former members, and what it may be, in seconds."""
    with _marks(work, case) as marks:
        most = TRAINING + case.joining
        sets = (
            f"model.module={MODEL}",
            f"maxWorkers={most}",
            "training.batchSize=64",
            "local.threads=1",
            "elastic.heartbeatTimeoutSeconds=20",
        )
        with job(work, TRAINING, *sets, start="spawn") as running:
            ring = running.journal.ring(TRAINING, seconds=SECONDS)
            here = [running.pid(member) for member in ring.members]
            until(lambda: all(len(steps(marks, pid)) > STEPS for pid in here))
            memory = AtHand(case.joining * (2 * case.millions * BYTES * 1_000_000 + BESIDE))
            running.client.scale(most)
            running.journal.until(lambda seen: len(_ready(seen)) >= most or None, SECONDS)
            memory.give()
            # Newcomers may come one by one: the last ring with all of them is the one.
            running.journal.formed(ring.generation, SECONDS)
            if case.giver_killed:
                os.kill(here.pop(0), signal.SIGKILL)
                most = TRAINING  # its replacement comes later than is looked at
            until(lambda: all(_settled(steps(marks, pid), ring.generation, most) for pid in here))
            found = [[s for s in steps(marks, pid) if s.generation > ring.generation] for pid in here]
    longest = max(max(s.seconds for s in each) for each in found)
    median = statistics.median(s.seconds for each in found for s in each)
    return longest, 1.5 * median + 0.1


def _ready(seen: Seen) -> set[int]:
    """The workers that could enter a ring."""
    events = [line["event"] for _, line in seen if "event" in line]
    return {event["worker"] for event in events if event["type"] == "Ready"}


def _settled(found: list[Step], before: int, size: int) -> bool:
    """Whether so many hold the state, for some steps already, in a ring after that generation."""
    return len([s for s in found if s.generation > before and s.holders >= size]) >= STEPS


@contextmanager
def _marks(work: Path, case: Case) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=work) as marks:
        os.environ.update(EDL_BENCH=marks, EDL_LARGE=str(case.millions))
        yield Path(marks)


def rows(job: Callable[..., Any], work: Path, pairs: int) -> Iterator[Row]:
    for case in CASES:
        found = [join(job, work, case) for _ in range(pairs)]
        longest, most = map(list, zip(*found, strict=True))
        met = all(is_ <= may_be for is_, may_be in found)
        name = f"{case.name}: the longest step; allowed"
        yield Row(name, longest, most, "s", "<= 1.5 medians + 0.1 s", met)
