# SPDX-License-Identifier: Apache-2.0
"""Reuse of a pod by the next worker after a crash.

Process 1 of a worker's pod is a supervisor (trainer/supervisor.py). When the worker's process crashes, the
supervisor has the next process ready, which asks for a worker id. The core sees the usual events: one worker
is gone, with its cause, and a worker with the next id is created. Only this module knows that no new pod is
needed.

The stream of a crashed process ends before the next process can ask. So a worker that is created while a
different worker's process is exiting waits a moment for its pod, before a new pod is created.

The labels of the pod are changed before the process is notified, so the next master reads the right worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.contract.phases import WorkerState
from edl.kubernetes import pods
from edl.kubernetes.client import URGENT, Api, ApiError
from edl.master.backends.kubernetes.exit_cause import NOT_ITS_FAULT, OOM_KILLED, out_of_memory
from edl.master.backends.kubernetes.pod_view import WorkerPod
from edl.master.backends.kubernetes.release import Place
from edl.master.backends.kubernetes.worker_pods import WorkerPods
from edl.master.core import events as ev

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class IdlePod:
    """A pod whose worker is gone, and the future that receives the id of its next worker."""

    left_by: WorkerPod
    taken: asyncio.Future[WorkerId]


class PodReuse:
    """The idle pods of a run, and the workers that wait for an idle pod.

    Args:
        supervised: whether pods outlive a worker's process (elastic.prefork).
    """

    def __init__(self, api: Api, place: Place, workers: WorkerPods, supervised: bool):
        self._api, self._place, self._workers, self._supervised = api, place, workers, supervised
        self._idle: deque[IdlePod] = deque()
        self._waiting: deque[asyncio.Future[IdlePod | None]] = deque()
        workers.on_end.append(self._look_again)

    async def offer(self, ended: ev.Gone) -> WorkerId | None:
        """Offer an idle pod, and wait for the id of its next worker; None if none is needed.

        Args:
            ended: how the previous process ended; its `worker` is the one that the pod was created for.
        """
        w = self._workers.in_pod(self._place.names.worker(ended.worker))
        if w is None or not w.may_go_on:
            return None
        idle = IdlePod(w, asyncio.get_running_loop().create_future())
        self._fill(idle)
        if not w.ended:
            self._workers.end(w, _cause(w, ended))
        try:
            async with asyncio.timeout(self._api.pace.offer):
                return await idle.taken
        except TimeoutError:
            return None
        finally:
            idle.taken.cancel()
            with suppress(ValueError):
                self._idle.remove(idle)

    async def take(self, w: WorkerPod) -> bool:
        """Start the worker in a pod whose process has exited or is exiting. False if no pod is free."""
        while (idle := await self._next()) is not None:
            if not w.needs_pod:
                self._fill(idle)
                return False
            if await self._move(w, idle):
                return True
        return False

    def _fill(self, idle: IdlePod) -> None:
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_result(idle)
                return
        if not idle.taken.done():
            self._idle.append(idle)

    def _look_again(self) -> None:
        """Release waiting workers if fewer pods will become idle than workers wait."""
        while len(self._waiting) > self._workers.ending:
            if not (waiting := self._waiting.pop()).done():
                waiting.set_result(None)

    async def _next(self) -> IdlePod | None:
        if self._idle:
            return self._idle.popleft()
        if not self._supervised or self._workers.ending <= len(self._waiting):
            return None
        waiting: asyncio.Future[IdlePod | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await asyncio.wait((waiting,), timeout=self._api.pace.mercy)
        if waiting.done():
            return waiting.result()
        self._waiting.remove(waiting)
        return None

    async def _move(self, w: WorkerPod, idle: IdlePod) -> bool:
        """Label the pod with its next worker, and notify the process that waits in it."""
        before = idle.left_by
        if idle.taken.done() or not before.may_go_on:
            return False
        assert before.pod is not None
        name = before.pod["metadata"]["name"]
        labels = {
            pods.WORKER_ID: str(w.id),
            pods.PLACE: str(pods.place(before.pod)),
            pods.RANK: None,
            pods.STATE: WorkerState.STARTING.value,
        }
        try:
            patch = {"metadata": {"uid": before.uid, "labels": labels}}
            pod = await self._api.patch(self._place.path("pods", name), patch, URGENT)
        except ApiError as error:
            log.warning(f"worker {w.id} cannot reuse pod {name}, and gets a new pod: {error}")
            return False
        if w.ended:  # the worker was deleted during the request
            return False
        self._workers.move(w, before, pod)
        if not idle.taken.done():  # else the pod ends, or a later process of it asks again
            idle.taken.set_result(w.id)
        return True


def _cause(w: WorkerPod, ended: ev.Gone) -> ev.Gone:
    """Convert the end that the supervisor reported to the end of a worker."""
    assert w.pod is not None
    why = out_of_memory(w.pod) if ended.why == OOM_KILLED else NOT_ITS_FAULT.get(ended.code or 0, "")
    return replace(ended, worker=w.id, free=ended.code == WorkerExit.PEER_BROKEN, why=why)
