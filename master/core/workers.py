"""A worker's life, as a table, and what the master knows of one worker.

    asked -> starting -> warming -> ready -> member -> leaving -> gone

There is no way back: a replacement is a new worker with the next number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edl.contract.phases import WorkerState
from edl.errors import EdlError
from edl.ids import Generation, WorkerId
from edl.ranges import Range, RangeSet
from master.core import events as ev

NEXT = {
    (WorkerState.ASKED, "seen"): WorkerState.STARTING,
    (WorkerState.ASKED, "hello"): WorkerState.WARMING,  # its stream may be quicker than the backend
    (WorkerState.STARTING, "hello"): WorkerState.WARMING,
    (WorkerState.WARMING, "ready"): WorkerState.READY,
    (WorkerState.READY, "placed"): WorkerState.MEMBER,
    (WorkerState.ASKED, "leave"): WorkerState.LEAVING,
    (WorkerState.STARTING, "leave"): WorkerState.LEAVING,
    (WorkerState.WARMING, "leave"): WorkerState.LEAVING,
    (WorkerState.READY, "leave"): WorkerState.LEAVING,
    (WorkerState.MEMBER, "leave"): WorkerState.LEAVING,
    (WorkerState.ASKED, "gone"): WorkerState.GONE,
    (WorkerState.STARTING, "gone"): WorkerState.GONE,
    (WorkerState.WARMING, "gone"): WorkerState.GONE,
    (WorkerState.READY, "gone"): WorkerState.GONE,
    (WorkerState.MEMBER, "gone"): WorkerState.GONE,
    (WorkerState.LEAVING, "gone"): WorkerState.GONE,
}


class ImpossibleStep(EdlError):
    """A worker was asked to do what a worker in its state cannot."""


def step(state: WorkerState, event: str) -> WorkerState:
    """The state after `event`.

    Raises:
        ImpossibleStep: the table has no such step.
    """
    try:
        return NEXT[state, event]
    except KeyError:
        raise ImpossibleStep(f"a worker that is {state} cannot be {event}") from None


NO_RING = Generation(0)


@dataclass(slots=True)
class Worker:
    """What the master knows of one worker."""

    id: WorkerId
    since: float  # when it was asked for; once it runs, when it began to
    heard: float  # when it was last heard of
    state: WorkerState = WorkerState.ASKED
    handle: str = ""
    delay: str = ""  # why it does not run yet
    expected: bool = False  # an earlier master's, and it has not said yet what it is by now
    in_ring: bool = False  # it has been told of the current generation and is not out of it yet
    up_in: Generation = NO_RING  # the last generation in which it said `up`
    holds: bool = False  # it has synced: its memory is a copy of the job's state
    step: int = 0
    applied: RangeSet = field(default_factory=RangeSet)  # as of its last `out`
    skipped: RangeSet = field(default_factory=RangeSet)
    digest: str = ""
    leases: tuple[Range, ...] = ()
    wants: bool = False
    stopped: bool = False  # told to end; what it does now is no news
    kill_at: float | None = None  # told to end, and this is when patience does
    in_broken_ring: bool = False  # when it was lost, its ring had lost somebody else before
    last_words: str = ""  # why it is lost: as it said itself, or as it was told when it was given up
    rate: float = 0.0
    memory: int = 0

    def goes(self, event: str) -> None:
        self.state = step(self.state, event)

    def left(self, out: ev.Out) -> None:
        """It has left a ring, and this is what it then said of itself."""
        self.in_ring, self.wants = False, False
        self.step, self.holds = out.step, self.holds or out.holds
        self.applied, self.skipped, self.digest = out.applied, out.skipped, out.digest

    @property
    def comes(self) -> bool:
        """It was asked for and is not ready yet."""
        return self.state in (WorkerState.ASKED, WorkerState.STARTING, WorkerState.WARMING)

    @property
    def warm(self) -> bool:
        """It could be a member now."""
        return self.state in (WorkerState.READY, WorkerState.MEMBER)


class Pool:
    """The living workers, by id; ids count up and are never given twice."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, Worker] = {}
        self.lost: dict[WorkerId, Worker] = {}  # out of the job, their exit not yet heard of
        self.born = 0  # also the next id

    def add(self, now: float) -> Worker:
        worker = Worker(WorkerId(self.born), since=now, heard=now)
        self._workers[worker.id] = worker
        self.born += 1
        return worker

    def adopt(self, worker: WorkerId, handle: str, now: float) -> None:
        """Know of a worker that another master has started."""
        w = Worker(worker, since=now, heard=now, handle=handle)
        self._workers[worker] = w
        if handle:
            w.goes("seen")
            w.expected = True
        self.born = max(self.born, worker + 1)

    def lose(self, worker: Worker) -> None:
        """The worker is out of the job for good. It is known until its exit is heard of, and then
        forgotten: a long job has had thousands."""
        worker.goes("gone")
        self.lost[worker.id] = self._workers.pop(worker.id)

    def get(self, worker: WorkerId) -> Worker | None:
        return self._workers.get(worker)

    def __getitem__(self, worker: WorkerId) -> Worker:
        return self._workers[worker]

    def __iter__(self) -> Iterator[Worker]:
        """Oldest first."""
        return iter(self._workers.values())

    @property
    def vacant(self) -> WorkerId | None:
        """The oldest worker that was asked for and that nobody has been seen to start."""
        return next((w.id for w in self if w.state == WorkerState.ASKED), None)

    @property
    def staying(self) -> list[Worker]:
        """The living that nobody has asked to leave: the ones that count towards the target."""
        return [w for w in self if w.state != WorkerState.LEAVING]
