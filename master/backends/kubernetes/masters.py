# SPDX-License-Identifier: Apache-2.0
"""The pods of a job's masters, and the label by which the Service selects the acting master.

The acting master's pod has this label, and a deletion cost, so that its Deployment deletes it last. A master
that takes over labels its own pod and removes the label from all others. This includes a pod on a lost node,
which stays in the API as long as the node is lost.
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
    """State of a master's pod, according to the Kubernetes API."""

    HERE = "here"
    LEAVING = "leaving"  # it is being deleted
    GONE = "gone"


class Masters:
    """A cache of the pods of one job's masters, kept up to date while `run` runs.

    Args:
        changed: called at each change of a pod.
    """

    def __init__(self, api: Api, place: Place, changed: Callable[[], None]):
        self._api, self._place, self._tell = api, place, changed
        selector = {"labelSelector": pods.masters(place.release, place.fullname)}
        self._informer = Informer(api, place.path("pods"), selector, self._changed)
        self._news = asyncio.Event()

    async def read(self) -> None:
        """Read the pods. Raises: ApiError."""
        await self._informer.list()

    async def run(self) -> None:
        """Keep the pods up to date, for ever."""
        await self._informer.run()

    @property
    def others(self) -> list[pods.Pod]:
        """The pods of other masters whose processes may run."""
        found = self._informer.objects.values()
        return [p for p in found if p["metadata"]["name"] != self._place.pod and not _ended(p)]

    @property
    def standbys(self) -> tuple[str, ...]:
        """host:port of the masters that are ready to take over."""
        able = (p for p in self.others if pods.ready(p) and not pods.deleting(p) and pods.ip(p))
        return tuple(sorted(_address(pods.ip(pod)) for pod in able))

    def whereabouts(self, name: str) -> Whereabouts:
        pod = self._informer.objects.get(name)
        if pod is None or _ended(pod):
            return Whereabouts.GONE
        return Whereabouts.LEAVING if pods.deleting(pod) else Whereabouts.HERE

    async def show_who_acts(self) -> None:
        """Keep the Service's label on this master's pod only, for ever.

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
