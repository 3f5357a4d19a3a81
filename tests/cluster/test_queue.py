# SPDX-License-Identifier: Apache-2.0
"""Workers under the scheduling gates of a queue, as Kueue's."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.cluster.release import Release, talking


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
