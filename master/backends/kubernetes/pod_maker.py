"""Making workers' pods: each create is tried until its pod is there, or nobody wants it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.errors import ConfigError
from edl.kubernetes import pods
from edl.kubernetes.client import Api, ApiError, Backoff
from master.backends.kubernetes.release import Place
from master.backends.kubernetes.retry import refusal
from master.backends.kubernetes.workers import Worker, Workers
from master.core import events as ev

log = structlog.get_logger()


class Maker:
    """Makes pods.

    When one create is refused for a reason that holds for all (a quota, a right), the others wait,
    and one asks now and then for all of them.

    Args:
        stamped: the pod of a worker as it is to be made; raises ConfigError when there can be none.
        known: is shown each pod that a create was answered with, before anything is said of it.
    """

    def __init__(
        self,
        api: Api,
        place: Place,
        workers: Workers,
        stamped: Callable[[Worker], pods.Pod],
        known: Callable[[pods.Pod], None],
    ):
        self._api, self._place, self._pace = api, place, api.pace
        self._workers, self._stamped, self._known = workers, stamped, known
        self._blocked, self._retry_at = "", 0.0  # why creates are refused, and when to try again
        self._backoff = Backoff(max(self._pace.first_pause, self._pace.outage), self._pace.blocked)
        self._probing = asyncio.Lock()

    async def make(self, w: Worker) -> None:
        """Until its pod is there; one that is not wanted any more is said to be gone, if it never was."""
        while not w.unwanted and not w.uid:  # the watch may know of a pod whose create was never answered
            if not self._blocked:
                if await self._try(w):
                    break
                continue
            self._workers.delay(w, self._blocked)
            async with self._probing:
                if self._blocked and not w.unwanted and not w.uid:
                    await self._until_retry()
                    if w.unwanted or w.uid or await self._try(w):
                        break
        w.making = False
        if not w.uid and not w.over.is_set():
            self._workers.end(w, ev.Gone(w.id, free=True, why="it was not started yet"))

    def retry(self) -> None:
        """What was refused may not be by now."""
        self._retry_at = 0.0
        self._workers.room.set()

    async def _until_retry(self) -> None:
        loop, room = asyncio.get_running_loop(), self._workers.room
        while (pause := self._retry_at - loop.time()) > 0:
            room.clear()
            try:
                async with asyncio.timeout(pause):
                    await room.wait()
            except TimeoutError:
                return
            # A pod is gone and leaves room, but pods that go all the time are no reason to hurry.
            self._retry_at = min(self._retry_at, loop.time() + self._pace.outage)

    async def _try(self, w: Worker) -> bool:
        """One create. True: no other is needed, the pod is there or never will be."""
        name = self._name(w.id)
        try:
            pod = await self._api.create(self._place.path("pods"), self._stamped(w))
        except ConfigError as error:
            self._block(f"the worker's pod cannot be made: {error}")
            return False
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return await self._meet(w, name)
            self._block(_blocked_by(error, name))
            return False
        self._unblock()
        self._is_there(w, pod)
        return True

    async def _meet(self, w: Worker, name: str) -> bool:
        """A pod of that name exists. It is ours if a create came through whose answer did not."""
        try:
            pod = await self._api.get(self._place.path("pods", name))
        except ApiError as error:
            if error.status != 404:
                self._block(_blocked_by(error, name))
            return False
        run_id = self._workers.run_id
        if w.uid or pods.of(pod) == (run_id, w.id):  # whatever has become of it meanwhile
            self._is_there(w, pod)
            return True
        run = pods.of(pod)[0]
        whose = f"it belongs to run {run}" if run and run != run_id else "this master did not make it"
        self._workers.give_up(w, Reason.PodExists, f"there is a pod {name} already, and {whose}")
        return True

    def _is_there(self, w: Worker, pod: pods.Pod) -> None:
        if not w.uid:
            self._known(pod)
            self._workers.made(w, pod)

    def _block(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if why != self._blocked:
            log.warning(f"workers cannot be made: {why}")
        if not self._blocked or now >= self._retry_at:  # once for a burst of refusals
            self._retry_at = now + self._backoff.next()
        self._blocked = why
        for w in self._workers:
            if w.making:
                self._workers.delay(w, why)

    def _unblock(self) -> None:
        if self._blocked:
            log.info("workers can be made again")
        self._blocked = ""
        self._backoff.reset()

    def _name(self, worker: WorkerId) -> str:
        return pods.name(self._place.fullname, worker)


def _blocked_by(error: ApiError, name: str) -> str:
    """Why no pod can be made now, the same words for all pods."""
    message = error.message.replace(f'pods "{name}" is forbidden: ', "").replace(name, "the pod")
    if error.out:
        return f"the Kubernetes API is in trouble ({error.message})"
    if error.status == 403 and "exceeded quota" in message:
        return message
    return refusal(ApiError("", error.status, error.reason, message))
