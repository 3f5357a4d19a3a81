# SPDX-License-Identifier: Apache-2.0
"""A worker and its pod, the state table of a pod, and the classification of a pod for it (`worker_pods`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from edl.contract.ids import WorkerId
from edl.contract.phases import WorkerState
from edl.contract.state_tables import Table
from edl.kubernetes import pods


class PodState(StrEnum):
    """The state of a worker's pod."""

    CREATING = "creating"  # it was requested, and is not known to exist
    WAITING = "waiting"  # not scheduled, pulling its image, or not started for a different reason
    RUNNING = "running"
    ENDED = "ended"  # it has ended, was deleted, or is given up, and `Gone` is emitted


CREATING, WAITING = PodState.CREATING, PodState.WAITING
RUNNING, ENDED = PodState.RUNNING, PodState.ENDED

POD = Table(
    "a pod",
    CREATING,
    {
        (CREATING, "made"): WAITING,
        (WAITING, "runs"): RUNNING,
        (CREATING, "ends"): ENDED,
        (WAITING, "ends"): ENDED,
        (RUNNING, "ends"): ENDED,
    },
)


@dataclass(frozen=True, slots=True)
class PodView:
    """The classification of a pod for the table of workers.

    Args:
        state: WAITING, RUNNING or ENDED.
        delay: why it does not run yet; empty if that is a matter of time, or if it runs.
        disruption: why Kubernetes evicts it; empty if it does not.
        deletion_seconds: its grace period if it is being deleted; None if it is not.
    """

    state: PodState
    delay: str
    disruption: str
    deletion_seconds: float | None


def classify(pod: pods.Pod, vanished: bool) -> PodView:
    """Classify a pod.

    Args:
        vanished: the pod was deleted; `pod` is its last known version.
    """
    state, delay = WAITING, ""
    if vanished or pods.ended(pod):
        state = ENDED
    elif pods.running(pod):
        state = RUNNING
    else:
        delay = pods.delay(pod)
    grace = (pod["metadata"].get("deletionGracePeriodSeconds") or 0) if pods.deleting(pod) else None
    return PodView(state, delay, pods.disruption(pod), grace)


@dataclass(eq=False)
class WorkerPod:
    """A worker and its pod."""

    id: WorkerId
    state: PodState = CREATING
    uid: str = ""  # empty until the pod is created
    pod: pods.Pod | None = None
    high: bool = False
    creating: bool = False  # its pod is being created
    unwanted: bool = False  # to be deleted
    delete_requested: bool = False  # its deletion was requested
    fenced: bool = False  # it was removed and may still run
    why: str = ""  # why it does not run yet
    terminating: bool = False  # `Terminating` is emitted: it is evicted, or was deleted from outside
    disrupted: str = ""  # why Kubernetes evicts it
    deletion_timer: asyncio.TimerHandle | None = None
    pickup_timer: asyncio.TimerHandle | None = None
    end: asyncio.Event = field(default_factory=asyncio.Event)  # set once the pod has ended
    labels: tuple[str, str] = ("", str(WorkerState.STARTING))  # rank and state, as last written
    labelled_at: float = 0.0

    def step(self, event: str) -> None:
        """Change the state of the pod, by an event of its table."""
        self.state = POD.after(self.state, event)
        if self.state is ENDED:
            self.end.set()

    @property
    def ended(self) -> bool:
        """True if the end of the pod was reported to the core."""
        return self.state is ENDED

    @property
    def needs_pod(self) -> bool:
        """True if the worker is needed and has no pod yet.

        A watch may report a pod before the request that creates it returns.
        """
        return not self.unwanted and self.state is CREATING

    @property
    def may_go_on(self) -> bool:
        """True if a different worker may follow in the pod when this worker's process ends."""
        pod = self.pod
        return (
            pod is not None
            and not self.delete_requested
            and not self.disrupted
            and pods.running(pod)
            and not pods.deleting(pod)
        )

    @property
    def kept(self) -> bool:
        """True if the worker has ended and its pod still exists for its logs."""
        pod = self.pod
        return self.ended and pod is not None and pods.ended(pod) and not pods.deleting(pod)
