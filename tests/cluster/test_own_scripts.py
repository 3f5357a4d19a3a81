# SPDX-License-Identifier: Apache-2.0
"""Scripts with a training loop of their own, as one file of the chart: faults of their pods cost no step."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import ROOT
from tests.cluster.release import Release
from tests.cluster.test_job import process
from tests.cluster.test_parameter_servers import takes_the_place_of_one_worker

pytestmark = pytest.mark.timeout(420)
HOROVOD = ROOT / "tests" / "models" / "horovod_idle.py"
# tests/models/counting_loop.py with NumPy in one file: it idles until the test says go.
LOOP = """
import time, zipfile
from pathlib import Path
import h5py, numpy as np
import edl

RECORDS = 40_000
count = np.zeros(RECORDS, np.float32)
job = edl.join(data=edl.arrays(np.arange(RECORDS, dtype=np.int32)), state=[count])

for step in job.steps():
    if not Path("/var/lib/edl/go").exists():
        time.sleep(0.2)
    (mine,) = step.records
    gradient = np.zeros(RECORDS, np.float32)
    gradient[mine] = 1.0 / len(mine)
    if (mean := step.mean([gradient], loss=1.0)) is not None:
        count += mean[0] > 0

def save(directory):
    with h5py.File("/tmp/weights.h5", "w") as weights:
        weights["layers/count/vars/0"] = count
    with zipfile.ZipFile(directory / "model.keras", "w") as model:
        model.write("/tmp/weights.h5", "model.weights.h5")

job.save(save)
"""


def outlives_its_pods(job: Release, script: Path) -> None:
    """A worker is preempted, the master is killed, and the number of workers changes; the job trains on."""
    job.install("--set-file", f"model.script={script}", workers=3)
    job.ring_of(3)
    job.namespace.apply(takes_the_place_of_one_worker(job.namespace, cpu_of_worker=0.4))
    job.told("PreemptionByScheduler")
    job.told("ring 3 -> 2")
    before = job.status
    os.kill(process(job.master(), "edl.master"), signal.SIGKILL)
    job.namespace.kubectl("delete", "pod", "urgent", "--grace-period=0", "--force")
    job.told("a new master took over, and the ring of", "trains on", reason=Reason.FailedOver)
    job.told("ring 2 -> 3")
    job.upgrade("--set-file", f"model.script={script}", workers=2)
    after = job.ring_of(2)
    assert json.loads(after["state"])["runId"] == json.loads(before["state"])["runId"]
    assert json.loads(after["status.json"])["failures"] == 0, "what Kubernetes does is not charged"


def test_a_loop_counts_each_record_once(release: Callable[..., Release], tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(LOOP)
    job = release(**{"training.epochs": "1"})
    outlives_its_pods(job, script)
    job.is_exact()


def test_an_elastic_horovod_script_counts_each_step_once(release: Callable[..., Release]) -> None:
    orders = {"worker.env[0].name": "EDL_FAULTS", "worker.env[0].value": "/var/lib/edl"}
    job = release(**{"mode": "horovod", "horovod.elastic": "true"}, **orders)
    (idle := Path(job.values["output.hostPath"]) / "idle").touch()
    outlives_its_pods(job, HOROVOD)
    idle.unlink()
    # The script compares its counts with its steps at the end, and would end with an exception.
    data = job.phase("Succeeded", "Failed", "Stopped")
    assert data["phase"] == "Succeeded", data
