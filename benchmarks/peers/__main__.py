# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench peers`: the same job with edl and with each peer, in turns. A measurement, no test.

The first table: what a kill -9, a join and a SIGSTOP of one of three workers cost the others, what becomes of
the records, a step against the peer's plain step, and the lines of the user's program. With --faults the
second: the time to a result of four workers, with one kill each 15 seconds, against plain Horovod
without faults. Each peer is installed into an environment of its own, in the user's cache.
"""

from __future__ import annotations

import argparse
import ast
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.peers import faults
from benchmarks.peers.job import BATCH
from benchmarks.peers.running import ALL, HERE, OPTIONS, PEERS, Running, Step, kill
from benchmarks.recorder import Recorder
from benchmarks.report import say, spread

WORKERS, ROUNDS = 3, 3
STEADY_SECONDS = 6.0  # of steps whose median is a step
MAX_SECONDS = 60.0  # to wait for the others to go on, and for a new worker
AGAIN = 5  # steps of each of the others after which they have gone on


def measured(name: str, work: Path, workers: int, only_steps: bool, **variables: str) -> dict[str, Any]:
    """One round of a peer: its plain step, its step, a kill, a join and a SIGSTOP."""
    peer = ALL[name]
    found: dict[str, Any] = {}
    with Running(peer.plain, work, workers, **variables) as job:
        found["plain step ms"] = steady(job)
    with Running(name, work, workers, **variables) as job:
        found["step ms"] = steady(job)
        if only_steps:
            return found
        victim = job.wait(workers)[1]
        at = kill(victim)
        found["kill s"], gone_on = stall(job, victim, at)
        if not gone_on:
            say(job.tail())
        if gone_on:
            found["whole again s"] = when_whole(job, at, workers)
            found |= records(job, at)
    with Running(name, work, workers - peer.grows, BENCH_WORKERS=str(workers), **variables) as job:
        before = job.wait(workers - peer.grows)
        if peer.grows:
            at = time.monotonic()
            job.grow(workers)
            joined = when_whole(job, at, workers)
            found["join: new worker's first step s"] = joined
            # The pause of those from before; if all are new ones, that of any.
            staying = set(job.wait(workers, AGAIN)) & set(before) if joined else set()
            found["join s"] = longest_gap(job.steps(), sorted(staying), at) if joined else None
        if not peer.grows or joined:
            victim = job.wait(workers)[1]
            at = kill(victim, signal.SIGSTOP)
            found["SIGSTOP s"], _ = stall(job, victim, at)
    return found


def steady(job: Running) -> float:
    """The median of the seconds between two steps of the slowest worker, in milliseconds."""
    job.wait(job.workers)
    time.sleep(STEADY_SECONDS)
    since, times = time.monotonic() - STEADY_SECONDS, dict[int, list[float]]()
    for step in job.steps():
        if step.at > since:
            times.setdefault(step.pid, []).append(step.at)
    return max(
        1e3 * statistics.median(b - a for a, b in pairwise(each)) for each in times.values() if len(each) > 2
    )


def stall(job: Running, victim: int, at: float) -> tuple[float | None, bool]:
    """The longest time without a step of a worker around `at`, and whether the others have gone on.

    They have gone on when at least all but one of the workers have made five steps in a smaller ring or as
    new processes.
    """
    deadline = at + MAX_SECONDS
    while time.monotonic() < deadline:
        steps = job.steps()
        at_kill = {step.pid for step in steps if at - 2 < step.at <= at} - {victim}
        after: dict[int, int] = {}
        for step in steps:
            changed = step.pid not in at_kill or step.workers < job.workers or resumed(steps, step, at)
            if step.at > at and step.pid != victim and changed:
                after[step.pid] = after.get(step.pid, 0) + 1
        if sum(count >= AGAIN for count in after.values()) >= job.workers - 1:
            staying = sorted(at_kill & after.keys())
            return longest_gap(steps, staying, at), True
        time.sleep(0.1)
    return None, False


def resumed(steps: Sequence[Step], step: Step, at: float) -> bool:
    """Whether the worker of a step had paused for a second since `at`: a ring that waits keeps its size."""
    times = [s.at for s in steps if s.pid == step.pid and at - 1 < s.at <= step.at]
    return any(b - a > 1 for a, b in pairwise(times))


def longest_gap(steps: Sequence[Step], pids: Sequence[int], at: float) -> float:
    """The longest time between two steps of one of these workers around or after `at`.

    Without workers that stayed, it is that between the last step of any before and the first one after it.
    """
    rows = [[s.at for s in steps if s.pid == pid] for pid in pids] or [[s.at for s in steps]]
    return max(b - a for row in rows for a, b in pairwise(row) if b > at)


def when_whole(job: Running, at: float, workers: int) -> float | None:
    """The seconds until the first step after `at` in a ring of so many with a new worker."""
    deadline = at + MAX_SECONDS
    while time.monotonic() < deadline:
        steps = job.steps()
        old = {step.pid for step in steps if step.at <= at}
        new = [step.at for step in steps if step.at > at and step.pid not in old and step.workers == workers]
        if new:
            return min(new) - at
        time.sleep(0.1)
    return None


def records(job: Running, at: float) -> dict[str, Any]:
    """What a kill did to the records: those that are not in the model, and steps that were made again."""
    time.sleep(1)
    steps = job.steps()
    if job.is_edl:
        command = [sys.executable, "-m", "edl.cli", "audit", str(job.folder / "job")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return {"records": done.stdout.strip().splitlines()[-1], "audit": done.returncode}
    newest = {step.pid: step.number for step in steps if at - 2 < step.at <= at}
    before = min(newest.values())  # the others may complete this step just after the kill
    again = max(0, before + 1 - min(step.number for step in steps if step.at > at))
    covered: dict[int, set[int]] = {}
    for step in {(s.number, s.pid): s for s in steps}.values():
        covered.setdefault(step.number, set()).update(range(step.first, step.first + step.count))
    # From just before the kill, but for the newest steps, which not all workers have written down.
    whole = range(max(min(covered), before - AGAIN), max(covered) - 2)
    lost = sum(BATCH - len(covered.get(number, ())) for number in whole)
    return {"records lost": lost, "steps again": again}


def lines(script: Path) -> int:
    """The lines of a program, without comments, docstrings and blank lines."""
    tree = ast.parse(script.read_text())
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    source = script.read_text().splitlines()
    return sum(
        1
        for number, line in enumerate(source, 1)
        if number not in texts
        and line.strip()
        and not line.strip().startswith("#")
        and not re.search(r"\bdone\(|\bwork\(|stamp", line)
    )


COLUMNS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
    "kill -9: the others pause, s": ("kill s", lambda r: numbers(r, "kill s")),
    "until all train again, s": ("whole again s", lambda r: numbers(r, "whole again s")),
    "its records": ("records", lambda r: told(r)),
    "join: the others pause, s": ("join s", lambda r: numbers(r, "join s")),
    "until the new one trains, s": (
        "join: new worker's first step s",
        lambda r: numbers(r, "join: new worker's first step s"),
    ),
    "SIGSTOP: the others pause, s": ("SIGSTOP s", lambda r: numbers(r, "SIGSTOP s")),
    "a step, by its plain step": ("step ms", lambda r: ratio(r)),
}


def numbers(rounds: list[dict[str, Any]], key: str) -> str:
    here = [found[key] for found in rounds if key in found]
    known = [value for value in here if value is not None]
    text = spread(known) if known else ""
    if len(known) < len(here):
        text = f"{text}; not within {MAX_SECONDS:g} s: {len(here) - len(known)} of {len(here)}".strip("; ")
    return text or "fixed size"


def told(rounds: list[dict[str, Any]]) -> str:
    texts = []
    for found in rounds:
        if "audit" in found:
            texts.append("none lost" if found["audit"] == 0 else found["records"])
        elif "records lost" in found:
            texts.append(f"{found['records lost']} lost, {found['steps again']} steps again")
    return "; ".join(texts)


def ratio(rounds: list[dict[str, Any]]) -> str:
    pairs = [(r["step ms"], r["plain step ms"]) for r in rounds if "step ms" in r and "plain step ms" in r]
    if not pairs:
        return ""
    return f"{spread([a / b for a, b in pairs])} of {statistics.median(b for _, b in pairs):.0f} ms"


def table(found: dict[str, list[dict[str, Any]]], only_steps: bool) -> str:
    columns = dict([*COLUMNS.items()][-1:]) if only_steps else COLUMNS
    head = ["peer", *columns, "lines"]
    rows = [head, ["---"] * len(head)]
    for name, rounds in found.items():
        peer = ALL[name]
        cells = [cell(rounds) for _, cell in columns.values()]
        rows.append([name, *cells, str(lines(HERE / peer.script))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    names = [*PEERS, *OPTIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=list(PEERS), metavar="NAME")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--width", type=int, default=955, help="of the two layers; 4960: 25 million weights")
    parser.add_argument("--steps", action="store_true", help="only a step beside the plain one, no faults")
    parser.add_argument("--faults", action="store_true", help="the time to a result under faults")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="with --faults: of the run without faults"
    )
    parser.add_argument("--record", default="", metavar="NAME", help="write benchmarks/records/DATE-NAME/")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    recorder = Recorder(args.record)
    rounds = 1 if args.quick else args.rounds
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    settings = {name: ALL[name].settings for name in args.only}
    used = [peer for name in args.only for peer in (ALL[name], ALL[ALL[name].plain])]
    packages: dict[str, set[str]] = {}
    for peer in used:
        packages.setdefault(peer.environment, set()).update(peer.packages)
    versions = {name: environments.versions(name, *sorted(each)) for name, each in packages.items()}
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        if args.faults:
            keep = lambda result: recorder.write({"faults": result}, versions)  # noqa: E731
            print(faults.table(faults.measure(args.only, Path(directory), args.seconds, rounds, keep)))
            return 0
        for number in range(rounds):
            for name in args.only:
                say(f"round {number + 1}: {name}")
                try:
                    work, width = Path(directory), str(args.width)
                    one = measured(name, work, args.workers, args.steps, BENCH_WIDTH=width)
                    found[name].append(one)
                except (TimeoutError, IndexError, ValueError) as error:
                    say(str(error))
                    found[name].append({"error": type(error).__name__})
                say(f"{name}: {found[name][-1]}")
                recorder.write({"peers": found, "settings": settings}, versions)  # even if the next one fails
    print(table(found, args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
