# SPDX-License-Identifier: Apache-2.0
"""What happened in a job, as plain data for pictures and tables. `reading` makes it from a journal.

All times are seconds since the job began. They continue over a change of the master. If the oldest segments
of the journal were deleted, the timeline begins with the oldest existing one (`Timeline.begins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from edl.contract.modes import HOROVOD
from edl.contract.steps import Steps
from edl.report.pace import Pace
from edl.report.servers import ServerHistory

Entry = Mapping[str, Any]


class State(StrEnum):
    """The states of a worker in the report."""

    STARTING = "starting"
    INITIALIZING = "initializing"
    READY = "ready"
    MEMBER = "member"
    DRAINING = "draining"


@dataclass
class Worker:
    """One worker: its states with their times, and its end."""

    id: int
    handle: str = ""  # process id or pod name
    intervals: list[tuple[State, float, float]] = field(default_factory=list)  # the last one may be open
    state: State = State.STARTING
    since: float = 0.0
    runs_since: float | None = None  # None: no process or pod of it was seen
    ended: float | None = None  # None: it lives
    why: str = ""  # how it ended
    failed: str = ""  # what it has reported of its own failure
    ordered: bool = False  # whether it was asked to leave
    lost: bool = False  # whether it ended without being asked to, before the end of the job
    speed: float | None = None  # records/s of its own steps, as last reported

    def runs(self, now: float) -> None:
        """Note that its process runs, or its pod is placed."""
        if self.runs_since is None:
            self.runs_since = now

    def become(self, state: State, now: float) -> None:
        if state is not State.DRAINING:  # a pod that was never placed may be stopped, too
            self.runs(now)
        if self.ended is None and state is not self.state:
            self.intervals.append((self.state, self.since, now))
            self.state, self.since = state, now

    def end(self, now: float) -> None:
        if self.ended is None:
            self.intervals.append((self.state, self.since, now))
            self.ended = now

    def until(self, now: float) -> Worker:
        """Return a copy whose open interval is closed at this time."""
        open_one = [] if self.ended is not None else [(self.state, self.since, now)]
        return replace(self, intervals=[*self.intervals, *open_one])

    def seconds(self, state: State) -> float:
        """Seconds that this worker has spent in a state."""
        return sum(end - start for kind, start, end in self.intervals if kind is state)


@dataclass
class Change:
    """A change of the ring, with the times of its phases.

    Args:
        noticed: when the master heard of its cause.
        left: when the last member had left the old ring; None if no member had to.
        formed: when the new ring was decided.
        connected: when the first member was in the new ring; None if it broke before.
        stepped: when the member with the longest stall had made its first step.
        stall: seconds between the last step before and the first step after it, as its members measured.
        steppers: the members that have made a step.
    """

    generation: int
    members: tuple[int, ...]
    before: tuple[int, ...]  # members of the ring before
    noticed: float
    left: float | None
    formed: float
    connected: float | None = None
    stepped: float | None = None
    stall: float = 0.0
    steppers: set[int] = field(default_factory=set)
    redone: int = 0  # records that were trained again
    broken: str = ""  # what the members reported of the break
    planned: bool = False  # whether the ring before was left by order, at a step boundary
    cause: str = ""  # as the master named it in its notice

    @property
    def phases(self) -> list[tuple[str, float]]:
        """The stall in parts, in seconds: from the last step of the old ring to the first of the new one."""
        end = self.stepped if self.stepped is not None else self.connected or self.formed
        times = [end - self.stall, self.noticed, self.left or self.noticed, self.formed]
        times = [*times, self.connected or self.formed, end]
        for i in range(1, len(times)):  # members step on after the notice of a planned change
            times[i] = min(max(times[i], times[i - 1]), end)
        return [(name, after - before) for name, before, after in zip(PHASES, times, times[1:], strict=False)]


PHASES = ("not noticed yet", "leaving the old ring", "deciding", "connecting", "first step")


RECORDS, COMMITS = "records", "commits"


@dataclass
class Timeline:
    """All that the report shows of a journal."""

    run_id: str = ""
    values: Entry = field(default_factory=dict)
    begins: float = 0.0  # the time of the first line that is kept
    ends: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    steps: Steps | None = None
    loss: dict[int, float] = field(default_factory=dict)  # of single steps, by step
    trained: dict[str, dict[int, float]] = field(default_factory=dict)  # metric: step: mean of the epoch
    held_out: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)  # split, metric: by step
    checkpoints: list[tuple[float, int, int]] = field(default_factory=list)  # time, step, bytes
    notices: list[tuple[float, str, str]] = field(default_factory=list)  # time, reason, text: important ones
    waits: list[tuple[float, float, str]] = field(default_factory=list)  # start, end, kind: without a step
    masters: int = 0
    servers: dict[int, ServerHistory] = field(default_factory=dict)  # parameter servers, by index
    paces: dict[int, Pace] = field(default_factory=dict)  # by worker
    redone_seconds: float = 0.0  # of all workers, in steps that were trained again

    @property
    def writes_checkpoints(self) -> bool:
        return bool(self.values.get("checkpoint", {}).get("dir"))

    @property
    def counted(self) -> str:
        """What workers count as their progress: records, or commits of a script that Horovod runs."""
        return COMMITS if self.values.get("mode") == HOROVOD else RECORDS

    def cause(self, change: Change) -> tuple[str, str]:
        """Name the kind of a change (start, lost, left, joined, planned, broken), and its cause as text."""
        if not change.before:
            return "start", "start"
        before, members = set(change.before), set(change.members)  # a ring may have thousands
        gone = [self._worker(w) for w in change.before if w not in members]
        lost = [f"worker {w.id} lost ({w.why})" if w.why else f"worker {w.id} lost" for w in gone if w.lost]
        left = [f"worker {w.id} left" for w in gone if not w.lost]
        new = [w for w in change.members if w not in before]
        joined = [f"worker {w} joined" if len(new) < 5 else "" for w in new]
        if len(new) >= 5:
            joined = [f"{len(new)} workers joined"]
        if named := "; ".join([*lost, *left, *joined]):
            return "lost" if lost else "left" if left else "joined", named
        if change.planned:  # for example, for another number of parameter servers
            return "planned", change.cause or "ordered by the master"
        return "broken", change.broken or change.cause or "the ring broke"

    def _worker(self, number: int) -> Worker:
        return self.workers.get(number) or Worker(number)


def duration(seconds: float) -> str:
    """Format seconds: 4.2 s, 3:20, 1:02:05, 3 d 04:00."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{rest // 60:02}"
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
