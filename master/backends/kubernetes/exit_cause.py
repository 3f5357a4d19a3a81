# SPDX-License-Identifier: Apache-2.0
"""Why a worker ended, judged by its pod."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.exit_announcements import announced_in
from edl.kubernetes import pods
from edl.master.core import events as ev

NOT_ITS_FAULT: Mapping[int, str] = {
    WorkerExit.PEER_BROKEN: "its peers broke the ring",
    WorkerExit.UNAUTHENTICATED: "the master does not know its token: the Secret has changed",
}
# Container or pod reasons that are caused by the node, not by the job.
LOST_NODE = frozenset({"ContainerStatusUnknown", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"})

# A node's kubelet ends a pod for one of these, and for what it writes in the pod's status, not for the
# container's exit code: that is always the one of SIGKILL or SIGTERM.
OOM_KILLED, EVICTED, DEADLINE = "OOMKilled", "Evicted", "DeadlineExceeded"
# The kubelet's words for an eviction that the node caused. Any other eviction without the condition
# DisruptionTarget is for a limit of the pod itself: ephemeral storage, or the size of an emptyDir
# (pkg/kubelet/eviction/helpers.go of Kubernetes).
NODE_PRESSURE = ("The node was low on resource", "The node had condition")


def exit_cause(
    worker: WorkerId, pod: pods.Pod, by_us: bool, disrupted: str = "", overdue: bool = False
) -> ev.Gone:
    """Determine why the worker ended; the strongest evidence is checked first.

    Args:
        pod: the last known version of the pod.
        by_us: this master requested the deletion of the pod.
        disrupted: an earlier result of `pods.disruption` for this pod.
        overdue: the deleted pod should have ended long ago, but its end was never confirmed.
    """
    status = pod.get("status", {})
    terminated = pods.state(pod).get("terminated") or {}
    code, reason = terminated.get("exitCode"), terminated.get("reason", "")
    if disrupted := pods.disruption(pod) or disrupted:
        return ev.Gone(worker, code=code, free=True, why=disrupted)
    if not by_us and pods.deleting(pod) and not _ended_before_deletion(pod, terminated):
        if overdue:
            return ev.Gone(
                worker, free=True, why="its node does not answer, and it should have ended long ago"
            )
        return ev.Gone(worker, code=code, free=True, why="its pod was deleted")
    if reason in LOST_NODE or (not terminated and status.get("reason") in LOST_NODE):
        return ev.Gone(worker, free=True, why=f"its node was lost ({reason or status['reason']})")
    if reason == OOM_KILLED:
        return ev.Gone(worker, code=code, why=out_of_memory(pod))
    if exceeded := _exceeded_limit(status):
        return ev.Gone(worker, code=code, limit=exceeded)
    if status.get("reason") == EVICTED:
        return ev.Gone(worker, code=code, free=True, why=f"{EVICTED}: {pods.short(status)}")
    if code is not None:
        code = announced_in(terminated.get("message") or "", code)
        # The exit code also counts if we deleted the pod. A crashed worker's stream ends before its pod,
        # and the master then deletes the pod; the crash is still a crash.
        return _exit(worker, code, terminated.get("signal"), by_us)
    for container in pods.containers(pod, "initContainerStatuses"):
        ended_with = (container.get("state", {}).get("terminated") or {}).get("exitCode")
        if ended_with and pods.phase(pod) == "Failed":
            why = f"its init container {container.get('name')} ended with exit code {ended_with}"
            return ev.Gone(worker, code=ended_with, why=why)
    # A node rejected the pod: OutOfcpu, NodeAffinity, ...
    if pods.phase(pod) == "Failed" and status.get("reason"):
        return ev.Gone(worker, free=True, why=f"{status['reason']}: {pods.short(status)}")
    if by_us:
        return ev.Gone(worker, free=True, why="the master deleted its pod")
    return ev.Gone(worker, free=True, why="its pod is gone")


def out_of_memory(pod: pods.Pod) -> str:
    """Describe that the container exceeded its memory limit."""
    return f"{OOM_KILLED}: container memory limit {_memory_limit(pod)}"


def _exceeded_limit(status: Mapping[str, Any]) -> str:
    """Name the limit of the pod that it exceeded and was ended for; empty if it was not."""
    reason, message = status.get("reason"), str(status.get("message") or "")
    if reason == DEADLINE or (reason == EVICTED and not message.startswith(NODE_PRESSURE)):
        return f"{reason}: {pods.short(status)}"
    return ""


def _exit(worker: WorkerId, code: int, number: int | None, by_us: bool) -> ev.Gone:
    number = number or (code - 128 if code > 128 else None)
    if number is None:
        why = NOT_ITS_FAULT.get(code, "")
        return ev.Gone(worker, code=code, free=bool(why), why=why)
    try:
        told = signal.Signals(number).name
    except ValueError:  # 255 is an exit code, although 128 + n means signal n by convention
        return ev.Gone(worker, code=code)
    asked = by_us and told in ("SIGTERM", "SIGKILL")
    return ev.Gone(worker, signal=told, free=asked, why="the master deleted its pod" if asked else "")


def _ended_before_deletion(pod: pods.Pod, terminated: Mapping[str, Any]) -> bool:
    """True if the container ended by itself before the pod was deleted, at a resolution of one second."""
    finished, deleted = terminated.get("finishedAt"), pod["metadata"].get("deletionTimestamp")
    if not finished or not deleted:
        return False
    grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
    return _time(finished) < _time(deleted) - grace


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _memory_limit(pod: pods.Pod) -> str:
    for container in pod.get("spec", {}).get("containers") or []:
        if container.get("name") == pods.CONTAINER:
            return str((container.get("resources", {}).get("limits") or {}).get("memory", "not set"))
    return "not set"
