# SPDX-License-Identifier: Apache-2.0
"""The cluster behind the small API server: objects, their history, and a kubelet that runs and ends pods."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from edl.exit_announcements import termination_message

Object = dict[str, Any]
NAMESPACE = "test"
KINDS = {
    "pods": "Pod",
    "configmaps": "ConfigMap",
    "events": "Event",
    "leases": "Lease",
    "secrets": "Secret",
    "statefulsets": "StatefulSet",
}


class KubernetesCluster:
    """Objects of one namespace, and the pods among them.

    Args:
        second: how long one second of all this takes.
        seed: of the moments at which pods start and end.
    """

    def __init__(self, second: float = 1.0, seed: int = 0):
        self.second, self.random = second, random.Random(seed)
        self.objects: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}
        self.history: list[tuple[int, str, str, Object]] = []  # version, resource, type, object
        self.version, self.compacted = 1, 0
        self.autorun = True  # the kubelet runs pods by itself
        self._news = asyncio.Condition()
        self._kubelet: set[asyncio.Task[None]] = set()

    def halt(self) -> None:
        """Pods neither start nor end from now on."""
        for task in self._kubelet:
            task.cancel()

    def compact(self) -> None:
        """Forget all history: a watch from before now cannot be had."""
        self.compacted = self.version

    def put(self, resource: str, thing: Object) -> Object:
        """Make the object, or change it."""
        self.version += 1
        meta = thing.setdefault("metadata", {})
        known = self.objects[resource].get(meta["name"])
        thing = {"apiVersion": "v1", "kind": KINDS[resource], **thing}
        meta.setdefault("uid", str(uuid.uuid4()))
        meta["namespace"], meta["resourceVersion"] = NAMESPACE, str(self.version)
        self.objects[resource][meta["name"]] = thing
        self._tell(resource, "MODIFIED" if known else "ADDED", thing)
        return thing

    def drop(self, resource: str, name: str) -> None:
        """The object is gone, at once."""
        thing = self.objects[resource].pop(name, None)
        if thing is not None:
            self.version += 1
            thing = copy.deepcopy(thing)
            thing["metadata"]["resourceVersion"] = str(self.version)
            self._tell(resource, "DELETED", thing)

    def pod(self, name: str) -> Object:
        return self.objects["pods"][name]

    def bind_pod(self, name: str, node: str) -> None:
        """The scheduler has found a place for it."""
        pod = copy.deepcopy(self.pod(name))
        pod["spec"]["nodeName"] = node
        self.put("pods", pod)

    def take_up_pod(self, name: str) -> None:
        """The kubelet knows of it, and works on it."""
        waiting = {"waiting": {"reason": "ContainerCreating"}}
        self._status(name, startTime=timestamp(), containerStatuses=[_container(waiting)])

    def run_pod(self, name: str) -> None:
        """The kubelet has started the pod's containers."""
        running = _container({"running": {}}, self.pod(name))
        self._status(name, phase="Running", startTime=timestamp(), containerStatuses=[running])

    def end_pod(self, name: str, code: int, reason: str = "", message: str = "") -> None:
        """The worker's process has ended; the pod stays.

        Args:
            message: the termination message; by default edl has ended the process.
        """
        told = reason or ("Completed" if code == 0 else "Error")
        terminated = {
            "exitCode": code,
            "reason": told,
            "finishedAt": timestamp(),
            "message": message or termination_message(code),
        }
        # As a kubelet does: the container's end comes first, the pod's in a moment.
        self._status(name, phase="Running", containerStatuses=[_container({"terminated": terminated})])
        phase = "Succeeded" if code == 0 else "Failed"
        self._status(name, phase=phase, containerStatuses=[_container({"terminated": terminated})])

    def hold_pod(self, name: str, reason: str, message: str) -> None:
        """The pod does not get to run."""
        if reason == "Unschedulable":
            condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
            self._status(name, phase="Pending", conditions=[condition])
        else:
            waiting = {"waiting": {"reason": reason, "message": message}}
            self._status(name, phase="Pending", conditions=[], containerStatuses=[_container(waiting)])

    def preempt(self, name: str, reason: str = "PreemptionByScheduler", grace: float = 1) -> None:
        """The scheduler needs the place."""
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "message": "edl-scheduler: preempting to accommodate a higher priority pod",
        }
        self._status(name, conditions=[condition])
        self.delete_pod(name, grace)

    def delete_pod(self, name: str, grace: float = 1) -> None:
        """Delete the pod: it has its grace period, then it is killed and removed. 0: at once."""
        if grace == 0:
            self.drop("pods", name)
            return
        pod = self.pod(name)
        if pod["metadata"].get("deletionTimestamp"):
            return
        pod = copy.deepcopy(pod)
        pod["metadata"]["deletionTimestamp"] = timestamp(grace)
        pod["metadata"]["deletionGracePeriodSeconds"] = int(grace)
        self.put("pods", pod)
        self._keep(self._finish(name, pod["metadata"]["uid"], grace))

    async def _finish(self, name: str, uid: str, grace: float) -> None:
        await asyncio.sleep(grace * self.second * self.random.uniform(0.1, 1.0))
        if (pod := self.objects["pods"].get(name)) and pod["metadata"]["uid"] == uid:
            if "running" in json.dumps(pod["status"].get("containerStatuses", "")):
                self.end_pod(name, 137 if self.random.random() < 0.5 else 0)
            self.drop("pods", name)

    async def _start(self, name: str, uid: str) -> None:
        await asyncio.sleep(self.second * self.random.uniform(0.0, 0.5))
        pod = self.objects["pods"].get(name)
        if self.autorun and pod and pod["metadata"]["uid"] == uid and pod["status"]["phase"] == "Pending":
            self.run_pod(name)

    def _status(self, name: str, **status: Any) -> None:
        pod = copy.deepcopy(self.pod(name))
        pod["status"] = {**pod.get("status", {}), **status}
        self.put("pods", pod)

    def _tell(self, resource: str, kind: str, thing: Object) -> None:
        self.history.append((self.version, resource, kind, copy.deepcopy(thing)))
        self._wake()

    def _wake(self) -> None:
        async def wake() -> None:
            async with self._news:
                self._news.notify_all()

        self._keep(wake())

    def _keep(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._kubelet.add(task)
        task.add_done_callback(self._kubelet.discard)


def _container(state: Object, pod: Object | None = None) -> Object:
    labels = (pod or {}).get("metadata", {}).get("labels") or {}
    return {
        "name": labels.get("app.kubernetes.io/component", "worker"),
        "state": state,
        "ready": "running" in state,
        "restartCount": 0,
    }


def timestamp(seconds: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
