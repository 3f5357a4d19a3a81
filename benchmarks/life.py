# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench life`: what a job's life costs beside its steps. A measurement, no test.

goodput      a job lives through the hour of a spot fleet, against one that is begun again at each change
checkpoint   steps with a checkpoint, against steps without and a save that blocks; restoring
evaluation   the ring's evaluation, against `model.evaluate`
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks import checkpoints, goodput, large_joins, report
from benchmarks.jobs import OurJob
from benchmarks.large_joins import until
from benchmarks.report import Row
from edl.checkpoints import Store, Tensor
from tests.support.checkpoints.checkpoints import write

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "models"
SECONDS = 300.0  # to wait for anything

# --- checkpoints

MILLIONS, RANKS = 25, 2
INTERVAL = 10.0  # seconds, as checkpoint.seconds
SIZES = 100, 300, 1000  # MB to restore


@dataclass(frozen=True)
class Window:
    """The steps of INTERVAL seconds. All in seconds."""

    median: float
    mean: float
    longest: float

    @property
    def stall(self) -> float:
        return self.longest - self.median


def windows(directory: Path, kept: Path, rounds: int) -> tuple[list[Window], list[Window]]:
    """In one job, ten seconds with a checkpoint at their beginning and ten without, in turns.

    Args:
        kept: where the checkpoints are written.

    Returns:
        The windows without a checkpoint and those with one.
    """
    plain: list[Window] = []
    writing: list[Window] = []
    marks = directory / "marks"
    marks.mkdir()
    os.environ.update(EDL_BENCH=str(marks), EDL_LARGE=str(MILLIONS))
    sets = (
        f"model.module={large_joins.MODEL}",
        "training.batchSize=64",
        "local.threads=1",
        "elastic.heartbeatTimeoutSeconds=20",
        f"checkpoint.dir={kept}",
        "checkpoint.seconds=0",
    )
    with OurJob(directory, RANKS, *sets, start="spawn") as job:
        pid = job.pid(job.journal.ring(RANKS, seconds=SECONDS).members[0])
        until(lambda: len(large_joins.steps(marks, pid)) > large_joins.STEPS)
        goodput.keep(job, kept, SECONDS)  # the first one makes room for itself
        while len(plain) < rounds:
            one, two = _window(job, marks / str(pid), False), _window(job, marks / str(pid), True)
            if one is not None and two is not None:
                plain.append(one)
                writing.append(two)
    return plain, writing


def written(work: Path, rounds: int) -> Iterator[Row]:
    """The steps with a checkpoint and without, and a save that blocks."""
    with tempfile.TemporaryDirectory(dir=work) as directory:
        kept = Path(directory) / "kept"
        plain, writing = windows(Path(directory), kept, rounds)
        newest = goodput.newest(kept)
        assert newest is not None
        tensors = newest.read()
        store, blocking = Store.open(str(Path(directory) / "blocking")), []
        for number in range(rounds):
            began = time.monotonic()
            write(store, number + 1, tensors=tensors, parts=1)
            blocking.append(time.monotonic() - began)
    name = f"{MILLIONS} million parameters, Adam, {RANKS} ranks"
    yield Row(
        f"{name}: median step, with a checkpoint in {INTERVAL:g} s and without",
        _ms(writing, "median"),
        _ms(plain, "median"),
        "ms",
        "",
    )
    row = Row(f"{name}: mean step, likewise", _ms(writing, "mean"), _ms(plain, "mean"), "ms", "ratio <= 1.02")
    row.met = (row.ratio or 2) <= 1.02
    yield row
    # On these machines every ten seconds have a long step: what a checkpoint adds to it is the stall.
    longest, noise = _ms(writing, "stall"), _ms(plain, "stall")
    added = [max(with_it - without, 0.0) for with_it, without in zip(longest, noise, strict=True)]
    told = f"{report.spread(longest)} ms, without {report.spread(noise)} ms"
    row = Row(
        f"{name}: what it adds to the longest step beyond the median ({told}); a save that blocks",
        added,
        [1e3 * b for b in blocking],
        "ms",
        "ratio <= 0.10",
    )
    row.met = row.ratio is not None and row.ratio <= 0.10
    yield row


def _ms(windows: list[Window], what: str) -> list[float]:
    return [1e3 * float(getattr(window, what)) for window in windows]


def _window(job: OurJob, marks: Path, checkpoint: bool) -> Window | None:
    """The steps of the next seconds. None: the end of an epoch had its own checkpoint written."""
    before, began = job.client.status()["checkpoint"]["step"], time.monotonic()
    if checkpoint:
        job.client.checkpoint()
    time.sleep(INTERVAL)
    after = job.client.status()["checkpoint"]["step"]
    if (after != before) != checkpoint:
        return None
    lines = [line.split() for line in marks.read_text().splitlines(keepends=True) if line.endswith("\n")]
    times = [when for when in (float(line[0]) for line in lines) if when >= began]
    steps = [b - a for a, b in pairwise(times)]
    return Window(statistics.median(steps), statistics.mean(steps), max(steps))


def restored(work: Path, rounds: int) -> Iterator[Row]:
    """Seconds to read a checkpoint, and a plain file of the same bytes with its SHA-256, both in the kernel's
    cache."""
    chance = np.random.default_rng(7)
    for megabytes in SIZES:
        count = megabytes * 1_000_000 // checkpoints.VARIABLES // 4
        numbers = range(checkpoints.VARIABLES)
        state = {f"v{n}": Tensor.of(chance.random(count, np.float32)) for n in numbers}
        ours, peer = [], []
        with tempfile.TemporaryDirectory(dir=work) as directory:
            plain = Path(directory) / "plain"
            checkpoints.write_plain(plain, state, hashed=False)
            made = write(Store.open(str(Path(directory) / "kept")), 1, tensors=state, parts=RANKS)
            del state
            for _ in range(rounds):
                ours.append(_seconds(made.read))
                peer.append(_seconds(partial(checkpoints.read_plain, plain, hashed=True)))
        yield Row(
            f"restore {megabytes:,} MB of {RANKS} parts; a plain file with SHA-256",
            ours,
            peer,
            "s",
            "ratio <= 1.1",
            statistics.median(ours) <= 1.1 * statistics.median(peer),
        )


def _seconds(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


# --- evaluation

BATCH = 1024  # records in a round of the ring, and in a batch of Keras
TIMES = 3  # evaluations whose median is one measurement
EVALUATED = {"cnn": "convolutional net as of digits", "mlp": "MLP of 8 million parameters"}
GOALS = {1: 1.1, 2: 0.6}  # by the number of workers: of the seconds that Keras takes


def evaluated(work: Path, rounds: int) -> Iterator[Row]:
    for name, what in EVALUATED.items():
        ours: dict[int, list[float]] = {workers: [] for workers in GOALS}
        peer: list[float] = []
        for _ in range(rounds):
            os.environ["EDL_EVALUATED"] = name
            for workers, found in ours.items():
                found.append(_of_a_ring(work, workers))
            peer.append(_of_keras())
        for workers, found in ours.items():
            most = GOALS[workers]
            ring = f"{workers} worker{'s' * (workers > 1)}"
            title = f"{what}, {ring}: evaluation of 10,000 records; Keras on one thread"
            row = Row(title, found, peer, "s", f"ratio <= {most:g}")
            row.met = (row.ratio or 2) <= most
            yield row


def _of_a_ring(work: Path, workers: int) -> float:
    with tempfile.TemporaryDirectory(dir=work) as marks:
        os.environ["EDL_BENCH"] = marks
        sets = (
            f"model.module={MODELS / 'evaluated.py'}",
            "training.batchSize=32",
            "local.threads=1",
            f"evaluation.batchSize={BATCH}",
            "elastic.heartbeatTimeoutSeconds=20",
        )
        with OurJob(work, workers, f"minWorkers={workers}", *sets) as job:
            pid = job.pid(job.journal.ring(workers, seconds=SECONDS).members[0])
            until(lambda: len(_evaluations(Path(marks) / str(pid))) > TIMES)
            return statistics.median(_evaluations(Path(marks) / str(pid))[1:])


def _evaluations(marks: Path) -> list[float]:
    """The seconds of each whole one: from the step before it to its last round."""
    lines = [line.split() for line in marks.read_text().splitlines(keepends=True) if line.endswith("\n")]
    steps = [n for n, (_, what) in enumerate(lines) if what == "step"]
    return [float(lines[b - 1][0]) - float(lines[a][0]) for a, b in pairwise(steps) if b - a > 1]


def _of_keras() -> float:
    environment = {name: value for name, value in os.environ.items() if name != "EDL_BENCH"}
    command = [sys.executable, "-m", "benchmarks.keras_evaluation", str(BATCH)]
    done = subprocess.run(
        command,
        input="\n" * TIMES,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
        timeout=SECONDS,
    )
    return statistics.median(float(line) for line in done.stdout.split()[-TIMES:])


PARTS = ("goodput", "checkpoint", "evaluation")


def measure(only: list[str], rounds: int) -> Iterator[list[Row]]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        work = Path(directory)
        parts: dict[str, Callable[[], list[Row]]] = {
            "goodput": lambda: goodput.measure(OurJob, work, rounds, goodput.DENSE_HOUR),
            "checkpoint": lambda: [*written(work, rounds), *restored(work, rounds)],
            "evaluation": lambda: list(evaluated(work, rounds)),
        }
        for name in only:
            report.say(name)
            yield parts[name]()


if __name__ == "__main__":
    sys.exit(report.main("scripts/bench life", __doc__, PARTS, measure))
