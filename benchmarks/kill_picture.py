# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench kill_picture`: make docs/kill.svg, the picture of the README, from two real jobs.

The same script (`peer_elastic.py`) learns scikit-learn's digits on three workers, first under `edl horovod`
and then under stock Elastic Horovod. It is a loop with `hvd.elastic.run`, because stock Horovod cannot train
a model of Keras 3. At the same seconds of both jobs one worker gets `kill -9`, and later two at once. The
picture has the size of the ring and the loss over all records.
"""

from __future__ import annotations

import itertools
import os
import platform
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from sklearn.datasets import load_digits

from benchmarks.jobs import ROOT
from benchmarks.stock import OurScript, Stock, Watched
from edl.report import lanes, pictures, svg
from edl.report.tables import COLOURS

WORKERS = 3
KILLS = ((15.0, 1), (75.0, 2))  # seconds of training, and how many workers are killed then
SECONDS = 135.0  # of training
# Without these flags, stock Horovod never uses the host of a failed worker again.
COOLDOWN = ("--blacklist-cooldown-range", "10", "100")
PAUSE = 0.5  # seconds without a step that are marked
ENDING = 3.0  # seconds after a kill in which the last step before the pause may still end


@dataclass(frozen=True)
class Recorded:
    """What a job has written, in seconds since its first ring was whole."""

    steps: list[tuple[float, int]]  # (when, size of the ring) of all workers, in order
    losses: list[tuple[float, float]]
    kills: list[tuple[float, int]]  # (when, how many workers)

    def pauses(self) -> list[tuple[float, float]]:
        """Return from when to when no worker made a step, if for longer than `PAUSE`."""
        times = [now for now, _ in self.steps]
        return [(a, b) for a, b in itertools.pairwise(times) if b - a > PAUSE]

    def stall(self, kill: float) -> float:
        """Return the seconds without a step of any worker after a kill."""
        times = [now for now, _ in self.steps]
        return max(b - a for a, b in itertools.pairwise(times) if b > kill and a < kill + ENDING)


def record(job: Watched) -> Recorded:
    """Train, kill, and return what the workers have written."""
    job.wait(WORKERS)
    began, kills = time.monotonic(), []
    for seconds, count in KILLS:
        time.sleep(began + seconds - time.monotonic())
        ring = newest_ring(job)
        # A ring that has not recovered from the first kill loses fewer workers: one must survive.
        killed = ring[1:][-count:]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        kills.append((time.monotonic() - began, len(killed)))
    time.sleep(began + SECONDS - time.monotonic())
    steps = sorted((now - began, size) for rows in job.steps().values() for now, _, size in rows)
    losses = [(now - began, loss) for now, loss in job.losses()]
    inside = [(now, size) for now, size in steps if 0 <= now <= SECONDS]
    return Recorded(inside, [x for x in losses if 0 <= x[0] <= SECONDS], kills)


def newest_ring(job: Watched) -> list[int]:
    """Return the process ids of the workers that made the newest step."""
    rows = {pid: rows for pid, rows in job.steps().items() if rows}
    latest = sorted(rows, key=lambda pid: rows[pid][-1][0])
    return sorted(latest[-rows[latest[-1]][-1][2] :])


def draw(jobs: dict[str, Recorded], note: str) -> Figure:
    """Draw the size of the ring and the loss of each job, one job below the other on the same time axis."""
    figure = Figure((lanes.WIDTH, 5.6), layout="constrained")
    grid = figure.subplots(2 * len(jobs), 1, sharex=True, height_ratios=(3, 4) * len(jobs))
    losses = [loss for job in jobs.values() for _, loss in job.losses]
    for (name, job), above, below in zip(jobs.items(), grid[::2], grid[1::2], strict=True):
        above.set_title(name, fontweight="bold")
        draw_sizes(above, job)
        below.plot(*zip(*job.losses, strict=True), color=COLOURS["blue"], linewidth=1.6)
        below.set_yscale("log")
        below.set_ylim(0.8 * min(losses), 1.25 * max(losses))
        below.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        below.yaxis.set_major_formatter("{x:g}")
        below.yaxis.set_minor_formatter(NullFormatter())
        below.set_ylabel("loss")
        for axes in (above, below):
            for begins, ends in job.pauses():
                axes.axvspan(begins, ends, color=COLOURS["orange"], alpha=0.25, linewidth=0)
            for now, _ in job.kills:
                axes.axvline(now, color=COLOURS["red"], linewidth=1)
    grid[-1].set_xlim(0, SECONDS)
    grid[-1].set_xlabel("seconds of training")
    figure.align_ylabels(grid)
    figure.supxlabel(note, fontsize=8, color=COLOURS["muted"])
    return figure


def draw_sizes(axes: Axes, job: Recorded) -> None:
    """Draw the size of the ring, which is 0 while no worker makes a step, and what each kill cost."""
    corners = [job.steps[0], *(b for a, b in itertools.pairwise(job.steps) if a[1] != b[1])]
    corners += [(begins, 0) for begins, _ in job.pauses()]
    corners += [(ends, next(size for now, size in job.steps if now == ends)) for _, ends in job.pauses()]
    times, sizes = zip(*sorted(set(corners)), strict=True)
    axes.step([*times, SECONDS], [*sizes, sizes[-1]], where="post", color=COLOURS["blue"], linewidth=1.6)
    axes.set_ylim(0, WORKERS + 1.7)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("workers")
    for now, count in job.kills:
        text = f"kill -9 of {count} worker{'s' * (count > 1)}: no step for {job.stall(now):.1f} s"
        axes.annotate(
            text, (now, WORKERS + 1.6), (4, 0), textcoords="offset points", va="top", color=COLOURS["red"]
        )


def versions(python: str) -> str:
    """Name the machine, and the versions of both sides."""
    code = "from importlib.metadata import version as v; print(v('tensorflow-cpu'))"
    theirs = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    return (
        f"One machine with {os.cpu_count()} cores, load {os.getloadavg()[1]:.0f}, "
        f"Python {platform.python_version()}. edl {metadata.version('edl-trainer')} with TensorFlow "
        f"{metadata.version('tensorflow-cpu')}; Horovod 0.28.1 with TensorFlow {theirs.strip()}.\n"
        "The same script, data and times of the kills, one job after the other. "
        "Orange: no step for more than half a second. To repeat: scripts/bench kill_picture"
    )


def main() -> None:
    """Run both jobs, and write the picture."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    told = subprocess.run([ROOT / "scripts/dev/bench-peer"], check=True, stdout=subprocess.PIPE, text=True)
    peer = told.stdout.strip()
    x, y = load_digits(return_X_y=True)
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        work, records = Path(directory), Path(directory) / "digits.npz"
        np.savez(records, x=(x / 16).astype(np.float32), y=y.astype(np.int64))
        with OurScript(work, WORKERS, BENCH_DATA=str(records)) as job:
            ours = record(job)
        with Stock(peer, work, WORKERS, COOLDOWN, BENCH_DATA=str(records)) as stock:
            theirs = record(stock)
    jobs = {"edl horovod": ours, "Elastic Horovod 0.28.1": theirs}
    with pictures.styled():
        (ROOT / "docs" / "kill.svg").write_bytes(svg.written(draw(jobs, versions(peer)), "svg"))


if __name__ == "__main__":
    main()
