# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes backend against a real API server, kubelet and scheduler; busybox plays the workers.

What the small server of tests/process only claims about Kubernetes is true here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import yaml
from lightkube.config.kubeconfig import KubeConfig

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.kubernetes.client import Api
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes import Place
from edl.master.core import events as ev
from tests.cluster.cluster import Cluster, Namespace, Object
from tests.support.kubernetes import driver
from tests.support.kubernetes.driver import Driven, job_values

SECONDS = 60.0
# It does what a file tells it to, and ends when it is asked to.
SCRIPT = "trap 'exit 0' TERM; while sleep 0.1; do [ -f /tmp/do ] && . /tmp/do; done"


def install(cluster: Cluster, namespace: Namespace, **spec: Any) -> None:
    """What the chart would leave of a release."""
    container = {
        "name": "worker",
        "image": cluster.busybox,
        "command": ["sh", "-c", SCRIPT],
        "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "32Mi"}},
    } | spec.pop("container", {})
    beside = spec.pop("beside", [])
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "containers": [container, *beside],
            **spec,
        },
    }
    data = {"values.json": json.dumps(job_values()), "worker.yaml": yaml.safe_dump(pod)}
    for name, content in (("edl-job", data), ("edl-status", {})):
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": content}
        namespace.apply(made)


def driving(cluster: Cluster, namespace: Namespace) -> contextlib.AbstractAsyncContextManager[Driven]:
    api = Api(Timing(mercy=1.0), KubeConfig.from_file(cluster.kubeconfig))
    return driver.driving(Place(namespace.name, "edl", "edl", "nowhere:1"), api)


async def do(namespace: Namespace, worker: int, what: str) -> None:
    """Have the worker's own process do that; it may end before the shell that tells it has."""
    await kubectl(
        namespace,
        "exec",
        f"edl-worker-{worker}",
        "-c",
        "worker",
        "--",
        "sh",
        "-c",
        f"echo '{what}' >/tmp/x; mv /tmp/x /tmp/do",
        ok=False,
    )


async def kubectl(namespace: Namespace, *words: str, **how: Any) -> str:
    return await asyncio.to_thread(namespace.kubectl, *words, **how)


def is_told_gone(pod: Object) -> bool:
    return bool(pod["metadata"]["labels"]["edl.dev/state"] == "gone")


async def test_a_real_clusters_ends_are_told_with_their_cause(cluster: Cluster, namespace: Namespace) -> None:
    install(cluster, namespace)
    async with driving(cluster, namespace) as job:
        await job.running(*range(7), seconds=SECONDS)
        asked = {key[:2]: n for key, n in job.backend.numbers()["requests"].items() if key[1] == "pods"}
        assert asked == {("get", "pods"): 1, ("watch", "pods"): 1, ("post", "pods"): 7}
        await do(namespace, 0, "exit 3")
        await do(namespace, 1, "exec tail /dev/zero")  # needs all the memory there is
        await do(namespace, 2, "kill -9 $$; exit 139")  # a first process cannot kill itself
        await kubectl(namespace, "delete", "pod", "edl-worker-3", "--wait=false")
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "edl-worker-4"}}
        path = f"/api/v1/namespaces/{namespace.name}/pods/edl-worker-4/eviction"
        await kubectl(namespace, "create", "--raw", path, "-f", "-", text=json.dumps(eviction))
        await kubectl(namespace, "delete", "pod", "edl-worker-5", "--force", "--grace-period=0")
        job.delete(6, grace=3)
        gone = {w: await job.gone(w, SECONDS) for w in range(7)}
        assert gone[0] == ev.Gone(WorkerId(0), code=WorkerExit.USER_CODE), "nothing announced the 3"
        assert gone[1] == ev.Gone(WorkerId(1), code=137, why="OOMKilled: container memory limit 32Mi")
        assert gone[2] == ev.Gone(WorkerId(2), signal="SIGSEGV")
        assert (gone[3].free, gone[3].why) == (True, "its pod was deleted")
        assert gone[4].free and gone[4].why.startswith("EvictionByEvictionAPI: ")
        assert gone[5].free
        assert gone[6] == ev.Gone(WorkerId(6), code=0)
        output = await kubectl(namespace, "describe", "configmap", "edl-job")
        assert "WorkerPreempted" in output and "EvictionByEvictionAPI" in output
        left = await asyncio.to_thread(
            namespace.until, "pods", lambda found: len(found) == 3 and all(is_told_gone(p) for p in found)
        )
        pods = {p["metadata"]["name"]: p for p in left}
        assert sorted(pods) == ["edl-worker-0", "edl-worker-1", "edl-worker-2"], "their logs are kept"
        (owner,) = pods["edl-worker-0"]["metadata"]["ownerReferences"]
        assert owner["name"] == "edl-job"
    await kubectl(namespace, "delete", "configmap", "edl-job")  # as an uninstall does
    await asyncio.to_thread(namespace.until, "pods", lambda found: not found)


async def test_what_keeps_a_worker_from_running_is_told_within_seconds(
    cluster: Cluster, namespace: Namespace
) -> None:
    install(cluster, namespace)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "two"}}
    namespace.apply({**quota, "spec": {"hard": {"pods": "2"}}})
    namespace.wait("resourcequota/two", "jsonpath={.status.hard.pods}=2")  # the quota has no effect before
    async with driving(cluster, namespace) as job:

        async def reinstall(**spec: Any) -> None:
            before = len(job.taken)
            install(cluster, namespace, **spec)
            await job.until(lambda: len(job.taken) > before, SECONDS)

        job.create(0, 1, 2)
        await job.until(lambda: len(job.seen) == 2, SECONDS)
        (waiting,) = {0, 1, 2} - set(job.seen)
        why = await job.until(lambda: job.delays(waiting), SECONDS)
        assert why[0] == "exceeded quota: two, requested: pods=1, used: pods=2, limited: pods=2"
        namespace.apply({**quota, "spec": {"hard": {"pods": "9"}}})
        await job.until(lambda: len(job.seen) == 3, 90)
        await reinstall(container={"resources": {"requests": {"cpu": "64"}}})
        job.create(3)
        why = await job.until(lambda: job.delays(3), SECONDS)
        assert why[0].startswith("no node has room for it: 0/2 nodes are available: 2 Insufficient cpu")
        await reinstall(container={"image": "localhost:1/none:1"})
        job.create(4)
        why = await job.until(lambda: job.delays(4), SECONDS)
        assert why[0].startswith(("ErrImagePull: ", "ImagePullBackOff: "))
        await reinstall(nonsense=1, container={"image": ""})
        job.create(5)
        why = await job.until(lambda: job.delays(5), SECONDS)
        assert "spec.containers[0].image: Required value" in why[0], "in Kubernetes' own words"
        replaced = "it was pending, and its pod was outdated"
        for worker in (3, 4):
            gone = await job.gone(worker, SECONDS)
            assert (gone.free, gone.why) == (True, replaced)
        assert len(job.of(ev.Gone)) == 2


async def test_a_container_beside_the_worker_does_not_keep_its_pod(
    cluster: Cluster, namespace: Namespace
) -> None:
    beside = {"name": "beside", "image": cluster.busybox, "command": ["sh", "-c", "sleep 3600"]}
    install(cluster, namespace, beside=[beside])
    async with driving(cluster, namespace) as job:
        await job.running(0, seconds=SECONDS)
        await do(namespace, 0, "exit 0")
        assert await job.gone(0, SECONDS) == ev.Gone(WorkerId(0), code=0)
        await asyncio.to_thread(namespace.until, "pods", lambda found: not found)
