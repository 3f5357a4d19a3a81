# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench kill_picture`: make docs/kill.svg, the picture of the README, from a real job.

The job trains `digits` on four workers. One of them gets `kill -9`, and later two at the same moment.
The picture has the size of the ring and the loss of each epoch.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.jobs import ROOT, OurJob
from benchmarks.journal import Entry, Journal
from edl.report import lanes, pictures, svg
from edl.report.tables import COLOURS

WORKERS, EPOCHS, WAIT = 4, 4, 120.0  # EPOCHS are trained before a kill; WAIT: seconds for them
KILLS = ((1,), (0, 2))  # by rank


def epochs(journal: Journal, more: int) -> None:
    """Wait until so many more epochs have ended."""

    def ended() -> int:
        return sum(entry["event"]["type"] == "EpochEnded" for entry in journal.entries)

    wanted = ended() + more
    journal.until(lambda _: ended() >= wanted or None, WAIT)


def recorded(work: Path) -> tuple[list[Entry], list[tuple[float, int]]]:
    """Run the job. Return its journal, and the times of the kills with the numbers of the killed workers."""
    kills = []
    with OurJob(work, WORKERS, "model.module=digits", "training.epochs=1000") as job:
        ring = job.journal.ring(WORKERS, seconds=WAIT)
        for ranks in KILLS:
            epochs(job.journal, EPOCHS)
            for rank in ranks:
                os.kill(job.pid(ring.members[rank]), signal.SIGKILL)
            ring = job.journal.ring(WORKERS, ring.generation, WAIT)
            kills.append((lost(job.journal.entries, ring.members), len(ranks)))
        epochs(job.journal, EPOCHS)
        return job.journal.entries, kills


def lost(entries: Sequence[Entry], members: Sequence[int]) -> float:
    """When the newest worker that is none of `members` was lost."""
    closed = (x for x in entries if x["event"]["type"] == "Closed" and x["event"]["worker"] not in members)
    return max(float(x["now"]) for x in closed)


def drawn(entries: Sequence[Entry], kills: Sequence[tuple[float, int]]) -> Figure:
    """Draw the size of the ring, and below it the loss of each epoch."""
    forms = [(x["now"], effect) for x in entries for effect in x["effects"] if effect["type"] == "Form"]
    losses = [(x["now"], x["event"]["loss"]["mean"]) for x in entries if x["event"]["type"] == "EpochEnded"]
    begin, end = forms[0][0], losses[-1][0]
    figure = Figure((lanes.WIDTH, 3.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    sizes = [len(form["members"]) for _, form in forms]
    times = [now - begin for now, _ in forms]
    above.step([*times, end - begin], [*sizes, sizes[-1]], where="post", color=COLOURS["blue"], linewidth=1.6)
    above.set_ylim(0, WORKERS + 1.6)
    above.yaxis.set_major_locator(MaxNLocator(integer=True))
    above.set_ylabel("workers")
    above.set_xlim(left=0)
    below.plot([now - begin for now, _ in losses], [loss for _, loss in losses], "o-", markersize=3.5)
    below.lines[0].set_color(COLOURS["blue"])
    below.set_yscale("log")
    below.yaxis.set_major_formatter("{x:g}")
    below.set_ylabel("loss of an epoch")
    below.set_xlabel("seconds of training")
    for now, count in kills:
        for axes in (above, below):
            axes.axvline(now - begin, color=COLOURS["red"], linewidth=1)
        above.annotate(
            f" kill -9 of {count} worker{'s' * (count > 1)}",
            (now - begin, WORKERS + 1.5),
            va="top",
            color=COLOURS["red"],
        )
    return figure


def main() -> None:
    """Run the job, and write the picture."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        entries, kills = recorded(Path(directory))
    with pictures.styled():
        (ROOT / "docs" / "kill.svg").write_bytes(svg.written(drawn(entries, kills), "svg"))


if __name__ == "__main__":
    main()
