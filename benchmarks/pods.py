# SPDX-License-Identifier: Apache-2.0
"""A thousand pods on a real API server: what it takes the master until all of its workers are in one ring.

The pods are kwok's and only seem to run; for each, a fake worker calls the master (tests/cluster/crowd.py).
What is counted begins when the master listens. API server, scheduler, kwok and crowd are on its machine.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.report import Row
from edl.kubernetes import pods
from tests.cluster.cluster import Cluster, Namespace, new_namespace, script
from tests.cluster.crowd import PODS, Cost, Spent, fleet

WORKERS = 1000
SECONDS = 900.0  # for all of them to come
LISTEN_SECONDS = 60.0  # while nothing changes
CORES, MEBIBYTES = 1.0, 400  # at most


def measure(cluster: Cluster, rounds: int) -> list[Row]:
    script("kwok", str(-(-WORKERS // PODS)))
    found: list[tuple[Spent, Spent, Spent]] = []
    try:
        for number in range(rounds):
            with (
                new_namespace(cluster, "thousand") as namespace,
                tempfile.TemporaryDirectory(prefix="edl-bench-") as output,
            ):
                found.append(asyncio.run(_one(cluster, namespace, Path(output))))
            ring, labels, idle = found[-1]
            report.say(f"round {number + 1}: to a ring: {ring}; labels: {labels}; then: {idle}")
    finally:
        cluster.kubectl("delete", "nodes", "-l", "type=kwok")
    come, named, there = zip(*found, strict=True)
    name = f"{WORKERS:,} pods"
    memory = [float(s.mebibytes) for s in there]
    cores = [s.cpu / s.seconds for s in come]
    return [
        Row(f"{name}: from nothing to a ring of all", [s.seconds for s in come], [], "s", ""),
        Row(f"{name}: the master's CPU until then", [s.cpu for s in come], [], "s", ""),
        Row(f"{name}: of one core", cores, [], "", f"<= {CORES:g}", max(cores) <= CORES),
        Row(f"{name}: its memory", memory, [], "MiB", f"<= {MEBIBYTES}", max(memory) <= MEBIBYTES),
        Row(f"{name}: requests to the API server", [s.requests for s in come], [], "", ""),
        Row(f"{name}: then, until each pod's labels tell its rank", [s.seconds for s in named], [], "s", ""),
        Row(
            f"{name}: requests a minute while nothing changes",
            [60 * s.requests / s.seconds for s in there],
            [],
            "",
            "",
        ),
    ]


async def _one(cluster: Cluster, namespace: Namespace, output: Path) -> tuple[Spent, Spent, Spent]:
    """What it takes until all are in the ring; until their labels say so; and while nothing changes."""

    def labelled() -> bool:
        there = crowd.running()
        return len(there) == WORKERS and all(pods.RANK in p["metadata"]["labels"] for p in there)

    async with fleet(cluster, namespace, output, WORKERS) as (crowd, process):
        address = await process.address()
        began = Cost(process)
        crowd.start(address)
        async with asyncio.timeout(SECONDS):
            await crowd.until(lambda: crowd.talking == WORKERS, SECONDS)
            report.say(f"{WORKERS:,} talk: {Cost(process).since(began)}")
            while process.pages.value("edl_workers", state="member") != WORKERS:
                await asyncio.sleep(0.5)
        come = Cost(process)
        await crowd.until(labelled, SECONDS)
        named = Cost(process)
        await asyncio.sleep(LISTEN_SECONDS)
        return come.since(began), named.since(come), Cost(process).since(named)
