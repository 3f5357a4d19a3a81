# SPDX-License-Identifier: Apache-2.0
"""The steps that a server has applied in asynchronous SGD (mode=ps), and the coordinator's leases of steps.

    Lease ──▶ leased ──Push──▶ accepted ──Reschedule (another server has lost the step)──▶ leased again
                 └──the worker is silent or late──▶ leased to another worker

Promise: a step is accepted once, whichever worker pushes it and however often. Each step below a limit that
is not accepted is leased, sooner or later, to a worker that asks. Pure: a state is a value, and each call
returns the next one; the clock of `Leases` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any

from edl.contract.ranges import RangeSet
from edl.ps.errors import Invalid, Misplaced, Stale, check_not_stale
from edl.ps.phase import Phase

SILENT_SECONDS = 20.0  # a worker that is silent for longer loses its leases
SILENT_TIMES = 5.0  # or for this many times the duration of a step, if that is longer
LATE_SECONDS = 1.0  # a step is late after LATE_TIMES the duration of a step, plus this
LATE_TIMES = 2.0
FIRST_SECONDS = 5.0  # assumed duration of a step before the first one is measured
NEWER = 0.2  # weight of the newest step in the moving average of the duration
NOTHING = RangeSet()


class PushOutcome(Enum):
    """The result of pushing a step."""

    ACCEPTED = "the step counts"
    DUPLICATE = "the step was accepted before"
    TOO_STALE = "its weights are too old"


@dataclass(frozen=True)
class Rules:
    """How steps are applied (ps.proto, Asynchronous).

    Args:
        together: number of steps that are applied as one update.
        max_staleness: in updates; 0: unlimited.
        scale_rate: divide a step's learning rate by the staleness of its weights.
    """

    together: int = 1
    max_staleness: int = 0
    scale_rate: bool = False

    def rate(self, learning_rate: float, staleness: int) -> float:
        return learning_rate / max(1, staleness) if self.scale_rate else learning_rate


@dataclass(frozen=True)
class Pushed:
    """An accepted step that is not in the rows yet.

    Args:
        learning_rate: the rate of the step.
        gradients: opaque here; the caller applies them.
        loss: mean over the step's records.
    """

    step: int
    learning_rate: float
    gradients: Any
    loss: float = 0.0
    records: int = 0


@dataclass(frozen=True)
class Update:
    """Apply the mean of these steps, the lowest first, to rows that have `version` updates."""

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
    """The workers' state at a step, beside the weights.

    Args:
        order: a lower order never replaces a higher one.
        repeated: number of duplicate pushes up to then.
    """

    step: int
    order: int
    ledger: bytes
    repeated: int = 0


@dataclass(frozen=True)
class AppliedSteps:
    """The steps that count on one server.

    Args:
        phase: whether the server has the rows of a job, and accepts steps.
        incarnation: id of this history of states; empty: the server has no rows.
        version: number of updates in the rows.
        accepted: steps that count here, including those that wait.
        waiting: accepted steps that are not in the rows yet.
        rescheduled: accepted steps that must be computed again, because another server lacks them.
        repeated: number of duplicate pushes of accepted steps.
        loss, records: sum of the loss over the records of the steps accepted since `keep`, and their number.
        kept: the newest state of the workers.
        restored: generation, step and attempt of the last rollback.
        others: coordinator only: the known incarnations of the other servers.
        generation: of the last root that quiesced this server.
        assigned_in: the generation since which the server's shard assignment holds.
    """

    phase: Phase = Phase.EMPTY
    incarnation: str = ""
    version: int = 0
    accepted: RangeSet = NOTHING
    waiting: tuple[Pushed, ...] = ()
    rescheduled: RangeSet = NOTHING
    repeated: int = 0
    loss: float = 0.0
    records: int = 0
    kept: Kept | None = None
    restored: tuple[int, int, str] = (0, 0, "")
    others: tuple[tuple[int, str], ...] = ()
    generation: int = 0
    assigned_in: int = 0

    @property
    def step(self) -> int:
        """All steps below it are accepted, and none of them is rescheduled."""
        ranges = self.accepted.ranges
        whole = ranges[0][1] if ranges and ranges[0][0] == 0 else 0
        return min([whole, *(start for start, _ in self.rescheduled.ranges[:1])])

    @property
    def in_rows(self) -> AppliedSteps:
        """The steps that are in the rows: without those that wait."""
        waiting = self.waiting
        return replace(
            self,
            accepted=self.accepted.minus(RangeSet.of((one.step, one.step + 1) for one in waiting)),
            waiting=(),
            loss=self.loss - math.fsum(one.loss * one.records for one in waiting),
            records=self.records - sum(one.records for one in waiting),
        )

    def missing(self, limit: int) -> RangeSet:
        """The steps below `limit` that must be computed."""
        missing = RangeSet.of([(0, limit)]).minus(self.accepted)
        return missing.union(self.rescheduled.within(0, limit))

    # --- start and rollback

    def begin(self, incarnation: str, since: int = 0) -> AppliedSteps:
        """Start the job. Later calls change nothing.

        Args:
            since: the generation of the calling root.
        """
        if self.phase.has_rows:
            return self
        return replace(self, phase=self.phase.after("begin"), incarnation=incarnation, assigned_in=since)

    def goes_back(self, generation: int, step: int, attempt: str) -> bool:
        """Whether the server must roll back to that checkpoint. False: it has done so already.

        Args:
            generation: greater than that of the last rollback; 0: roll back only a server without rows.

        Raises:
            Stale: the server has rolled back since.
            Misplaced: the server has rolled back to another checkpoint, or would lose its rows.
            Invalid: a number is negative.
        """
        if generation < 0 or step < 0:
            raise Invalid(f"generation {generation}, step {step}: expected at least 0")
        known, *where = self.restored
        if generation:
            check_not_stale(generation, self.generation)
        if generation < known and generation:
            raise Stale(f"stale generation {generation}: the server rolled back in generation {known}")
        if generation > known or not (generation or self.phase.has_rows):
            return True
        if where != [step, attempt]:
            raise Misplaced(
                f"restore to step {step} rejected: the server has rows, and generation {known} already "
                f"restored step {where[0]}; use a newer generation"
            )
        return False

    def lost(self) -> AppliedSteps:
        """Drop everything but the generations: the rows are lost, or on other servers."""
        phase, restored = self.phase.after("lose"), (self.restored[0], 0, "")
        return AppliedSteps(phase, restored=restored, generation=self.generation)

    # --- resharding

    def quiesce(self, generation: int) -> AppliedSteps:
        """Start this generation and accept no steps until `assign`. Repeating the call changes nothing.

        Raises:
            Stale: another root has started a newer generation.
        """
        check_not_stale(generation, self.generation)
        if generation == self.generation:
            return self
        return replace(self, phase=self.phase.after("quiesce"), generation=generation)

    def check_generation(self, generation: int) -> None:
        """Check that the caller is the root that quiesced this server last.

        Raises:
            Stale: another root has started a newer generation.
            Misplaced: the generation has not started here: the server has lost its log.
        """
        check_not_stale(generation, self.generation)
        if generation > self.generation:
            raise Misplaced(f"generation {generation} has not started here: the server has lost its log")

    def joins(
        self, steps: RangeSet, version: int, kept: Kept | None, incarnation: str, since: int
    ) -> AppliedSteps:
        """Join with rows of other servers.

        Args:
            steps: the steps that all these servers have accepted.
            version: the most updates that one of them has.
        """
        repeated = kept.repeated if kept is not None else 0
        return replace(
            self,
            phase=self.phase.after("join"),
            incarnation=incarnation,
            version=version,
            accepted=steps,
            kept=kept,
            repeated=repeated,
            assigned_in=since,
        )

    def moved(self, version: int, incarnation: str, since: int) -> AppliedSteps:
        """Continue with a different set of rows, in a new incarnation: calls of the old one are stale."""
        version = max(self.version, version)
        return replace(self.resumed(), incarnation=incarnation, version=version, assigned_in=since)

    def resumed(self) -> AppliedSteps:
        """Accept steps again, if there are rows."""
        return replace(self, phase=self.phase.after("resume"))

    # --- steps

    def classify(self, step: int, version: int, skipped: bool, rules: Rules) -> PushOutcome:
        """Whether a pushed step counts.

        Args:
            version: of the weights that the step used.

        Raises:
            Invalid: the step is negative.
        """
        if step < 0:
            raise Invalid(f"step {step}: expected 0 or more")
        if self.accepted.covers(step, step + 1):
            return PushOutcome.DUPLICATE
        if rules.max_staleness and not skipped and self.staleness(version) > rules.max_staleness:
            return PushOutcome.TOO_STALE
        return PushOutcome.ACCEPTED

    def staleness(self, version: int) -> int:
        return max(0, self.version - version)

    def mark_duplicate(self, step: int) -> AppliedSteps:
        """Count a duplicate push; the step is not rescheduled again."""
        rescheduled = self.rescheduled.minus(RangeSet.of([(step, step + 1)]))
        return replace(self, repeated=self.repeated + 1, rescheduled=rescheduled)

    def accept(self, pushed: Pushed, rules: Rules, skipped: bool) -> tuple[AppliedSteps, Update | None]:
        """Accept a step that was not accepted before. A skipped step changes no rows and does not wait."""
        after = replace(self, accepted=self.accepted.add(pushed.step, pushed.step + 1))
        if skipped:
            return after, None
        after = replace(
            after,
            loss=self.loss + pushed.loss * pushed.records,
            records=self.records + pushed.records,
            waiting=(*self.waiting, pushed),
        )
        if len(after.waiting) < rules.together:
            return after, None
        return after._apply(after.waiting)

    def drain(self, step: int) -> tuple[AppliedSteps, Update | None]:
        """Apply the waiting steps below `step`.

        Raises:
            Misplaced: a step below `step` is not accepted.
        """
        if not self.accepted.covers(0, step):
            missing = RangeSet.of([(0, step)]).minus(self.accepted)
            raise Misplaced(f"this server lacks the steps {missing}: expected all below {step}")
        waiting = tuple(one for one in self.waiting if one.step < step)
        return self._apply(waiting) if waiting else (self, None)

    def _apply(self, pushed: tuple[Pushed, ...]) -> tuple[AppliedSteps, Update]:
        update = Update(self.version, tuple(sorted(pushed, key=lambda one: one.step)))
        applied = {one.step for one in pushed}
        rest = tuple(one for one in self.waiting if one.step not in applied)
        return replace(self, version=self.version + 1, waiting=rest), update

    # --- on the coordinator

    def reschedule(
        self, steps: RangeSet, incarnation: str, server: int = 0, server_incarnation: str = ""
    ) -> AppliedSteps:
        """Compute those of these steps again that are accepted here, because another server lacks them.

        The result has a new incarnation if any step is rescheduled or if the other server has a new one.
        Workers that compute a step must then refresh: they may have pushed the step to that server before the
        loss.

        Args:
            incarnation: the new one.
            server, server_incarnation: the other server; 0: unspecified.
        """
        rescheduled = self.rescheduled.union(self.accepted.minus(self.accepted.minus(steps)))
        known = dict(self.others)
        others = tuple(sorted({**known, server: server_incarnation}.items())) if server else self.others
        if rescheduled == self.rescheduled and others == self.others:
            return self
        is_new = server in known and known[server] != server_incarnation
        after = incarnation if is_new or rescheduled != self.rescheduled else self.incarnation
        return replace(self, rescheduled=rescheduled, others=others, incarnation=after)

    def keep(self, kept: Kept) -> AppliedSteps:
        """Store the workers' state, unless a newer one is stored."""
        if self.kept is not None and kept.order <= self.kept.order:
            return self
        repeated = max(self.repeated, kept.repeated)
        return replace(self, kept=kept, loss=0.0, records=0, repeated=repeated)


@dataclass
class _Held:
    worker: int
    since: float


class Leases:
    """The worker that computes each step.

    It is in memory only: a coordinator that restarts leases the steps that it lacks again.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._held: dict[int, _Held] = {}
        self._heard: dict[int, float] = {}
        self._takes = FIRST_SECONDS  # duration of a step
        self._made_one = False

    @property
    def held(self) -> Mapping[int, int]:
        """The worker that holds the lease of each step."""
        return {step: held.worker for step, held in self._held.items()}

    def lease(self, worker: int, most: int, missing: RangeSet) -> list[int]:
        """Lease at most `most` steps: the lowest free ones, or if none is free, the late ones held longest.

        Args:
            missing: the steps that must be computed.
        """
        now = self.heard(worker)
        silent = now - max(SILENT_SECONDS, SILENT_TIMES * self._takes)
        gone = {other for other, at in self._heard.items() if at < silent}
        for other in gone:
            del self._heard[other]
        self._held = {step: held for step, held in self._held.items() if held.worker not in gone}
        free = (step for start, stop in missing for step in range(start, stop) if step not in self._held)
        found = list(islice(free, most))
        if not found:
            late = now - (LATE_SECONDS + LATE_TIMES * self._takes)
            waited = [
                (held.since, step)
                for step, held in self._held.items()
                if held.since <= late and missing.covers(step, step + 1)
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
        """Note that the worker is alive; returns the time."""
        self._heard[worker] = now = self._clock()
        return now

    def clear(self) -> None:
        """Drop all leases."""
        self._held.clear()
