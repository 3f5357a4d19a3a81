"""Which calls count: the generation that is settled, the step that is reached, what is staged for the next
one.

    stage ──▶ staged ──commit──▶ applied ──settle at the step before──▶ taken back
                 └──newer generation──▶ dropped

Promise: pure. A call gives the state after it and what is to be done to the tables; a call that comes twice,
or late, gives the same state and nothing to do, or a refusal. What is staged for a step is applied once, in
the order of the ranks, or dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from edl.ps.errors import Invalid, Misplaced, Stale, Unsettled


@dataclass(frozen=True)
class Commit:
    """What became of the step that was taken at `step` (ps.proto, Commit)."""

    step: int
    skipped: bool
    scale: float
    learning_rate: float
    iteration: int

    def is_same(self, other: Commit) -> bool:
        """Bit for bit; a NaN is the same as itself."""
        return self._bits == other._bits

    @property
    def _bits(self) -> bytes:
        return struct.pack("<q?fdq", self.step, self.skipped, self.scale, self.learning_rate, self.iteration)


@dataclass(frozen=True)
class Apply:
    """Take a step: what the ranks have staged, the lowest first."""

    commit: Commit
    staged: tuple[Any, ...]


@dataclass(frozen=True)
class TakeBack:
    """Undo the last step."""


@dataclass(frozen=True)
class GoBack:
    """All is as in the checkpoint of this step; 0: as at the beginning."""

    step: int
    attempt: str


Effect: TypeAlias = Apply | TakeBack | GoBack
NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Steps:
    """
    Args:
        generation: that is settled; 0: none is.
        step: of the state that the rows are.
        began: whether the rows are those of a job; otherwise the server has just been started, and knows
        nothing.
        last: the step that led here; None: it was not made here.
        can_undo: that step can be taken back.
        staged: by rank, for the step that is taken at `step`.
        restored: the generation, step and attempt of the last going back.
        begun_in: the generation in which it was at the beginning without that; 0: it was not.
    """

    generation: int = 0
    step: int = 0
    began: bool = False
    last: Commit | None = None
    can_undo: bool = False
    staged: Mapping[int, Any] = field(default_factory=lambda: NOTHING)
    restored: tuple[int, int, str] = (0, 0, "")
    begun_in: int = 0

    def settle(self, generation: int, step: int, last: Commit | None) -> tuple[Steps, tuple[Effect, ...]]:
        """The ring is at `step`, in a new generation. If that cannot be reached from here, the step stays
        what it is: the ring has to go back.

        Raises:
            Stale: a newer generation is settled.
            Invalid: `last` is not of the step before.
        """
        _check(step, last)
        self._check_not_stale(generation)
        if generation < 1:
            raise Invalid(f"generation {generation}: expected at least 1")
        if generation == self.generation:
            return self, ()
        settled = replace(self, generation=generation, staged=NOTHING)
        if not self.began:
            begins = step == 0
            return replace(settled, began=begins, begun_in=generation if begins else 0), ()
        if step == self.step + 1 and last is not None:
            return settled._after(last), (Apply(last, self._in_order()),)
        if step == self.step - 1 and self.can_undo:
            return replace(settled, step=step, last=None, can_undo=False), (TakeBack(),)
        return settled, ()

    def reach(self, generation: int, step: int, last: Commit | None) -> tuple[Steps, tuple[Effect, ...]]:
        """Somebody needs the state at `step`.

        Raises:
            Unsettled: the generation is not settled yet.
            Stale: a newer one is.
            Misplaced: that state cannot be reached from here.
            Invalid: `last` is not of the step before.
        """
        _check(step, last)
        self._check_current(generation)
        if self.began and step == self.step:
            if last is not None and self.last is not None and not last.is_same(self.last):
                raise Misplaced(
                    f"step {last.step}: workers disagree on what became of it: {last}, {self.last}"
                )
            return self, ()
        if self.began and step == self.step + 1 and last is not None:
            return self._after(last), (Apply(last, self._in_order()),)
        raise self._misplaced(step)

    def stage(self, generation: int, step: int, rank: int, gradients: Any) -> Steps:
        """One rank's gradients for the step that is taken at `step`.

        Raises:
            Unsettled, Stale, Misplaced: as `reach`.
            Invalid: there is no such rank.
        """
        if rank < 0:
            raise Invalid(f"rank {rank}: expected 0 or more")
        self._check_current(generation)
        if not self.began or step > self.step:
            raise self._misplaced(step)
        if step < self.step or rank in self.staged:
            return self  # it is in the rows already, or waits to be
        return replace(self, staged=MappingProxyType({**self.staged, rank: gradients}))

    def restore(self, generation: int, step: int, attempt: str) -> tuple[Steps, tuple[Effect, ...]]:
        """Go back to the checkpoint of this step; 0: to the beginning. Once in a generation to the same one.

        Raises:
            Stale: a newer generation is settled.
        """
        self._check_not_stale(generation)
        if generation < 1 or step < 0:
            raise Invalid(f"generation {generation}, step {step}: expected at least 1, and 0")
        key = generation, step, attempt
        if key == self.restored:
            return self, ()
        return Steps(generation, step, began=True, restored=key), (GoBack(step, attempt),)

    @classmethod
    def joining(cls, generation: int, step: int, last: Commit | None) -> Steps:
        """Of a server that has been given its rows by others, at this step."""
        return cls(generation, step, began=True, last=last, begun_in=generation)

    def lost(self) -> Steps:
        """The rows are gone: going back to a checkpoint has failed."""
        return Steps(self.generation)

    def for_good(self) -> Steps:
        """The last step cannot be taken back any more."""
        return replace(self, can_undo=False)

    def _after(self, commit: Commit) -> Steps:
        return replace(self, step=commit.step + 1, last=commit, can_undo=True, staged=NOTHING)

    def _in_order(self) -> tuple[Any, ...]:
        return tuple(self.staged[rank] for rank in sorted(self.staged))

    def _check_not_stale(self, generation: int) -> None:
        if generation < self.generation:
            raise Stale(f"generation {generation} has passed: generation {self.generation} is settled")

    def _check_current(self, generation: int) -> None:
        self._check_not_stale(generation)
        if generation > self.generation:
            raise Unsettled(f"generation {generation} is not settled yet")

    def _misplaced(self, step: int) -> Misplaced:
        where = (
            f"at step {self.step}" if self.began else "empty: it has lost its log, or has just been started"
        )
        return Misplaced(
            f"the state at step {step} was asked for, and the server is {where}; "
            "the ring has to be formed anew, and says where it is"
        )


def _check(step: int, last: Commit | None) -> None:
    if step < 0 or (last is not None and last.step != step - 1):
        raise Invalid(
            f"step {step}, after the step at {last.step if last else '-'}: expected the one before it"
        )
