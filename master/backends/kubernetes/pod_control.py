# SPDX-License-Identifier: Apache-2.0
"""Creation and deletion of pods: each request is repeated until it succeeds or is not needed.

A create may be refused for a reason that holds for all: a quota, a right, a template of a wrong shape. Then
the others wait, and one of them retries from time to time on behalf of all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import structlog

from edl.errors import ConfigError
from edl.kubernetes import pods
from edl.kubernetes.client import Api, ApiError
from edl.kubernetes.rate_limit import Backoff
from edl.master.backends.base import Emit, Tasks, format_error
from edl.master.backends.kubernetes.release import Place
from edl.master.backends.kubernetes.retry import refusal
from edl.master.core import events as ev

log = structlog.get_logger()

DELETIONS = "pod deletion"  # the part that is Degraded while deletions are refused


class PodDeletion:
    """Deletes pods.

    Args:
        emit: called with Degraded when the API refuses.
    """

    def __init__(self, api: Api, place: Place, tasks: Tasks, emit: Emit):
        self._api, self._place, self._pace = api, place, api.pace
        self._tasks, self._emit = tasks, emit
        self._refused: set[str] = set()  # uids of pods

    def discard(self, pod: pods.Pod, by_force: bool = False) -> None:
        """Delete an unneeded pod in the background; `by_force`: its node is lost."""
        deletion = self.delete(pod, by_force=by_force)
        self._tasks.start(deletion, lambda error: self._failed(pod, format_error(error)))

    async def delete(self, pod: pods.Pod, grace: float = 0.0, by_force: bool = False) -> None:
        """Delete this pod, but not a different pod of its name.

        The grace period is at least 1 s: with 0, the API would remove the object of a pod that still runs.
        Only a pod whose node is lost is removed `by_force`, because no kubelet would ever confirm its end.
        """
        name = pod["metadata"]["name"]
        seconds = 0 if by_force else max(1, math.ceil(grace))
        body = {"gracePeriodSeconds": seconds, "preconditions": {"uid": pods.uid(pod)}}
        backoff = Backoff(self._pace.first_pause, self._pace.blocked)
        while True:
            try:
                await self._api.delete(self._place.path("pods", name), body)
            except ApiError as error:
                if error.status not in (404, 409):  # 409: a different pod has the name
                    log.warning(f"pod {name} cannot be deleted: {error}")
                    if not error.out:
                        self._failed(pod, refusal(error))
                    await asyncio.sleep(max(backoff.next(), error.retry_after))
                    continue
            if pods.uid(pod) in self._refused:
                self._refused.remove(pods.uid(pod))
                if not self._refused:
                    self._emit(ev.Degraded(DELETIONS, ""))
            return

    def _failed(self, pod: pods.Pod, why: str) -> None:
        self._refused.add(pods.uid(pod))
        self._emit(ev.Degraded(DELETIONS, f"pod {pod['metadata']['name']} cannot be deleted: {why}"))


class PodCreation:
    """Gate of all creates: open, or blocked for a reason that holds for all.

    Args:
        blocked: called with the reason each time that a create is refused.
    """

    def __init__(self, api: Api, place: Place, blocked: Callable[[str], None]):
        self._api, self._place, self._pace, self._tell = api, place, api.pace, blocked
        self.blocked, self._retry_at = "", 0.0  # why creates are refused, and when to try again
        self._backoff = Backoff(max(self._pace.first_pause, self._pace.outage), self._pace.blocked)
        self._probing = asyncio.Lock()
        self._room = asyncio.Event()  # there may be room, or a waiting pod may not be needed

    async def create(self, render: Callable[[], pods.Pod], needed: Callable[[], bool]) -> pods.Pod | None:
        """Create a pod while it is needed. None if it is not needed, or a different pod has its name.

        Args:
            render: returns the pod to create; may raise ConfigError.
            needed: called before each attempt.
        """
        while needed():
            if not self.blocked:
                try:
                    return await self._try(render)
                except _Refused:
                    continue
            async with self._probing:
                if self.blocked and needed():
                    await self._until_retry(needed)
                    if needed():
                        try:
                            return await self._try(render)
                        except _Refused:
                            continue
        return None

    def look_again(self) -> None:
        """Look again, because a pod is gone, or a waiting pod is not needed."""
        self._room.set()

    def retry(self) -> None:
        """Retry now, because a create that was refused may succeed."""
        self._retry_at = 0.0
        self._room.set()

    async def get(self, name: str) -> pods.Pod | None:
        """Read the pod of that name; None if it is gone, or if the API refuses or is unavailable."""
        try:
            return await self._api.get(self._place.path("pods", name))
        except ApiError as error:
            if error.status != 404:
                self._block(_blocked_by(error, name))
            return None

    async def _try(self, render: Callable[[], pods.Pod]) -> pods.Pod | None:
        """Try once to create a pod. None if a different pod has its name.

        Raises:
            _Refused: the pod cannot be rendered, or the API refuses it; `blocked` then holds the reason.
        """
        try:
            pod = render()
        except ConfigError as error:
            self._block(f"the worker's pod cannot be rendered: {error}")
            raise _Refused from error
        try:
            made = await self._api.create(self._place.path("pods"), pod)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return None
            self._block(_blocked_by(error, pod["metadata"]["name"]))
            raise _Refused from error
        if self.blocked:
            log.info("workers can be created again")
        self.blocked = ""
        self._backoff.reset()
        return made

    async def _until_retry(self, needed: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while needed() and (pause := self._retry_at - loop.time()) > 0:
            self._room.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._room.wait()
            except TimeoutError:
                return
            # A pod that is gone leaves room. If pods end all the time, this does not retry more often.
            self._retry_at = min(self._retry_at, loop.time() + self._pace.outage)

    def _block(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if why != self.blocked:
            log.warning(f"workers cannot be created: {why}")
        if not self.blocked or now >= self._retry_at:  # once for a burst of refusals
            self._retry_at = now + self._backoff.next()
        self.blocked = why
        self._tell(why)


class _Refused(Exception):
    """A create was refused; `PodCreation.blocked` has the reason."""


def _blocked_by(error: ApiError, name: str) -> str:
    """Describe why no pod can be created now, in the same words for all pods."""
    message = error.message.replace(f'pods "{name}" is forbidden: ', "").replace(name, "the pod")
    if error.out:
        return f"the Kubernetes API is unavailable ({error.message})"
    if error.status == 403 and "exceeded quota" in message:
        return message
    return refusal(ApiError("", error.status, error.reason, message))
