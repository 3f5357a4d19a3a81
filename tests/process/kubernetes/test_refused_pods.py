# SPDX-License-Identifier: Apache-2.0
"""What the API server refuses or cannot do: quotas, rights, room, images, a status, a deletion."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edl.errors import ConfigError
from edl.master.backends.kubernetes import backend
from edl.master.backends.kubernetes.labels import Labels
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.kubernetes.small_server import SECOND, a_status, driving, install

pytestmark = pytest.mark.waits


# --- why a worker does not run yet


async def test_a_quota_is_named_and_asked_again_seldom(server: KubernetesApi) -> None:
    server.quota = 2
    async with driving(server) as job:
        job.create(0, 1, 2, 3)
        await job.until(lambda: len(job.of(ev.Seen)) == 2)
        waiting = sorted({0, 1, 2, 3} - set(job.seen))
        for worker in waiting:
            await job.until(lambda worker=worker: job.delays(worker))
            assert job.delays(worker)[0].startswith("exceeded quota: few, requested: pods=1")
        before = len(server.requests)
        await asyncio.sleep(60 * SECOND)
        assert server.count(before)["create", "pods"] <= 12
        server.delete_pod(f"edl-worker-{job.seen[0]}")
        await job.until(lambda: len(job.of(ev.Seen)) == 3)
        server.quota = 4
        await job.until(lambda: job.seen == [0, 1, 2, 3])
        assert all(job.delays(worker)[-1] == "" for worker in waiting)


async def test_a_missing_right_is_named(server: KubernetesApi) -> None:
    why = 'pods is forbidden: User "edl" cannot create resource "pods" in API group ""'
    refusal = server.refuse("create", "pods", 403, "Forbidden", why, times=1000)
    async with driving(server) as job:
        job.create(0, 1)
        await job.until(lambda: job.delays(0) and job.delays(1))
        assert why in job.delays(0)[0] and "Role" in job.delays(0)[0]
        before = len(server.requests)
        await asyncio.sleep(60 * SECOND)
        assert server.count(before)["create", "pods"] <= 12
        refusal.times = 0
        await job.until(lambda: job.seen == [0, 1])


async def test_no_room_and_no_image_are_named_and_cleared(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        job.create(0, 1)
        await job.until(lambda: len(server.objects["pods"]) == 2)
        server.hold_pod("edl-worker-0", "Unschedulable", "0/2 nodes are available: 2 Insufficient cpu.")
        server.hold_pod("edl-worker-1", "ImagePullBackOff", "Back-off pulling image edl-worker")
        await job.until(lambda: job.delays(0) and job.delays(1))
        assert job.delays(0) == ["no node has room for it: 0/2 nodes are available: 2 Insufficient cpu."]
        assert job.delays(1) == ["ImagePullBackOff: Back-off pulling image edl-worker"]
        server.hold_pod("edl-worker-0", "ContainerCreating", "")
        await job.until(lambda: job.delays(0)[-1] == "")
        server.run_pod("edl-worker-1")
        await job.until(lambda: job.seen == [1])
        assert server.count()["create", "pods"] == 2, "a pod that waits is not made again"


async def test_what_cannot_be_started_is_said(server: KubernetesApi) -> None:
    server.drop("configmaps", "edl-job")
    with pytest.raises(ConfigError, match="configmap edl-job: not found in namespace test"):
        async with driving(server):
            pass
    install(server, **{"values.json": "nonsense"})
    with pytest.raises(ConfigError, match=r"configmap edl-job: values\.json is not valid JSON"):
        async with driving(server):
            pass
    server.refuse("list", "pods", 403, "Forbidden", 'User "edl" cannot list resource "pods"')
    install(server)
    with pytest.raises(ConfigError, match='cannot list resource "pods"'):
        async with driving(server):
            pass


# --- failures beside the workers are reported, too


async def test_a_mistake_of_our_own_is_the_workers_end(
    server: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any, **__: Any) -> None:
        raise TypeError("unhashable type: 'dict'")

    monkeypatch.setattr(backend, "render", mistaken)
    async with driving(server) as job:
        job.create(0)
        gone = await job.gone(0)
        assert (gone.free, gone.why) == (False, "internal error: TypeError: unhashable type: 'dict'")


@pytest.mark.parametrize("status", [403, 422])
async def test_a_status_that_cannot_be_written_is_told_and_when_it_can_again(
    server: KubernetesApi, status: int
) -> None:
    refusal = server.refuse("patch", "configmaps", status, "Refused", "cannot patch edl-status", times=1000)
    async with driving(server) as job:
        job.told = a_status()
        job.backend.observe(0.0, ev.Tick(), [])
        (degraded,) = await job.until(lambda: job.of(ev.Degraded))
        assert degraded.part == "status"
        assert "edl-status cannot be written" in degraded.why and "cannot patch edl-status" in degraded.why
        refusal.times = 0
        await job.until(lambda: job.of(ev.Degraded)[-1] == ev.Degraded("status", ""))
        assert server.objects["configmaps"]["edl-status"]["data"]["phase"] == "Training"


async def test_a_deletion_that_is_refused_is_told_and_when_it_is_not_any_more(server: KubernetesApi) -> None:
    refusal = server.refuse("delete", "pods", 403, "Forbidden", "cannot delete resource pods", times=1000)
    async with driving(server) as job:
        await job.running(0)
        job.delete(0)
        (degraded,) = await job.until(lambda: job.of(ev.Degraded))
        assert degraded.part == "pod deletion" and "cannot delete resource pods" in degraded.why
        refusal.times = 0
        await job.gone(0)
        await job.until(lambda: job.of(ev.Degraded)[-1] == ev.Degraded("pod deletion", ""))


async def test_what_goes_on_for_all_is_started_again_when_it_fails(
    server: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, failures = Labels.run, iter([RuntimeError("dictionary changed size")])

    async def once(self: Labels) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        await labels(self)

    monkeypatch.setattr(Labels, "run", once)
    async with driving(server) as job:
        (degraded,) = await job.until(lambda: job.of(ev.Degraded))
        assert (degraded.part, "dictionary changed size" in degraded.why) == ("labels", True)
        await job.until(lambda: job.of(ev.Degraded)[-1] == ev.Degraded("labels", ""))
