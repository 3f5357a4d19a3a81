# SPDX-License-Identifier: Apache-2.0
"""The current ring, its state table, and the record of earlier rings.

    none -> running -> leaving -> broken -> member lost -> none or running

Members leave a ring at a step boundary if the change is planned; the ring is cut if it breaks. A planned
change may still break, and a broken ring may turn out to have lost a member. `quorum` decides the members of
the next ring. Whether all members hold the state is known by the workers' places, so it is no state here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from edl.contract.ids import NO_RING, Generation, WorkerId
from edl.contract.reasons import Reason
from edl.contract.state_tables import Table
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.workers import DRAINING, IN, Pool, WorkerRecord

KEPT_CHANGES = 100  # a job that runs for a month has ten thousand
MAX_ERRORS = 3  # errors of a broken ring that are shown to users


class RingState(StrEnum):
    """The state of the current ring."""

    NONE = "none"
    RUNNING = "running"  # it was formed, and no member was ordered to leave it
    LEAVING = "leaving"  # its members were ordered to leave it at a step boundary
    BROKEN = "broken"  # it was cut, and no member is known to be lost
    MEMBER_LOST = "member lost"  # it was cut, and a member is lost
    NONE_AFTER_A_BREAK = "none after a break"


NONE, RUNNING, LEAVING = RingState.NONE, RingState.RUNNING, RingState.LEAVING
BROKEN, MEMBER_LOST, NONE_AFTER_A_BREAK = (
    RingState.BROKEN,
    RingState.MEMBER_LOST,
    RingState.NONE_AFTER_A_BREAK,
)
CHANGE, BREAK, LOSS = "change", "break", "loss"  # the events by which a ring is closed

RING = Table(
    "a ring",
    NONE,
    {
        (NONE, "form"): RUNNING,
        (RUNNING, CHANGE): LEAVING,
        (RUNNING, BREAK): BROKEN,
        (RUNNING, LOSS): MEMBER_LOST,
        (LEAVING, CHANGE): LEAVING,
        (LEAVING, BREAK): BROKEN,
        (LEAVING, LOSS): MEMBER_LOST,
        (BROKEN, CHANGE): BROKEN,
        (BROKEN, BREAK): BROKEN,
        (BROKEN, LOSS): MEMBER_LOST,
        (MEMBER_LOST, CHANGE): MEMBER_LOST,
        (MEMBER_LOST, BREAK): MEMBER_LOST,
        (MEMBER_LOST, LOSS): MEMBER_LOST,
        # Once all members have left, the next ring is formed at once, or only after a while.
        (LEAVING, "form"): RUNNING,
        (BROKEN, "form"): RUNNING,
        (MEMBER_LOST, "form"): RUNNING,
        (LEAVING, "dissolve"): NONE,
        (BROKEN, "dissolve"): NONE_AFTER_A_BREAK,
        (MEMBER_LOST, "dissolve"): NONE_AFTER_A_BREAK,
        (NONE, "dissolve"): NONE,
        (NONE_AFTER_A_BREAK, "dissolve"): NONE_AFTER_A_BREAK,
        (NONE_AFTER_A_BREAK, "form"): RUNNING,
        # A member reports a newer ring, which an earlier master has formed.
        **{(state, "learn"): RUNNING for state in RingState},
    },
)


@dataclass(slots=True)
class Change:
    """The record of one generation: its members, its cause, and the cost of the change to it."""

    generation: Generation
    members: tuple[WorkerId, ...]
    cause: str
    planned: bool
    formed_at: float
    from_size: int
    stopped_at: float | None = None  # when the first member left the previous ring
    step: int = 0
    round: int = 0  # the evaluation batch after that step, with which it began
    up_seconds: float | None = None  # from the formation until every member had the state
    stall_seconds: float = 0.0  # the longest pause between two steps of a survivor
    redone_records: int = 0
    stepped: set[WorkerId] = field(default_factory=set)
    told: bool = False
    learned: bool = False  # an earlier master formed it; whether it made a step is unknown
    rolled_back: bool = False  # to an earlier step, together with the parameter servers

    def note(self, stepped: ev.Stepped) -> bool:
        """Record a member's first step in this ring. Returns False if it was recorded already."""
        if stepped.worker in self.stepped:
            return False
        self.stepped.add(stepped.worker)
        self.stall_seconds = max(self.stall_seconds, stepped.stall_seconds)
        self.redone_records += stepped.redone_records
        return True

    def join(self, step: int, up: bool, now: float) -> bool:
        """Record a member that holds the state of this step. True, once, if every member does (`up`)."""
        self.step = max(self.step, step)
        if not up or self.up_seconds is not None:
            return False
        self.up_seconds = now - self.formed_at
        return True

    def roll_back(self) -> bool:
        """Record that the ring rolls back with the parameter servers. False if that was recorded already."""
        before, self.rolled_back = self.rolled_back, True
        return not before

    def tell(self, counts_records: bool = True) -> list[ef.Effect]:
        """Return one notice about this change, the first time that it is called.

        Args:
            counts_records: whether the workers report the records that they train again.
        """
        if self.told:
            return []
        self.told = True
        text = f"ring {self.from_size} -> {len(self.members)}"
        if not self.stepped:
            reason, text = Reason.RingBroken, f"{text} broke before its first step"
        elif self.from_size:
            reason = Reason.RingReshaped
            text += f" in {self.stall_seconds:.2f} s"
            text += f", {self.redone_records} records redone" if counts_records else ""
        else:
            reason = Reason.RingFormed
        return [ef.Notice(reason, f"{text} ({self.cause})")]


@dataclass(slots=True)
class Earlier:
    """Totals of the changes that are too old to be kept one by one."""

    changes: int = 0
    stall_seconds: float = 0.0  # the longest of any
    redone_records: int = 0

    def add(self, change: Change) -> None:
        """Add the figures of a change that is dropped from the list."""
        self.changes += 1
        self.stall_seconds = max(self.stall_seconds, change.stall_seconds)
        self.redone_records += change.redone_records


class Ring:
    """The current ring."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.state = RING.first
        self.generation = NO_RING
        self.members: tuple[WorkerId, ...] = ()  # by rank
        self.ranks: dict[WorkerId, int] = {}
        self.cause = ""  # why its members leave it
        self._reported = ""  # the part of `cause` that a member has reported, such as an error of Horovod
        self.cut_at = 0.0  # when the last of its members were ordered to leave it
        self._read_at = 0.0  # when a read of a worker that has left a ring returned last
        self._asked: set[WorkerId] = set()  # members that were ordered to leave
        self.errors = Counter[str]()  # errors with which members left it, and how often
        self.stopped_at: float | None = None  # when the first of its members left
        self.stop_seconds = 0.0  # how long the last planned change stopped training; 0: unknown
        self.shares: tuple[int, ...] = ()  # of each step, by rank
        self.changes: list[Change] = []  # the newest KEPT_CHANGES
        self.earlier = Earlier()
        self._counted: tuple[Generation, tuple[WorkerId, ...]] = (
            NO_RING,
            (),
        )  # members whose costs `earlier` has

    @property
    def inside(self) -> list[WorkerRecord]:
        """The live members that are in the ring."""
        return [w for m in self.members if (w := self._pool.get(m)) is not None and w.in_ring]

    @property
    def running(self) -> bool:
        """True if the ring was formed and no member was ordered to leave it."""
        return self.state is RUNNING

    @property
    def broken(self) -> bool:
        """True if the ring was cut, and its members have not all left it."""
        return self.state in (BROKEN, MEMBER_LOST)

    @property
    def closing(self) -> bool:
        """True if the members were ordered to leave, and have not all left."""
        return self.state is LEAVING or self.broken

    @property
    def steps_whole(self) -> bool:
        """True if the ring runs or is left at a step boundary, so its members' reported steps are valid."""
        return self.state in (RUNNING, LEAVING)

    @property
    def broke_by_itself(self) -> bool:
        """True if the ring broke before its first step without a lost member; final once all have left it.

        A ring that its members were ordered to leave did not break by itself: a member that waits for
        something else then breaks it. So does a member that has to end soon.
        """
        told = self.cause != self._reported
        ends = any(w.state == DRAINING for w in map(self._pool.get, self.members) if w is not None)
        change = self.changes[-1] if self.state is BROKEN and self.errors and not (told or ends) else None
        return change is not None and not (change.stepped or change.learned)

    @property
    def error(self) -> str:
        """Why it broke, as its members reported it.

        One member may know the cause, and the others only that it failed: the rarest texts come first.
        """
        texts = sorted(self.errors, key=lambda text: self.errors[text])
        return "; ".join(texts[:MAX_ERRORS])

    @property
    def up(self) -> bool:
        """True if every member in the ring holds the state."""
        return not self._pool.any(lambda kind: kind.place == IN)

    def form(
        self,
        members: tuple[WorkerId, ...],
        cause: str,
        now: float,
        shares: tuple[int, ...] = (),
        round: int = 0,
    ) -> None:
        """Start the next generation. All members must have left the previous one.

        Args:
            round: the evaluation batch that its root has reached.
        """
        self.shares = shares
        planned = not (self.broken or self.state is NONE_AFTER_A_BREAK)
        generation = Generation(self.generation + 1)
        change = Change(generation, members, cause, planned, now, len(self.members), self.stopped_at)
        change.round = round
        self._begin("form", change)

    def learn(self, generation: Generation, members: tuple[WorkerId, ...], now: float) -> None:
        """Record a ring that an earlier master formed, as its members report it."""
        self.earlier.changes = generation - 1 - len(self.changes)  # each generation is one change
        change = Change(generation, members, "taken over", True, now, len(members), told=True, learned=True)
        if generation == self._counted[0]:
            change.stepped.update(self._counted[1])
        self._begin("learn", change)

    def _begin(self, event: str, change: Change) -> None:
        self.state = RING.after(self.state, event)
        self.generation, self.members = change.generation, change.members
        self.ranks = {worker: rank for rank, worker in enumerate(change.members)}
        self.cause = self._reported = ""
        self.errors.clear()
        self.stopped_at = None
        if self.changes:
            self.changes[-1].stepped = set()  # it is over and was reported
        self.changes.append(change)
        if len(self.changes) > KEPT_CHANGES:
            self.earlier.add(self.changes.pop(0))

    def close(self, why: str, event: str, now: float) -> list[ef.Effect]:
        """Order every member to leave: at a step boundary, or by a cut if the ring is broken.

        Args:
            event: CHANGE, BREAK or LOSS.
        """
        if not self.members:
            return []
        before, self.state = self.state, RING.after(self.state, event)
        if before is RUNNING:
            self.cause = why
        elif before is LEAVING and self.broken:
            self.cause = f"{self.cause}; {why}"
        else:
            if self.state is MEMBER_LOST and self._reported:
                # The peers of a crashed worker often report a broken ring before its exit is seen.
                self.cause, self._reported = self.cause.removesuffix(self._reported) + why, ""
            return []  # ordered already
        self._reported = why if self.state is BROKEN else ""
        self.cut_at, self._asked = now, set()
        return self.ask_the_rest(now)

    def name_cause(self, known: str, now_known: str) -> None:
        """Replace a part of the cause of the change to the next ring, unless the change is reported."""
        self.cause = self.cause.replace(known, now_known)
        if self.changes and not self.changes[-1].told:
            self.changes[-1].cause = self.changes[-1].cause.replace(known, now_known)

    def ask_the_rest(self, now: float) -> list[ef.Effect]:
        """Order the remaining members to leave: those that were not known yet when the ring was closed."""
        rest = tuple(w.id for w in self.inside if w.id not in self._asked)
        if not self.closing or not rest:
            return []
        self._asked.update(rest)
        self.cut_at = now
        return [ef.Cut(self.generation, rest) if self.broken else ef.Leave(self.generation, rest)]

    @property
    def quiet_since(self) -> float:
        """When members were last ordered to leave it, or a read of one that has left it returned."""
        return max(self.cut_at, self._read_at)

    def read(self, now: float) -> None:
        """Record that a read of a worker that has left a ring has returned."""
        self._read_at = now

    def stops(self, now: float, error: str = "") -> None:
        """Record that a member has left the ring, because of an error or as ordered."""
        self.errors.update([error] if error else [])
        if self.stopped_at is None:
            self.stopped_at = now

    def goes_on(self, now: float) -> None:
        """Record that a member of the previous ring trains in this one."""
        change = self.changes[-1]
        if change.stopped_at is not None and change.planned and self.running:
            self.stop_seconds = now - change.stopped_at

    def keep(self) -> None:
        """Record that all members of a learned ring hold the state, and train on."""
        self.changes[-1].up_seconds, self.shares = 0.0, (1,) * len(self.members)

    def restore(self, earlier: Earlier, generation: Generation, stepped: tuple[WorkerId, ...]) -> None:
        """Continue the totals of an earlier master.

        Args:
            generation: that master's last ring.
            stepped: its members whose costs are in the totals; they report them again.
        """
        self.earlier, self._counted = earlier, (generation, stepped)

    def dissolve(self) -> None:
        """Remove the ring: all members have left, and no ring follows at once."""
        self.state = RING.after(self.state, "dissolve")
        self.members, self.ranks, self.cause, self.stopped_at = (), {}, "", None
