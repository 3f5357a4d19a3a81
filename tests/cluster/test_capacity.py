"""Capacity comes and goes: what docs/preemption.md shows, with the same commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Namespace, Object
from tests.cluster.release import Release, idling

pytestmark = pytest.mark.timeout(600)
# Two of these fill a node, with the little else that runs there.
HALF_A_NODE = {"worker.resources.requests.cpu": "850m"}


def service(namespace: Namespace, replicas: int) -> Object:
    """A Deployment of the cluster's ordinary priority: what pays for the machines."""
    container = {
        "name": "main", "image": namespace.cluster.busybox, "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": "850m"}},
    }  # fmt: skip
    pod = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    labels = {"app": "service"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "service", "labels": labels},
        "spec": spec,
    }


def serves(namespace: Namespace, replicas: int) -> None:
    def ready(found: list[Object]) -> bool:
        return bool(found) and found[0]["status"].get("readyReplicas", 0) == replicas

    namespace.until("deployments", ready, "app=service")


def seconds(*steps: Callable[[], object]) -> float:
    """What some steps take."""
    began = time.monotonic()
    for step in steps:
        step()
    return time.monotonic() - began


def test_a_deployment_takes_the_capacity_and_gives_it_back(
    release: Callable[..., Release], tmp_path: Path
) -> None:
    """Half of it, then all; at last the release is gone, too, and another one trains its job for longer."""
    kept = tmp_path / "checkpoints"
    kept.mkdir()
    kept.chmod(0o777)
    checkpoints = {
        "checkpoint.hostPath": str(kept), "checkpoint.dir": "/checkpoints", "checkpoint.seconds": "2",
    }  # fmt: skip
    job = release(**idling(), **HALF_A_NODE, **checkpoints)
    namespace = job.namespace
    first = seconds(job.install, lambda: job.ring_of(4))
    namespace.apply(service(namespace, replicas=2))
    serves(namespace, 2)
    job.ring_of(2)
    job.told("PreemptionByScheduler")
    waiting = job.until(lambda data: "waiting" in data)["waiting"]
    assert "no node has room" in waiting, waiting
    scale = ("scale", "deployment/service")
    back = seconds(lambda: namespace.kubectl(*scale, "--replicas=0"), lambda: job.ring_of(4))
    assert back <= 2 * first, "a worker starts, that is all"
    assert "waiting" not in job.status
    assert not any(event.startswith(Reason.StateLost) for event in job.events())
    job.until(lambda data: data.get("progress", "0%") not in ("0%", ""))

    namespace.kubectl(*scale, "--replicas=4")
    serves(namespace, 4)
    data = job.until(lambda data: data.get("ringSize") == "0")
    assert data["phase"] == "Waiting", data
    assert "no node has room" in data["waiting"]
    assert job.workers() == []
    namespace.kubectl("delete", "deployment", "service")
    job.ring_of(4)
    job.told("is restored from /checkpoints", reason=Reason.Restored)
    summary = job.is_exact()
    assert summary["failures"] == [], "what Kubernetes does is not charged"
    # Who is asked to leave keeps its state to its end; when the others are gone, the job goes on from that.
    # The last one of all has written it, unless it had to go before.
    assert summary["state_losses"] <= 2

    namespace.helm("uninstall", job.name)
    more = {"training.epochs": "2", "workers": "3", "checkpoint.resume": "true"}
    again = release("again", **idling(**more), **HALF_A_NODE, **checkpoints)
    again.install()
    steps = summary["task"]["steps_done"]
    again.told(f"the state of step {steps:,} is restored from /checkpoints", reason=Reason.Restored)
    assert again.is_exact()["task"]["steps_done"] == 2 * steps


def test_a_job_of_high_priority_takes_the_place_of_one_of_low(release: Callable[..., Release]) -> None:
    low = release("low", **idling(), **HALF_A_NODE)
    high = release("high", **idling(), **HALF_A_NODE)
    low.install()
    low.ring_of(4)
    high.install(workers=1, priorityClass__value=100, priorityClass__preemptionPolicy="PreemptLowerPriority")
    low.ring_of(3)
    high.ring_of(1)
    assert high.is_exact()["failures"] == []
    low.ring_of(4)
    summary = low.is_exact()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0
    assert any(e.startswith(Reason.WorkerPreempted) for e in low.events())
    assert not any(e.startswith(Reason.WorkerPreempted) for e in high.events())
