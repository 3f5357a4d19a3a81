# SPDX-License-Identifier: Apache-2.0
"""Workers on nodes that are lost, silent or slow, at the small API server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from edl.kubernetes import pods
from edl.kubernetes.client import Api
from edl.master.backends.kubernetes.server_set import ServerSet
from edl.master.core import events as ev
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.kubernetes.driver import Driven
from tests.support.kubernetes.small_server import PACE, PLACE, SECOND, driving

pytestmark = pytest.mark.waits


async def test_a_node_that_never_answers_does_not_hold_its_worker_for_ever(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0)
        server._finish = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign]  # no kubelet ends it
        server.delete_pod("edl-worker-0", 2)
        await asyncio.sleep(10 * SECOND)
        assert job.of(ev.Gone) == []
        assert (await job.gone(0)).why == "its node does not answer, and it should have ended long ago"


LOST, EVICTED = "DeletionByTaintManager", "EvictionByEvictionAPI"


def condemn(server: KubernetesApi, name: str, reason: str) -> None:
    """Kubernetes deletes a pod for that reason; no kubelet confirms its end."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}
    pod = server.pod(name)
    server.put("pods", {**pod, "status": {**pod.get("status", {}), "conditions": [condition]}})
    server._finish = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign]
    server.delete_pod(name, 2)


async def test_a_worker_on_a_lost_node_is_removed_by_force_and_others_are_not(server: KubernetesApi) -> None:
    async with driving(server) as job:
        await job.running(0, 1)
        condemn(server, "edl-worker-0", EVICTED)
        condemn(server, "edl-worker-1", LOST)
        assert (await job.gone(0)).why == "EvictionByEvictionAPI: m"
        assert (await job.gone(1)).why == "DeletionByTaintManager: m"
        await job.until(lambda: "edl-worker-1" not in server.objects["pods"])
        assert "edl-worker-0" in server.objects["pods"], "it may still run"


async def test_a_server_on_a_lost_node_is_removed_by_force_and_others_are_not(server: KubernetesApi) -> None:
    def a_server(index: int, job: str = "edl") -> str:
        labels = {pods.JOB: job, pods.COMPONENT: pods.SERVER}
        server.put(
            "pods", {"metadata": {"name": f"{job}-ps-{index}", "labels": labels}, "spec": {"nodeName": "n1"}}
        )
        return f"{job}-ps-{index}"

    server.put("statefulsets", {"metadata": {"name": "edl-ps"}, "spec": {"replicas": 3}})
    for index in range(3):
        a_server(index)
    foreign = a_server(0, "other")
    config = KubeConfig.from_one(cluster=Cluster(server=server.url), user=User())
    api, told = Api(PACE, config), list[ev.Event]()
    servers = ServerSet(api, PLACE, told.append)
    servers.scale(3)
    condemn(server, "edl-ps-0", LOST)
    condemn(server, "edl-ps-1", EVICTED)
    condemn(server, foreign, LOST)
    first = server.pod("edl-ps-0")["metadata"]["uid"]
    async with asyncio.timeout(60):
        while "edl-ps-0" in server.objects["pods"]:
            await asyncio.sleep(SECOND)
    a_server(0)  # as its StatefulSet does
    condemn(server, "edl-ps-2", LOST)
    async with asyncio.timeout(60):
        while "edl-ps-2" in server.objects["pods"]:
            await asyncio.sleep(SECOND)
    assert server.pod("edl-ps-0")["metadata"]["uid"] != first, "its replacement stays"
    assert {"edl-ps-1", foreign} <= server.objects["pods"].keys()
    await servers.close()
    await api.close()


async def runs_on(job: Driven, server: KubernetesApi, worker: int, node: str) -> None:
    job.create(worker)
    await job.until(lambda: f"edl-worker-{worker}" in server.objects["pods"])
    server.bind_pod(f"edl-worker-{worker}", node)
    server.run_pod(f"edl-worker-{worker}")
    await job.until(lambda: worker in job.seen)


async def test_what_is_put_on_a_node_that_is_lost_is_made_anew_elsewhere(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        await runs_on(job, server, 0, "n1")
        await runs_on(job, server, 1, "n2")
        job.create(2, 3)
        await job.until(lambda: len(server.objects["pods"]) == 4)
        server.bind_pod("edl-worker-2", "n1")  # before its worker 0 is missed
        job.give_up(0)
        server.bind_pod("edl-worker-3", "n1")  # and after
        for worker in (2, 3):
            gone = await job.gone(worker)
            assert (gone.free, gone.why) == (True, "node n1 does not answer")
        await job.until(lambda: {"edl-worker-2", "edl-worker-3"}.isdisjoint(server.objects["pods"]))
        avoided = [e for e in server.objects["events"].values() if e["reason"] == "NodeAvoided"]
        assert [e["message"] for e in avoided] == ["node n1 does not answer: workers are made elsewhere"]

        job.create(4)
        await job.until(lambda: "edl-worker-4" in server.objects["pods"])
        assert not_on(server.pod("edl-worker-4")) == ["n1"]
        server.hold_pod("edl-worker-4", "Unschedulable", "0/2 nodes are available: 1 Insufficient cpu.")
        await job.until(lambda: job.delays(4))
        # By the time it is trusted again it is back, or Kubernetes itself puts nothing there.
        assert (await job.gone(4)).why == "it was pending, and its pod was outdated"
        job.create(5)
        await job.until(lambda: "edl-worker-5" in server.objects["pods"])
        assert not_on(server.pod("edl-worker-5")) == []
        assert job.of(ev.Gone, 1) == []


async def test_a_node_on_which_others_are_heard_of_is_not_lost(server: KubernetesApi) -> None:
    server.autorun = False
    async with driving(server) as job:
        await runs_on(job, server, 0, "n1")
        await runs_on(job, server, 1, "n1")
        job.create(2)
        await job.until(lambda: "edl-worker-2" in server.objects["pods"])
        server.bind_pod("edl-worker-2", "n1")
        job.give_up(0)
        await asyncio.sleep(3 * PACE.untaken)
        assert job.of(ev.Gone, 2) == []
        job.give_up(1)
        assert (await job.gone(2)).why == "node n1 does not answer"


async def test_a_node_that_takes_its_pods_up_is_not_avoided_for_a_silent_worker(
    server: KubernetesApi,
) -> None:
    server.autorun = False
    async with driving(server) as job:
        await runs_on(job, server, 0, "n1")
        job.give_up(0)
        job.create(1, 2)
        await job.until(lambda: {"edl-worker-1", "edl-worker-2"} <= set(server.objects["pods"]))
        server.bind_pod("edl-worker-1", "n1")
        server.take_up_pod("edl-worker-1")
        server.bind_pod("edl-worker-2", "n2")  # slow, and in no doubt
        await asyncio.sleep(3 * PACE.untaken)
        assert job.of(ev.Gone, 1) == job.of(ev.Gone, 2) == []
        job.create(3)
        await job.until(lambda: "edl-worker-3" in server.objects["pods"])
        assert not_on(server.pod("edl-worker-3")) == []


def not_on(pod: dict[str, Any]) -> list[str]:
    """The nodes on which a pod must not be."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {}).get(required, {})
    (term,) = affinity.get("nodeSelectorTerms", [{}])
    return [node for asked in term.get("matchFields", []) for node in asked["values"]]
