# SPDX-License-Identifier: Apache-2.0
"""The state machine of synchronous steps: generation, step, and gradients staged for the next step.

    stage ──▶ staged ──commit──▶ applied ──StartGeneration at the step before──▶ undone
                 └──newer generation──▶ dropped

Promise: pure. A call returns the next state and the effects on the tables. A duplicate or late call returns
the same state without effects, or raises. Gradients staged for a step are applied once, in the order of the
ranks, or dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from edl.ps.errors import GenerationPending, Invalid, Misplaced, check_not_stale
from edl.ps.phase import Phase


@dataclass(frozen=True)
class Commit:
    """The result of the step taken at `step` (ps.proto, Commit)."""

    step: int
    skipped: bool
    scale: float
    learning_rate: float
    iteration: int

    def is_same(self, other: Commit) -> bool:
        """Whether both are equal bit for bit; a NaN equals itself."""
        return self._bits == other._bits

    @property
    def _bits(self) -> bytes:
        return struct.pack("<q?fdq", self.step, self.skipped, self.scale, self.learning_rate, self.iteration)


@dataclass(frozen=True)
class Apply:
    """Apply a step: the gradients that the ranks have staged, the lowest rank first."""

    commit: Commit
    staged: tuple[Any, ...]


@dataclass(frozen=True)
class TakeBack:
    """Undo the last step."""


Effect: TypeAlias = Apply | TakeBack
NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Steps:
    """The synchronous state of one server.

    Args:
        generation: the newest that has started; 0: none.
        step: of the state in the rows.
        phase: EMPTY or SERVING.
        last: the step before; None: it was not applied here.
        can_undo: whether that step can be undone.
        staged: gradients by rank, for the step taken at `step`.
        restored: generation, step and attempt of the last rollback.
        begun_in: the generation in which the server started without a rollback; 0: it did not.
    """

    generation: int = 0
    step: int = 0
    phase: Phase = Phase.EMPTY
    last: Commit | None = None
    can_undo: bool = False
    staged: Mapping[int, Any] = field(default_factory=lambda: NOTHING)
    restored: tuple[int, int, str] = (0, 0, "")
    begun_in: int = 0

    def start_generation(
        self, generation: int, step: int, last: Commit | None
    ) -> tuple[Steps, tuple[Effect, ...]]:
        """Start a new generation, whose ring is at `step`.

        If that step cannot be reached from here, the step stays unchanged, and the ring must roll back.

        Raises:
            Stale: a newer generation has started.
            Invalid: `last` is not the step before.
        """
        _check(step, last)
        check_not_stale(generation, self.generation)
        if generation < 1:
            raise Invalid(f"generation {generation}: expected at least 1")
        if generation == self.generation:
            return self, ()
        started = replace(self, generation=generation, staged=NOTHING)
        if not self.phase.has_rows:
            if step:
                return started, ()
            return replace(started, phase=self.phase.after("begin"), begun_in=generation), ()
        if step == self.step + 1 and last is not None:
            return started._after(last), (Apply(last, self._in_order()),)
        if step == self.step - 1 and self.can_undo:
            return replace(started, step=step, last=None, can_undo=False), (TakeBack(),)
        return started, ()

    def advance_to(self, generation: int, step: int, last: Commit | None) -> tuple[Steps, tuple[Effect, ...]]:
        """Advance to the state at `step`, which a caller needs.

        Raises:
            GenerationPending: the generation has not started yet.
            Stale: a newer one has started.
            Misplaced: that state cannot be reached from here.
            Invalid: `last` is not the step before.
        """
        _check(step, last)
        self._check_current(generation)
        self.phase.check_can("read rows")
        if step == self.step:
            if last is not None and self.last is not None and not last.is_same(self.last):
                raise Misplaced(f"step {last.step}: workers disagree about its result: {last}, {self.last}")
            return self, ()
        if step == self.step + 1 and last is not None:
            return self._after(last), (Apply(last, self._in_order()),)
        raise self._misplaced(step)

    def stage(self, generation: int, step: int, rank: int, gradients: Any) -> Steps:
        """Stage one rank's gradients for the step taken at `step`.

        Raises:
            GenerationPending, Stale, Misplaced: as in `advance_to`.
            Invalid: the rank is negative.
        """
        if rank < 0:
            raise Invalid(f"rank {rank}: expected 0 or more")
        self._check_current(generation)
        self.phase.check_can("accept a step")
        if step > self.step:
            raise self._misplaced(step)
        if step < self.step or rank in self.staged:
            return self  # the gradients are in the rows or staged already
        return replace(self, staged=MappingProxyType({**self.staged, rank: gradients}))

    def restore(self, generation: int, step: int, attempt: str) -> Steps:
        """Roll back to the checkpoint of this step; 0: to the initial state. A repeated call changes nothing.

        Raises:
            Stale: a newer generation has started.
            Invalid: the generation or the step is too small.
        """
        check_not_stale(generation, self.generation)
        if generation < 1 or step < 0:
            raise Invalid(f"generation {generation}, step {step}: expected at least 1, and 0")
        key = generation, step, attempt
        if key == self.restored:
            return self
        return Steps(generation, step, self.phase.after("restore"), restored=key)

    def joins(self, generation: int, step: int, last: Commit | None) -> Steps:
        """Continue with rows of other servers, at this step."""
        return Steps(generation, step, self.phase.after("join"), last=last, begun_in=generation)

    def lost(self) -> Steps:
        """Drop everything but the generation: the rows are lost, or on other servers."""
        return Steps(self.generation, phase=self.phase.after("lose"))

    def for_good(self) -> Steps:
        """Make the last step final: it cannot be undone afterwards."""
        return replace(self, can_undo=False)

    def _after(self, commit: Commit) -> Steps:
        return replace(self, step=commit.step + 1, last=commit, can_undo=True, staged=NOTHING)

    def _in_order(self) -> tuple[Any, ...]:
        return tuple(self.staged[rank] for rank in sorted(self.staged))

    def _check_current(self, generation: int) -> None:
        check_not_stale(generation, self.generation)
        if generation > self.generation:
            raise GenerationPending(f"generation {generation} has not started yet")

    def _misplaced(self, step: int) -> Misplaced:
        return Misplaced(
            f"the state at step {step} was requested, and the server is at step {self.step}; a new ring must "
            "be formed"
        )


def _check(step: int, last: Commit | None) -> None:
    if step < 0 or (last is not None and last.step != step - 1):
        raise Invalid(
            f"step {step}, with the last step {last.step if last else '-'}: expected the one before it"
        )
