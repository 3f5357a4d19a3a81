"""The StatefulSet of a release's parameter servers: how many there are to be.

The chart makes it, and the master changes nothing of it but that number.

Promise: the last number that was asked for is the one that is there in the end, however long the API is out;
what it refuses, people are told.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from edl.errors import ConfigError
from edl.kubernetes.client import SOON, Api
from master.backends.base import Tasks
from master.backends.kubernetes.release import Place
from master.backends.kubernetes.retry import until_answered
from master.core import events as ev

PART = "the number of parameter servers"


class ServerSet:
    """That of one release.

    Args:
        emit: takes Degraded.
    """

    def __init__(self, api: Api, place: Place, emit: Callable[[ev.Event], None]):
        self._api, self._emit = api, emit
        self._path = place.path("statefulsets", f"{place.names.servers}/scale", "apis/apps/v1")
        self._newest = 0
        self._tasks = Tasks()

    def scale(self, servers: int) -> None:
        """From now on there are to be so many."""
        self._newest = servers
        self._tasks.start(self._patched(), self._failed)

    def keep_between(self, least: int, most: int) -> None:
        """No fewer and no more than that, and else as many as there are."""
        self._tasks.start(self._kept_between(least, most), self._failed)

    async def _kept_between(self, least: int, most: int) -> None:
        async def read() -> None:
            found = await until_answered(self._api.pace, lambda: self._api.get(self._path))
            there = int((found.get("spec") or {}).get("replicas") or 0)
            if there != (wanted := min(max(there, least), most)):
                self._newest = wanted
                await self._patch()

        await self._told(read())

    async def _patched(self) -> None:
        await self._told(self._patch())

    async def _patch(self) -> None:
        await until_answered(
            self._api.pace, lambda: self._api.patch(self._path, {"spec": {"replicas": self._newest}}, SOON)
        )

    async def _told(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self._emit(ev.Degraded(PART, ""))
        except ConfigError as error:
            self._emit(ev.Degraded(PART, f"the StatefulSet is not scaled to {self._newest}: {error}"))

    def _failed(self, error: Exception) -> None:
        self._emit(ev.Degraded(PART, str(error)))
