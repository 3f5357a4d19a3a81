"""What a worker's pod says of itself: whose it is by its labels, how it is by its status.

Nothing here talks to anybody: dictionaries in, values out.
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
SERVER_INDEX: Final = "apps.kubernetes.io/pod-index"  # of a parameter server: Kubernetes writes it
JOB: Final = (
    "edl.dev/job"  # the full name of the job's release: several jobs may share all labels but this one
)
TEMPLATE: Final = "edl.dev/template"  # an annotation
OURS: Final = "edl-master"
ACTING: Final = "edl.dev/acting"  # a label of the master that acts: the Service selects it
DELETION_COST: Final = (
    "controller.kubernetes.io/pod-deletion-cost"  # an annotation: who costs less goes first
)

SHOWN = 300  # characters of Kubernetes' messages that we pass on

# Why a container waits although nothing is being done about it (ContainerCreating is work).
STUCK = frozenset({
    "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError", "CrashLoopBackOff",
})  # fmt: skip


def name(fullname: str, worker: WorkerId) -> str:
    return Names(fullname).worker(worker)


def selector(release: str) -> str:
    """Of all workers of a release, whichever run they belong to; `of_release` tells its jobs apart."""
    return f"{INSTANCE}={release},{COMPONENT}=worker,{MANAGER}={OURS}"


def masters(release: str, fullname: str) -> str:
    """Of all masters of a job."""
    return f"{INSTANCE}={release},{COMPONENT}=master,{JOB}={fullname}"


def of(pod: Pod) -> tuple[str, WorkerId | None]:
    """Whose pod it is: run id and worker id, as its labels say. The worker need not be the one that it was
    made for: when a worker's process crashes, another worker may live on in its place."""
    labels = pod["metadata"].get("labels") or {}
    number = str(labels.get(WORKER_ID, ""))
    return str(labels.get(RUN_ID, "")), WorkerId(int(number)) if number.isdecimal() else None


def of_release(pod: Pod, fullname: str) -> bool:
    """It is a worker of that release's job, by its name: a parent chart can have several jobs in one release,
    with the same labels."""
    made_for = place(pod)
    return made_for is not None and pod["metadata"]["name"] == Names(fullname).worker(made_for)


def place(pod: Pod) -> WorkerId | None:
    """The worker that it was made for, and that its name tells."""
    number = str((pod["metadata"].get("labels") or {}).get(PLACE, ""))
    return WorkerId(int(number)) if number.isdecimal() else of(pod)[1]


def component(pod: Pod) -> str:
    """What it is in its release: master, worker."""
    return str((pod["metadata"].get("labels") or {}).get(COMPONENT, ""))


def ready(pod: Pod) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def ip(pod: Pod) -> str:
    """Its address; empty while it has none."""
    return str(pod.get("status", {}).get("podIP") or "")


def uid(pod: Pod) -> str:
    return str(pod["metadata"]["uid"])


def owned_by(pod: Pod, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or [])


def node(pod: Pod) -> str:
    """Where it is put; empty while it is nowhere."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def taken_up(pod: Pod) -> bool:
    """Its node's kubelet has acknowledged it."""
    return bool(pod.get("status", {}).get("startTime"))


def running(pod: Pod, container: str = CONTAINER) -> bool:
    """The worker's own container runs, or the one of that name."""
    return "running" in state(pod, container)


def ended(pod: Pod) -> bool:
    """The worker's own container has ended, or never will run; containers beside it may go on."""
    return phase(pod) in ("Succeeded", "Failed") or "terminated" in state(pod)


def started(pod: Pod) -> bool:
    """Its own container, the one named like its component, runs or has run: it has a log."""
    return bool(state(pod, component(pod)).keys() & {"running", "terminated"})


def goes_on(pod: Pod) -> bool:
    """Another container runs on beside a worker that has ended, and would for ever.

    The pod's phase does not tell: a kubelet first says that a container has ended, and a moment
    later that the pod has.
    """
    others = (c for c in containers(pod, "containerStatuses") if c.get("name") != CONTAINER)
    return any("running" in (c.get("state") or {}) for c in others)


def deleting(pod: Pod) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def delay(pod: Pod) -> str:
    """Why the worker does not run yet; empty while that is only a matter of time."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            why = short(condition)
            volume = "persistentvolumeclaim" in why.lower()  # no room would help
            return f"{'its volume is not there' if volume else 'no node has room for it'}: {why}"
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            gates = ", ".join(
                gate.get("name", "") for gate in pod.get("spec", {}).get("schedulingGates") or []
            )
            return f"it is held back by the scheduling gate {gates or 'of an unknown name'}"
    for container in containers(pod, "initContainerStatuses", "containerStatuses"):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in STUCK:
            return f"{waiting['reason']}: {short(waiting)}"
    return ""


def disruption(pod: Pod) -> str:
    """Why Kubernetes takes the pod away: the reason of its condition DisruptionTarget, and its message."""
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{condition.get('reason', 'disrupted')}: {short(condition)}"
    return ""


def phase(pod: Pod) -> str:
    """Pending, Running, Succeeded, Failed; empty while nobody has said."""
    return str(pod.get("status", {}).get("phase", ""))


def containers(pod: Pod, *kinds: str) -> list[dict[str, Any]]:
    """The statuses of its containers of these kinds: containerStatuses, initContainerStatuses."""
    status = pod.get("status", {})
    return [container for kind in kinds for container in status.get(kind) or []]


def state(pod: Pod, container: str = CONTAINER) -> dict[str, Any]:
    """Of the worker's own container, or the one of that name."""
    own = (c for c in containers(pod, "containerStatuses") if c.get("name") == container)
    return dict(next(own, {}).get("state") or {})


def short(said: Mapping[str, Any]) -> str:
    """The message of a status or condition, cut where it gets long."""
    text = " ".join(str(said.get("message") or "no reason given").split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
