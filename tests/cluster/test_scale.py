# SPDX-License-Identifier: Apache-2.0
"""100 workers, half of them killed per minute, and 30 at once: the real master, kwok pods, talking clients.

EDL_SCALE_WORKERS says how many there are (300 is what the scale was measured with), EDL_SCALE_MINUTES for how
many minutes they are killed (0.2 by default). `pytest -s` shows what it cost.
`scripts/bench cluster --only thousand` is for more of them.
"""

from __future__ import annotations

import asyncio
import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.kubernetes import pods
from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.crowd import PODS, Cost, fleet

WORKERS = int(os.environ.get("EDL_SCALE_WORKERS", "100"))
MINUTES = float(os.environ.get("EDL_SCALE_MINUTES", "0.2"))


@pytest.mark.timeout(300 + 60 * MINUTES)
async def test_a_hundred_workers_half_of_them_killed_each_minute(
    cluster: Cluster, fake_nodes: Callable[[int], str], namespace: Namespace, tmp_path: Path
) -> None:
    await asyncio.to_thread(fake_nodes, -(-WORKERS // PODS))
    async with fleet(cluster, namespace, tmp_path, WORKERS) as (crowd, process):
        began = Cost(process)
        crowd.start(await process.address())
        await crowd.until(lambda: crowd.talking == WORKERS, 180)
        print(f"\n{WORKERS} workers are there: {Cost(process).since(began)}")
        began, lowest = Cost(process), WORKERS
        loop = asyncio.get_running_loop()
        for number in range(round(MINUTES * WORKERS / 2)):
            await asyncio.sleep(began.at + number * 60 / (WORKERS / 2) - loop.time())
            await crowd.kill_one()
            lowest = min(lowest, crowd.talking)
        cost = Cost(process).since(began)
        print(f"{crowd.killed} were killed, and never fewer than {lowest} there: {cost}")
        began = Cost(process)
        await crowd.until(lambda: crowd.talking == WORKERS == len(crowd.running()), 90)
        while process.pages.value("edl_workers", state="member") != WORKERS:
            assert loop.time() - began.at < 90, "they are there, and not in the ring"
            await asyncio.sleep(0.1)
        print(f"all are there again: {Cost(process).since(began)}")
        await asyncio.sleep(5)
        assert crowd.talking == WORKERS == len(crowd.running()), "desired and actual are one, and stay it"
        assert crowd.killed == round(MINUTES * WORKERS / 2)
        assert len(crowd.uids) == WORKERS + crowd.killed, "for each that was killed, one was made"
        assert all(len(uids) == 1 for uids in crowd.uids.values()), "no name is used twice"
        assert process.pages.value("edl_workers", state="member") == WORKERS


async def test_thirty_pods_deleted_in_one_call_are_replaced_for_two_hundred_requests(
    cluster: Cluster, fake_nodes: Callable[[int], str], namespace: Namespace, tmp_path: Path
) -> None:
    await asyncio.to_thread(fake_nodes, 1)
    async with fleet(cluster, namespace, tmp_path, 32) as (crowd, process):

        async def whole(made: int) -> None:
            await crowd.until(
                lambda: crowd.talking == 32 == len(crowd.running()) and len(crowd.uids) == made, 60
            )
            async with asyncio.timeout(60):
                while process.pages.value("edl_workers", state="member") != 32:
                    await asyncio.sleep(0.1)

        crowd.start(await process.address())
        await whole(32)
        began, changes = Cost(process), process.pages.value("edl_ring_reshapes_total")
        chosen = urllib.parse.quote(f"{pods.WORKER_ID} notin (0,1)")
        everyone = f"/api/v1/namespaces/{namespace.name}/pods?labelSelector={chosen}"
        await asyncio.to_thread(namespace.kubectl, "delete", "--raw", everyone)
        await whole(62)
        changes = process.pages.value("edl_ring_reshapes_total") - changes
        print(f"\na full ring: {Cost(process).since(began)}, {changes:.0f} changes of the ring")
        await asyncio.sleep(5)  # labels are written when they are stable
        cost = Cost(process).since(began)
        print(f"with its labels: {cost}")
        assert cost.requests <= 200
