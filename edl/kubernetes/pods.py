# SPDX-License-Identifier: Apache-2.0
"""Reading a worker's pod: its identity from its labels, its condition from its status.

These functions do no I/O: they take dictionaries and return values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from edl.contract.ids import WorkerId
from edl.kubernetes.names import Names

Pod: TypeAlias = dict[str, Any]

CONTAINER: Final = "worker"
NAME, INSTANCE, COMPONENT, MANAGER, PART_OF = (
    f"app.kubernetes.io/{key}" for key in ("name", "instance", "component", "managed-by", "part-of")
)
WORKER_ID, RUN_ID, RANK, STATE, PRIORITY, PLACE = (
    f"edl.dev/{key}" for key in ("worker-id", "run-id", "rank", "state", "priority", "place")
)
SERVER: Final = "ps"  # the component of parameter servers, and the name of their container
SERVER_INDEX: Final = "apps.kubernetes.io/pod-index"  # index of a parameter server; Kubernetes writes it
JOB: Final = (
    "edl.dev/job"  # the full name of the job's release: several jobs may share all labels but this one
)
TEMPLATE: Final = "edl.dev/template"  # an annotation
OURS: Final = "edl-master"
ACTING: Final = "edl.dev/acting"  # a label of the acting master: the Service selects it
DELETION_COST: Final = (
    "controller.kubernetes.io/pod-deletion-cost"  # an annotation: the lowest cost is deleted first
)
QUEUE: Final = "kueue.x-k8s.io/queue-name"  # a label
EVICTED: Final = frozenset({"DisruptionTarget", "TerminationTarget"})  # conditions; the second is Kueue's
ADMISSION: Final = "kueue.x-k8s.io/admission"  # the scheduling gate of a pod that Kueue has not admitted

SHOWN = 300  # greatest length of a shown message of Kubernetes

# Reasons of waiting containers that do not make progress (unlike ContainerCreating).
STUCK = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "CrashLoopBackOff",
    }
)


def name(fullname: str, worker: WorkerId) -> str:
    """Return the name of a worker's pod."""
    return Names(fullname).worker(worker)


def selector(release: str) -> str:
    """Label selector of all workers of a release, of any run; `of_release` distinguishes its jobs."""
    return f"{INSTANCE}={release},{COMPONENT}=worker,{MANAGER}={OURS}"


def masters(release: str, fullname: str) -> str:
    """Label selector of all masters of a job."""
    return f"{INSTANCE}={release},{COMPONENT}=master,{JOB}={fullname}"


def of(pod: Pod) -> tuple[str, WorkerId | None]:
    """The run id and worker id of a pod, from its labels.

    The pod may have been created for a different worker: if a worker's process crashes, a new worker may run
    in its pod.
    """
    labels = pod["metadata"].get("labels") or {}
    number = str(labels.get(WORKER_ID, ""))
    return str(labels.get(RUN_ID, "")), WorkerId(int(number)) if number.isdecimal() else None


def of_release(pod: Pod, fullname: str) -> bool:
    """Whether a pod is a worker of the job with this full name.

    The pod's name decides, because a parent chart can have several jobs with the same labels in one release.
    """
    made_for = place(pod)
    return made_for is not None and pod["metadata"]["name"] == Names(fullname).worker(made_for)


def place(pod: Pod) -> WorkerId | None:
    """The worker that the pod was created for, which is also in its name."""
    number = str((pod["metadata"].get("labels") or {}).get(PLACE, ""))
    return WorkerId(int(number)) if number.isdecimal() else of(pod)[1]


def component(pod: Pod) -> str:
    """The component of a pod in its release: master, worker."""
    return str((pod["metadata"].get("labels") or {}).get(COMPONENT, ""))


def ready(pod: Pod) -> bool:
    """True if the pod's readiness probe succeeds: its condition Ready is True."""
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def ip(pod: Pod) -> str:
    """The pod's address; empty before it has one."""
    return str(pod.get("status", {}).get("podIP") or "")


def uid(pod: Pod) -> str:
    """Return the pod's uid, which distinguishes it from a later pod of the same name."""
    return str(pod["metadata"]["uid"])


def owned_by(pod: Pod, uid: str) -> bool:
    """True if the object with this uid owns the pod."""
    return any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or [])


def node(pod: Pod) -> str:
    """The node of the pod; empty before it is scheduled."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def taken_up(pod: Pod) -> bool:
    """Whether the node's kubelet has acknowledged the pod."""
    return bool(pod.get("status", {}).get("startTime"))


def running(pod: Pod, container: str = CONTAINER) -> bool:
    """Whether the worker's own container runs, or the one of that name."""
    return "running" in state(pod, container)


def ended(pod: Pod) -> bool:
    """Whether the worker's own container has ended, or never will run; other containers may still run."""
    return phase(pod) in ("Succeeded", "Failed") or "terminated" in state(pod)


def started(pod: Pod) -> bool:
    """Whether the container with the component's name runs or has run, so that it has a log."""
    return bool(state(pod, component(pod)).keys() & {"running", "terminated"})


def goes_on(pod: Pod) -> bool:
    """Whether a container beside the worker still runs, and would run forever after the worker has ended.

    The pod's phase is not enough: a kubelet first reports the end of a container, and a moment later that of
    the pod.
    """
    others = (c for c in containers(pod, "containerStatuses") if c.get("name") != CONTAINER)
    return any("running" in (c.get("state") or {}) for c in others)


def deleting(pod: Pod) -> bool:
    """True once deletion was requested; the pod then still exists for up to its grace period."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def delay(pod: Pod) -> str:
    """Why the worker does not run yet; empty if no intervention is needed."""
    # The condition SchedulingGated outlives the gates until the scheduler looks at the pod.
    if gates := [gate["name"] for gate in pod.get("spec", {}).get("schedulingGates") or []]:
        queue = (pod["metadata"].get("labels") or {}).get(QUEUE)
        if queue and ADMISSION in gates:
            return f"it waits for quota of Kueue's queue {queue}"
        return f"it is held back by the scheduling gate {', '.join(gates)}"
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            why = short(condition)
            volume = "persistentvolumeclaim" in why.lower()  # more nodes would not help
            return f"{'its volume is not there' if volume else 'no node has room for it'}: {why}"
    for container in containers(pod, "initContainerStatuses", "containerStatuses"):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in STUCK:
            return f"{waiting['reason']}: {short(waiting)}"
    return ""


def disruption(pod: Pod) -> str:
    """Why Kubernetes or Kueue evicts the pod: reason and message of its condition."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") in EVICTED and condition.get("status") == "True":
            return f"{condition.get('reason', 'disrupted')}: {short(condition)}"
    return ""


def node_lost(pod: Pod) -> bool:
    """True if Kubernetes deletes the pod because its node is lost or drained by a taint."""
    return disruption(pod).startswith("DeletionByTaintManager:")


def phase(pod: Pod) -> str:
    """The pod's phase: Pending, Running, Succeeded or Failed; empty before it is reported."""
    return str(pod.get("status", {}).get("phase", ""))


def containers(pod: Pod, *kinds: str) -> list[dict[str, Any]]:
    """The statuses of the pod's containers of these kinds: containerStatuses, initContainerStatuses."""
    status = pod.get("status", {})
    return [container for kind in kinds for container in status.get(kind) or []]


def state(pod: Pod, container: str = CONTAINER) -> dict[str, Any]:
    """The state of the worker's own container, or of the one with that name."""
    own = (c for c in containers(pod, "containerStatuses") if c.get("name") == container)
    return dict(next(own, {}).get("state") or {})


def short(said: Mapping[str, Any]) -> str:
    """The message of a status or condition, cut after `SHOWN` characters."""
    text = " ".join(str(said.get("message") or "no reason given").split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
