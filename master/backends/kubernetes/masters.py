"""The pods of a job's masters: who else there is, and which of them the Service leads to.

The one that acts has a label that the Service selects by, and is the last that its Deployment deletes when it
has to delete one. Who takes over gives itself the label, and takes it from the others: also from one whose
node is lost, whose pod stays in the API for as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any

from edl.kubernetes import pods
from edl.kubernetes.client import SOON, Api, ApiError
from edl.kubernetes.informer import Informer
from edl.kubernetes.names import MASTER_PORT
from edl.master.backends.kubernetes.release import Place


class Whereabouts(Enum):
    """Of a master's pod, as Kubernetes knows it."""

    HERE = "here"
    LEAVING = "leaving"  # it is being deleted
    GONE = "gone"


class Masters:
    """The pods of one job's masters, kept up to date while `run` runs.

    Args:
        changed: called at each change of them.
    """

    def __init__(self, api: Api, place: Place, changed: Callable[[], None]):
        self._api, self._place, self._tell = api, place, changed
        selector = {"labelSelector": pods.masters(place.release, place.fullname)}
        self._informer = Informer(api, place.path("pods"), selector, self._changed)
        self._news = asyncio.Event()

    async def read(self) -> None:
        """Read them. Raises: ApiError."""
        await self._informer.list()

    async def run(self) -> None:
        """Keep them up to date, for ever."""
        await self._informer.run()

    @property
    def others(self) -> list[pods.Pod]:
        """Those whose process may run, but for this one's."""
        found = self._informer.objects.values()
        return [p for p in found if p["metadata"]["name"] != self._place.pod and not _ended(p)]

    @property
    def standbys(self) -> tuple[str, ...]:
        """host:port of those who are ready to take over."""
        able = (p for p in self.others if pods.ready(p) and not pods.deleting(p) and pods.ip(p))
        return tuple(sorted(_address(pods.ip(pod)) for pod in able))

    def whereabouts(self, name: str) -> Whereabouts:
        pod = self._informer.objects.get(name)
        if pod is None or _ended(pod):
            return Whereabouts.GONE
        return Whereabouts.LEAVING if pods.deleting(pod) else Whereabouts.HERE

    async def show_who_acts(self) -> None:
        """Have the Service lead to this master alone, for ever.

        Raises:
            ApiError: a pod cannot be changed.
        """
        while True:
            self._news.clear()
            for name, pod in list(self._informer.objects.items()):
                mine = name == self._place.pod
                if mine != (pods.ACTING in (pod["metadata"].get("labels") or {})):
                    await self._mark(name, mine)
            await self._news.wait()

    async def _mark(self, name: str, acts: bool) -> None:
        labels = {pods.ACTING: "true" if acts else None}
        annotations: dict[str, Any] = {pods.DELETION_COST: "1" if acts else None}
        meta = {"metadata": {"labels": labels, "annotations": annotations}}
        try:
            await self._api.patch(self._place.path("pods", name), meta, SOON)
        except ApiError as error:
            if error.status != 404:
                raise

    def _changed(self, _pod: pods.Pod, _vanished: bool) -> None:
        self._news.set()
        self._tell()


def _ended(pod: pods.Pod) -> bool:
    return pods.phase(pod) in ("Succeeded", "Failed")


def _address(ip: str) -> str:
    return f"[{ip}]:{MASTER_PORT}" if ":" in ip else f"{ip}:{MASTER_PORT}"
