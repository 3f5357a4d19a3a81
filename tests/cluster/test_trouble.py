# SPDX-License-Identifier: Apache-2.0
"""What keeps workers from running, or ends them, is reported with its cause, and retries are not hurried.

What docs/trouble.md shows, with the same commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime

import pytest
import yaml

from tests.cluster.cluster import ROOT
from tests.cluster.release import Release, idling, talking

pytestmark = pytest.mark.timeout(600)
SOON = 30  # seconds in which a cause is to be seen


def creates(job: Release, known: int = 0) -> int:
    """How often the master has asked for a pod in half a minute, from its request number `known` on."""
    times = asked(job)[known:]
    return sum(at - times[0] <= 30 for at in times)


def asked(job: Release) -> list[float]:
    """The times, in seconds, at which the master has asked for a pod."""
    return [
        datetime.fromisoformat(r["requestReceivedTimestamp"]).timestamp()
        for r in job.namespace.requests(f"{job.full}-master")
        if r["verb"] == "create" and r["objectRef"]["resource"] == "pods"
    ]


def waits_for(job: Release, cause: str) -> None:
    """The cause is in the status, and among the Events, soon."""
    job.until(lambda data: cause in data.get("waiting", ""), seconds=SOON)
    job.told(cause, seconds=SOON)
    assert cause in job.namespace.kubectl("describe", "configmap", f"{job.full}-job")


def test_a_worker_that_is_killed_for_its_memory(release: Callable[..., Release]) -> None:
    # A worker that swallows memory has no time for heartbeats, and must not be lost for that.
    long_silence = {"elastic.heartbeatTimeoutSeconds": "60"}
    job = release(**idling(workers="2"), **{"worker.resources.limits.memory": "1Gi"}, **long_silence)
    job.install()
    job.ring_of(2)
    job.namespace.kubectl("exec", "edl-worker-1", "--", "touch", "/tmp/eat")
    cause = "OOMKilled: container memory limit 1Gi"
    job.told(cause, seconds=SOON)
    summary = job.is_exact()
    (failure,) = summary["failures"]
    assert failure["worker"] == 1
    assert cause in failure["why"], "it is charged: the job's own doing"


def test_an_image_that_cannot_be_pulled_a_role_without_the_right_to_create_and_a_quota(
    release: Callable[..., Release],
) -> None:
    """One release, three causes, one after the other: each is reported, and mended while the job runs."""
    job = release(**talking(workers="2"))
    job.install(worker__image__tag="none")
    job.until(lambda data: "ErrImagePull" in data.get("waiting", ""), seconds=SOON)
    waits_for(job, "ImagePullBackOff")
    assert job.status["phase"] == "Starting"
    assert creates(job) == 2, "another pod would wait for the same image"
    job.upgrade()
    job.ring_of(2)

    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "ours"}}
    pods, *others = yaml.safe_load((ROOT / "tests" / "chart" / "role.yaml").read_text())
    less = {**pods, "verbs": [verb for verb in pods["verbs"] if verb != "create"]}
    job.namespace.apply({**role, "rules": [less, *others]})
    account = f"{job.namespace.name}:edl-master"
    job.namespace.kubectl("create", "rolebinding", "ours", "--role=ours", f"--serviceaccount={account}")
    known = len(asked(job))
    job.upgrade(rbac__create="false")
    job.upgrade(rbac__create="false", workers=4)
    waits_for(job, f'Kubernetes does not allow it: pods is forbidden: User "system:serviceaccount:{account}"')
    assert creates(job, known) <= 10, "one asks for all, ever less often"
    job.namespace.apply({**role, "rules": [pods, *others]})
    # It is tried again at once when anything has changed.
    job.upgrade(rbac__create="false", workers=4, maxWorkers=8)
    job.ring_of(4)
    assert "waiting" not in job.status

    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    job.namespace.apply({**quota, "spec": {"hard": {"pods": "6"}}})  # the master, and five workers
    # The quota has no effect before.
    job.namespace.wait("resourcequota/small", "jsonpath={.status.hard.pods}=6")
    known = len(asked(job))
    job.upgrade(rbac__create="false", workers=7)
    waits_for(job, "exceeded quota: small, requested: pods=1, used: pods=6, limited: pods=6")
    job.ring_of(5)
    reached = json.loads(job.status["status.json"])["step"]
    job.until(lambda data: json.loads(data["status.json"])["step"] > reached + 20)
    assert creates(job, known) <= 12, "it asks again for one of them, less and less often"
    job.namespace.apply({**quota, "spec": {"hard": {"pods": "9"}}})
    job.ring_of(7)
    assert "waiting" not in job.status
    assert job.stop()["failures"] == []
