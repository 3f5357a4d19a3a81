# SPDX-License-Identifier: Apache-2.0
"""The hours of a job's workers by what they were spent on, which is what a job costs.

Goodput divides the time of the job. Here, the time of each worker counts, from the moment at which it runs
until its end, so that the sum is what is paid for. A pod that waits for a node costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from edl.report.timeline import State, Timeline, Worker

WAITING = "waiting in a ring"
KINDS = ("useful", "redone", "re-forming", WAITING, "waiting to join", "starting", "leaving")
_STATES = {
    State.STARTING: "starting",
    State.INITIALIZING: "starting",
    State.READY: "waiting to join",
    State.DRAINING: "leaving",
}


def worker_seconds(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of all workers by kind."""
    seconds = dict.fromkeys(KINDS, 0.0)
    stalls = _stalls(timeline, first=False)
    starting, forming = _Spans(_stalls(timeline, first=True)), _Spans(stalls)
    idle = _Spans([*stalls, *((start, end) for start, end, _ in timeline.waits)])
    for worker in timeline.workers.values():
        for state, start, end in _paid(worker):
            if state is not State.MEMBER:
                seconds[_STATES[state]] += end - start
                continue
            formed = forming.within(start, end)
            without = starting.within(start, end), formed, idle.within(start, end) - formed
            seconds["starting"] += without[0]
            seconds["re-forming"] += without[1]
            seconds[WAITING] += without[2]
            seconds["useful"] += max(end - start - sum(without), 0.0)
    seconds["redone"] = min(timeline.redone_seconds, seconds["useful"])
    seconds["useful"] -= seconds["redone"]
    return seconds


def price(timeline: Timeline) -> float:
    """Return the price of a worker for an hour; 0: it is unknown."""
    return float((timeline.values.get("report") or {}).get("pricePerWorkerHour") or 0.0)


def _paid(worker: Worker) -> list[tuple[State, float, float]]:
    """The intervals of a worker from the moment at which its process ran."""
    began = worker.runs_since
    if began is None:
        return []
    return [(state, max(start, began), end) for state, start, end in worker.intervals if end > began]


def _stalls(timeline: Timeline, first: bool) -> list[tuple[float, float]]:
    """When members of rings made no step: up to the first step of a job, or while a ring changed."""
    found = []
    for index, change in enumerate(timeline.changes):
        if (not change.before) is not first:
            continue
        later = timeline.changes[index + 1].formed if index + 1 < len(timeline.changes) else timeline.ends
        end = later if change.stepped is None else change.stepped
        found.append((min(change.formed, end - change.stall), end))
    return found


class _Spans:
    """Spans of time, which answer how many of their seconds are within an interval."""

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        merged: list[tuple[float, float]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        self._spans = merged
        self._starts = [start for start, _ in merged]
        self._before = [0.0, *accumulate(end - start for start, end in merged)]

    def within(self, start: float, end: float) -> float:
        """Return the seconds of the spans between two times."""
        return self._up_to(end) - self._up_to(start)

    def _up_to(self, time: float) -> float:
        place = bisect_right(self._starts, time)
        if not place:
            return 0.0
        begins, ends = self._spans[place - 1]
        return self._before[place - 1] + min(time, ends) - begins
