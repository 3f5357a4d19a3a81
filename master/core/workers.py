"""A worker's life, as a table, and what the master knows of one worker, and of all of them at once.

    pending -> starting -> initializing -> ready -> member -> draining -> gone

There is no way back: a replacement is a new worker with the next number.

No event may cost more the more workers there are. So what is asked of all of them (does anybody hold the
state?) is asked of their kinds, of which there is a handful. A worker's kind is changed through the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from edl.contract.ids import Generation, WorkerId
from edl.contract.phases import WorkerState
from edl.contract.ranges import RangeSet
from edl.errors import EdlError
from edl.master.core import events as ev
from edl.master.core import facts

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

# Compared at each event, and Python 3.11 takes 0.1 us to look up a member of an enum.
PENDING, DRAINING = WorkerState.PENDING, WorkerState.DRAINING
STARTING_STATES = frozenset({WorkerState.PENDING, WorkerState.STARTING, WorkerState.INITIALIZING})
READY_STATES = frozenset({WorkerState.READY, WorkerState.MEMBER})


class Place(StrEnum):
    """Where a worker is with respect to the present ring."""

    OUT = "out"
    IN = "in"  # it has been told of the ring, and has not left it yet
    UP = "up"  # and it has the ring's state


OUT, IN, UP = Place.OUT, Place.IN, Place.UP


class Kind(NamedTuple):
    """What is asked of many workers at once."""

    state: WorkerState
    place: Place
    has_state: bool
    stopped: bool

    @property
    def is_starting(self) -> bool:
        """It was created and is not ready yet."""
        return self.state in STARTING_STATES

    @property
    def is_ready(self) -> bool:
        """It could be a member now."""
        return self.state in READY_STATES

    @property
    def stays(self) -> bool:
        """Nobody has asked it to leave: it counts towards the target."""
        return self.state != DRAINING


@dataclass(slots=True)
class WorkerRecord:
    """What the master knows of one worker."""

    id: WorkerId
    since: float  # when it was created; once it runs, when it started
    state: WorkerState = WorkerState.PENDING
    handle: str = ""
    ready_at: float = 0.0  # when it became ready
    delay: str = ""  # why it does not run yet
    expected: bool = False  # an earlier master's, and it has not told its present state yet
    place: Place = OUT
    has_state: bool = False  # it has synced: its memory is a copy of the job's state
    from_copy: bool = False  # that was left to it: no ring has had it, and another of the same step differs
    step: int = 0  # as of when it last joined or left a ring
    round: int = 0  # of the evaluation after that step, as of then
    turn: int = 0  # 1: callbacks had been called after that step
    skipped: RangeSet = field(default_factory=RangeSet)  # steps, as of when it last left a ring
    bad: dict[int, int] = field(default_factory=dict)  # records left out by epoch, as of then
    digest: str = ""
    exported: bool = False  # it was lost while it saved or evaluated the final model
    stopped: bool = False  # told to end; what it does now is no news
    kill_at: float | None = None  # told to end, and this is when it is killed
    in_broken_ring: bool = False  # when it was lost, its ring had lost somebody else before
    failure_reason: str = ""  # why it is lost: as it reported itself, or the reason why it was given up
    speed: float = 0.0  # records per second of computing; 0: not known
    sample_loss: facts.SampleLoss | None = None  # as it reported it, once it is admitted

    @property
    def kind(self) -> Kind:
        return Kind(self.state, self.place, self.has_state, self.stopped)

    @property
    def progress(self) -> tuple[int, int, int]:
        """How far its state is: steps, and what was done after the last of them. Equal for equal states."""
        return self.step, self.round, self.turn

    @property
    def in_ring(self) -> bool:
        return self.place != OUT

    @property
    def is_starting(self) -> bool:
        return self.state in STARTING_STATES

    @property
    def is_ready(self) -> bool:
        return self.state in READY_STATES


class Pool:
    """The living workers, by id; ids count up and are never given twice."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerRecord] = {}
        self.lost: dict[WorkerId, WorkerRecord] = {}  # out of the job, their exit not yet heard of
        self.next_id = 0  # also how many there have been
        self.bringing: set[WorkerId] = set()  # who start with a copy of the state
        self.copies: dict[WorkerId, ev.LeftRing] = {}  # of the state, of those who are ready, and for a while
        # Follow from the workers, and are there so that nobody has to look at all of them.
        self._kinds: dict[Kind, dict[WorkerId, WorkerRecord]] = {}
        self._delays = Counter[str]()

    # --- one worker

    def add(self, now: float) -> WorkerRecord:
        worker = WorkerRecord(WorkerId(self.next_id), since=now)
        self.next_id += 1
        return self._take_in(worker)

    def adopt(self, worker: WorkerId, handle: str, now: float) -> WorkerRecord:
        """Know of a worker that another master has started."""
        state = WorkerState.STARTING if handle else PENDING
        w = WorkerRecord(worker, since=now, state=state, handle=handle, expected=bool(handle))
        self.next_id = max(self.next_id, worker + 1)
        return self._take_in(w)

    def _take_in(self, w: WorkerRecord) -> WorkerRecord:
        self._workers[w.id] = w
        self._kinds.setdefault(w.kind, {})[w.id] = w
        return w

    def change(
        self,
        w: WorkerRecord,
        event: str = "",
        *,
        place: Place | None = None,
        has_state: bool | None = None,
        stopped: bool | None = None,
    ) -> None:
        """The worker is of another kind now. `event` is one of the table's."""
        self._forget(w)
        if event:
            self.bringing.discard(w.id)
        if has_state:
            self.copies.pop(w.id, None)
        w.state = step(w.state, event) if event else w.state
        w.place = w.place if place is None else place
        w.from_copy = w.from_copy and place != UP
        w.has_state = w.has_state if has_state is None else has_state
        w.stopped = w.stopped if stopped is None else stopped
        self._kinds.setdefault(w.kind, {})[w.id] = w

    def left(self, w: WorkerRecord, out: ev.LeftRing) -> None:
        """It has left a ring, and this is what it then said of itself."""
        self.change(w, place=OUT, has_state=w.has_state or out.has_state)
        w.step, w.round, w.turn = out.step, out.round, out.turn
        w.skipped, w.bad, w.digest = out.skipped, out.bad, out.digest

    def take_copy(self, w: WorkerRecord, copy: ev.LeftRing) -> None:
        """The state that was left to it counts as one that it holds."""
        self.left(w, copy)
        w.from_copy = True

    def delay(self, w: WorkerRecord, why: str) -> bool:
        """It does not run yet, or (empty) is delayed no longer. Whether it is the first one that waits for
        this reason."""
        self._delays[w.delay] -= 1
        if self._delays[w.delay] <= 0:
            del self._delays[w.delay]
        self._delays[why] += 1
        w.delay = why
        return bool(why) and self._delays[why] == 1

    def lose(self, w: WorkerRecord) -> None:
        """The worker is out of the job for good. It is known until its exit is heard of, and then
        forgotten: a long job has had thousands."""
        self.delay(w, "")
        self._forget(w)
        self.bringing.discard(w.id)
        self.copies.pop(w.id, None)
        w.state, w.place = step(w.state, "gone"), OUT
        self.lost[w.id] = self._workers.pop(w.id)

    def _forget(self, w: WorkerRecord) -> None:
        same = self._kinds[w.kind]
        del same[w.id]
        if not same:
            del self._kinds[w.kind]

    def get(self, worker: WorkerId) -> WorkerRecord | None:
        return self._workers.get(worker)

    def __getitem__(self, worker: WorkerId) -> WorkerRecord:
        return self._workers[worker]

    # --- all of them

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerRecord]:
        """Oldest first."""
        return iter(self._workers.values())

    def any(self, test: Callable[[Kind], bool]) -> bool:
        return any(test(kind) for kind in self._kinds)

    def count(self, test: Callable[[Kind], bool]) -> int:
        return sum(len(workers) for kind, workers in self._kinds.items() if test(kind))

    def where(self, test: Callable[[Kind], bool]) -> list[WorkerRecord]:
        """Oldest first."""
        found = [w for kind, workers in self._kinds.items() if test(kind) for w in workers.values()]
        return sorted(found, key=lambda w: w.id)

    @property
    def staying(self) -> list[WorkerRecord]:
        """The living that nobody has asked to leave: the ones that count towards the target."""
        return self.where(lambda kind: kind.stays)

    @property
    def vacant(self) -> WorkerId | None:
        """The oldest pending worker: one that nobody has started yet."""
        return next((w.id for w in self.where(lambda kind: kind.state == PENDING)), None)
