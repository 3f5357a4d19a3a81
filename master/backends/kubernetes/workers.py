"""The workers of a run and their pods: what happens to a pod becomes `Seen`, `Delayed` or `Gone`.

A pod is ours by its UID. Its name tells the worker that it was made for, and as ids are never reused, no two
pods of a run ever have one name; where another one has, it is not touched, and the worker is given up. A
worker may also take the place of one whose process has crashed (`places`): the pod is then its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from edl.master.core import events as ev

log = structlog.get_logger()

KEPT = 20  # pods of ended workers that stay for `kubectl logs`; more would only fill the list


@dataclass(eq=False)
class WorkerPod:
    """One worker and its pod."""

    id: WorkerId
    uid: str = ""  # unknown until the pod is made
    pod: pods.Pod | None = None
    high: bool = False
    making: bool = False  # a create is under way
    unwanted: bool = False  # to be deleted
    asked: bool = False  # its deletion has been asked for
    fenced: bool = False  # it was given up, and may still run
    seen: bool = False
    why: str = ""  # it does not run yet
    disrupted: str = ""  # why Kubernetes takes it away
    overdue: asyncio.TimerHandle | None = None
    untaken: asyncio.TimerHandle | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)  # `Gone` is said
    labels: tuple[str, str] = ("", str(WorkerState.STARTING))  # rank and state, as last written
    labelled_at: float = 0.0

    @property
    def needs_pod(self) -> bool:
        """It is needed, and its pod is unknown. (A watch may know a pod before its create is answered.)"""
        return not self.unwanted and not self.uid and not self.over.is_set()

    @property
    def may_go_on(self) -> bool:
        """When the worker's process ends, another one may follow it in the pod."""
        pod = self.pod
        return (
            pod is not None
            and not self.asked
            and not self.disrupted
            and pods.running(pod)
            and not pods.deleting(pod)
        )

    @property
    def kept(self) -> bool:
        """It has ended, and its pod is there to be read."""
        pod = self.pod
        return self.over.is_set() and pod is not None and pods.ended(pod) and not pods.deleting(pod)


class Workers:
    """All workers of a run that are needed, or whose pods are there.

    Args:
        emit: takes Seen, Delayed, Gone.
        next_id: ids below are taken.
        nodes: what is thought of the nodes; learns of those that do not take up their pods.
        creation, deletion: create pods, and delete those that nobody needs.
        events: for people.
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
        self._ended: list[WorkerId] = []  # whose pods stay; the oldest first
        self._all: dict[WorkerId, WorkerPod] = {}
        self.on_end: list[Callable[[], None]] = []  # called when one is gone
        self._moved: dict[str, WorkerId] = {}  # by UID of the pod: who lives there now, whatever a watch says

    def close(self) -> None:
        for w in self:
            self._await_nothing(w)

    def __iter__(self) -> Iterator[WorkerPod]:
        return iter(tuple(self._all.values()))

    @property
    def _wanted(self) -> Iterator[WorkerPod]:
        return (w for w in self if not w.unwanted and not w.over.is_set())

    def get(self, worker: WorkerId) -> WorkerPod | None:
        return self._all.get(worker)

    def in_pod(self, name: str) -> WorkerPod | None:
        """The last worker in the pod of that name."""
        named = (w for w in self if w.pod is not None and w.pod["metadata"]["name"] == name)
        return max(named, key=lambda w: w.id, default=None)

    @property
    def ending(self) -> int:
        """How many there are whose streams have ended, and whose processes seem to have."""
        return sum(
            w.unwanted and w.seen and not w.over.is_set() and not w.fenced and w.may_go_on for w in self
        )

    def move(self, w: WorkerPod, before: WorkerPod, pod: pods.Pod) -> None:
        """It lives in the pod of one that is gone."""
        self._moved[before.uid] = w.id
        self._all.pop(before.id, None)
        w.high, w.making = before.high, False
        w.labels = ("", str(WorkerState.STARTING))
        self.made(w, pod)

    def add(self, worker: WorkerId) -> WorkerPod:
        """One whose pod is to be made."""
        self.next_id = max(self.next_id, worker + 1)
        w = self._all[worker] = WorkerPod(worker, making=True)
        return w

    def adopt(self, worker: WorkerId, pod: pods.Pod) -> None:
        """One whose pod an earlier master has made."""
        labels = pod["metadata"]["labels"]
        w = self._all[worker] = WorkerPod(
            worker, pods.uid(pod), pod, high=labels.get(pods.PRIORITY) == "high",
            labels=(labels.get(pods.RANK, ""), labels.get(pods.STATE, "")),
        )  # fmt: skip
        if pods.ended(pod):  # that master has told of it, or the adoption leaves it out
            w.over.set()
            self._ended.append(worker)
        else:
            self._look(w, pod, False)

    async def create(self, w: WorkerPod, render: Callable[[], pods.Pod], installed: Installed) -> None:
        """Have its pod made, for as long as it is needed; one that was never made is said to be gone.

        Args:
            render: its pod as it is to be created now.
            installed: learns of the pod before anything is said of it.
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
        w.making = False
        if not w.uid and not w.over.is_set():
            self.end(w, ev.Gone(w.id, free=True, why="it was not started yet"))

    def _meet(self, w: WorkerPod, pod: pods.Pod, installed: Installed) -> None:
        """A pod of its name exists. It is ours if a create came through whose answer did not."""
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
        """Nobody's pod can be created now."""
        for w in self:
            if w.making:
                self.delay(w, why)

    def made(self, w: WorkerPod, pod: pods.Pod) -> None:
        """Its pod is there: a create was answered, or the watch was quicker."""
        if not w.uid:
            w.uid, w.pod = pods.uid(pod), pod
            self.delay(w, "")
            self._look(w, pod, False)  # it may run already, and then no change would be seen

    def changed(self, pod: pods.Pod, vanished: bool) -> None:
        """A pod is as it is now, or gone."""
        run, worker = pods.of(pod)
        worker = self._moved.get(pods.uid(pod), worker)
        w = self._all.get(worker) if worker is not None and run == self.run_id else None
        if w is not None and not w.uid and w.making and not vanished:
            self.made(w, pod)
        if w is None or w.uid != pods.uid(pod):
            if not vanished:
                self._stranger(pod)
            return
        w.pod = pod
        if not w.over.is_set():
            self._look(w, pod, vanished)
        elif not vanished:  # nobody has taken the place that it left
            self._keep(w)
        if vanished:
            del self._all[w.id]
            self._moved.pop(w.uid, None)
            if w.id in self._ended:
                self._ended.remove(w.id)
            self._creation.look_again()

    def delay(self, w: WorkerPod, why: str) -> None:
        """It does not run yet, and why; "" while that is only a matter of time."""
        if why != w.why and not w.over.is_set():
            w.why = why
            self._emit(ev.Delayed(w.id, why))

    def end(self, w: WorkerPod, gone: ev.Gone) -> None:
        """Say that it is gone; its pod may stay a while."""
        w.over.set()
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
        """Its pod stays for a while, if it has ended, for those who read its log."""
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
        """It is not heard of. Where nobody is, the node may be lost, and with it what is put there next."""
        w = self._all.get(worker)
        if w is not None:
            w.fenced = True
        if w is None or w.pod is None or not (node := pods.node(w.pod)):
            return
        if any(o.seen and o.pod and pods.node(o.pod) == node for o in self._wanted if o is not w):
            return
        self._nodes.doubt(node)
        for other in self._wanted:
            if other.pod is not None:
                self._see_it_taken_up(other, other.pod)

    def _look(self, w: WorkerPod, pod: pods.Pod, vanished: bool) -> None:
        if (why := pods.disruption(pod)) and not w.disrupted:
            w.disrupted = why
            self._events.record(Reason.WorkerPreempted, f"worker {w.id}: {why}")
        if vanished or pods.ended(pod):
            self.end(w, exit_cause(w.id, pod, w.asked, w.disrupted))
            return
        if pods.running(pod):
            if not w.seen:
                w.seen, w.why = True, ""
                self._emit(ev.Seen(w.id, pod["metadata"]["name"]))
        else:
            self.delay(w, pods.delay(pod))
        self._see_it_taken_up(w, pod)
        if pods.deleting(pod) and w.overdue is None:
            grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            loop = asyncio.get_running_loop()
            w.overdue = loop.call_later(grace + self._pace.overdue, self._is_overdue, w)

    def _is_overdue(self, w: WorkerPod) -> None:
        """Kubernetes keeps a pod until its node says that it has ended. A lost node never does."""
        if not w.over.is_set() and w.pod is not None:
            self.end(w, exit_cause(w.id, w.pod, w.asked, w.disrupted, overdue=True))

    def _see_it_taken_up(self, w: WorkerPod, pod: pods.Pod) -> None:
        if w.untaken is None and not pods.taken_up(pod) and self._nodes.doubts(pods.node(pod)):
            loop = asyncio.get_running_loop()
            w.untaken = loop.call_later(self._pace.untaken, self._is_untaken, w)

    def _is_untaken(self, w: WorkerPod) -> None:
        """No kubelet works on its pod: the worker is replaced, on another node."""
        if w.over.is_set() or w.pod is None or pods.taken_up(w.pod):
            return
        why = f"node {pods.node(w.pod)} does not answer"
        if self._nodes.avoid(pods.node(w.pod)):
            self._events.record(Reason.NodeAvoided, f"{why}: workers are made elsewhere")
        self._deletion.discard(w.pod)
        self.end(w, ev.Gone(w.id, free=True, why=why))

    def _await_nothing(self, w: WorkerPod) -> None:
        for timer in (w.overdue, w.untaken):
            if timer is not None:
                timer.cancel()

    def _stranger(self, pod: pods.Pod) -> None:
        """A pod with our labels that we do not know."""
        run, worker = pods.of(pod)
        if run != self.run_id or worker is None or worker >= self.next_id:
            return  # of another master, which may know better
        if not pods.deleting(pod):
            name = pod["metadata"]["name"]
            log.warning(f"pod {name} says that it is worker {worker}, which is gone: deleting it")
            self._deletion.discard(pod)
