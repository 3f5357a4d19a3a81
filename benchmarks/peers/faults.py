# SPDX-License-Identifier: Apache-2.0
"""The time to a result under faults: four workers, a fixed number of steps, one kill each 15 seconds.

A record's work is a sleep, so that four workers do not compete for the cores of one machine. All times are
counted from the first step of all workers, and divided by that of plain Horovod without faults.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.running import PEERS, Running, kill
from benchmarks.report import say, spread

WORKERS, EVERY = 4, 15.0  # seconds from one kill to the next
RECORD_SECONDS = "0.002"  # 48 records of each worker: 96 ms a step
LONGEST = 4.0  # times the time without faults after which a run is given up
CALIBRATION_SECONDS = 5.0
REFERENCE = "plain Horovod"


def measure(
    names: Sequence[str],
    work: Path,
    seconds: float,
    rounds: int,
    keep: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[str, Any]:
    """All runs: for each the seconds until the last step, kills, and the mean number of workers.

    Args:
        keep: is called with the results so far after each run.
    """
    found: dict[str, Any] = {"seconds": seconds, REFERENCE: [], **{name: [] for name in names}}
    steps = 0
    for number in range(rounds):
        for name in (REFERENCE, *names):
            say(f"round {number + 1}: {name}")
            variables = {"BENCH_RECORD_SECONDS": RECORD_SECONDS, "BENCH_WORKERS": str(WORKERS)}
            with Running(name, work, WORKERS, **variables) as job:
                try:
                    job.wait(WORKERS, steps=3)
                    steps = steps or calibrated(job, seconds)
                    found[name].append(finish(job, steps, seconds, random.Random(number)))
                except TimeoutError as error:
                    say(str(error))
                    found[name].append({"error": type(error).__name__})
            say(f"{name}: {found[name][-1]}")
            found["steps"] = steps
            keep(found)
    return found


def calibrated(job: Running, seconds: float) -> int:
    """The number of steps that take so many seconds."""
    began, first = time.monotonic(), max(step.number for step in job.steps())
    time.sleep(CALIBRATION_SECONDS)
    made = max(step.number for step in job.steps()) - first
    return max(10, round(made / (time.monotonic() - began) * seconds))


def finish(job: Running, steps: int, seconds: float, chance: random.Random) -> dict[str, Any]:
    """Kill a worker now and again until so many steps more are made."""
    began = time.monotonic()
    first = max(step.number for step in job.steps() if step.at <= began)
    kills, due = 0, began + EVERY
    while True:
        news = [step for step in job.steps() if step.at > began]
        ends = [step.at for step in news if step.number >= first + steps]
        now = time.monotonic()
        if ends or now > began + LONGEST * seconds:
            break
        if job.name in PEERS and now >= due:
            due += EVERY
            alive = job.active()
            if len(alive) > 1:  # one must survive
                kill(chance.choice(alive))
                kills += 1
        time.sleep(0.1)
    end = min(ends) if ends else now
    last = max((step.number for step in news), default=first)
    return {
        "seconds": round(end - began, 2) if ends else None,
        "share of the steps": min(1.0, (last - first) / steps),
        "kills": kills,
        "workers": round(statistics.fmean(step.workers for step in news), 2) if news else 0,
    }


def table(found: dict[str, Any]) -> str:
    """Each peer's time by that without faults."""
    reference = statistics.median(run["seconds"] for run in found[REFERENCE] if run.get("seconds"))
    rows = [
        f"{found['steps']} steps; plain Horovod without faults takes {reference:.0f} s.\n",
        "| with one kill each 15 s | time, by that without faults | workers of a step, mean | kills |",
        "| --- | --- | --- | --- |",
    ]
    for name, runs in found.items():
        if name in ("seconds", "steps", REFERENCE):
            continue
        whole = [run["seconds"] / reference for run in runs if run.get("seconds")]
        text = spread(whole) if whole else ""
        for run in runs:
            if not run.get("seconds"):
                share = run.get("share of the steps", 0)
                text += f" not within {LONGEST:g} times: {share:.0%} of the steps"
        workers = [run["workers"] for run in runs if "workers" in run]
        kills = ", ".join(str(run["kills"]) for run in runs if "kills" in run)
        rows.append(f"| {name} | {text.strip()} | {spread(workers)} | {kills} |")
    return "\n".join(rows)
