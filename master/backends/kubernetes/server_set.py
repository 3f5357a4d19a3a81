# SPDX-License-Identifier: Apache-2.0
"""The StatefulSet of a release's parameter servers, and its number of replicas.

The chart creates it, and the master changes only the number of replicas.

Pods of servers on lost nodes are replaced (`lost_servers`).

Promise: until `close` is called, the number is the one requested last. This holds after outages of the API,
and if others write the number: an upgrade by Helm writes the number from when it was rendered. A refusal of
the API is reported as `Degraded`.
"""

from __future__ import annotations

from collections.abc import Callable

from edl.errors import ConfigError
from edl.kubernetes.client import SOON, Api
from edl.kubernetes.informer import Informer, Object
from edl.master.backends.base import Tasks
from edl.master.backends.kubernetes.lost_servers import LostServers
from edl.master.backends.kubernetes.release import Place
from edl.master.backends.kubernetes.retry import until_answered
from edl.master.core import events as ev

PART, PODS = "the number of parameter servers", "the pods of parameter servers"
GROUP = "apis/apps/v1"


class ServerSet:
    """The StatefulSet of one release. It is neither watched nor changed before a number is requested.

    Args:
        emit: called with Degraded.
    """

    def __init__(self, api: Api, place: Place, emit: Callable[[ev.Event], None]):
        self._api, self._emit = api, emit
        self._path = place.path("statefulsets", f"{place.names.servers}/scale", GROUP)
        only = {"fieldSelector": f"metadata.name={place.names.servers}"}
        path = place.path("statefulsets", group=GROUP)
        self._informer = Informer(api, path, only, self._changed, forgiving=False)
        self._there: int | None = None  # the number, as it was last seen or written
        self._sightings = 0  # how often it was seen
        self._between: tuple[int, int] | None = None  # the requested least and greatest number
        self._writes = False
        self._tasks = Tasks()
        self._lost = LostServers(api, place, self._tasks, emit)

    @property
    def running(self) -> int | None:
        """The present number of replicas in the spec; None until it was read."""
        return self._there

    def scale(self, servers: int) -> None:
        """Request this number of servers."""
        self.keep_between(servers, servers)

    def keep_between(self, least: int, most: int) -> None:
        """Request a number between `least` and `most`; the present number stays if it is in this range."""
        if self._between is None:
            self._tasks.keep(PART, self._informer.run, self._emit, self._api.pace.status)
            self._tasks.keep(PODS, self._lost.run, self._emit, self._api.pace.status)
        self._between = least, most
        self._write_if_needed()

    async def close(self) -> None:
        """Stop watching and changing the number."""
        self._lost.close()
        await self._tasks.close()

    def _changed(self, thing: Object, gone: bool) -> None:
        self._sightings += 1
        self._there = None if gone else int(thing["spec"].get("replicas") or 0)
        self._write_if_needed()

    @property
    def _wanted(self) -> int | None:
        """The number to write; None if the present number may stay or is unknown."""
        if self._there is None or self._between is None:
            return None
        wanted = min(max(self._there, self._between[0]), self._between[1])
        return wanted if wanted != self._there else None

    def _write_if_needed(self) -> None:
        if self._wanted is not None and not self._writes:
            self._writes = True
            self._tasks.start(self._write(), lambda error: self._emit(ev.Degraded(PART, str(error))))

    async def _write(self) -> None:
        api, wanted = self._api, self._wanted
        try:
            while (wanted := self._wanted) is not None:
                body, sightings = {"spec": {"replicas": wanted}}, self._sightings
                await until_answered(api.pace, lambda body=body: api.patch(self._path, body, SOON))  # type: ignore[misc]
                # A number seen during the write may have been written by others after ours, so it is kept.
                # If it is older than ours, the loop writes the same number again.
                if sightings == self._sightings:
                    self._there = wanted
            self._emit(ev.Degraded(PART, ""))
        except ConfigError as error:
            self._emit(ev.Degraded(PART, f"the StatefulSet is not scaled to {wanted}: {error}"))
        finally:
            self._writes = False
