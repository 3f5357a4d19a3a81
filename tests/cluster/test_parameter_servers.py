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
from tests.cluster.release import Release
from tests.cluster.test_job import process
from tests.rows import saved_rows

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
    folders = {name: tmp_path / name for name in ("output", "checkpoints")}
    for name, folder in folders.items():
        folder.mkdir()
        folder.chmod(0o777)
        claim(name, folder, "ReadWriteMany")
    job = Release(namespace, {
        **images.values,
        "mode": "hybrid", "ps.servers": "2", "ps.resources.requests.cpu": "100m", "workers": "3",
        "model.source": str(ROOT / "tests" / "models" / "obedient_rows.py"),
        "worker.env[0].name": "EDL_COUNTING_RECORDS", "worker.env[0].value": str(RECORDS),
        "training.epochs": str(EPOCHS), "output.existingClaim": "output",
        "checkpoint.existingClaim": "checkpoints", "checkpoint.dir": "/checkpoints",
        "checkpoint.seconds": "2",
    })  # fmt: skip
    job.install()
    job.ring_of(3)

    # A process that crashes: its log is in the pod, and nothing is lost.
    at = step_after(job, 0)
    before = server(job, 0)
    os.kill(process(before, "ps"), signal.SIGKILL)
    at = step_after(job, at)
    again = server(job, 0)
    assert again["metadata"]["uid"] == before["metadata"]["uid"]
    assert again["status"]["containerStatuses"][0]["restartCount"] == 1
    assert not any(event.startswith(Reason.WentBack) for event in job.events())

    # A pod that is deleted: its log is gone, and ring and servers go on from a checkpoint.
    job.told(reason=Reason.Checkpointed)
    job.namespace.kubectl("delete", "pod", f"{job.full}-ps-1", "--grace-period=0", "--force")
    job.told("checkpoint", reason=Reason.WentBack, seconds=120)
    assert server(job, 1)["metadata"]["uid"]
    job.namespace.kubectl("delete", "pod", job.workers()[0], "--grace-period=0", "--force")
    job.ring_of(3)

    (folders["output"] / "go").touch()
    data = job.phase("Succeeded", "Failed", "Stopped", seconds=300)
    assert data["phase"] == "Succeeded", data
    assert job.summary()["records"]["applied"] == RECORDS * EPOCHS
    ids, rows = saved_rows(folders["output"] / artifacts.MODEL)
    assert np.sort(ids).tolist() == list(range(RECORDS))
    assert (rows == EPOCHS).all(), f"rows count {rows.min():g} to {rows.max():g}"

    job.namespace.helm("uninstall", "edl", "--wait")
    job.namespace.until("pods", lambda pods: not pods, seconds=60)
    for kind in ("statefulsets", "services", "poddisruptionbudgets", "persistentvolumeclaims"):
        assert job.namespace.get(kind, "-l", "app.kubernetes.io/instance=edl") == [], f"{kind} are left"
