# SPDX-License-Identifier: Apache-2.0
"""What a master costs, by the number of its workers: its core alone, and the whole of it over real streams.

`core`: events made up here, in the order in which a job has them; CPU time of this process.
`streams`: a master with its journal, and workers that only talk (`benchmarks.talkers`), in other processes;
CPU time of the master's process alone.
`minutes`: the same with 1,000 of them for ten minutes (`--quick`: one), and how its memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import say
from edl import config
from edl.config import values
from edl.contract import artifacts
from edl.contract.ids import RunId, WorkerId
from edl.contract.layout import Layout
from edl.contract.tokens import Tokens
from edl.log import log_at
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, snapshot
from edl.master.jobs import new_job
from edl.master.journal.journal import Journal
from edl.master.loop import Master
from edl.master.rpc.server import MasterServer
from edl.master.spec import JobSpec
from edl.master.telemetry import Telemetry
from edl.net.listener import Listener

CORE = (16, 64, 256, 1000, 4000, 10_000)
STREAMS = (16, 64, 300)
LAYOUT = Layout(10**8)
PROCESSES = 2  # of talkers
HEARTBEATS_A_SECOND = 2.0  # of a worker, as with elastic.heartbeatTimeoutSeconds=3
LISTEN_SECONDS = 10.0
MANY = 1000
MINUTES, QUICK_MINUTES = 10.0, 1.0
SAMPLE_SECONDS = 1.0  # between two looks at the memory


@dataclass(frozen=True)
class Core:
    """Costs of the core with so many workers: microseconds of one event, milliseconds of the rest."""

    workers: int
    heartbeat_us: float
    stepped_us: float
    tick_us: float
    start_ms: float  # from nothing to a ring that is up
    death_ms: float  # to the next ring ordered


@dataclass(frozen=True)
class Streams:
    """Costs of a master with so many workers: CPU milliseconds of its process, or CPU seconds a second."""

    workers: int
    start_ms: float  # from the first stream to a ring that is up
    form_ms: float  # from a ring ordered to all of it up
    death_ms: float  # to the next ring up
    share: float  # of a core, while all of them train and send heartbeats
    memory_mib: float  # resident, at the most
    beats: float  # that it has heard in a second, of all together
    growth_mib_an_hour: float  # of what is resident, while they send heartbeats: the slope of a straight line


def a_spec(workers: int) -> dict[str, Any]:
    pool = [f"workers={workers}", f"minWorkers={workers // 2}", f"maxWorkers={workers}"]
    # Hundreds of talkers share a process: one may be silent for longer than a worker of its own would be.
    elastic = ["elastic.joinDelaySeconds=5", "elastic.heartbeatTimeoutSeconds=60"]
    return values.load([], [*pool, *elastic, "training.epochs=1000"])


def core(workers: int) -> Core:
    """A job of so many workers, from nothing to the ring after the first death."""
    parsed = config.parse(a_spec(workers))
    job, telemetry, now = new_job(parsed), Telemetry(parsed), 0.0

    def tell(said: ev.Event | facts.Heartbeat, after: float = 1e-5) -> None:
        nonlocal now
        now += after
        for event in telemetry.hears(said, now):
            job.handle(event, now)

    def each(say: Callable[[WorkerId], ev.Event | facts.Heartbeat]) -> float:
        """Seconds of CPU until all members have said it."""
        members = job.ring.members
        began = time.process_time()
        for m in members:
            tell(say(m))
        return time.process_time() - began

    gc.collect()
    began = time.process_time()
    tell(ev.Begin())
    for w in map(WorkerId, range(workers)):
        tell(ev.Seen(w, f"pod-{w}"))
        tell(ev.Hello(w))
    for w in map(WorkerId, range(workers)):
        tell(ev.Ready(w, LAYOUT))
    tell(ev.Tick(), after=10.0)
    assert len(job.ring.members) == workers
    each(lambda m: ev.JoinedRing(m, job.ring.generation, 0))
    start = time.process_time() - began
    stepped = each(lambda m: ev.Stepped(m, job.ring.generation, 1, 0.0, 0, 0.0))
    beat = min(each(lambda m: facts.Heartbeat(m, job.ring.generation, 1, 1.0, 0.5)) for _ in range(5))
    ticks = time.process_time()
    for _ in range(1000):
        tell(ev.Tick())
        job.next_deadline()
    tick = (time.process_time() - ticks) / 1000
    dead, members, generation = job.ring.members[workers // 2], job.ring.members, job.ring.generation
    began = time.process_time()
    tell(ev.Closed(dead, "its stream ended"))
    tell(ev.Gone(dead, signal="SIGKILL"))
    for m in members:
        if m != dead:
            tell(ev.LeftRing(m, generation, 1, True, broken="reset"))
    death = time.process_time() - began
    assert len(job.ring.members) == workers - 1 and job.ring.generation == generation + 1
    per = 1e6 / workers
    return Core(workers, beat * per, stepped * per, tick * 1e6, start * 1e3, death * 1e3)


class Counting(Master):
    """Counts what it hears."""

    beats = 0

    def emit(self, said: ev.Event | facts.Heartbeat) -> None:
        self.beats += isinstance(said, facts.Heartbeat)
        super().emit(said)


class Nowhere:
    """A backend whose workers come by themselves."""

    async def start(self) -> None: ...

    def perform(self, effect: ef.Effect) -> None: ...

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def talkers(port: int, workers: int) -> AsyncIterator[list[subprocess.Popen[str]]]:
    per = -(-workers // PROCESSES)
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.talkers",
                f"127.0.0.1:{port}",
                str(first),
                str(min(per, workers - first)),
                str(HEARTBEATS_A_SECOND),
            ],
            stdin=subprocess.PIPE,
            text=True,
        )
        for first in range(0, workers, per)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def streams(workers: int, seconds: float = LISTEN_SECONDS) -> Streams:
    """A master and so many talkers, up to the ring after the first death.

    Args:
        seconds: for which all of them train.
    """
    changed = asyncio.Event()
    spent: dict[int, float] = {}  # CPU seconds when each ring was ordered

    def observe(now: float, event: ev.Event, effects: list[ef.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ef.Form):
                spent[effect.generation] = time.process_time()
        changed.set()

    with tempfile.TemporaryDirectory(prefix="edl-bench-") as directory:
        spec = JobSpec.parse(a_spec(workers))
        master = Counting(spec, RunId("bench"), [observe])
        server = MasterServer(master, Listener(Tokens("token")), json.dumps(spec.values), directory)
        port = await server.start("127.0.0.1:0")
        state = partial(snapshot.dump, master.job)
        journal = Journal(Path(directory) / artifacts.JOURNAL, master.run_id, spec, state)
        life = asyncio.create_task(master.live(server, Nowhere(), journal))
        job = master.job

        async def up(generation: int, size: int) -> float:
            """CPU seconds of this process when a ring of that size is up."""
            while not (
                len(job.ring.members) == size
                and job.ring.generation > generation
                and job.ring.running
                and job.ring.up
            ):
                changed.clear()
                await changed.wait()
            return time.process_time()

        async with asyncio.timeout(900), talkers(port, workers) as processes:
            began = time.process_time()
            start = await up(0, workers)
            generation = job.ring.generation
            await asyncio.sleep(2)  # until the first steps are reported
            listening, since = time.process_time(), time.monotonic()
            resident, process, before = [], psutil.Process(), master.beats
            while time.monotonic() - since < seconds:
                await asyncio.sleep(SAMPLE_SECONDS)
                resident.append((time.monotonic() - since, process.memory_info().rss))
            share = (time.process_time() - listening) / (time.monotonic() - since)
            beats = (master.beats - before) / (time.monotonic() - since)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            killed = time.process_time()
            assert processes[0].stdin is not None
            processes[0].stdin.write("0\n")
            processes[0].stdin.flush()
            again = await up(generation, workers - 1)
        life.cancel()
        journal.close()
        await server.close()
    form = again - spent[job.ring.generation]
    growth = statistics.linear_regression(*zip(*resident, strict=True)).slope * 3600 / (1 << 20)
    return Streams(
        workers, (start - began) * 1e3, form * 1e3, (again - killed) * 1e3, share, memory, beats, growth
    )


RULE = "| --- | --- | --- | --- | --- | --- |"
CORE_HEAD = (
    "| workers | a heartbeat | a first step | a tick without news | from nothing to a ring | a death |"
)
STREAMS_HEAD = "| workers | from nothing to a ring | forming a ring | a death | heartbeats | memory |"
MINUTES_HEAD = "| workers | minutes | heartbeats heard | CPU | memory | its growth in an hour |"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench master", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rows = ["core", "streams", "minutes"]
    parser.add_argument("--only", nargs="+", choices=rows, default=rows)
    parser.add_argument("--quick", action="store_true", help="one minute instead of ten")
    parser.add_argument("--workers", nargs="+", type=int, help="instead of the usual numbers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    log_at("error")
    found: dict[str, list[dict[str, Any]]] = {}
    if "core" in args.only:
        print(CORE_HEAD, RULE, sep="\n")
        for workers in args.workers or CORE:
            c = core(workers)
            print(
                f"| {workers:,} | {c.heartbeat_us:.1f} us | {c.stepped_us:.1f} us | {c.tick_us:.1f} us | "
                f"{c.start_ms:.1f} ms | {c.death_ms:.1f} ms |",
                flush=True,
            )
            found.setdefault("core", []).append(asdict(c))
    loop = asyncio.Runner()  # one for all: gRPC stays with the first that it meets
    if "streams" in args.only:
        print(STREAMS_HEAD, RULE, sep="\n")
        for workers in args.workers or STREAMS:
            say(f"{workers} workers")
            s = loop.run(streams(workers))
            print(
                f"| {workers:,} | {s.start_ms:.0f} ms | {s.form_ms:.0f} ms | {s.death_ms:.0f} ms | "
                f"{s.share:.2f} cores | {s.memory_mib:.0f} MiB |",
                flush=True,
            )
            found.setdefault("streams", []).append(asdict(s))
    if "minutes" in args.only:
        minutes = QUICK_MINUTES if args.quick else MINUTES
        print(MINUTES_HEAD, RULE, sep="\n")
        for workers in args.workers or (MANY,):
            say(f"{workers} workers for {minutes:g} minutes")
            s = loop.run(streams(workers, minutes * 60))
            print(
                f"| {workers:,} | {minutes:g} | {s.beats:,.0f} a second | {s.share:.2f} cores | "
                f"{s.memory_mib:.0f} MiB | {s.growth_mib_an_hour:+.1f} MiB |",
                flush=True,
            )
            found.setdefault("minutes", []).append(asdict(s) | {"minutes": minutes})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
