# SPDX-License-Identifier: Apache-2.0
"""A worker's pod: the chart's template, completed with the worker's identity and the nodes to avoid.

The chart's `podTemplate` values may override any part of the template. A template of a wrong shape is refused
here, by a ConfigError that names the place. All functions are pure and send no requests.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edl.contract.ids import RunId, WorkerId
from edl.contract.phases import WorkerState
from edl.contract.workers import script_environment, worker_environment
from edl.errors import ConfigError
from edl.kubernetes import pods
from edl.kubernetes.names import Names

NODE_AFFINITY = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")


@dataclass(frozen=True)
class Identity:
    """The common properties of all worker pods of a run.

    Args:
        address: host:port of the master, as workers reach it.
        owner: reference to the release's object: with it, Kubernetes deletes the pods.
        script: the path or the text of the job's script with its own training loop, if it has one.
        threads: of each library in such a script; 0 leaves the number to the libraries.
    """

    names: Names
    release: str
    run_id: RunId
    address: str
    owner: Mapping[str, str]
    script: str = ""
    threads: int = 0


def render(template: pods.Pod, identity: Identity, worker: WorkerId, high: bool) -> pods.Pod:
    """Render the pod of a worker.

    Args:
        high: the pod has the higher priority.

    Raises:
        ConfigError: the template has a wrong shape, or no container named worker.
    """
    pod = copy.deepcopy(template)
    meta = _map(pod, "metadata")
    meta["name"] = identity.names.worker(worker)
    meta["labels"] = {
        pods.NAME: "edl",
        **_map(meta, "labels", "metadata."),
        pods.INSTANCE: identity.release,
        pods.COMPONENT: "worker",
        pods.MANAGER: pods.OURS,
        pods.WORKER_ID: str(worker),
        pods.RUN_ID: identity.run_id,
        pods.STATE: WorkerState.STARTING.value,
        pods.PRIORITY: "high" if high else "low",
    }
    annotations = _map(meta, "annotations", "metadata.")
    meta["annotations"] = {**annotations, pods.TEMPLATE: digest(template)}
    meta["ownerReferences"] = [{**identity.owner, "controller": False, "blockOwnerDeletion": False}]
    containers = _maps(_map(pod, "spec"), "containers", "spec.")
    own = next((c for c in containers if c.get("name") == pods.CONTAINER), None)
    if own is None:
        raise ConfigError(f"worker.yaml: the pod has no container named {pods.CONTAINER}")
    given = _maps(own, "env", "spec.containers[].")
    before = {str(e.get("name")): str(e.get("value", "")) for e in given}
    env = {
        "EDL_WORKER_ID": str(worker),
        "EDL_RUN_ID": identity.run_id,
        "EDL_MASTER": identity.address,
        "EDL_RESULTS_PER_RUN": "true",  # other runs may use the output volume, before or after this run
        **worker_environment(before),
        **(script_environment(before, identity.script, identity.threads) if identity.script else {}),
    }
    kept = [e for e in given if e.get("name") not in env]
    own["env"] = [*kept, *({"name": key, "value": value} for key, value in env.items())]
    return pod


def excluding(template: pods.Pod, nodes: Iterable[str]) -> pods.Pod:
    """Return the same pod, excluded from these nodes. The template's own node affinity still holds.

    Raises:
        ConfigError: the template has a wrong shape.
    """
    not_there = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    if not not_there:
        return template
    pod = copy.deepcopy(template)
    within, where = _map(pod, "spec"), "spec."
    for key in NODE_AFFINITY:
        within, where = _map(within, key, where), f"{where}{key}."
    terms = _maps(within, "nodeSelectorTerms", where) or [{}]  # a node must match any one of them
    within["nodeSelectorTerms"] = [
        {**term, "matchFields": [*_maps(term, "matchFields", f"{where}nodeSelectorTerms[]."), *not_there]}
        for term in terms
    ]
    return pod


def digest(template: pods.Pod) -> str:
    """Return a digest of the template that a pod was made from, to compare it with later templates."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]


def _map(parent: dict[str, Any], key: str, where: str = "") -> dict[str, Any]:
    """Return the map under that key; create it if it is absent or null.

    Raises:
        ConfigError: the value is of a different type.
    """
    value = parent.get(key)
    if value is None:
        value = parent[key] = {}
    if not isinstance(value, dict):
        raise ConfigError(f"worker.yaml: {where}{key}: {_shown(value)} is not a map")
    return value


def _maps(parent: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """Return the list of maps under that key; empty if it is absent or null.

    Raises:
        ConfigError: the value is of a different type.
    """
    value = parent.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"worker.yaml: {where}{key}: {_shown(value)} is not a list of maps")
    return value


def _shown(value: object) -> str:
    return json.dumps(value)[:80]
