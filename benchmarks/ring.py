# SPDX-License-Identifier: Apache-2.0
"""`scripts/bench ring`: us against stock Horovod, interleaved, medians and spread. A measurement, no test.

Peers: stock Elastic Horovod 0.28.1 (horovodrun with a discovery script; its newest TensorFlow),
Horovod's own rendezvous server, and plain static Horovod in our own environment. Every pair
runs one side and then the other, so that a noisy minute hits both.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import large_joins, report
from benchmarks.jobs import LEASE, ROOT, OurJob
from benchmarks.journal import MAX_WAIT
from benchmarks.report import Row, p95
from benchmarks.steady_state import STEADY, bits, steady
from benchmarks.stock import Stock

HERE = Path(__file__).parent
UNEVEN = ROOT / "tests" / "models" / "uneven.py"


def kills(peer: str, work: Path, pairs: int) -> list[Row]:
    rows = []
    for place, which in (("first", 0), ("middle", 1), ("last", 2)):
        ours, theirs = [], []
        for _ in range(pairs):
            with OurJob(work, 3) as job:
                ring = job.journal.ring(3)
                os.kill(job.pid(ring.members[which]), signal.SIGKILL)
                ours.append(job.journal.ring(2, ring.generation).stall)
            with Stock(peer, work, 3) as stock:
                pids = stock.wait(3)
                since = time.monotonic()
                os.kill(pids[which], signal.SIGKILL)
                theirs.append(stock.stall(since, 2))
        name = f"kill -9 of the {place} of 3: stall of survivors"
        rows.append(Row(name, ours, theirs, "s", "p95 <= 0.3 s", p95(ours) <= 0.3))
    return rows


def kills_in_reforming(work: Path, pairs: int) -> Row:
    """A second kill as soon as the ring that follows the first one is ordered: inside `hvd.init` or the
    broadcast. The stall is from the last step before the first kill to the first after both."""
    stalls, aborted = [], 0
    for _ in range(pairs):
        with OurJob(work, 4, start="spawn") as job:  # forked newcomers would be there before the end
            ring = job.journal.ring(4)
            members, generation = ring.members, ring.generation
            pids = [job.pid(m) for m in members]
            os.kill(pids[1], signal.SIGKILL)
            job.journal.formed(generation)
            os.kill(pids[3], signal.SIGKILL)
            stalls.append(job.journal.ring(2, generation).stall)
            aborted += len({members[0], members[2]} - set(job.journal.ring(4, generation).members))
    goal = "p95 <= 1 s, no survivor aborted"
    name = f"kill -9 inside re-forming, 4 -> 3 -> 2: stall of survivors ({aborted} aborted)"
    return Row(name, stalls, [], "s", goal, p95(stalls) <= 1 and not aborted)


def joins(peer: str, work: Path, pairs: int) -> Row:
    ours, theirs = [], []
    for _ in range(pairs):
        with OurJob(work, 2, start="spawn") as job:
            ring = job.journal.ring(2)
            job.client.scale(3)
            ours.append(job.journal.ring(3, ring.generation).stall)
        with Stock(peer, work, 2) as stock:
            stock.wait(2)
            since = time.monotonic()
            stock.set_hosts(3)
            theirs.append(stock.stall(since, 3))
    row = Row("join 2 -> 3: stall of running workers", ours, theirs, "s", "ratio <= 0.05")
    row.met = (row.ratio or 1) <= 0.05
    return row


def leaves(work: Path, pairs: int) -> Row:
    redone, stalls = 0, []
    for _ in range(pairs):
        with OurJob(work, 3) as job:
            ring = job.journal.ring(3)
            os.kill(job.pid(ring.members[1]), signal.SIGTERM)
            after = job.journal.ring(2, ring.generation)
            stalls.append(after.stall)
            redone += after.redone
    return Row(
        f"SIGTERM of one of 3: stall ({redone} records redone)", stalls, [], "s", "0 redone", not redone
    )


def balances(work: Path, pairs: int) -> Row:
    """Seconds of a step of two workers, one of them half as fast, with parts by speed and with even ones."""
    seconds: dict[str, list[float]] = {"speed": [], "none": []}
    for _ in range(pairs):
        for balance, found in seconds.items():
            with tempfile.TemporaryDirectory(dir=work) as marks:
                os.environ["EDL_BENCH"] = marks
                sets = (
                    f"model.module={UNEVEN}",
                    f"training.loadBalancing={balance}",
                    "training.batchSize=24",
                )
                with OurJob(work, 2, *sets) as job:
                    ring = job.journal.ring(2)
                    if balance == "speed":
                        job.journal.ring(2, ring.generation)  # formed anew, once the speeds are known
                    before, began = job.client.status(), time.monotonic()
                    time.sleep(10)
                    after, ended = job.client.status(), time.monotonic()
                    found.append((ended - began) / (after["task"]["step"] - before["task"]["step"]))
    rate = statistics.median(seconds["none"]) / statistics.median(seconds["speed"])
    return Row(
        f"one of 2 half as fast: a step with parts by speed, and even ({rate:.2f} times the rate)",
        seconds["speed"],
        seconds["none"],
        "s",
        "rate >= 1.3",
        rate >= 1.3,
    )


def stops(peer: str, work: Path, pairs: int) -> Row:
    ours, theirs = [], []
    for number in range(pairs):
        with OurJob(work, 3) as job:
            ring = job.journal.ring(3)
            os.kill(job.pid(ring.members[1]), signal.SIGSTOP)
            ours.append(job.journal.ring(2, ring.generation).stall)
        if number == 0:  # it does not come back: once is enough
            with Stock(peer, work, 3) as stock:
                pids = stock.wait(3)
                since = time.monotonic()
                os.kill(pids[1], signal.SIGSTOP)
                theirs.append(stock.stall(since, 2))
    return Row(
        f"SIGSTOP of one of 3: stall (heartbeat timeout {LEASE:g} s; stock: waited {MAX_WAIT:g} s)",
        ours,
        theirs,
        "s",
        f"<= {LEASE + 0.5:g} s",
        max(ours) <= LEASE + 0.5,
    )


def inits(peer: str, work: Path, pairs: int) -> list[Row]:
    rows = []
    for n, goal in ((8, 0.12), (16, 0.07)):
        ours, theirs = [], []
        for _ in range(pairs):
            sets = (f"minWorkers={n}", f"training.batchSize={4 * n}", "elastic.heartbeatTimeoutSeconds=20")
            with OurJob(work, n, *sets) as job:
                ring = job.journal.ring(n)
                entries = job.journal.entries
            formed = next(x["now"] for x in entries for e in x["effects"] if e["type"] == "Form")
            ours.append(ring.up_at - formed)
            done = subprocess.run([peer, HERE / "peer_init.py", str(n)], check=True, stdout=-1, timeout=300)
            theirs.append(float(done.stdout))
        name = f"forming a ring of {n} (ours with the state's broadcast; stock: hvd.init)"
        row = Row(name, ours, theirs, "s", f"ratio <= {goal:g}")
        row.met = (row.ratio or 1) <= goal
        rows.append(row)
    return rows


def first_steps(peer: str, work: Path, pairs: int) -> list[Row]:
    ours: dict[str, list[float]] = {"spawn": [], "fork": []}
    theirs = []
    for _ in range(pairs):
        for start, found in ours.items():
            began = time.monotonic()
            with OurJob(work, 3, "minWorkers=3", start=start) as job:
                job.journal.ring(3)
                found.append(job.journal.first_step() - began)
        began = time.monotonic()
        with Stock(peer, work, 3) as stock:
            stock.wait(3)
            theirs.append(min(rows[0][0] for rows in stock.steps().values()) - began)
    rows = []
    for start, found in ours.items():
        name = f"from the command to the first step, 3 workers, local.startMethod={start}"
        row = Row(name, found, theirs, "s", "ratio <= 0.60")
        row.met = (row.ratio or 1) <= 0.60
        rows.append(row)
    return rows


PARTS = ("steady", "bits", "kill", "reform", "join", "large", "leave", "stop", "init", "first", "balance")


def measure(only: list[str], pairs: int) -> Iterator[list[Row]]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    peer = ""
    if set(only) - {"steady", "bits", "reform", "large", "leave", "balance"}:
        peer = subprocess.run(
            [ROOT / "scripts/dev/bench-peer"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        work = Path(directory)
        parts: dict[str, Callable[[], list[Row]]] = {
            "steady": lambda: list(steady(3 * pairs, [c for c in STEADY if c.quick or pairs > report.QUICK])),
            "bits": lambda: list(bits(3 * pairs)),
            "kill": lambda: kills(peer, work, pairs),
            "reform": lambda: [kills_in_reforming(work, pairs)],
            "join": lambda: [joins(peer, work, pairs)],
            "large": lambda: list(large_joins.rows(OurJob, work, pairs)),
            "leave": lambda: [leaves(work, pairs)],
            "stop": lambda: [stops(peer, work, pairs)],
            "init": lambda: inits(peer, work, pairs),
            "first": lambda: first_steps(peer, work, pairs),
            "balance": lambda: [balances(work, pairs)],
        }
        for name in only:
            report.say(name)
            yield parts[name]()


if __name__ == "__main__":
    sys.exit(report.main("scripts/bench ring", __doc__, PARTS, measure))
