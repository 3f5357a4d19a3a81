# SPDX-License-Identifier: Apache-2.0
"""Workers that live on in the pods of others, at the small API server."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import pytest

from edl.contract.ids import WorkerId
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.kubernetes.driver import Driven
from tests.support.kubernetes.small_server import PACE, SECOND, driving

pytestmark = pytest.mark.waits

PATIENT = replace(PACE, mercy=5.0, offer=20.0)  # for a busy machine
CRASH = ev.Gone(WorkerId(1), signal="SIGSEGV")  # of the worker that the pod was made for


def offers(job: Driven, ended: ev.Gone = CRASH) -> asyncio.Task[WorkerId | None]:
    """The supervisor of a pod has another process there."""
    return asyncio.create_task(job.backend.replace_in_place(ended))


@pytest.mark.parametrize("first", ["the stream ends", "its successor asks"])
async def test_a_worker_is_followed_in_its_pod_by_the_next_one(server: KubernetesApi, first: str) -> None:
    async with driving(server, pace=PATIENT) as job:
        await job.running(0, 1)
        if first == "the stream ends":
            job.delete(1)  # as the core does, with the next one
            job.create(2)
            await asyncio.sleep(2 * SECOND)
            offered = offers(job)
        else:
            offered = offers(job)
            await job.gone(1)
            job.create(2)
        assert await offered == 2
        assert await job.gone(1) == CRASH
        assert job.of(ev.Seen, 2) == [ev.Seen(WorkerId(2), "edl-worker-1")]
        assert server.names == ["edl-worker-0", "edl-worker-1"]
        labels = server.pod("edl-worker-1")["metadata"]["labels"]
        assert (labels["edl.dev/worker-id"], labels["edl.dev/place"]) == ("2", "1")
        again = offers(job, replace(CRASH, signal="SIGBUS"))  # and once more
        assert await job.gone(2) == ev.Gone(WorkerId(2), signal="SIGBUS")
        job.create(3)
        assert await again == 3
        assert server.pod("edl-worker-1")["metadata"]["labels"]["edl.dev/place"] == "1"
        killed = offers(job, ev.Gone(WorkerId(1), code=137, why="OOMKilled"))
        assert (await job.gone(3)).why == "OOMKilled: container memory limit 512Mi"
        job.create(4)
        assert await killed == 4
        server.end_pod("edl-worker-1", 7)
        assert await job.gone(4) == ev.Gone(WorkerId(4), code=7)
        assert ("delete", "pods") not in server.count()


async def test_what_a_watch_tells_late_is_of_who_lives_there_now(server: KubernetesApi) -> None:
    async with driving(server, pace=PATIENT) as job:
        await job.running(0, 1)
        before = copy.deepcopy(server.pod("edl-worker-1"))
        offered = offers(job)
        job.create(2)
        assert await offered == 2
        job.backend._workers.changed(before, False)
        await asyncio.sleep(5 * SECOND)
        assert ("delete", "pods") not in server.count()


async def test_a_pod_that_ends_as_a_whole_is_replaced_at_once(server: KubernetesApi) -> None:
    async with driving(server, pace=PATIENT) as job:
        await job.running(0)
        job.delete(0)
        job.create(1)
        await asyncio.sleep(2 * SECOND)
        assert server.names == ["edl-worker-0"]
        server.end_pod("edl-worker-0", 137)
        async with asyncio.timeout(PATIENT.mercy / 2):
            await job.until(lambda: 1 in job.seen)
        assert server.names == ["edl-worker-0", "edl-worker-1"]


async def test_who_is_given_up_is_not_waited_for(server: KubernetesApi) -> None:
    async with driving(server, pace=PATIENT) as job:
        await job.running(0)
        job.give_up(0)
        job.create(1)
        async with asyncio.timeout(PATIENT.mercy / 2):
            await job.until(lambda: 1 in job.seen)


async def test_a_place_that_nobody_needs_or_that_is_taken_away_is_refused(server: KubernetesApi) -> None:
    async with driving(server, pace=replace(PACE, offer=0.2)) as job:
        await job.running(0, 1, 2)
        assert await offers(job) is None, "no worker is created"
        assert await job.gone(1) == CRASH
        server.preempt("edl-worker-2", grace=100)
        await job.until(
            lambda: any(e.get("reason") == "WorkerPreempted" for e in server.objects["events"].values())
        )
        assert await offers(job, ev.Gone(WorkerId(2), signal="SIGKILL")) is None
        assert job.of(ev.Gone, 2) == [], "its pod's end will tell"
        assert await offers(job, ev.Gone(WorkerId(9), signal="SIGKILL")) is None, "there is no such pod"


async def test_the_next_master_finds_who_lives_where(server: KubernetesApi) -> None:
    async with driving(server, pace=PATIENT) as job:
        await job.running(0, 1)
        offered = offers(job)
        job.create(2)
        assert await offered == 2
    async with driving(server, pace=PATIENT) as job:
        assert dict(job.found.workers) == {0: "edl-worker-0", 2: "edl-worker-1"}
        assert job.found.next_id == 3
        offered = offers(job)
        assert await job.gone(2) == replace(CRASH, worker=WorkerId(2))
        job.create(3)
        assert await offered == 3
