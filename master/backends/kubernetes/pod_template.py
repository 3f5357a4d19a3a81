"""A worker's pod as the chart wrote it, with what the master stamps onto it: which worker it is.

The shape of the pod is the chart's. Nothing here talks to anybody.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping

from edl.contract.ids import RunId, WorkerId
from edl.errors import ConfigError
from edl.kubernetes import pods


def stamp(
    template: pods.Pod, fullname: str, release: str, worker: WorkerId, run_id: RunId,
    owner: Mapping[str, str], env: Mapping[str, str], high: bool,
) -> pods.Pod:  # fmt: skip
    """The chart wrote this pod; we only say which worker it is.

    Raises:
        ConfigError: the template has no container named worker.
    """
    pod = copy.deepcopy(template)
    meta = pod.setdefault("metadata", {})
    meta["name"] = pods.name(fullname, worker)
    meta["labels"] = {
        pods.NAME: "edl", **(meta.get("labels") or {}),
        pods.INSTANCE: release, pods.COMPONENT: "worker", pods.MANAGER: pods.OURS,
        pods.WORKER_ID: str(worker), pods.RUN_ID: run_id, pods.STATE: "starting",
        pods.PRIORITY: "high" if high else "low",
    }  # fmt: skip
    meta["annotations"] = {**(meta.get("annotations") or {}), pods.TEMPLATE: digest(template)}
    meta["ownerReferences"] = [{**owner, "controller": False, "blockOwnerDeletion": False}]
    own = [c for c in pod.get("spec", {}).get("containers", []) if c.get("name") == pods.CONTAINER]
    if not own:
        raise ConfigError("worker.yaml: the pod has no container named worker")
    kept = [e for e in own[0].get("env") or [] if e.get("name") not in env]
    own[0]["env"] = [*kept, *({"name": key, "value": value} for key, value in env.items())]
    return pod


def digest(template: pods.Pod) -> str:
    """Which template a pod was made from, for whoever has another one later."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
