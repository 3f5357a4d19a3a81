"""A worker's pod: what the master stamps onto the chart's template, and what it reads from a pod.

Nothing here talks to anybody: dictionaries in, values out. The shape of the pod is the chart's;
we say only which worker it is.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypeAlias

from edl.errors import ConfigError
from edl.ids import RunId, WorkerId
from master.core import events as ev

Pod: TypeAlias = dict[str, Any]

CONTAINER: Final = "worker"
NAME, INSTANCE, COMPONENT, MANAGER = (
    f"app.kubernetes.io/{key}" for key in ("name", "instance", "component", "managed-by")
)
WORKER_ID, RUN_ID, RANK, STATE, PRIORITY = (
    f"edl.dev/{key}" for key in ("worker-id", "run-id", "rank", "state", "priority")
)
OURS: Final = "edl-master"

PEERS_BROKE = 75  # the exit code of a worker that could not get out of a ring that its peers broke
SHOWN = 300  # characters of Kubernetes' messages that we pass on

# Why a container waits although nothing is being done about it (ContainerCreating is work).
STUCK = frozenset({
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError", "CrashLoopBackOff",
})  # fmt: skip

# The node's own doing, as container or pod reasons: nobody's program is to blame.
LOST_NODE = frozenset({"ContainerStatusUnknown", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"})


def name(fullname: str, worker: WorkerId) -> str:
    return f"{fullname}-worker-{worker}"


def selector(release: str) -> str:
    """Of all workers of a release, whichever run they belong to."""
    return f"{INSTANCE}={release},{COMPONENT}=worker,{MANAGER}={OURS}"


def stamp(
    template: Pod, fullname: str, release: str, worker: WorkerId, run_id: RunId,
    owner: Mapping[str, str], env: Mapping[str, str], high: bool,
) -> Pod:  # fmt: skip
    """The chart wrote this pod; we only say which worker it is.

    Raises:
        ConfigError: the template has no container named worker.
    """
    pod = copy.deepcopy(template)
    meta = pod.setdefault("metadata", {})
    meta["name"] = name(fullname, worker)
    meta["labels"] = {
        NAME: "edl", **(meta.get("labels") or {}),
        INSTANCE: release, COMPONENT: "worker", MANAGER: OURS,
        WORKER_ID: str(worker), RUN_ID: run_id, STATE: "starting", PRIORITY: "high" if high else "low",
    }  # fmt: skip
    meta["ownerReferences"] = [{**owner, "controller": False, "blockOwnerDeletion": False}]
    containers = [c for c in pod.get("spec", {}).get("containers", []) if c.get("name") == CONTAINER]
    if not containers:
        raise ConfigError("worker.yaml: the pod has no container named worker")
    kept = [e for e in containers[0].get("env") or [] if e.get("name") not in env]
    containers[0]["env"] = [*kept, *({"name": key, "value": value} for key, value in env.items())]
    return pod


def of(pod: Pod) -> tuple[str, WorkerId | None]:
    """Whose pod it is: run id and worker id, as its labels say."""
    labels = pod["metadata"].get("labels") or {}
    number = str(labels.get(WORKER_ID, ""))
    return str(labels.get(RUN_ID, "")), WorkerId(int(number)) if number.isdecimal() else None


def uid(pod: Pod) -> str:
    return str(pod["metadata"]["uid"])


def running(pod: Pod) -> bool:
    """The worker's own container runs."""
    return "running" in _state(pod)


def ended(pod: Pod) -> bool:
    """The worker's own container has ended, or never will run; containers beside it may go on."""
    return _phase(pod) in ("Succeeded", "Failed") or "terminated" in _state(pod)


def goes_on(pod: Pod) -> bool:
    """Another container runs on beside a worker that has ended, and would for ever.

    The pod's phase does not tell: a kubelet first says that a container has ended, and a moment
    later that the pod has.
    """
    others = (c for c in _containers(pod, "containerStatuses") if c.get("name") != CONTAINER)
    return any("running" in (c.get("state") or {}) for c in others)


def deleting(pod: Pod) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def delay(pod: Pod) -> str:
    """Why the worker does not run yet; empty while that is only a matter of time."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return f"no node has room for it: {_short(condition)}"
    for container in _containers(pod, "initContainerStatuses", "containerStatuses"):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in STUCK:
            return f"{waiting['reason']}: {_short(waiting)}"
    return ""


def disruption(pod: Pod) -> str:
    """Why Kubernetes takes the pod away: the reason of its condition DisruptionTarget, and its message."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{condition.get('reason', 'disrupted')}: {_short(condition)}"
    return ""


def verdict(worker: WorkerId, pod: Pod, by_us: bool, disrupted: str = "", overdue: bool = False) -> ev.Gone:
    """How the worker ended, in the order in which evidence counts.

    Args:
        pod: as it was last seen.
        by_us: we have asked for its deletion.
        disrupted: what `disruption` has said of it earlier.
        overdue: it should have ended long ago, and nobody says that it has.
    """
    status = pod.get("status", {})
    terminated = _state(pod).get("terminated") or {}
    code, reason = terminated.get("exitCode"), terminated.get("reason", "")
    if disrupted := disruption(pod) or disrupted:
        return ev.Gone(worker, code=code, free=True, why=disrupted)
    if not by_us and deleting(pod) and not _ended_before_deletion(pod, terminated):
        if overdue:
            return ev.Gone(
                worker, free=True, why="its node does not answer, and it should have ended long ago"
            )
        return ev.Gone(worker, code=code, free=True, why="somebody deleted its pod")
    if reason in LOST_NODE or (not terminated and status.get("reason") in LOST_NODE):
        return ev.Gone(worker, free=True, why=f"its node was lost ({reason or status['reason']})")
    if reason == "OOMKilled":
        return ev.Gone(worker, code=code, why=f"OOMKilled: container memory limit {_memory_limit(pod)}")
    if code is not None:
        # Also of a pod that we have deleted: a worker's stream ends before its pod does, and
        # when the master answers with a deletion, the crash is still a crash.
        return _exit(worker, code, terminated.get("signal"), by_us)
    for container in _containers(pod, "initContainerStatuses"):
        ended_with = (container.get("state", {}).get("terminated") or {}).get("exitCode")
        if ended_with and _phase(pod) == "Failed":
            why = f"its init container {container.get('name')} ended with exit code {ended_with}"
            return ev.Gone(worker, code=ended_with, why=why)
    if _phase(pod) == "Failed" and status.get(
        "reason"
    ):  # a node that did not take it: OutOfcpu, Evicted, ...
        return ev.Gone(worker, free=True, why=f"{status['reason']}: {_short(status)}")
    if by_us:
        return ev.Gone(worker, free=True, why="the master deleted its pod")
    return ev.Gone(worker, free=True, why="its pod is gone")


def _exit(worker: WorkerId, code: int, number: int | None, by_us: bool) -> ev.Gone:
    number = number or (code - 128 if code > 128 else None)
    if number is None:
        why = "its peers broke the ring" if code == PEERS_BROKE else ""
        return ev.Gone(worker, code=code, free=code == PEERS_BROKE, why=why)
    try:
        told = signal.Signals(number).name
    except ValueError:  # 255 is an exit code, whatever the convention says
        return ev.Gone(worker, code=code)
    asked = by_us and told in ("SIGTERM", "SIGKILL")
    return ev.Gone(worker, signal=told, free=asked, why="the master deleted its pod" if asked else "")


def _ended_before_deletion(pod: Pod, terminated: Mapping[str, Any]) -> bool:
    """It had ended by itself when somebody deleted it, as far as whole seconds tell."""
    finished, deleted = terminated.get("finishedAt"), pod["metadata"].get("deletionTimestamp")
    if not finished or not deleted:
        return False
    grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
    return _time(finished) < _time(deleted) - grace


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _phase(pod: Pod) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _containers(pod: Pod, *kinds: str) -> list[dict[str, Any]]:
    status = pod.get("status", {})
    return [container for kind in kinds for container in status.get(kind) or []]


def _state(pod: Pod) -> dict[str, Any]:
    """Of the worker's own container."""
    own = (c for c in _containers(pod, "containerStatuses") if c.get("name") == CONTAINER)
    return dict(next(own, {}).get("state") or {})


def _memory_limit(pod: Pod) -> str:
    for container in pod.get("spec", {}).get("containers") or []:
        if container.get("name") == CONTAINER:
            return str((container.get("resources", {}).get("limits") or {}).get("memory", "not set"))
    return "not set"


def _short(said: Mapping[str, Any]) -> str:
    text = " ".join(str(said.get("message") or "no reason given").split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
