"""The master's process as the chart starts it, over all its runs; pods and API are the small server's."""

from __future__ import annotations

import asyncio
import time

from tests.process.small_release import Release, until

# --- after the end


async def test_ended_pods_are_deleted_when_their_time_to_live_is_over(small_release: Release) -> None:
    small_release.install("workers=2", "ttlSecondsAfterFinished=-1")
    async with small_release.master() as first:
        await until(lambda: len(small_release.pods) == 2)
        small_release.server.end_pod("edl-worker-0", 0)
        await until(lambda: "edl-worker-2" in small_release.pods)
        await small_release.stop(first)
        await until(lambda: small_release.pods == ["edl-worker-0"])
        ended_at = time.time()
    small_release.install("workers=2", "ttlSecondsAfterFinished=3")
    async with small_release.master("edl-master-b"):
        await until(lambda: not small_release.pods)
        assert 2 <= time.time() - ended_at <= 8, "the time is counted from the end, not from a master's start"
        assert small_release.status["phase"] == "Stopped"


async def test_a_time_to_live_that_is_given_after_the_end_counts_too(small_release: Release) -> None:
    small_release.install("workers=1", "ttlSecondsAfterFinished=-1")
    async with small_release.master() as process:
        await until(lambda: small_release.pods)
        small_release.server.end_pod("edl-worker-0", 0)
        await until(lambda: "edl-worker-1" in small_release.pods)
        await small_release.stop(process)
        await until(lambda: "waiting for other values" in process.log)
        assert small_release.pods == ["edl-worker-0"], "its log may be read"
        small_release.install("workers=1", "ttlSecondsAfterFinished=0")
        await until(lambda: not small_release.pods)
        before = len(small_release.server.requests)
        await asyncio.sleep(1)
        assert small_release.server.count(before)["create", "pods"] == 0
