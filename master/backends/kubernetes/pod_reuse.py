"""Pods that outlive a worker's process, and who lives in them next.

Process 1 of such a pod is a supervisor (trainer/supervisor.py): when the worker's process crashes, it
has the next one ready, which asks for the pod's place. To the core that is what it always is: one worker is
gone, with its cause, and another one is created, with the next id. Only this module
knows that no pod has to be.

The stream of a process that crashes ends before its successor can ask. So a worker that is created while
another one's process is ending waits for that a moment, before it is given a pod of its own.

A pod's labels say who lives in it before anybody is told to: the next master reads them.
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
from edl.master.backends.kubernetes.release import Place
from edl.master.backends.kubernetes.workers import WorkerPod, Workers
from edl.master.core import events as ev

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class Vacancy:
    """A pod whose worker is gone, and who is told which one is the next."""

    left_by: WorkerPod
    taken: asyncio.Future[WorkerId]


class Places:
    """The pods of a run in which somebody waits to be a worker, and the workers that wait for such a pod.

    Args:
        supervised: whether the pods outlive a worker's process at all.
    """

    def __init__(self, api: Api, place: Place, workers: Workers, supervised: bool):
        self._api, self._place, self._workers, self._supervised = api, place, workers, supervised
        self._vacant: deque[Vacancy] = deque()
        self._waiting: deque[asyncio.Future[Vacancy | None]] = deque()
        workers.on_end.append(self._look_again)

    async def offer(self, ended: ev.Gone) -> WorkerId | None:
        """A process waits in a pod, to be the next worker there. Returns which one; None: none is needed.

        Args:
            ended: how the process before it ended; of the worker that the pod was made for.
        """
        w = self._workers.in_pod(self._place.names.worker(ended.worker))
        if w is None or not w.may_go_on:
            return None
        vacancy = Vacancy(w, asyncio.get_running_loop().create_future())
        self._fill(vacancy)
        if not w.over.is_set():
            self._workers.end(w, _cause(w, ended))
        try:
            async with asyncio.timeout(self._api.pace.offer):
                return await vacancy.taken
        except TimeoutError:
            return None
        finally:
            vacancy.taken.cancel()
            with suppress(ValueError):
                self._vacant.remove(vacancy)

    async def take(self, w: WorkerPod) -> bool:
        """Have a worker live in a pod that somebody has left, or is about to leave. False: there is none."""
        while (vacancy := await self._next()) is not None:
            if not w.needs_pod:
                self._fill(vacancy)
                return False
            if await self._move(w, vacancy):
                return True
        return False

    def _fill(self, vacancy: Vacancy) -> None:
        while self._waiting:
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_result(vacancy)
                return
        if not vacancy.taken.done():
            self._vacant.append(vacancy)

    def _look_again(self) -> None:
        """A pod has ended, so one place less is to be expected."""
        while len(self._waiting) > self._workers.ending:
            if not (waiting := self._waiting.pop()).done():
                waiting.set_result(None)

    async def _next(self) -> Vacancy | None:
        if self._vacant:
            return self._vacant.popleft()
        if not self._supervised or self._workers.ending <= len(self._waiting):
            return None
        waiting: asyncio.Future[Vacancy | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await asyncio.wait((waiting,), timeout=self._api.pace.mercy)
        if waiting.done():
            return waiting.result()
        self._waiting.remove(waiting)
        return None

    async def _move(self, w: WorkerPod, vacancy: Vacancy) -> bool:
        """Write whose pod it is now, and tell who waits in it."""
        before = vacancy.left_by
        if vacancy.taken.done() or not before.may_go_on:
            return False
        assert before.pod is not None
        name = before.pod["metadata"]["name"]
        labels = {
            pods.WORKER_ID: str(w.id), pods.PLACE: str(pods.place(before.pod)),
            pods.RANK: None, pods.STATE: WorkerState.STARTING.value,
        }  # fmt: skip
        try:
            patch = {"metadata": {"uid": before.uid, "labels": labels}}
            pod = await self._api.patch(self._place.path("pods", name), patch, URGENT)
        except ApiError as error:
            log.warning(f"worker {w.id} cannot live in pod {name}, and is given another one: {error}")
            return False
        if w.over.is_set():  # meanwhile it was not needed any more
            return False
        self._workers.move(w, before, pod)
        if not vacancy.taken.done():  # else its pod ends, or another process asks for its place
            vacancy.taken.set_result(w.id)
        return True


def _cause(w: WorkerPod, ended: ev.Gone) -> ev.Gone:
    """What its supervisor has told of its end, as it is told of a pod's."""
    assert w.pod is not None
    why = out_of_memory(w.pod) if ended.why == OOM_KILLED else NOT_ITS_FAULT.get(ended.code or 0, "")
    return replace(ended, worker=w.id, free=ended.code == WorkerExit.PEER_BROKEN, why=why)
