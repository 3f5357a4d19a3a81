"""The StatefulSet of a release's parameter servers: how many there are to be.

The chart makes it, and the master changes nothing of it but that number.

Promise: while `close` has not been called the number is what was asked for last, however long the API is out,
and whoever else writes it: an upgrade by Helm writes the number that was there when it was rendered. What the
API refuses, people are told.
"""

from __future__ import annotations

from collections.abc import Callable

from edl.errors import ConfigError
from edl.kubernetes.client import SOON, Api
from edl.kubernetes.informer import Informer, Object
from edl.master.backends.base import Tasks
from edl.master.backends.kubernetes.release import Place
from edl.master.backends.kubernetes.retry import until_answered
from edl.master.core import events as ev

PART = "the number of parameter servers"
GROUP = "apis/apps/v1"


class ServerSet:
    """That of one release. Nothing is done before a number is asked for.

    Args:
        emit: takes Degraded.
    """

    def __init__(self, api: Api, place: Place, emit: Callable[[ev.Event], None]):
        self._api, self._emit = api, emit
        self._path = place.path("statefulsets", f"{place.names.servers}/scale", GROUP)
        only = {"fieldSelector": f"metadata.name={place.names.servers}"}
        path = place.path("statefulsets", group=GROUP)
        self._informer = Informer(api, path, only, self._changed, forgiving=False)
        self._there: int | None = None  # the number, as it was last seen or written
        self._sightings = 0  # how often it was seen
        self._between: tuple[int, int] | None = None  # it is to be
        self._writes = False
        self._tasks = Tasks()

    @property
    def running(self) -> int | None:
        """How many there are to be now; None: nobody has looked yet."""
        return self._there

    def scale(self, servers: int) -> None:
        """From now on there are to be so many."""
        self.keep_between(servers, servers)

    def keep_between(self, least: int, most: int) -> None:
        """No fewer and no more than that, and else as many as there are."""
        if self._between is None:
            self._tasks.keep(PART, self._informer.run, self._emit, self._api.pace.status)
        self._between = least, most
        self._settle()

    async def close(self) -> None:
        """Leave the number to others."""
        await self._tasks.close()

    def _changed(self, thing: Object, gone: bool) -> None:
        self._sightings += 1
        self._there = None if gone else int(thing["spec"].get("replicas") or 0)
        self._settle()

    @property
    def _wanted(self) -> int | None:
        """Another number than there is; None: it may stay."""
        if self._there is None or self._between is None:
            return None
        wanted = min(max(self._there, self._between[0]), self._between[1])
        return wanted if wanted != self._there else None

    def _settle(self) -> None:
        if self._wanted is not None and not self._writes:
            self._writes = True
            self._tasks.start(self._write(), lambda error: self._emit(ev.Degraded(PART, str(error))))

    async def _write(self) -> None:
        api, wanted = self._api, self._wanted
        try:
            while (wanted := self._wanted) is not None:
                body, sightings = {"spec": {"replicas": wanted}}, self._sightings
                await until_answered(api.pace, lambda body=body: api.patch(self._path, body, SOON))  # type: ignore[misc]
                # What was seen meanwhile may be what somebody wrote after us. If it is older, the same is
                # written again.
                if sightings == self._sightings:
                    self._there = wanted
            self._emit(ev.Degraded(PART, ""))
        except ConfigError as error:
            self._emit(ev.Degraded(PART, f"the StatefulSet is not scaled to {wanted}: {error}"))
        finally:
            self._writes = False
