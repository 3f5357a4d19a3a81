# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench kill_picture`: make docs/kill.svg, the picture of the README.

A job of edl and one of stock Elastic Horovod train on three workers. One gets `kill -9`; the picture has the
steps since then. It shows a single kill; `scripts/bench ring --only kill` has the medians.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.ring import ROOT, OurJob, Stock
from edl.report import pictures, svg
from edl.report.tables import COLOURS

BEFORE, AFTER = 10.0, 45.0  # seconds of training around the kill
Steps = list[tuple[float, int]]  # seconds since the kill, and the steps made by then


def ours(work: Path) -> tuple[Steps, float]:
    """Return the steps of a job of edl, and how many seconds after the kill it had three workers again."""
    with OurJob(work, 3) as job:
        ring = job.journal.ring(3)
        time.sleep(BEFORE)
        killed = time.monotonic()
        os.kill(job.pid(ring.members[1]), signal.SIGKILL)
        whole = job.journal.ring(3, job.journal.ring(2, ring.generation).generation).up_at
        time.sleep(max(0.0, killed + AFTER - time.monotonic()))
        reports = [x for x in job.journal.entries if x["event"]["type"] == "Progress"]
    return [(x["now"] - killed, x["event"]["step"]) for x in reports], whole - killed


def theirs(python: str, work: Path) -> Steps:
    """Return the steps of a job of stock Elastic Horovod."""
    with Stock(python, work, 3) as stock:
        pids = stock.wait(3)
        time.sleep(BEFORE)
        killed = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(AFTER)
        rows = sorted((t, step) for steps in stock.steps().values() for t, step, _ in steps)
    times = [t - killed for t, _ in rows]
    return list(zip(times, itertools.accumulate((step for _, step in rows), max), strict=True))


def drawn(edl: Steps, joined: float, stock: Steps) -> Figure:
    """Draw the steps of both sides since the kill."""
    figure = Figure((pictures.WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=COLOURS["red"], linewidth=1.2)
    axes.annotate(" kill -9 of one of three workers", (0, 1), xycoords=("data", "axes fraction"), va="top")
    for steps, colour, label in (
        (edl, "blue", "edl"),
        (stock, "grey", "stock Elastic Horovod 0.28.1"),
    ):
        start = max(step for at, step in steps if at <= 0)
        seen = [(at, step - start) for at, step in steps if -BEFORE <= at <= AFTER]
        axes.plot(*zip(*seen, strict=True), color=COLOURS[colour], linewidth=2, label=label)
        if label == "edl":
            at, step = next((at, step) for at, step in seen if at >= joined)
            axes.plot([at], [step], "o", color=COLOURS["green"], label="edl: a new worker has joined")
    axes.set_xlim(-BEFORE, AFTER)
    axes.set_xlabel("seconds since the kill")
    axes.set_ylabel("steps since the kill")
    figure.legend(ncols=3, loc="outside upper left")
    return figure


def main() -> None:
    """Run both sides, one after the other, and write the picture."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    made = subprocess.run([ROOT / "scripts/dev/bench-peer"], check=True, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        steps, joined = ours(Path(directory))
        stock = theirs(made.stdout.strip(), Path(directory))
    with pictures.styled():
        (ROOT / "docs" / "kill.svg").write_bytes(svg.written(drawn(steps, joined, stock), "svg"))


if __name__ == "__main__":
    main()
