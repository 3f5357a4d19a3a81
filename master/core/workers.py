# SPDX-License-Identifier: Apache-2.0
"""The life cycle of a worker, as a state table, and the master's records of workers.

    pending -> starting -> initializing -> ready -> member -> draining -> gone

States never go backwards: a replacement is a new worker with the next number.

The cost of an event must not grow with the number of workers. So questions about all workers (does any of
them hold the state?) are answered from the few kinds of workers. Change a worker's kind through the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from edl.contract.ids import NO_RING, Generation, WorkerId
from edl.contract.phases import WorkerState
from edl.contract.ranges import RangeSet
from edl.contract.state_tables import Table
from edl.master.core import events as ev
from edl.master.core import facts

WORKER = Table(
    "a worker",
    WorkerState.PENDING,
    {
        (WorkerState.PENDING, "seen"): WorkerState.STARTING,
        (WorkerState.PENDING, "hello"): WorkerState.INITIALIZING,  # the stream may be faster than the backend
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
    },
)

# Compared at each event; Python 3.11 needs 0.1 us to look up a member of an enum.
PENDING, MEMBER, DRAINING = WorkerState.PENDING, WorkerState.MEMBER, WorkerState.DRAINING
STARTING_STATES = frozenset({WorkerState.PENDING, WorkerState.STARTING, WorkerState.INITIALIZING})
READY_STATES = frozenset({WorkerState.READY, WorkerState.MEMBER})


class Place(StrEnum):
    """A worker's relation to the present ring."""

    OUT = "out"
    IN = "in"  # it was ordered to join the ring, and has not left it yet
    UP = "up"  # it is in the ring and holds the ring's state
    AWAY = "away"  # it is silent, and its ring was cut; the others go on before it reports that it has left


OUT, IN, UP, AWAY = Place.OUT, Place.IN, Place.UP, Place.AWAY


class Kind(NamedTuple):
    """The properties by which workers are counted and selected."""

    state: WorkerState
    place: Place
    has_state: bool
    stopped: bool

    @property
    def is_starting(self) -> bool:
        """True if the worker was created and is not ready yet."""
        return self.state in STARTING_STATES

    @property
    def in_ring(self) -> bool:
        """True if the worker is a member of the present ring, also while it connects."""
        return self.place == UP or self.place == IN

    @property
    def is_ready(self) -> bool:
        """True if the worker can be a member now."""
        return self.state in READY_STATES and self.place != AWAY

    @property
    def stays(self) -> bool:
        """True if the worker is not draining, and so counts towards the target."""
        return self.state != DRAINING


@dataclass(slots=True)
class WorkerRecord:
    """The master's record of one worker."""

    id: WorkerId
    since: float  # when it was created; once it runs, when it started
    state: WorkerState = WorkerState.PENDING
    handle: str = ""
    ready_at: float = 0.0  # when it became ready
    delay: str = ""  # why it does not run yet
    expected: bool = False  # a worker of an earlier master that has not reported its present state yet
    place: Place = OUT
    has_state: bool = False  # it has synced: its memory is a copy of the job's state
    step: int = 0  # when it last joined or left a ring
    round: int = 0  # the evaluation batch after that step, at that time
    callbacks_done: int = 0  # 1: callbacks had been called after that step
    made_in: int = 0  # id of the ring that made the last change to its state, when it last left a ring
    skipped: RangeSet = field(default_factory=RangeSet)  # steps, when it last left a ring
    reads: bool = False  # its reads have not returned since it left a ring
    bad: dict[int, int] = field(default_factory=dict)  # omitted records by epoch, at that time
    digest: str = ""
    exported: bool = False  # it was lost while it saved or evaluated the final model
    terminating: str = ""  # why its process will be killed, according to the backend; empty: it will not
    leaves: bool = False  # it was asked to leave, by itself or the master: later failures do not count
    stopped: bool = False  # it was ordered to exit, so its later failures do not count
    kill_at: float | None = None  # it was ordered to exit, and is killed at this time
    in_broken_ring: bool = False  # when it was lost, its ring had already lost a different member
    away_from: Generation = NO_RING  # the ring that goes on without it, while it is away
    away_until: float = 0.0  # it is removed then, unless it has left that ring
    patience: float | None = None  # seconds that the job still waits while it is away; None: all of them
    failure_reason: str = ""  # why it is lost: as it reported itself, or why it was removed
    speed: float = 0.0  # records per second of computing; 0: unknown
    sample_loss: facts.SampleLoss | None = None  # as it reported, once it is admitted

    @property
    def kind(self) -> Kind:
        """The fields by which the pool counts workers."""
        return Kind(self.state, self.place, self.has_state, self.stopped)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Progress of its state: steps, and the work after the last step. Equal for equal states."""
        return self.step, self.round, self.callbacks_done

    @property
    def in_ring(self) -> bool:
        """Whether the worker is a member of the present ring, also while it connects."""
        return self.place == UP or self.place == IN

    @property
    def is_starting(self) -> bool:
        """Whether the worker is not ready yet."""
        return self.state in STARTING_STATES

    @property
    def is_ready(self) -> bool:
        """Whether the worker can be a member of a ring."""
        return self.state in READY_STATES and self.place != AWAY


class Pool:
    """The live workers, by id; ids count up and are never reused."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerRecord] = {}
        self.lost: dict[WorkerId, WorkerRecord] = {}  # removed from the job, with an exit still unreported
        self.next_id = 0  # also the number of workers so far
        # Indexes of the workers, so that no event needs a scan of all workers.
        self._kinds: dict[Kind, dict[WorkerId, WorkerRecord]] = {}
        self._delays = Counter[str]()

    # --- one worker

    def add(self, now: float) -> WorkerRecord:
        """Add a new worker with the next id."""
        worker = WorkerRecord(WorkerId(self.next_id), since=now)
        self.next_id += 1
        return self._take_in(worker)

    def adopt(self, worker: WorkerId, handle: str, now: float) -> WorkerRecord:
        """Add a worker that an earlier master has started."""
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
        """Change a worker's kind. `event` is an event of the state table."""
        self._forget(w)
        w.state = WORKER.after(w.state, event) if event else w.state
        w.place = w.place if place is None else place
        w.has_state = w.has_state if has_state is None else has_state
        w.stopped = w.stopped if stopped is None else stopped
        self._kinds.setdefault(w.kind, {})[w.id] = w

    def left(self, w: WorkerRecord, out: ev.LeftRing) -> None:
        """Record that a worker has left a ring, with the state that it reported."""
        self.change(w, place=OUT, has_state=w.has_state or out.has_state)
        w.step, w.round, w.callbacks_done = out.step, out.round, out.callbacks_done
        w.skipped, w.bad, w.digest, w.made_in = out.skipped, out.bad, out.digest, out.made_in
        w.reads = out.reads

    def delay(self, w: WorkerRecord, why: str) -> bool:
        """Record why a worker does not run yet; empty if its delay has ended.

        True if it is the first worker that waits for this reason.
        """
        self._delays[w.delay] -= 1
        if self._delays[w.delay] <= 0:
            del self._delays[w.delay]
        self._delays[why] += 1
        w.delay = why
        return bool(why) and self._delays[why] == 1

    def lose(self, w: WorkerRecord) -> None:
        """Remove a worker from the job for good.

        Its record is kept until its exit is reported, and then dropped: a long job has had thousands.
        """
        self.delay(w, "")
        self._forget(w)
        w.state, w.place = WORKER.after(w.state, "gone"), OUT
        self.lost[w.id] = self._workers.pop(w.id)

    def _forget(self, w: WorkerRecord) -> None:
        same = self._kinds[w.kind]
        del same[w.id]
        if not same:
            del self._kinds[w.kind]

    def get(self, worker: WorkerId) -> WorkerRecord | None:
        """Return the worker with this id; None if it was removed."""
        return self._workers.get(worker)

    def __getitem__(self, worker: WorkerId) -> WorkerRecord:
        return self._workers[worker]

    # --- all of them

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerRecord]:
        """Iterate over the workers, oldest first."""
        return iter(self._workers.values())

    def any(self, test: Callable[[Kind], bool]) -> bool:
        """Whether any worker is of a kind that fulfills `test`. It takes time by kinds, not by workers."""
        return any(test(kind) for kind in self._kinds)

    def count(self, test: Callable[[Kind], bool]) -> int:
        """The number of workers whose kind fulfills `test`."""
        return sum(len(workers) for kind, workers in self._kinds.items() if test(kind))

    def where(self, test: Callable[[Kind], bool]) -> list[WorkerRecord]:
        """Return the workers of the kinds that pass the test, oldest first."""
        found = [w for kind, workers in self._kinds.items() if test(kind) for w in workers.values()]
        return sorted(found, key=lambda w: w.id)

    @property
    def staying(self) -> list[WorkerRecord]:
        """The workers that are not draining, and so count towards the target."""
        return self.where(lambda kind: kind.stays)

    @property
    def vacant(self) -> WorkerId | None:
        """The oldest pending worker, which was not started yet."""
        return next((w.id for w in self.where(lambda kind: kind.state == PENDING)), None)
