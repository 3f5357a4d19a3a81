"""A worker's life, as a table, and what the master knows of one worker.

    pending -> starting -> initializing -> ready -> member -> draining -> gone

There is no way back: a replacement is a new worker with the next number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from edl.contract.ids import Generation, WorkerId
from edl.contract.phases import WorkerState
from edl.contract.ranges import RangeSet
from edl.errors import EdlError
from master.core import events as ev

NEXT = {
    (WorkerState.PENDING, "seen"): WorkerState.STARTING,
    (WorkerState.PENDING, "hello"): WorkerState.INITIALIZING,  # its stream may be quicker than the backend
    (WorkerState.STARTING, "hello"): WorkerState.INITIALIZING,
    (WorkerState.INITIALIZING, "ready"): WorkerState.READY,
    (WorkerState.READY, "placed"): WorkerState.MEMBER,
    (WorkerState.PENDING, "leave"): WorkerState.DRAINING,
    (WorkerState.STARTING, "leave"): WorkerState.DRAINING,
    (WorkerState.INITIALIZING, "leave"): WorkerState.DRAINING,
    (WorkerState.READY, "leave"): WorkerState.DRAINING,
    (WorkerState.MEMBER, "leave"): WorkerState.DRAINING,
    (WorkerState.PENDING, "gone"): WorkerState.GONE,
    (WorkerState.STARTING, "gone"): WorkerState.GONE,
    (WorkerState.INITIALIZING, "gone"): WorkerState.GONE,
    (WorkerState.READY, "gone"): WorkerState.GONE,
    (WorkerState.MEMBER, "gone"): WorkerState.GONE,
    (WorkerState.DRAINING, "gone"): WorkerState.GONE,
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

# Compared for each worker at each event, and Python 3.11 takes 0.1 us to look up a member of an enum.
PENDING, DRAINING = WorkerState.PENDING, WorkerState.DRAINING
STARTING_STATES = frozenset({WorkerState.PENDING, WorkerState.STARTING, WorkerState.INITIALIZING})
READY_STATES = frozenset({WorkerState.READY, WorkerState.MEMBER})


@dataclass(slots=True)
class WorkerRecord:
    """What the master knows of one worker."""

    id: WorkerId
    since: float  # when it was created; once it runs, when it started
    heard: float  # when it was last heard of
    state: WorkerState = WorkerState.PENDING
    handle: str = ""
    delay: str = ""  # why it does not run yet
    expected: bool = False  # an earlier master's, and it has not told its present state yet
    in_ring: bool = False  # it has been told of the current generation and is not out of it yet
    up_in: Generation = NO_RING  # the last generation in which it said `up`
    has_state: bool = False  # it has synced: its memory is a copy of the job's state
    step: int = 0
    skipped: RangeSet = field(default_factory=RangeSet)  # steps, as of when it last left a ring
    bad: dict[int, int] = field(default_factory=dict)  # records left out by epoch, as of then
    digest: str = ""
    exported: bool = False  # it was lost while it saved or evaluated the final model
    stopped: bool = False  # told to end; what it does now is no news
    kill_at: float | None = None  # told to end, and this is when it is killed
    in_broken_ring: bool = False  # when it was lost, its ring had lost somebody else before
    failure_reason: str = ""  # why it is lost: as it reported itself, or the reason why it was given up
    rate: float = 0.0
    speed: float = 0.0  # records per second of computing; 0: not known
    memory: int = 0

    def transition(self, event: str) -> None:
        self.state = step(self.state, event)

    def left(self, out: ev.LeftRing) -> None:
        """It has left a ring, and this is what it then said of itself."""
        self.in_ring = False
        self.step, self.has_state = out.step, self.has_state or out.has_state
        self.skipped, self.bad, self.digest = out.skipped, out.bad, out.digest

    @property
    def is_starting(self) -> bool:
        """It was created and is not ready yet."""
        return self.state in STARTING_STATES

    @property
    def is_ready(self) -> bool:
        """It could be a member now."""
        return self.state in READY_STATES


class Pool:
    """The living workers, by id; ids count up and are never given twice."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerRecord] = {}
        self.lost: dict[WorkerId, WorkerRecord] = {}  # out of the job, their exit not yet heard of
        self.next_id = 0  # also the next id

    def add(self, now: float) -> WorkerRecord:
        worker = WorkerRecord(WorkerId(self.next_id), since=now, heard=now)
        self._workers[worker.id] = worker
        self.next_id += 1
        return worker

    def adopt(self, worker: WorkerId, handle: str, now: float) -> None:
        """Know of a worker that another master has started."""
        w = WorkerRecord(worker, since=now, heard=now, handle=handle)
        self._workers[worker] = w
        if handle:
            w.transition("seen")
            w.expected = True
        self.next_id = max(self.next_id, worker + 1)

    def lose(self, worker: WorkerRecord) -> None:
        """The worker is out of the job for good. It is known until its exit is heard of, and then
        forgotten: a long job has had thousands."""
        worker.transition("gone")
        self.lost[worker.id] = self._workers.pop(worker.id)

    def get(self, worker: WorkerId) -> WorkerRecord | None:
        return self._workers.get(worker)

    def __getitem__(self, worker: WorkerId) -> WorkerRecord:
        return self._workers[worker]

    def __iter__(self) -> Iterator[WorkerRecord]:
        """Oldest first."""
        return iter(self._workers.values())

    @property
    def vacant(self) -> WorkerId | None:
        """The oldest pending worker: one that nobody has started yet."""
        return next((w.id for w in self if w.state == PENDING), None)

    @property
    def staying(self) -> list[WorkerRecord]:
        """The living that nobody has asked to leave: the ones that count towards the target."""
        return [w for w in self if w.state != DRAINING]
