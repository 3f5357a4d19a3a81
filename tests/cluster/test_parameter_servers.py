# SPDX-License-Identifier: Apache-2.0
"""Rows on parameter servers in a cluster: what docs/parameter-servers.md says of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edl.contract import artifacts
from edl.contract.reasons import Reason
from tests.cluster.cluster import ROOT, Images, Namespace, Object
from tests.cluster.release import WORKERS, Release, in_ring
from tests.cluster.test_job import SECRET, process
from tests.support.kubernetes.certificates import Authority
from tests.support.ps.rows import saved_rows

pytestmark = pytest.mark.timeout(600)
RECORDS, EPOCHS = 6000, 2
SERVERS = "app.kubernetes.io/component=ps"


def server(job: Release, index: int) -> Object:
    """The pod of a server that is ready."""

    def ready(pods: list[Object]) -> list[Object]:
        return [
            pod
            for pod in pods
            if pod["metadata"]["name"] == f"{job.full}-ps-{index}"
            and "deletionTimestamp" not in pod["metadata"]
            and all(c["ready"] for c in pod["status"].get("containerStatuses", [{"ready": False}]))
        ]

    return ready(job.namespace.until("pods", ready, SERVERS))[0]


def step_after(job: Release, step: int) -> int:
    """A step later than that one, as soon as the status tells of it."""

    def at(data: dict[str, str]) -> int:
        return int(json.loads(data.get("status.json", "{}")).get("step") or 0)

    return at(job.until(lambda data: at(data) > step))


def test_workers_and_servers_are_killed_and_every_row_counts_its_record(
    namespace: Namespace, images: Images, claim: Callable[..., None], tmp_path: Path
) -> None:
    namespace.restrict()
    output = tmp_path / "output"
    output.mkdir()
    output.chmod(0o777)
    claim("output", output, "ReadWriteMany")
    job = Release(
        namespace,
        {
            **images.values,
            "ps.servers": "2",
            "ps.resources.requests.cpu": "100m",
            "workers": "3",  # mode=auto, the default
            "model.source": str(ROOT / "tests" / "models" / "obedient_rows.py"),
            "worker.env[0].name": "EDL_COUNTING_RECORDS",
            "worker.env[0].value": str(RECORDS),
            "training.epochs": str(EPOCHS),
            "output.existingClaim": "output",
            "storage.keep": "false",  # checkpoints of workers and servers are on the master's volume
            "checkpoint.seconds": "2",
            "evaluation.steps": "200",
            "tls.existingSecret": secret(namespace, tmp_path),  # also of the traffic with servers
        },
    )
    job.install()
    job.told("the model has 1 edl.layers.Embedding", reason=Reason.ModeDecided, seconds=120)
    job.ring_of(3)

    # A process that crashes: its log is in the pod, and nothing is lost.
    at = step_after(job, 0)
    before = server(job, 0)
    os.kill(process(before, "edl.ps"), signal.SIGKILL)
    at = step_after(job, at)
    again = server(job, 0)
    assert again["metadata"]["uid"] == before["metadata"]["uid"]
    assert again["status"]["containerStatuses"][0]["restartCount"] == 1
    killed = job.workers()[0]
    job.namespace.kubectl("delete", "pod", killed, "--grace-period=0", "--force")
    job.namespace.until("pods", lambda pods: len(ranked(pods) - {killed}) == 3, WORKERS, seconds=120)
    job.ring_of(3)
    assert not any(event.startswith((Reason.RolledBack, Reason.StateLost)) for event in job.events())

    # A pod that is deleted: its log is gone, and ring and servers go on from a checkpoint.
    job.told("master://checkpoints", reason=Reason.Checkpointed)
    job.namespace.kubectl("delete", "pod", f"{job.full}-ps-1", "--grace-period=0", "--force")
    job.told(reason=Reason.RolledBack, seconds=120)
    assert server(job, 1)["metadata"]["uid"]
    job.ring_of(3)

    has_other_numbers_of_servers(job)
    job.ring_of(3)

    (output / "go").touch()
    data = job.phase("Succeeded", "Failed", "Stopped", seconds=300)
    assert data["phase"] == "Succeeded", data
    summary = job.summary()
    assert summary["records"]["applied"] == RECORDS * EPOCHS
    assert summary["failures"] == [], "what Kubernetes does is not charged"
    job.told("Evaluation at step 200", reason=Reason.Evaluated)
    ids, rows = saved_rows(output / artifacts.MODEL)
    assert np.sort(ids).tolist() == list(range(RECORDS))
    assert (rows == EPOCHS).all(), f"rows count {rows.min():g} to {rows.max():g}"
    job.until(lambda data: data.get("servers") == "the rows of 2 parameter servers are freed")

    job.namespace.helm("uninstall", "edl", "--wait")
    job.namespace.until("pods", lambda pods: not pods, seconds=60)
    for kind in ("statefulsets", "services", "poddisruptionbudgets", "persistentvolumeclaims"):
        assert job.namespace.get(kind, "-l", "app.kubernetes.io/instance=edl") == [], f"{kind} are left"


def ranked(pods: list[Object]) -> set[str]:
    """The names of the pods whose workers are in the ring."""
    return {pod["metadata"]["name"] for pod in in_ring(pods)}


def has_other_numbers_of_servers(job: Release) -> None:
    """Three and two again, while the job trains: rows move, and pods go when theirs have moved."""
    job.upgrade(ps__servers="3")
    job.told("the rows are on 3 parameter servers", reason=Reason.Resharded, seconds=120)
    job.upgrade(ps__servers="2")
    job.told("the rows are on 2 parameter servers", reason=Reason.Resharded, seconds=120)
    job.namespace.until("pods", lambda pods: not has_server(pods, 2), seconds=90)


def secret(namespace: Namespace, folder: Path) -> str:
    """A Secret with a certificate of the master and of its servers; its name."""
    names = f"edl-master.{namespace.name}.svc", f"*.edl-ps.{namespace.name}.svc"
    made = Authority.new(folder / "authority").issue(folder / "certificate", *names)
    files = [f"--from-file={file}" for file in sorted(made.iterdir())]
    namespace.kubectl("create", "secret", "generic", SECRET, *files)
    return SECRET


def takes_the_place_of_one_worker(namespace: Namespace, cpu_of_worker: float) -> Object:
    """A pod of the cluster's ordinary priority that fits on a node if one of the workers there goes."""
    pods = [p for p in namespace.cluster.get("pods", "-A") if p["status"]["phase"] in ("Pending", "Running")]
    node = next(p["spec"]["nodeName"] for p in namespace.get("pods", "-l", WORKERS))
    there = [p for p in pods if p["spec"].get("nodeName") == node]
    requests = (c["resources"].get("requests", {}) for p in there for c in p["spec"]["containers"])
    used = sum(cpu(each.get("cpu", "0")) for each in requests)
    free = cpu(namespace.cluster.get("node", node)["status"]["allocatable"]["cpu"]) - used
    request = free + cpu_of_worker / 2
    container = {
        "name": "main",
        "image": namespace.cluster.busybox,
        "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": f"{1000 * request:.0f}m"}},
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": spec}


def cpu(amount: str) -> float:
    """Of Kubernetes: `2`, `400m`."""
    return float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)


def has_server(pods: list[Object], index: int) -> bool:
    return any(pod["metadata"]["name"].endswith(f"-ps-{index}") for pod in pods)


def test_two_servers_and_four_workers_of_which_one_is_deleted(
    namespace: Namespace, images: Images, claim: Callable[..., None], tmp_path: Path
) -> None:
    """With mode=ps, and a second copy of each row."""
    epochs = EPOCHS * 4  # each worker idles in steps of its own, not all in one
    output = tmp_path / "output"
    output.mkdir()
    output.chmod(0o777)
    claim("output", output, "ReadWriteMany")
    job = Release(
        namespace,
        {
            **images.values,
            "mode": "ps",
            "ps.servers": "2",
            "ps.resources.requests.cpu": "100m",
            "workers": "4",
            "model.source": str(ROOT / "tests" / "models" / "obedient_rows.py"),
            "worker.env[0].name": "EDL_COUNTING_RECORDS",
            "worker.env[0].value": str(RECORDS),
            "training.epochs": str(epochs),
            "evaluation.steps": "200",
            "output.existingClaim": "output",
            "tls.existingSecret": secret(namespace, tmp_path),
            "ps.replicas": "2",
        },
    )
    job.install()
    job.ring_of(4)
    first = set(job.workers())
    namespace.kubectl("delete", "pod", sorted(first)[0])
    job.until(lambda _: sorted(first)[0] not in job.workers())
    job.ring_of(4)

    has_other_numbers_of_servers(job)
    server(job, 0)
    # Its log is gone with it.
    namespace.kubectl("delete", "pod", f"{job.full}-ps-0", "--grace-period=0", "--force")
    job.told("the ring goes on without parameter server 0", reason=Reason.ServerRemoved)
    job.told("all parameter servers have their rows again", reason=Reason.Resharded, seconds=120)
    assert not any(event.startswith(Reason.RolledBack) for event in job.events())
    (output / "go").touch()
    data = job.phase("Succeeded", "Failed", "Stopped", seconds=300)
    assert data["phase"] == "Succeeded", data
    summary = job.summary()
    assert summary["records"]["applied"] == RECORDS * epochs and summary["state_losses"] == 0
    assert summary["failures"] == [], "what Kubernetes does is not charged"
    job.told("Evaluation at step 200", reason=Reason.Evaluated)
    ids, rows = saved_rows(output / artifacts.MODEL)
    assert np.sort(ids).tolist() == list(range(RECORDS))
    assert (rows == epochs).all(), f"rows count {rows.min():g} to {rows.max():g}"
    job.until(lambda data: data.get("servers") == "the rows of 2 parameter servers are freed")
    job.namespace.helm("uninstall", "edl", "--wait")
