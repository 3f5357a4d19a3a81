# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes backend at the small API server.

A second is SECOND seconds here, for the backend and for the server alike, so that five minutes
without an API pass in a few seconds; requests and pauses keep their proportions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import yaml
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from edl.kubernetes.client import Api
from edl.kubernetes.timing import Timing
from edl.master.backends.kubernetes import Installed, Place
from tests.support.fakes.kubernetes_api import KubernetesApi
from tests.support.fakes.kubernetes_cluster import NAMESPACE
from tests.support.kubernetes import driver
from tests.support.kubernetes.driver import Driven, job_values

SECOND = 0.02
# Five writes a second after a burst of ten; and a busy machine may think for longer than 15 of its seconds.
PACE = replace(Timing(write=0.2, burst=10).times(SECOND), answer=1.0)
PLACE = Place(NAMESPACE, "edl", "edl", "edl-master:8500", "edl-master-abc", "uid-of-the-master")
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"labels": {"team": "ours"}},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "worker",
                "image": "edl-worker",
                "env": [{"name": "EDL_MASTER", "value": "old"}, {"name": "HOME", "value": "/tmp"}],
                "resources": {"limits": {"memory": "512Mi"}},
            }
        ],
    },
}


def install(server: KubernetesApi, *sets: str, **data: str) -> None:
    """What `helm install` leaves, as far as the master reads it."""
    rendered = {"values.json": json.dumps(job_values(*sets)), "worker.yaml": yaml.safe_dump(POD), **data}
    known = server.objects["configmaps"].get("edl-job")
    meta = {"name": "edl-job"} | ({"uid": known["metadata"]["uid"]} if known else {})
    server.put("configmaps", {"metadata": meta, "data": rendered})
    if "edl-status" not in server.objects["configmaps"]:
        server.put("configmaps", {"metadata": {"name": "edl-status"}})


def driving(
    server: KubernetesApi, run: str = "run-1", pace: Timing = PACE
) -> contextlib.AbstractAsyncContextManager[Driven]:
    """A backend that has started, as the master starts it."""
    config = KubeConfig.from_one(cluster=Cluster(server=server.url), user=User())
    return driver.driving(PLACE, Api(pace, config), run)


@contextlib.asynccontextmanager
async def opened(server: KubernetesApi) -> AsyncIterator[Installed]:
    """The release as a new master reads it."""
    api = Api(PACE, KubeConfig.from_one(cluster=Cluster(server=server.url), user=User()))
    try:
        yield await Installed.open(PLACE, api)
    finally:
        await api.close()


def a_status(**changes: Any) -> dict[str, Any]:
    """A job as `view.status` tells it."""
    return {
        "phase": "Training",
        "reason": "2 workers (generation 1)",
        "target": 2,
        "loss": 0.12345,
        "eta_seconds": 1234.0,
        "records": {"size": 100, "total": 400, "applied": 130},
        "task": {"kind": "train", "epoch": 2, "epochs": 4, "step": 5, "steps": 16},
        "goodput": {"useful": 9.0, "starting": 1.0},
        "workers": [
            {"id": 0, "rank": 0, "state": "member"},
            {"id": 1, "rank": 1, "state": "member"},
            {"id": 2, "rank": None, "state": "initializing"},
        ],
        **changes,
    }
