# SPDX-License-Identifier: Apache-2.0
"""Capacity comes and goes: what docs/preemption.md shows, with the same commands.

The checkpoints are in a store that speaks S3, its account is in a Secret: what docs/checkpoints.md shows.

EDL_PREEMPTED_TIMES says how often all of it is gone (once by default), EDL_PREEMPTED_MINUTES for how many
minutes each time (5 seconds by default).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Namespace, Nodes, Object
from tests.cluster.release import WORKERS, Release, idling, in_ring, talking
from tests.support.checkpoints.s3 import Account, serving

pytestmark = pytest.mark.timeout(600)
MINUTES = float(os.environ.get("EDL_PREEMPTED_MINUTES", 5 / 60))
TIMES = int(os.environ.get("EDL_PREEMPTED_TIMES", "1"))
SECRET = "store-account"
# Two of these fill a node, with the little else that runs there.
HALF_A_NODE = {"worker.resources.requests.cpu": "850m"}


def service(namespace: Namespace, replicas: int) -> Object:
    """A Deployment of the cluster's ordinary priority: what pays for the machines."""
    container = {
        "name": "main",
        "image": namespace.cluster.busybox,
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": "850m"}},
    }
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


def stays_waiting(job: Release) -> None:
    """For MINUTES nothing changes; then the job is as it was."""
    with pytest.raises(AssertionError, match="not so of configmaps"):
        job.until(lambda data: data.get("phase") != "Waiting", seconds=60 * MINUTES)


def restored(job: Release, times: int) -> None:
    """The job has gone on so often from what it had written."""

    def so(events: list[Object]) -> bool:
        mine = (e for e in events if e["reason"] == Reason.Restored)
        return times <= sum(e.get("count", 1) for e in mine if "is restored from s3://" in e["message"])

    job.namespace.until("events", so)


def seconds(*steps: Callable[[], object]) -> float:
    """What some steps take."""
    began = time.monotonic()
    for step in steps:
        step()
    return time.monotonic() - began


@pytest.fixture
def store(nodes: Nodes) -> Iterator[Account]:
    """A store of checkpoints, on the machine that the nodes are on."""
    with serving(nodes.machine) as account:
        yield account


def keeps(namespace: Namespace, account: Account) -> None:
    """A Secret has it, and no other."""
    literals = [f"--from-literal={name}={text}" for name, text in account.variables.items()]
    namespace.kubectl("delete", "secret", SECRET, "--ignore-not-found")
    namespace.kubectl("create", "secret", "generic", SECRET, *literals)


def test_a_deployment_takes_the_capacity_and_gives_it_back(
    release: Callable[..., Release], store: Account
) -> None:
    """Half of it, then all; at last the release is gone, and the next one, at once, goes on."""
    checkpoints = {
        "checkpoint.dir": store.url,
        "checkpoint.existingSecret": SECRET,
        "checkpoint.seconds": "2",
    }
    job = release(**idling(40_000), **HALF_A_NODE, **checkpoints)
    namespace = job.namespace
    keeps(namespace, store)
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

    for times in range(1, TIMES + 1):
        namespace.kubectl(*scale, "--replicas=4")
        serves(namespace, 4)
        data = job.until(lambda data: data.get("ringSize") == "0")
        assert data["phase"] == "Waiting", data
        assert "no node has room" in data["waiting"]
        assert job.workers() == []
        stays_waiting(job)
        namespace.kubectl(*scale, "--replicas=0")
        job.ring_of(4)
        restored(job, times)
    namespace.kubectl("delete", "deployment", "service")
    told = json.loads(job.status["status.json"])
    assert told["failures"] == 0, "what Kubernetes does is not charged"

    first_run, uids = told_id(job), {p["metadata"]["uid"] for p in namespace.get("pods", "-l", WORKERS)}
    namespace.helm("uninstall", job.name)  # its pods are there for a while
    again = {"workers": 3, "training__epochs": 2, "checkpoint__resume": "true"}
    keeps(namespace, store.forged)
    job.install(**again)
    refused = job.phase("Failed")["reason"]
    assert f"{store.url}: cannot list the checkpoints: The request signature" in refused, "it begins nothing"
    namespace.helm("uninstall", job.name)
    keeps(namespace, store)
    job.install(**again)
    job.ring_of(3)
    restored(job, TIMES + 1)
    assert told_id(job) != first_run
    assert not uids & {p["metadata"]["uid"] for p in in_ring(namespace.get("pods", "-l", WORKERS))}
    assert not any(event.startswith(Reason.FailedOver) for event in job.events())
    summary = job.is_exact()
    assert summary["failures"] == []
    # A leaving worker keeps its state to its end; when the others are gone, the job continues from it.
    assert summary["state_losses"] == 0


def told_id(job: Release) -> str:
    """Return the id of the run from the job's status."""
    return str(json.loads(job.status["state"])["runId"])


def test_a_job_of_high_priority_takes_the_place_of_one_of_low(release: Callable[..., Release]) -> None:
    low = release("low", **talking(), **HALF_A_NODE)
    high = release("high", **talking(), **HALF_A_NODE)
    low.install()
    low.ring_of(4)
    high.install(workers=1, priorityClass__value=100, priorityClass__preemptionPolicy="PreemptLowerPriority")
    low.ring_of(3)
    high.ring_of(1)
    assert high.stop()["failures"] == []
    low.ring_of(4)
    summary = low.stop()
    assert summary["failures"] == []
    assert summary["state_losses"] == 0
    assert any(e.startswith(Reason.WorkerPreempted) for e in low.events())
    assert not any(e.startswith(Reason.WorkerPreempted) for e in high.events())
