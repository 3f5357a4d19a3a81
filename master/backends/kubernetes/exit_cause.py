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
    WorkerExit.UNAUTHENTICATED: "the master does not know its token: the Secret was changed more than once",
}
# The node's own doing, as container or pod reasons: the job is not to blame.
LOST_NODE = frozenset({"ContainerStatusUnknown", "NodeLost", "NodeShutdown", "Shutdown", "Terminated"})

OOM_KILLED = "OOMKilled"


def exit_cause(
    worker: WorkerId, pod: pods.Pod, by_us: bool, disrupted: str = "", overdue: bool = False
) -> ev.Gone:
    """Why the worker ended, in the order in which evidence counts.

    Args:
        pod: as it was last seen.
        by_us: we have asked for its deletion.
        disrupted: what `disruption` has said of it earlier.
        overdue: it should have ended long ago, and nobody says that it has.
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
        return ev.Gone(worker, code=code, free=True, why="somebody deleted its pod")
    if reason in LOST_NODE or (not terminated and status.get("reason") in LOST_NODE):
        return ev.Gone(worker, free=True, why=f"its node was lost ({reason or status['reason']})")
    if reason == OOM_KILLED:
        return ev.Gone(worker, code=code, why=out_of_memory(pod))
    if code is not None:
        code = announced_in(terminated.get("message") or "", code)
        # Also of a pod that we have deleted: a worker's stream ends before its pod does, and
        # when the master answers with a deletion, the crash is still a crash.
        return _exit(worker, code, terminated.get("signal"), by_us)
    for container in pods.containers(pod, "initContainerStatuses"):
        ended_with = (container.get("state", {}).get("terminated") or {}).get("exitCode")
        if ended_with and pods.phase(pod) == "Failed":
            why = f"its init container {container.get('name')} ended with exit code {ended_with}"
            return ev.Gone(worker, code=ended_with, why=why)
    if pods.phase(pod) == "Failed" and status.get(
        "reason"
    ):  # a node that did not take it: OutOfcpu, Evicted, ...
        return ev.Gone(worker, free=True, why=f"{status['reason']}: {pods.short(status)}")
    if by_us:
        return ev.Gone(worker, free=True, why="the master deleted its pod")
    return ev.Gone(worker, free=True, why="its pod is gone")


def out_of_memory(pod: pods.Pod) -> str:
    """Its container had no memory left."""
    return f"{OOM_KILLED}: container memory limit {_memory_limit(pod)}"


def _exit(worker: WorkerId, code: int, number: int | None, by_us: bool) -> ev.Gone:
    number = number or (code - 128 if code > 128 else None)
    if number is None:
        why = NOT_ITS_FAULT.get(code, "")
        return ev.Gone(worker, code=code, free=bool(why), why=why)
    try:
        told = signal.Signals(number).name
    except ValueError:  # 255 is an exit code, whatever the convention says
        return ev.Gone(worker, code=code)
    asked = by_us and told in ("SIGTERM", "SIGKILL")
    return ev.Gone(worker, signal=told, free=asked, why="the master deleted its pod" if asked else "")


def _ended_before_deletion(pod: pods.Pod, terminated: Mapping[str, Any]) -> bool:
    """It had ended by itself when somebody deleted it, as far as whole seconds tell."""
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
