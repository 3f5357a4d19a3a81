# SPDX-License-Identifier: Apache-2.0
"""Workers on a pool of nodes with GPUs, from the values file of docs/gpu.md; a stand-in offers the GPUs.

The kubelets, the scheduler and the device plugin API are Kubernetes' own. Nothing computes on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Cluster, Images, Namespace, Nodes, Object
from tests.cluster.release import CHART, WORKERS, Release, idling
from tests.cluster.test_commands import edl
from tests.support.device_plugin import RESOURCE, VISIBLE, DevicePlugin

VALUES = CHART / "ci" / "gpu-values.yaml"
TAINT = {"key": RESOURCE, "effect": "NoSchedule"}
LABEL = "accelerator"
OTHER = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}}
NO_GPU = f"no node has room for it: 0/2 nodes are available: 2 Insufficient {RESOURCE}"


@pytest.fixture
def gpus(nodes: Nodes, cluster: Cluster) -> Iterator[dict[str, DevicePlugin]]:
    """Make the nodes a pool with a GPU each, a taint, a label and a RuntimeClass.

    Returns the device plugins by node.
    """
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    taint = f"{TAINT['key']}:{TAINT['effect']}"
    with ExitStack() as pool:
        pool.callback(cluster.kubectl, "delete", "runtimeclass", "nvidia")
        cluster.apply({**runtime, "handler": "runc"})
        pool.callback(cluster.kubectl, "label", "nodes", *nodes.names, f"{LABEL}-")
        cluster.kubectl("label", "nodes", *nodes.names, f"{LABEL}=yes")
        pool.callback(cluster.kubectl, "taint", "nodes", *nodes.names, f"{taint}-")
        cluster.kubectl("taint", "nodes", *nodes.names, taint)
        state = Path(cluster.kubeconfig).parent
        plugins = {
            name: pool.enter_context(
                DevicePlugin(state / name / "kubelet" / "plugins_registry", [f"GPU-{name}"])
            )
            for name in nodes.names
        }
        for name in nodes.names:
            allocatable(cluster, name, 1)
        yield plugins


def allocatable(cluster: Cluster, node: str, number: int) -> None:
    """Wait until the node offers so many GPUs to the scheduler."""

    def offers(found: list[Object]) -> bool:
        return any(
            n["metadata"]["name"] == node and n["status"]["allocatable"].get(RESOURCE) == str(number)
            for n in found
        )

    cluster.until("nodes", offers)


def test_each_worker_has_a_gpu_of_its_own_and_the_others_wait_for_one(
    namespace: Namespace,
    release: Callable[..., Release],
    images: Images,
    priority_classes: Callable[..., None],
    gpus: dict[str, DevicePlugin],
) -> None:
    cluster = namespace.cluster
    priority_classes(important=1000, spot=-10)
    job = release(**adapted(images))
    job.install("-f", str(VALUES))
    job.ring_of(2)
    job.until(lambda status: re.match(rf"worker \d+: {NO_GPU}", status.get("waiting", "")))
    assert NO_GPU in edl(job, "status")
    home = {}
    for pod in namespace.get("pods", "-l", WORKERS):
        assert pod["spec"]["runtimeClassName"] == "nvidia"
        if pod["status"]["phase"] == "Running":
            home[pod["spec"]["nodeName"]] = pod["metadata"]["name"]
    assert {node: gpu_of(namespace, worker) for node, worker in home.items()} == {
        node: f"GPU-{node}" for node in gpus
    }
    container = {"name": "other", "image": cluster.busybox, "command": ["true"]}
    namespace.apply({**OTHER, "spec": {"containers": [container]}})
    namespace.wait("pod/other", "condition=PodScheduled=False")
    refused = namespace.get("pod", "other")["status"]["conditions"][0]["message"]
    assert "2 node(s) had untolerated taint" in refused, refused

    node, worker = home.popitem()
    gpus[node].set_health(f"GPU-{node}", healthy=False)
    allocatable(cluster, node, 0)
    assert worker in job.workers(), "Kubernetes ends no pod for that"
    namespace.kubectl("delete", "pod", worker, "--wait=false")
    job.ring_of(1)
    job.until(lambda status: re.match(rf"workers \d+ and \d+: {NO_GPU}", status.get("waiting", "")))

    gpus[node].failures = 1
    gpus[node].set_health(f"GPU-{node}", healthy=True)
    job.told("UnexpectedAdmissionError", "the GPU's driver does not answer", reason=Reason.WorkerLost)

    def an_important_one_runs(pods: list[Object]) -> Object | None:
        return next((p for p in pods if p["metadata"]["name"] != worker and is_important(p, node)), None)

    found = an_important_one_runs(namespace.until("pods", an_important_one_runs, WORKERS))
    assert found is not None
    assert gpu_of(namespace, found["metadata"]["name"]) == f"GPU-{node}"
    summary = job.is_exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0


def gpu_of(namespace: Namespace, worker: str) -> str:
    """The GPU that the kubelet has allocated to the worker, from its container's environment."""
    return namespace.kubectl("exec", worker, "--", "printenv", VISIBLE).strip()


def is_important(pod: Object, node: str) -> bool:
    """Whether it is an on-demand worker that runs on the node."""
    spec = pod["spec"]
    placed = spec["priorityClassName"] == "important" and spec.get("nodeName") == node
    return placed and pod["status"]["phase"] == "Running"


def adapted(images: Images) -> dict[str, str]:
    """Replace what the test cluster lacks: an image with CUDA, large nodes, and nodes for the master."""
    counting = idling(records=16_000, workers="3")
    # Behind NCCL's variables, which the values file sets.
    moved = {key.replace("env[0]", "env[2]"): value for key, value in counting.items()}
    tolerated = {f"master.tolerations[0].{key}": value for key, value in TAINT.items()}
    return {
        **moved,
        **tolerated,
        "worker.image.repository": "edl-worker",
        "worker.image.tag": images.tag,
        "worker.resources.requests.ephemeral-storage": "64Mi",
    }
