# SPDX-License-Identifier: Apache-2.0
"""Workers in a queue of Kueue, whose quota teams lend each other.

Kueue takes seven minutes of CPU to build. The test with it runs where scripts/dev/kueue has built it, and
builds it with EDL_STORMS=all; the other one does by itself what Kueue does to a pod.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edl.contract.reasons import Reason
from tests.cluster.cluster import Cluster, Lacking
from tests.cluster.conftest import lacking
from tests.cluster.kueue import built, hold, kueue, queues
from tests.cluster.release import WORKERS, Release, talking
from tests.cluster.test_own_scripts import LOOP


@pytest.fixture(scope="module")
def admission(cluster: Cluster) -> Iterator[None]:
    if not (home := built()):
        pytest.skip("Kueue is not built: scripts/dev/kueue builds it (7 minutes of CPU), EDL_STORMS=all, too")
    try:
        with kueue(cluster, home):
            yield
    except Lacking as reason:
        lacking(str(reason))


def loses_one(job: Release, size: int) -> float:
    """Wait until one worker has left a ring of this size; return for how long the others stopped."""
    message = job.told(f"ring {size} -> {size - 1} in ", reason=Reason.RingReshaped)["message"]
    assert "0 records redone" in message
    return float(re.findall(r"in ([\d.]+) s", message)[0])


@pytest.mark.timeout(900)
def test_borrowed_workers_are_reclaimed_one_by_one_while_the_ring_goes_on(
    admission: None, release: Callable[..., Release], tmp_path: Path
) -> None:
    (script := tmp_path / "train.py").write_text(LOOP)
    job = release(**{"training.epochs": "1"}, queueName="team-a", workers="4")
    with queues(job.namespace, **{"team-a": "800m", "team-b": "800m"}):  # two workers each
        hold(job.namespace, "team-a", held=True)
        job.install("--set-file", f"model.script={script}")
        everyone = "0, 1, 2 and 3: it waits for quota of Kueue's queue team-a"
        job.until(lambda data: everyone in data.get("waiting", ""))
        hold(job.namespace, "team-a", held=False)
        job.ring_of(4)
        other = release("other", **talking(), queueName="team-b")
        other.install(workers=1)
        gaps = [loses_one(job, 4)]
        job.until(lambda data: "4: it waits for quota of Kueue's queue team-a" in data.get("waiting", ""))
        other.upgrade(workers=2)
        gaps.append(loses_one(job, 3))
        other.ring_of(2)
        other.stop()
        its = f"{WORKERS},app.kubernetes.io/instance=other"
        job.namespace.until("pods", lambda pods: all(p["status"]["phase"] == "Succeeded" for p in pods), its)
        began = time.monotonic()
        job.ring_of(4)
        print(f"\ngaps of {gaps} s; a full ring {time.monotonic() - began:.1f} s after quota was free")
        assert job.is_exact()["failures"] == []


def test_workers_that_a_queue_holds_back_join_the_ring_as_it_admits_them(
    release: Callable[..., Release],
) -> None:
    """The gate and its removal are all that Kueue does to a worker; the API server holds the pods back."""
    gate = {"worker.podTemplate.spec.schedulingGates[0].name": "kueue.x-k8s.io/admission"}
    job = release(**talking(), **gate, queueName="team-a", workers="2")

    def admit(worker: int) -> None:
        patch = json.dumps([{"op": "remove", "path": "/spec/schedulingGates"}])
        job.namespace.kubectl("patch", "pod", f"edl-worker-{worker}", "--type=json", "-p", patch)

    job.install()
    job.until(lambda data: "0 and 1: it waits for quota of Kueue's queue team-a" in data.get("waiting", ""))
    admit(1)
    job.ring_of(1)
    assert "0: it waits for quota of Kueue's queue team-a" in job.status["waiting"]
    admit(0)
    job.ring_of(2)
    job.namespace.kubectl("delete", "pod", "edl-worker-1")  # its quota is reclaimed
    job.until(lambda data: "2: it waits for quota of Kueue's queue team-a" in data.get("waiting", ""))
    job.ring_of(1)
    assert job.stop()["failures"] == []
