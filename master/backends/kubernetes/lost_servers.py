# SPDX-License-Identifier: Apache-2.0
"""Pods of servers on lost nodes: they are removed by force, so that their StatefulSet replaces them.

Kubernetes deletes the pods of a node that is not ready. A StatefulSet waits until the node's kubelet confirms
their end, which a node without power never does, and the ring waits for the rows of such a server meanwhile.

Two processes of one server do no harm: a server that is restarted has a new incarnation, calls for an earlier
one are refused by both, and the name of the server leads to the new pod.
"""

from __future__ import annotations

import asyncio

import structlog

from edl.kubernetes import pods
from edl.kubernetes.client import Api
from edl.kubernetes.informer import Informer
from edl.master.backends.base import Emit, Tasks
from edl.master.backends.kubernetes.pod_control import PodDeletion
from edl.master.backends.kubernetes.release import Place

log = structlog.get_logger()


class LostServers:
    """The pods of a job's parameter servers whose end is overdue.

    Args:
        emit: called with Degraded when the API refuses a deletion.
    """

    def __init__(self, api: Api, place: Place, tasks: Tasks, emit: Emit):
        self._overdue = api.pace.overdue
        self._deletion = PodDeletion(api, place, tasks, emit)
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by uid of a pod that is being deleted
        chosen = f"{pods.JOB}={place.fullname},{pods.COMPONENT}={pods.SERVER}"
        self._informer = Informer(api, place.path("pods"), {"labelSelector": chosen}, self._changed)

    async def run(self) -> None:
        """Watch the pods, forever."""
        await self._informer.run()

    def close(self) -> None:
        """Remove no further pod."""
        for timer in self._timers.values():
            timer.cancel()

    def _changed(self, pod: pods.Pod, gone: bool) -> None:
        uid = pods.uid(pod)
        if gone:
            if uid in self._timers:
                self._timers.pop(uid).cancel()
        elif pods.deleting(pod) and pods.node_lost(pod) and uid not in self._timers:
            grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            loop = asyncio.get_running_loop()
            self._timers[uid] = loop.call_later(grace + self._overdue, self._remove, pod)

    def _remove(self, pod: pods.Pod) -> None:
        name, node = pod["metadata"]["name"], pods.node(pod)
        log.warning(f"pod {name} is removed by force: its node {node} is lost, and does not confirm its end")
        self._deletion.discard(pod, by_force=True)
