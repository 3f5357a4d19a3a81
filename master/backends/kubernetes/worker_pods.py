# SPDX-License-Identifier: Apache-2.0
"""The table of a run's workers and their pods. Changes of a pod become events: `Seen`, `Gone` and others.

A pod belongs to a worker by its UID. Its name has the id of the worker that it was created for. Ids are never
reused, so no two pods of a run have the same name. If a foreign pod has the name, it is not touched, and the
worker is removed. A worker may also continue in the pod of a crashed one (`pod_reuse`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import structlog

from edl.contract.ids import RunId, WorkerId
from edl.contract.phases import WorkerState
from edl.contract.reasons import Reason
from edl.kubernetes import pods
from edl.kubernetes.timing import Timing
from edl.master.backends.base import Emit
from edl.master.backends.kubernetes.event_recorder import EventRecorder
from edl.master.backends.kubernetes.exit_cause import exit_cause
from edl.master.backends.kubernetes.installed import Installed
from edl.master.backends.kubernetes.nodes import Nodes
from edl.master.backends.kubernetes.pod_control import PodCreation, PodDeletion
from edl.master.backends.kubernetes.pod_view import ENDED, RUNNING, WAITING, WorkerPod, classify
from edl.master.core import events as ev

log = structlog.get_logger()

DELETED = "its pod is being deleted"
KEPT = 20  # pods of ended workers are kept for `kubectl logs`; older ones are deleted


class WorkerPods:
    """The workers of a run that are needed or whose pods exist.

    Args:
        emit: called with Seen, Delayed, Terminating and Gone.
        next_id: the first unused id.
        nodes: health of the nodes; is notified of nodes that do not start their pods.
        creation, deletion: create pods, and delete those that are not needed.
        events: records Kubernetes Events.
    """

    def __init__(
        self,
        run_id: RunId,
        emit: Emit,
        next_id: int,
        pace: Timing,
        nodes: Nodes,
        creation: PodCreation,
        deletion: PodDeletion,
        events: EventRecorder,
    ):
        self.run_id, self.next_id, self._emit, self._pace, self._nodes = run_id, next_id, emit, pace, nodes
        self._creation, self._deletion, self._events = creation, deletion, events
        self._ended: list[WorkerId] = []  # whose pods are kept, oldest first
        self._all: dict[WorkerId, WorkerPod] = {}
        self.on_end: list[Callable[[], None]] = []  # called when a worker is gone
        # The present worker by UID of a reused pod; the watch may report its new labels late.
        self._moved: dict[str, WorkerId] = {}

    def close(self) -> None:
        for w in self:
            self._await_nothing(w)

    def __iter__(self) -> Iterator[WorkerPod]:
        return iter(tuple(self._all.values()))

    @property
    def _wanted(self) -> Iterator[WorkerPod]:
        return (w for w in self if not w.unwanted and not w.ended)

    def get(self, worker: WorkerId) -> WorkerPod | None:
        return self._all.get(worker)

    def in_pod(self, name: str) -> WorkerPod | None:
        """Return the last worker in the pod of that name."""
        named = (w for w in self if w.pod is not None and w.pod["metadata"]["name"] == name)
        return max(named, key=lambda w: w.id, default=None)

    @property
    def ending(self) -> int:
        """Number of workers whose streams ended and whose processes are probably exiting."""
        return sum(w.unwanted and w.state is RUNNING and not w.fenced and w.may_go_on for w in self)

    def move(self, w: WorkerPod, before: WorkerPod, pod: pods.Pod) -> None:
        """Continue in the pod of `before`, which is gone."""
        self._moved[before.uid] = w.id
        self._all.pop(before.id, None)
        w.high, w.creating = before.high, False
        w.labels = ("", str(WorkerState.STARTING))
        self.made(w, pod)

    def add(self, worker: WorkerId) -> WorkerPod:
        """Add a worker whose pod will be created."""
        self.next_id = max(self.next_id, worker + 1)
        w = self._all[worker] = WorkerPod(worker, creating=True)
        return w

    def adopt(self, worker: WorkerId, pod: pods.Pod) -> None:
        """Add a worker whose pod an earlier master created."""
        labels = pod["metadata"]["labels"]
        w = self._all[worker] = WorkerPod(
            worker,
            WAITING,
            pods.uid(pod),
            pod,
            high=labels.get(pods.PRIORITY) == "high",
            labels=(labels.get(pods.RANK, ""), labels.get(pods.STATE, "")),
        )
        if pods.ended(pod):  # that master reported it, or the adoption excludes it
            w.step("ends")
            self._ended.append(worker)
        else:
            self._look(w, pod, False)

    async def create(self, w: WorkerPod, render: Callable[[], pods.Pod], installed: Installed) -> None:
        """Create the pod of a worker while it is needed; emit `Gone` if it was never created.

        Args:
            render: returns the pod to create.
            installed: is notified of the pod before events about it are emitted.
        """
        name = installed.place.names.worker(w.id)
        if self._creation.blocked:
            self.delay(w, self._creation.blocked)
        while w.needs_pod:
            if (pod := await self._creation.create(render, lambda: w.needs_pod)) is not None:
                if not w.uid:
                    installed.pods.learn(pod)
                self.made(w, pod)
            elif w.needs_pod and (pod := await self._creation.get(name)) is not None:
                self._meet(w, pod, installed)
        w.creating = False
        if not w.uid and not w.ended:
            self.end(w, ev.Gone(w.id, free=True, why="it was not started yet"))

    def _meet(self, w: WorkerPod, pod: pods.Pod, installed: Installed) -> None:
        """Handle an existing pod of this name; it is ours if only the response to its creation was lost."""
        if pods.of(pod) == (self.run_id, w.id):
            if not w.uid:
                installed.pods.learn(pod)
            self.made(w, pod)
        elif not w.uid:
            run = pods.of(pod)[0]
            whose = (
                f"it belongs to run {run}" if run and run != self.run_id else "this master did not make it"
            )
            why = f"there is a pod {pod['metadata']['name']} already, and {whose}"
            self._events.record(Reason.PodExists, f"{why}; worker {w.id} is given up")
            self.end(w, ev.Gone(w.id, free=True, why=why))

    def blocked(self, why: str) -> None:
        """Report to all workers without a pod why none can be created now."""
        for w in self:
            if w.creating:
                self.delay(w, why)

    def made(self, w: WorkerPod, pod: pods.Pod) -> None:
        """Record the pod of a worker, from the response to its creation or from the watch."""
        if not w.uid:
            w.step("made")
            w.uid, w.pod = pods.uid(pod), pod
            self.delay(w, "")
            self._look(w, pod, False)  # it may run already, and then the watch reports no change

    def changed(self, pod: pods.Pod, vanished: bool) -> None:
        """Handle a change of a pod, or its deletion."""
        run, worker = pods.of(pod)
        worker = self._moved.get(pods.uid(pod), worker)
        w = self._all.get(worker) if worker is not None and run == self.run_id else None
        if w is not None and not w.uid and w.creating and not vanished:
            self.made(w, pod)
        if w is None or w.uid != pods.uid(pod):
            if not vanished:
                self._stranger(pod)
            return
        w.pod = pod
        if not w.ended:
            self._look(w, pod, vanished)
        elif not vanished:  # no worker continues in this pod
            self._keep(w)
        if vanished:
            del self._all[w.id]
            self._moved.pop(w.uid, None)
            if w.id in self._ended:
                self._ended.remove(w.id)
            self._creation.look_again()

    def delay(self, w: WorkerPod, why: str) -> None:
        """Report why a worker does not run yet; "" if only time is needed."""
        if why != w.why and not w.ended:
            w.why = why
            self._emit(ev.Delayed(w.id, why))

    def end(self, w: WorkerPod, gone: ev.Gone) -> None:
        """Emit that a worker is gone; its pod may be kept."""
        w.step("ends")
        self._creation.look_again()
        for tell in self.on_end:
            tell()
        self._await_nothing(w)
        self._emit(gone)
        if not w.uid:
            del self._all[w.id]
        else:
            self._keep(w)

    def _keep(self, w: WorkerPod) -> None:
        """Keep the ended pod of a worker for its logs, and delete the oldest pod beyond KEPT."""
        if not w.kept or w.id in self._ended:
            return
        assert w.pod is not None
        if pods.goes_on(w.pod):
            self._deletion.discard(w.pod)
            return
        self._ended.append(w.id)
        if len(self._ended) > KEPT:
            oldest = self._all[self._ended.pop(0)]
            assert oldest.pod is not None
            self._deletion.discard(oldest.pod)

    def doubt(self, worker: WorkerId) -> None:
        """Note a worker without heartbeats. If no worker on its node sends any, the node may be lost."""
        w = self._all.get(worker)
        if w is not None:
            w.fenced = True
        if w is None or w.pod is None or not (node := pods.node(w.pod)):
            return
        if any(o.state is RUNNING and o.pod and pods.node(o.pod) == node for o in self._wanted if o is not w):
            return
        self._nodes.doubt(node)
        for other in self._wanted:
            if other.pod is not None:
                self._see_it_taken_up(other, other.pod)

    def _look(self, w: WorkerPod, pod: pods.Pod, vanished: bool) -> None:
        view = classify(pod, vanished)
        if view.disruption and not w.disrupted:
            w.disrupted = view.disruption
            self._events.record(Reason.WorkerPreempted, f"worker {w.id}: {w.disrupted}")
        if view.state is ENDED:
            self.end(w, exit_cause(w.id, pod, w.delete_requested, w.disrupted))
            return
        if view.state is WAITING:
            self.delay(w, view.delay)
        elif w.state is WAITING:
            w.step("runs")
            w.why = ""
            self._emit(ev.Seen(w.id, pod["metadata"]["name"]))
        why = view.disruption or (DELETED if view.deletion_seconds is not None else "")
        if why and not (w.terminating or w.unwanted):  # the worker may have told only an earlier master so
            w.terminating = True
            self._emit(ev.Terminating(w.id, why))
        self._see_it_taken_up(w, pod)
        if view.deletion_seconds is not None and w.deletion_timer is None:
            loop = asyncio.get_running_loop()
            w.deletion_timer = loop.call_later(
                view.deletion_seconds + self._pace.overdue, self._is_overdue, w
            )

    def _is_overdue(self, w: WorkerPod) -> None:
        """Give up a deleted pod whose node never confirms its end, because the node is lost."""
        if not w.ended and w.pod is not None:
            if pods.node_lost(w.pod):  # else it would count against quotas until the node is back
                self._deletion.discard(w.pod, by_force=True)
            self.end(w, exit_cause(w.id, w.pod, w.delete_requested, w.disrupted, overdue=True))

    def _see_it_taken_up(self, w: WorkerPod, pod: pods.Pod) -> None:
        if w.pickup_timer is None and not pods.taken_up(pod) and self._nodes.doubts(pods.node(pod)):
            loop = asyncio.get_running_loop()
            w.pickup_timer = loop.call_later(self._pace.untaken, self._is_untaken, w)

    def _is_untaken(self, w: WorkerPod) -> None:
        """Replace a worker whose pod no kubelet starts, on a different node."""
        if w.ended or w.pod is None or pods.taken_up(w.pod):
            return
        why = f"node {pods.node(w.pod)} does not answer"
        if self._nodes.avoid(pods.node(w.pod)):
            self._events.record(Reason.NodeAvoided, f"{why}: workers are made elsewhere")
        self._deletion.discard(w.pod)
        self.end(w, ev.Gone(w.id, free=True, why=why))

    def _await_nothing(self, w: WorkerPod) -> None:
        for timer in (w.deletion_timer, w.pickup_timer):
            if timer is not None:
                timer.cancel()

    def _stranger(self, pod: pods.Pod) -> None:
        """Delete an unknown pod with the labels of this run."""
        run, worker = pods.of(pod)
        if run != self.run_id or worker is None or worker >= self.next_id:
            return  # created by a different master, which may be newer
        if not pods.deleting(pod):
            name = pod["metadata"]["name"]
            log.warning(f"deleting pod {name}: its worker {worker} does not exist")
            self._deletion.discard(pod)
