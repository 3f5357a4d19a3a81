"""Rank and state as labels on the workers' pods, for `kubectl get pods -L edl.dev/rank,edl.dev/state`.

Only people read them: one patch at a time, when no other write wants the budget, and of what stays as it is
for a moment. While a large ring loses members all the time, most ranks are others before anybody could read
them, and a patch of each would take the master more than to form the ring. The more workers, the longer that
moment: each that is lost gives another rank to half of the others.
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

WORKERS_A_SECOND = 30.0  # of more of them, a label has to stay as it is for longer

Said: TypeAlias = tuple[str, str]  # rank and state

GONE: Said = ("", str(WorkerState.GONE))


class _Differs(NamedTuple):
    """A worker whose labels say something else.

    Args:
        wanted: what they ought to say.
        steady_since: when they first ought to say it.
        since: when they began to differ.
    """

    wanted: Said
    steady_since: float
    since: float

    def or_now(self, wanted: Said, now: float) -> _Differs:
        """The same as of now, when they ought to say this."""
        return self if wanted == self.wanted else _Differs(wanted, now, self.since)


class Labels:
    """Writes them.

    Args:
        status: the job now, as `view.status` tells it.
    """

    def __init__(self, api: Api, place: Place, workers: WorkerPods, status: Callable[[], dict[str, Any]]):
        self._api, self._place, self._workers, self._status = api, place, workers, status
        self._wake = asyncio.Event()
        self._told: dict[WorkerId, Said] = {}
        self._differing: dict[WorkerId, _Differs] = {}  # as of the last look
        self._looked_at = 0.0

    def changed(self) -> None:
        """Something may have changed."""
        self._wake.set()

    async def run(self) -> None:
        """For ever."""
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
                        # Else the pod is gone, or they are not wanted: nothing is gained by asking again.
                await asyncio.sleep(max(0.0, pace.labels - self._age()))
                if not self._differing:
                    break

    def _look(self) -> list[WorkerPod]:
        """Whose labels are to be written now, the one first that was not written for the longest."""
        now = self._looked_at = asyncio.get_running_loop().time()
        self._told = {entry["id"]: _labels(entry) for entry in self._status().get("workers", [])}
        before, self._differing, due = self._differing, {}, []
        moment = len(self._told) / WORKERS_A_SECOND  # less than until the next look, in all but large rings
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
        if w.over.is_set():
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
    """Rank and state of a worker of `view.status`; until it is ready the state is that it starts."""
    state, rank = entry["state"], entry.get("rank")
    starts = state in (WorkerState.PENDING, WorkerState.INITIALIZING)
    return "" if rank is None else str(rank), WorkerState.STARTING if starts else state
