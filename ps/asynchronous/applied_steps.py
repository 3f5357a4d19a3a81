"""Which steps a server has taken, where they come in any order (mode=ps); and, of the coordinator, who makes
which.

    Take ──▶ held ──Push──▶ taken ──Reopen (another server has lost it)──▶ to be made again
               └──its worker is silent, or late──▶ handed out again

Promise: a step is taken once, whoever brings it and however often. What is not taken below a limit is handed
out to whoever asks, sooner or later. Pure: states are values, a call gives the one after it; the clock of the
book of leases is its owner's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any

from edl.contract.ranges import RangeSet
from edl.ps.errors import Invalid, Misplaced, Stale

SILENT_SECONDS = 20.0  # a worker that said nothing for so long has lost what it holds
SILENT_TIMES = 5.0  # or for so many times what a step takes, if that is more
LATE_SECONDS = 1.0  # a step that is held so long longer than steps take is late
LATE_TIMES = 2.0
FIRST_SECONDS = 5.0  # what a step is thought to take before one was made
NEWER = 0.2  # how much the newest step counts in what a step takes
NOTHING = RangeSet()


class Fate(Enum):
    """What becomes of a step that is pushed."""

    TAKEN = "it counts"
    REPEATED = "it was taken before"
    TOO_OLD = "it was made of weights that are too old"


@dataclass(frozen=True)
class Rules:
    """How steps are taken (ps.proto, Asynchronous).

    Args:
        together: so many are applied as one update.
        max_staleness: in updates; 0: any.
        scale_rate: the older its weights, the less a step's learning rate.
    """

    together: int = 1
    max_staleness: int = 0
    scale_rate: bool = False

    def rate(self, learning_rate: float, staleness: int) -> float:
        return learning_rate / max(1, staleness) if self.scale_rate else learning_rate


@dataclass(frozen=True)
class Pushed:
    """A step that counts, and is not in the rows yet.

    Args:
        learning_rate: with which it is applied.
        gradients: as its bringer has them.
        loss: the mean over its records.
    """

    step: int
    learning_rate: float
    gradients: Any
    loss: float = 0.0
    records: int = 0


@dataclass(frozen=True)
class Update:
    """Apply the mean of these, the lowest step first, to rows that have `version` updates."""

    version: int
    pushed: tuple[Pushed, ...]

    @property
    def learning_rate(self) -> float:
        return math.fsum(one.learning_rate for one in self.pushed) / len(self.pushed)

    @property
    def scale(self) -> float:
        return 1.0 / len(self.pushed)


@dataclass(frozen=True)
class Kept:
    """What the workers have to know at a step beside the weights.

    Args:
        repeated: steps that had come again after they were taken.
    """

    step: int
    order: int
    ledger: bytes
    repeated: int = 0


@dataclass(frozen=True)
class Taking:
    """
    Args:
        line: of states that follow one another; empty: nothing has begun.
        version: updates that the rows have.
        taken: steps that count here, also those that wait.
        waiting: of these, those that are not in the rows yet.
        reopened: steps that are taken here, and are to be made again for another server.
        repeated: steps that came again after they were taken.
        loss, records: of the steps that were taken since something was kept: the sum over their records.
        kept: the newest.
        restored: the generation, step and attempt of the last going back.
        others: of the coordinator: the lines that the other servers are in, as far as it was told.
        generation: of the last root that had it stand still.
        still: it takes no step until that one has it go on.
        arranged: the generation since which it has its rows in the arrangement in which it is.
    """

    line: str = ""
    version: int = 0
    taken: RangeSet = NOTHING
    waiting: tuple[Pushed, ...] = ()
    reopened: RangeSet = NOTHING
    repeated: int = 0
    loss: float = 0.0
    records: int = 0
    kept: Kept | None = None
    restored: tuple[int, int, str] = (0, 0, "")
    others: tuple[tuple[int, str], ...] = ()
    generation: int = 0
    still: bool = False
    arranged: int = 0

    @property
    def began(self) -> bool:
        return bool(self.line)

    @property
    def step(self) -> int:
        """All steps below it are taken, and none of them is to be made again."""
        ranges = self.taken.ranges
        whole = ranges[0][1] if ranges and ranges[0][0] == 0 else 0
        return min([whole, *(start for start, _ in self.reopened.ranges[:1])])

    @property
    def applied(self) -> Taking:
        """What the rows have: those steps that wait are not taken."""
        waiting = self.waiting
        return replace(
            self,
            taken=self.taken.minus(RangeSet.of((one.step, one.step + 1) for one in waiting)),
            waiting=(),
            loss=self.loss - math.fsum(one.loss * one.records for one in waiting),
            records=self.records - sum(one.records for one in waiting),
        )

    def open(self, limit: int) -> RangeSet:
        """What is to be made below `limit`."""
        missing = RangeSet.of([(0, limit)]).minus(self.taken)
        return missing.union(self.reopened.within(0, limit))

    # --- the job begins, and goes back

    def begin(self, line: str, since: int = 0) -> Taking:
        """With values that are in the rows then. Once.

        Args:
            since: the generation of the root that has it begin.
        """
        return self if self.began else replace(self, line=line, arranged=since)

    def goes_back(self, generation: int, step: int, attempt: str) -> bool:
        """Whether it is to go back to that checkpoint; otherwise it has done so.

        Args:
            generation: greater than that of the last going back; 0: only a server that has nothing is meant.

        Raises:
            Stale: it has gone back since.
            Misplaced: it has gone back elsewhere, or would lose what it has.
            Invalid: there are no such numbers.
        """
        if generation < 0 or step < 0:
            raise Invalid(f"generation {generation}, step {step}: expected at least 0")
        known, *where = self.restored
        if 0 < generation < self.generation:
            raise Stale(f"generation {generation} has passed")
        if generation < known and generation:
            raise Stale(f"generation {generation} has passed: the server went back in generation {known}")
        if generation > known or not (generation or self.began):
            return True
        if where != [step, attempt]:
            raise Misplaced(
                f"the server has rows, and went back to step {where[0]}, not to step {step}, in generation "
                f"{known}: who wants it to go back says so in a greater generation"
            )
        return False

    def lost(self) -> Taking:
        """The rows are gone."""
        return Taking(restored=(self.restored[0], 0, ""), generation=self.generation, still=self.still)

    # --- the arrangement of the servers changes, or a root sees to it that it does not

    def settle(self, generation: int) -> Taking:
        """A root claims this generation, and has it stand still. Once: the same again changes nothing.

        Raises:
            Stale: another root has claimed a later one.
        """
        if generation < self.generation:
            raise Stale(f"generation {generation} has passed")
        return self if generation == self.generation else replace(self, generation=generation, still=True)

    def speaks(self, generation: int) -> None:
        """Raises, unless the last root that has settled is the one that calls.

        Raises:
            Stale: another one has, since.
            Misplaced: it has not settled here: what it has settled was lost.
        """
        if generation < self.generation:
            raise Stale(f"generation {generation} has passed")
        if generation > self.generation:
            raise Misplaced(f"generation {generation} is not settled here: the server has lost its log")

    def joins(self, steps: RangeSet, version: int, kept: Kept | None, line: str, since: int) -> Taking:
        """With rows of other servers, which have all taken these steps, and so many updates."""
        repeated = kept.repeated if kept is not None else 0
        return replace(
            self, line=line, version=version, taken=steps, kept=kept, repeated=repeated, still=False,
            arranged=since,
        )  # fmt: skip

    def moved(self, version: int, line: str, since: int) -> Taking:
        """With other rows than before: whoever speaks of the line before is late."""
        version = max(self.version, version)
        return replace(self, line=line, version=version, still=False, arranged=since)

    # --- steps

    def fate(self, step: int, version: int, skipped: bool, rules: Rules) -> Fate:
        """
        Args:
            version: of the weights that it was made with.

        Raises:
            Invalid: there is no such step.
        """
        if step < 0:
            raise Invalid(f"step {step}: expected 0 or more")
        if self.taken.covers(step, step + 1):
            return Fate.REPEATED
        if rules.max_staleness and not skipped and self.staleness(version) > rules.max_staleness:
            return Fate.TOO_OLD
        return Fate.TAKEN

    def staleness(self, version: int) -> int:
        return max(0, self.version - version)

    def again(self, step: int) -> Taking:
        """A step has come that was taken before."""
        reopened = self.reopened.minus(RangeSet.of([(step, step + 1)]))
        return replace(self, repeated=self.repeated + 1, reopened=reopened)

    def take(self, pushed: Pushed, rules: Rules, skipped: bool) -> tuple[Taking, Update | None]:
        """A step that was not taken before. One that was skipped changes no rows, and nobody waits for it."""
        after = replace(self, taken=self.taken.add(pushed.step, pushed.step + 1))
        if skipped:
            return after, None
        after = replace(
            after, loss=self.loss + pushed.loss * pushed.records, records=self.records + pushed.records,
            waiting=(*self.waiting, pushed),
        )  # fmt: skip
        if len(after.waiting) < rules.together:
            return after, None
        return after._applied(after.waiting)

    def drain(self, step: int) -> tuple[Taking, Update | None]:
        """All steps below `step` are taken: apply those of them that wait.

        Raises:
            Misplaced: some are not taken.
        """
        if not self.taken.covers(0, step):
            missing = RangeSet.of([(0, step)]).minus(self.taken)
            raise Misplaced(f"of the steps below {step}, this server lacks {missing}")
        waiting = tuple(one for one in self.waiting if one.step < step)
        return self._applied(waiting) if waiting else (self, None)

    def _applied(self, pushed: tuple[Pushed, ...]) -> tuple[Taking, Update]:
        update = Update(self.version, tuple(sorted(pushed, key=lambda one: one.step)))
        applied = {one.step for one in pushed}
        rest = tuple(one for one in self.waiting if one.step not in applied)
        return replace(self, version=self.version + 1, waiting=rest), update

    # --- of the coordinator

    def reopen(self, steps: RangeSet, line: str, server: int = 0, server_line: str = "") -> Taking:
        """Those of these steps that are taken here are to be made again, because another server lacks them.
        If it is in another line than was known, or there are some, whoever is making a step now has to look
        anew: it may have given it to that server before it lost it.

        Args:
            line: another one.
            server, server_line: the other server; 0: it is not said which.
        """
        reopened = self.reopened.union(self.taken.minus(self.taken.minus(steps)))
        known = dict(self.others)
        others = tuple(sorted({**known, server: server_line}.items())) if server else self.others
        if reopened == self.reopened and others == self.others:
            return self
        is_new = server in known and known[server] != server_line
        after = line if is_new or reopened != self.reopened else self.line
        return replace(self, reopened=reopened, others=others, line=after)

    def keep(self, kept: Kept) -> Taking:
        """Nothing older replaces what is kept."""
        if self.kept is not None and kept.order <= self.kept.order:
            return self
        repeated = max(self.repeated, kept.repeated)
        return replace(self, kept=kept, loss=0.0, records=0, repeated=repeated)


@dataclass
class _Held:
    worker: int
    since: float


class Leases:
    """Who makes which steps. Only in memory: a server that has come back hands out again what it lacks.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._heard: dict[int, float] = {}
        self._takes = FIRST_SECONDS  # a step
        self._made_one = False

    @property
    def held(self) -> Mapping[int, int]:
        """The worker that makes each step."""
        return {step: held.worker for step, held in self._held.items()}

    def take(self, worker: int, most: int, open_: RangeSet) -> list[int]:
        """Steps for this worker: the lowest that nobody holds; if there are none, those that are late, the
        longest held first.

        Args:
            open_: what is to be made.
        """
        now = self.heard(worker)
        silent = now - max(SILENT_SECONDS, SILENT_TIMES * self._takes)
        gone = {other for other, at in self._heard.items() if at < silent}
        for other in gone:
            del self._heard[other]
        self._held = {step: held for step, held in self._held.items() if held.worker not in gone}
        free = (step for start, stop in open_ for step in range(start, stop) if step not in self._held)
        found = list(islice(free, most))
        if not found:
            late = now - (LATE_SECONDS + LATE_TIMES * self._takes)
            waited = [
                (held.since, step)
                for step, held in self._held.items()
                if held.since <= late and open_.covers(step, step + 1)
            ]
            found = sorted(step for _, step in sorted(waited)[:most])
        self._held.update({step: _Held(worker, now) for step in found})
        return found

    def made(self, step: int) -> None:
        held = self._held.pop(step, None)
        if held is not None:
            took = self._clock() - held.since
            self._takes = took if not self._made_one else self._takes + NEWER * (took - self._takes)
            self._made_one = True

    def heard(self, worker: int) -> float:
        """It lives."""
        self._heard[worker] = now = self._clock()
        return now

    def clear(self) -> None:
        """Nobody makes anything any more."""
        self._held.clear()
