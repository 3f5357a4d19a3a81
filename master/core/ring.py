"""The current ring, and the record of earlier rings.

    formed ──every member up──▶ running ──Leave or Cut──▶ closing ──every member out──▶ formed...

Members leave a ring at a step boundary if the change is planned; the ring is cut if a member is lost. A
planned change may still break. `quorum` decides the members of the next ring.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from edl.contract.ids import Generation, WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.workers import IN, NO_RING, Pool, WorkerRecord

KEPT_CHANGES = 100  # a job that runs for a month has ten thousand
MOST_ERRORS = 3  # errors of a broken ring that are shown to users


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
    up_seconds: float | None = None  # from the formation until every member had the state
    stall_seconds: float = 0.0  # the longest pause between two steps of a survivor
    redone_records: int = 0
    stepped: set[WorkerId] = field(default_factory=set)
    told: bool = False
    learned: bool = False  # an earlier master formed it; whether it made a step is unknown
    went_back: bool = False  # to an earlier step, together with the parameter servers

    def note(self, stepped: ev.Stepped) -> bool:
        """Record a member's first step in this ring. Returns False if it was recorded already."""
        if stepped.worker in self.stepped:
            return False
        self.stepped.add(stepped.worker)
        self.stall_seconds = max(self.stall_seconds, stepped.stall_seconds)
        self.redone_records += stepped.redone_records
        return True

    def tell(self) -> list[ef.Effect]:
        """Return one notice about this change, the first time that it is called."""
        if self.told:
            return []
        self.told = True
        text = f"ring {self.from_size} -> {len(self.members)}"
        if not self.stepped:
            reason, text = Reason.RingBroken, f"{text} broke before its first step"
        elif self.from_size:
            reason = Reason.RingReshaped
            text += f" in {self.stall_seconds:.2f} s, {self.redone_records} records redone"
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
        self.changes += 1
        self.stall_seconds = max(self.stall_seconds, change.stall_seconds)
        self.redone_records += change.redone_records


class Ring:
    """The current ring; without members there is no ring."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.generation = NO_RING
        self.members: tuple[WorkerId, ...] = ()  # by rank
        self.ranks: dict[WorkerId, int] = {}
        self.closing = ""  # why its members leave it; empty while it runs
        self.planned = True  # whether its members leave it at a step boundary
        self._asked: set[WorkerId] = set()  # members that were ordered to leave
        self.lost_member = False  # whether a member has been lost
        self.errors = Counter[str]()  # errors with which members left it, and how often
        self.stopped_at: float | None = None  # when the first of its members left
        self.stop_seconds = 0.0  # how long the last planned change stopped training; 0: unknown
        self.shares: tuple[int, ...] = ()  # of each step, by rank
        self.changes: list[Change] = []  # the newest KEPT_CHANGES
        self.earlier = Earlier()

    @property
    def inside(self) -> list[WorkerRecord]:
        """The live members that are in the ring."""
        return [w for m in self.members if (w := self._pool.get(m)) is not None and w.in_ring]

    @property
    def running(self) -> bool:
        """True if the ring was formed and no member was ordered to leave it."""
        return bool(self.members) and not self.closing

    @property
    def steps_whole(self) -> bool:
        """True if the ring runs or is left at a step boundary, so its members' reported steps are valid."""
        return bool(self.members) and (self.planned or not self.closing)

    @property
    def broke_by_itself(self) -> bool:
        """True if the ring broke before its first step without a lost member; final once all have left it."""
        if not self.closing or self.planned or self.lost_member or not self.errors:
            return False
        return not (self.changes[-1].stepped or self.changes[-1].learned)

    @property
    def error(self) -> str:
        """Why it broke, as its members reported it.

        One member may know the cause, and the others only that it failed: the rarest texts come first.
        """
        texts = sorted(self.errors, key=lambda text: self.errors[text])
        return "; ".join(texts[:MOST_ERRORS])

    @property
    def up(self) -> bool:
        """True if every member in the ring holds the state."""
        return not self._pool.any(lambda kind: kind.place == IN)

    def form(self, members: tuple[WorkerId, ...], cause: str, now: float) -> None:
        """Start the next generation. All members must have left the previous one."""
        generation = Generation(self.generation + 1)
        self._begin(Change(generation, members, cause, self.planned, now, len(self.members), self.stopped_at))

    def learn(self, generation: Generation, members: tuple[WorkerId, ...], now: float) -> None:
        """Record a ring that an earlier master formed, as its members report it."""
        self.earlier.changes = generation - 1 - len(self.changes)  # each generation is one change
        self._begin(
            Change(generation, members, "taken over", True, now, len(members), told=True, learned=True)
        )

    def _begin(self, change: Change) -> None:
        self.generation, self.members = change.generation, change.members
        self.ranks = {worker: rank for rank, worker in enumerate(change.members)}
        self.closing, self.planned, self.lost_member = "", True, False
        self.errors.clear()
        self.stopped_at = None
        if self.changes:
            self.changes[-1].stepped = set()  # it is over and was reported
        self.changes.append(change)
        if len(self.changes) > KEPT_CHANGES:
            self.earlier.add(self.changes.pop(0))

    def close(self, why: str, planned: bool) -> list[ef.Effect]:
        """Order every member to leave: at a step boundary, or by a cut if the ring is broken."""
        if not self.members:
            return []
        if not self.closing:
            self.closing, self.planned = why, planned
        elif self.planned and not planned:
            self.closing, self.planned = f"{self.closing}; {why}", False
        else:
            return []  # ordered already
        self._asked = set()
        return self.ask_the_rest()

    def ask_the_rest(self) -> list[ef.Effect]:
        """Order the remaining members to leave: those that were not known yet when the ring was closed."""
        rest = tuple(w.id for w in self.inside if w.id not in self._asked)
        if not self.closing or not rest:
            return []
        self._asked.update(rest)
        return [ef.Leave(self.generation, rest) if self.planned else ef.Cut(self.generation, rest)]

    def stops(self, now: float) -> None:
        """Record that a member has left the ring."""
        if self.stopped_at is None:
            self.stopped_at = now

    def goes_on(self, now: float) -> None:
        """Record that a member of the previous ring trains in this one."""
        change = self.changes[-1]
        if change.stopped_at is not None and change.planned and self.running:
            self.stop_seconds = now - change.stopped_at

    def dissolve(self) -> None:
        """Remove the ring: all members have left, and no ring follows at once."""
        self.members, self.ranks, self.closing, self.stopped_at = (), {}, "", None
