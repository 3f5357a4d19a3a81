"""The present ring, and the record of those before it.

    formed ──every member up──▶ running ──Leave or Cut──▶ closing ──every member out──▶ formed...

A ring is left at a step boundary where that was planned, and cut where somebody in it was lost;
what began as planned may still break. Who is in the next one is decided in `quorum`.
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
MOST_ERRORS = 3  # of a broken ring that people are shown


@dataclass(slots=True)
class Change:
    """One generation, for the record: who, why, and what the change to it cost."""

    generation: Generation
    members: tuple[WorkerId, ...]
    cause: str
    planned: bool
    formed_at: float
    from_size: int
    stopped_at: float | None = None  # when the first member had left the ring before
    step: int = 0
    up_seconds: float | None = None  # from formed to every member up
    stall_seconds: float = 0.0  # the longest that a survivor waited from step to step
    redone_records: int = 0
    stepped: set[WorkerId] = field(default_factory=set)
    told: bool = False
    learned: bool = False  # an earlier master formed it, and whether it has made a step is not known
    went_back: bool = False  # with the parameter servers, to what these could

    def note(self, stepped: ev.Stepped) -> bool:
        """A member's first step came back. False: it had said so before."""
        if stepped.worker in self.stepped:
            return False
        self.stepped.add(stepped.worker)
        self.stall_seconds = max(self.stall_seconds, stepped.stall_seconds)
        self.redone_records += stepped.redone_records
        return True

    def tell(self) -> list[ef.Effect]:
        """The one line that people look for after a change of the ring; once."""
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
    """The sum of the changes that are too long ago to be kept one by one."""

    changes: int = 0
    stall_seconds: float = 0.0  # the longest of any
    redone_records: int = 0

    def add(self, change: Change) -> None:
        self.changes += 1
        self.stall_seconds = max(self.stall_seconds, change.stall_seconds)
        self.redone_records += change.redone_records


class Ring:
    """The ring that is; no members: there is none."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.generation = NO_RING
        self.members: tuple[WorkerId, ...] = ()  # by rank
        self.ranks: dict[WorkerId, int] = {}
        self.closing = ""  # why it is being left; empty while it runs
        self.planned = True  # whether it is left at a step boundary
        self._asked: set[WorkerId] = set()  # to leave it
        self.lost_member = False  # whether a member has been lost
        self.errors = Counter[str]()  # with which members have left it, and how many
        self.stopped_at: float | None = None  # when the first of its members had left it
        self.stop_seconds = 0.0  # for which the last planned change stopped those who train; 0: not known
        self.shares: tuple[int, ...] = ()  # of each step, by rank
        self.changes: list[Change] = []  # the last ones
        self.earlier = Earlier()

    @property
    def inside(self) -> list[WorkerRecord]:
        """The members that live and are in it."""
        return [w for m in self.members if (w := self._pool.get(m)) is not None and w.in_ring]

    @property
    def running(self) -> bool:
        """It was formed, and nobody has been asked to leave it."""
        return bool(self.members) and not self.closing

    @property
    def steps_whole(self) -> bool:
        """It runs, or is left at a step boundary: what its members have said of their steps is so."""
        return bool(self.members) and (self.planned or not self.closing)

    @property
    def broke_by_itself(self) -> bool:
        """It broke before its first step, and no lost member is the reason. Final when all have left it."""
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
        """Every member in it has the state."""
        return not self._pool.any(lambda kind: kind.place == IN)

    def form(self, members: tuple[WorkerId, ...], cause: str, now: float) -> None:
        """The next generation: the last one has been left by everybody."""
        generation = Generation(self.generation + 1)
        self._begin(Change(generation, members, cause, self.planned, now, len(self.members), self.stopped_at))

    def learn(self, generation: Generation, members: tuple[WorkerId, ...], now: float) -> None:
        """A ring that an earlier master has formed, as its members tell of it."""
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
            self.changes[-1].stepped = set()  # it is over, and told
        self.changes.append(change)
        if len(self.changes) > KEPT_CHANGES:
            self.earlier.add(self.changes.pop(0))

    def close(self, why: str, planned: bool) -> list[ef.Effect]:
        """Have every member leave: at a step boundary, or by a cut when the ring is broken."""
        if not self.members:
            return []
        if not self.closing:
            self.closing, self.planned = why, planned
        elif self.planned and not planned:
            self.closing, self.planned = f"{self.closing}; {why}", False
        else:
            return []  # asked already
        self._asked = set()
        return self.ask_the_rest()

    def ask_the_rest(self) -> list[ef.Effect]:
        """Have those leave who were not in it yet when it was closed: under an earlier master they were."""
        rest = tuple(w.id for w in self.inside if w.id not in self._asked)
        if not self.closing or not rest:
            return []
        self._asked.update(rest)
        return [ef.Leave(self.generation, rest) if self.planned else ef.Cut(self.generation, rest)]

    def stops(self, now: float) -> None:
        """A member has left it."""
        if self.stopped_at is None:
            self.stopped_at = now

    def goes_on(self, now: float) -> None:
        """A member that had been in a ring before is in this one."""
        change = self.changes[-1]
        if change.stopped_at is not None and change.planned and self.running:
            self.stop_seconds = now - change.stopped_at

    def dissolve(self) -> None:
        """Everybody has left it, and no other follows at once."""
        self.members, self.ranks, self.closing, self.stopped_at = (), {}, "", None
