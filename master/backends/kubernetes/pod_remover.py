"""Deleting pods, each until the API has agreed."""

from __future__ import annotations

import asyncio
import math

import structlog

from edl.kubernetes import pods
from edl.kubernetes.client import Api, ApiError, Backoff
from master.backends.kubernetes.release import Place
from master.backends.kubernetes.workers import Worker

log = structlog.get_logger()


class Remover:
    """Deletes pods."""

    def __init__(self, api: Api, place: Place):
        self._api, self._place, self._pace = api, place, api.pace

    async def remove(self, w: Worker, grace: float) -> None:
        """Delete a worker's pod, unless it ends by itself in a moment.

        A worker that has crashed is known by its stream before its pod has ended. A pod that ends by
        itself keeps its log and its exit code; a deleted one takes them along.
        """
        if w.seen and not w.disrupted:
            try:
                async with asyncio.timeout(self._pace.mercy):
                    await w.over.wait()
            except TimeoutError:
                pass
        if not w.over.is_set():
            assert w.pod is not None
            w.asked = True
            await self.delete(w.pod, grace)

    async def delete(self, pod: pods.Pod, grace: float = 0.0) -> None:
        """Delete this pod, not another one of its name.

        With no grace the API would forget a pod that still runs: it is 1 s at least.
        """
        name = pod["metadata"]["name"]
        body = {"gracePeriodSeconds": max(1, math.ceil(grace)), "preconditions": {"uid": pods.uid(pod)}}
        backoff = Backoff(self._pace.first_pause, self._pace.blocked)
        while True:
            try:
                await self._api.delete(self._place.path("pods", name), body)
                return
            except ApiError as error:
                if error.status in (404, 409):  # it is gone already, or by now it is another one
                    return
                log.warning(f"pod {name} cannot be deleted: {error}")
                await asyncio.sleep(max(backoff.next(), error.retry_after))
