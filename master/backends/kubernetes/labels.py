"""Rank and state as labels on the workers' pods, for `kubectl get pods -L edl.dev/rank,edl.dev/state`.

Nobody needs them but people: one patch at a time, when no other write wants the budget, and what a
patch says is what is so when its turn has come. However fast the ring changes, nothing piles up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from edl.contract.ids import WorkerId
from edl.contract.phases import WorkerState
from edl.kubernetes import pods
from edl.kubernetes.client import WHENEVER, Api, ApiError
from edl.kubernetes.rate_limit import Backoff
from master.backends.kubernetes.release import Place
from master.backends.kubernetes.workers import WorkerPod, Workers

log = structlog.get_logger()

GONE = ("", str(WorkerState.GONE))


class Labels:
    """Writes them.

    Args:
        status: the job now, as `view.status` tells it.
    """

    def __init__(self, api: Api, place: Place, workers: Workers, status: Callable[[], dict[str, Any]]):
        self._api, self._place, self._workers, self._status = api, place, workers, status
        self._wake = asyncio.Event()
        self._stale = True  # the status may have changed since
        self._told: dict[WorkerId, tuple[str, str]] = {}

    def changed(self) -> None:
        """Something may have changed."""
        self._stale = True
        self._wake.set()

    async def run(self) -> None:
        """For ever."""
        pace = self._api.pace
        backoff = Backoff(pace.first_pause, pace.most_pause)
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(pace.labels)  # one change seldom comes alone
            while self._next() is not None:
                await self._api.budget.take(WHENEVER)
                if (w := self._next()) is None:
                    break
                try:
                    await self._write(w)
                    backoff.reset()
                except ApiError as error:
                    log.debug(f"labels: {error}")
                    if error.out:
                        w.labels = ("?", "?")
                        await asyncio.sleep(max(backoff.next(), error.retry_after))
                    # Else the pod is gone, or they are not wanted: nothing is gained by asking again.

    def _next(self) -> WorkerPod | None:
        """Of the workers whose labels are not what they should be, the one not written for the longest."""
        if self._stale:
            self._stale = False
            self._told = {entry["id"]: _labels(entry) for entry in self._status().get("workers", [])}
        differing = (w for w in self._workers if w.uid and self._wanted(w) != w.labels)
        return min(differing, key=lambda w: w.labelled_at, default=None)

    def _wanted(self, w: WorkerPod) -> tuple[str, str]:
        if w.over.is_set():
            return GONE if w.kept else w.labels
        return self._told.get(w.id, w.labels)

    async def _write(self, w: WorkerPod) -> None:
        rank, state = w.labels = self._wanted(w)
        w.labelled_at = asyncio.get_running_loop().time()
        labels = {pods.RANK: rank or None, pods.STATE: state}
        assert w.pod is not None
        path = self._place.path("pods", w.pod["metadata"]["name"])
        await self._api.patch(path, {"metadata": {"uid": w.uid, "labels": labels}}, None)


def _labels(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Rank and state of a worker of `view.status`; until it is ready the state is that it starts."""
    state, rank = entry["state"], entry.get("rank")
    starts = state in (WorkerState.PENDING, WorkerState.INITIALIZING)
    return "" if rank is None else str(rank), WorkerState.STARTING if starts else state
