"""What keeps workers from running, or ends them, is told with its cause, and nothing is asked in a hurry.

What docs/trouble.md shows, with the same commands.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest
import yaml

from tests.cluster.cluster import ROOT
from tests.cluster.release import Release, idling

pytestmark = pytest.mark.timeout(600)
SOON = 30  # seconds in which a cause is to be seen


def creates(job: Release) -> int:
    """How often the master has asked for a pod, in the half a minute since it first did."""
    asked = job.namespace.requests(f"{job.full}-master")
    times = [
        datetime.fromisoformat(r["requestReceivedTimestamp"]).timestamp()
        for r in asked
        if r["verb"] == "create" and r["objectRef"]["resource"] == "pods"
    ]
    return sum(at - times[0] <= 30 for at in times)


def waits_for(job: Release, cause: str) -> None:
    """The cause is in the status, and among the Events, soon."""
    job.until(lambda data: cause in data.get("waiting", ""), seconds=SOON)
    job.told(cause, seconds=SOON)
    assert cause in job.namespace.kubectl("describe", "configmap", f"{job.full}-job")


def test_a_worker_that_is_killed_for_its_memory(release: Callable[..., Release]) -> None:
    # Who swallows memory has no time for heartbeats: it is not to be lost for their want.
    patient = {"elastic.heartbeatTimeoutSeconds": "60"}
    job = release(**idling(workers="2"), **{"worker.resources.limits.memory": "1Gi"}, **patient)
    job.install()
    job.ring_of(2)
    job.namespace.kubectl("exec", "edl-worker-1", "--", "touch", "/tmp/eat")
    cause = "OOMKilled: container memory limit 1Gi"
    job.told(cause, seconds=SOON)
    summary = job.is_exact()
    (failure,) = summary["failures"]
    assert failure["worker"] == 1
    assert cause in failure["why"], "it is charged: the job's own doing"


def test_a_quota_that_admits_one_of_three(release: Callable[..., Release]) -> None:
    job = release(**idling(workers="3"))
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    job.namespace.apply({**quota, "spec": {"hard": {"pods": "2"}}})  # the master, and one worker
    job.namespace.wait("resourcequota/small", "jsonpath={.status.hard.pods}=2")  # before that it holds nobody
    job.install()
    waits_for(job, "exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2")
    job.ring_of(1)
    job.until(lambda data: int(data["progress"].strip("%")) >= 5)
    assert creates(job) <= 12, "it asks again for one of them, less and less often"
    job.namespace.apply({**quota, "spec": {"hard": {"pods": "9"}}})
    job.ring_of(3)
    assert "waiting" not in job.status
    assert job.is_exact()["failures"] == []


def test_an_image_that_cannot_be_pulled(release: Callable[..., Release]) -> None:
    job = release(**idling(workers="2"), **{"worker.image.tag": "none"})
    job.install()
    job.until(lambda data: "ErrImagePull" in data.get("waiting", ""), seconds=SOON)
    waits_for(job, "ImagePullBackOff")
    assert job.status["phase"] == "Starting"
    assert creates(job) == 2, "another pod would wait for the same image"
    job.upgrade(worker__image__tag=job.values["image.tag"])
    job.is_exact()


def test_a_role_without_the_right_to_create(release: Callable[..., Release]) -> None:
    job = release(**idling(workers="3"))
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "ours"}}
    pods, *others = yaml.safe_load((ROOT / "tests" / "chart" / "role.yaml").read_text())
    less = {**pods, "verbs": [verb for verb in pods["verbs"] if verb != "create"]}
    job.namespace.apply({**role, "rules": [less, *others]})
    account = f"{job.namespace.name}:edl-master"
    job.namespace.kubectl("create", "rolebinding", "ours", "--role=ours", f"--serviceaccount={account}")
    job.install(rbac__create="false")
    waits_for(job, f'Kubernetes does not allow it: pods is forbidden: User "system:serviceaccount:{account}"')
    assert creates(job) <= 10, "one asks for all, ever less often"
    job.namespace.apply({**role, "rules": [pods, *others]})
    job.upgrade(rbac__create="false", maxWorkers=8)  # it is tried again at once when anything has changed
    job.ring_of(3)
    assert job.is_exact()["failures"] == []
