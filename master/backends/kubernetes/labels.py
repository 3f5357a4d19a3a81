# SPDX-License-Identifier: Apache-2.0
"""Rank and state as labels on the workers' pods, for `kubectl get pods -L edl.dev/rank,edl.dev/state`.

Only users read them. So patches are sent one at a time, and only when no other write needs the rate limit.
Labels are written only once they have been stable for a moment. In a large ring that often loses members,
most ranks change before they could be read. Patching them all would cost the master more than forming the
ring. The moment grows with the number of workers, because each lost worker changes the ranks of half of the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import structlog

from edl.contract.ids import WorkerId
from edl.contract.phases import WorkerState
from edl.kubernetes import pods
from edl.kubernetes.client import WHENEVER, Api, ApiError
from edl.kubernetes.rate_limit import Backoff
from edl.master.backends.kubernetes.pod_view import WorkerPod
from edl.master.backends.kubernetes.release import Place
from edl.master.backends.kubernetes.worker_pods import WorkerPods

log = structlog.get_logger()

WORKERS_A_SECOND = 30.0  # labels of N workers must be stable for N / 30 seconds

Said: TypeAlias = tuple[str, str]  # rank and state

GONE: Said = ("", str(WorkerState.GONE))


class _Differs(NamedTuple):
    """A worker whose labels differ from the wanted ones.

    Args:
        wanted: the labels that it should have.
        steady_since: since when these labels are wanted.
        since: when its labels began to differ.
    """

    wanted: Said
    steady_since: float
    since: float

    def or_now(self, wanted: Said, now: float) -> _Differs:
        """Update the wanted labels."""
        return self if wanted == self.wanted else _Differs(wanted, now, self.since)


class Labels:
    """Writes the labels.

    Args:
        status: returns the present status of the job, as by `view.status`.
    """

    def __init__(self, api: Api, place: Place, workers: WorkerPods, status: Callable[[], dict[str, Any]]):
        self._api, self._place, self._workers, self._status = api, place, workers, status
        self._wake = asyncio.Event()
        self._told: dict[WorkerId, Said] = {}
        self._differing: dict[WorkerId, _Differs] = {}  # as of the last look
        self._looked_at = 0.0

    def changed(self) -> None:
        """Check the labels again."""
        self._wake.set()

    async def run(self) -> None:
        """Write changed labels, for ever."""
        pace = self._api.pace
        backoff = Backoff(pace.first_pause, pace.most_pause)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while True:
                due = self._look()
                while due:
                    await self._api.budget.take(WHENEVER)
                    if self._age() > pace.labels and not (due := self._look()):  # it took long
                        break
                    w = due.pop(0)
                    if self._wanted(w) == w.labels:
                        continue
                    try:
                        await self._write(w)
                        backoff.reset()
                    except ApiError as error:
                        log.debug(f"labels: {error}")
                        if error.out:
                            w.labels = ("?", "?")
                            self._wake.set()
                            await asyncio.sleep(max(backoff.next(), error.retry_after))
                        # Else the pod is gone, or the labels are refused: repeating would not help.
                await asyncio.sleep(max(0.0, pace.labels - self._age()))
                if not self._differing:
                    break

    def _look(self) -> list[WorkerPod]:
        """Return the workers whose labels are due; the one that was written longest ago comes first."""
        now = self._looked_at = asyncio.get_running_loop().time()
        self._told = {entry["id"]: _labels(entry) for entry in self._status().get("workers", [])}
        before, self._differing, due = self._differing, {}, []
        moment = len(self._told) / WORKERS_A_SECOND  # less than between looks, except in large rings
        for w in self._workers:
            if not w.uid or (wanted := self._wanted(w)) == w.labels:
                continue
            known = before.get(w.id)
            differs = self._differing[w.id] = (known or _Differs(wanted, now, now)).or_now(wanted, now)
            steady = known is not None and known.wanted == wanted and now - known.steady_since >= moment
            if steady or now - differs.since >= self._api.pace.restless_labels:
                due.append(w)
        return sorted(due, key=lambda w: w.labelled_at)

    def _age(self) -> float:
        """Seconds since the last look."""
        return asyncio.get_running_loop().time() - self._looked_at

    def _wanted(self, w: WorkerPod) -> Said:
        if w.ended:
            return GONE if w.kept else w.labels
        return self._told.get(w.id, w.labels)

    async def _write(self, w: WorkerPod) -> None:
        self._differing.pop(w.id, None)
        rank, state = w.labels = self._wanted(w)
        w.labelled_at = asyncio.get_running_loop().time()
        labels = {pods.RANK: rank or None, pods.STATE: state}
        assert w.pod is not None
        path = self._place.path("pods", w.pod["metadata"]["name"])
        await self._api.patch(path, {"metadata": {"uid": w.uid, "labels": labels}}, None)


def _labels(entry: Mapping[str, Any]) -> Said:
    """Return rank and state of a worker of `view.status`; the state is `starting` until it is ready."""
    state, rank = entry["state"], entry.get("rank")
    starts = state in (WorkerState.PENDING, WorkerState.INITIALIZING)
    return "" if rank is None else str(rank), WorkerState.STARTING if starts else state
