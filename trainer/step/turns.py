# SPDX-License-Identifier: Apache-2.0
"""The turns of a user's loop: how the worker's thread and the user's thread take each step together.

The worker's loop (trainer/worker.py) calls its learner, and a user's loop calls edl. So each has a thread,
and only one of the two runs at a time:

    user      next turn ─▶ computes gradients ─▶ mean() ─────────▶ applies the mean ─▶ next turn
    worker    offers a step ▲ waits ............ all-reduce, result ▲ waits ........... ▲ its next order

Promise: the state is read and replaced only while the user waits for the next turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edl.errors import EdlError


class LoopLeft(EdlError):
    """The user's loop has ended before the job."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One step, as the user's loop is offered it."""

    records: Any  # as the reader returns them
    number: int
    weight: int  # the number of records that count; 0: a sample, because this rank's part is empty
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What the user's loop has computed in a turn."""

    gradients: list[Any]  # one for each leaf: float32 [values], or None
    loss: float
    metrics: list[float]


class Turns:
    """The meeting point of the two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._at_rest = False  # whether the user waits for the next turn
        self._turn: Turn | None = None  # offered, and not taken yet
        self._given: Given | None = None
        self._results: list[Any] = []  # of `mean`, at most one
        self._over = False  # the job's training has ended
        self._left = ""  # why the user's loop takes no further turn
        self._error: BaseException | None = None  # of the worker's thread

    # --- the worker's thread

    def offer(self, turn: Turn) -> Given:
        """Let the user compute a step, and wait for the gradients.

        Raises:
            LoopLeft: the user's loop has ended.
        """
        self.rest()
        with self._changed:
            self._turn, self._at_rest = turn, False
            self._changed.notify_all()
            self._wait(lambda: self._given is not None)
            given, self._given = self._given, None
        assert given is not None
        return given

    def answer(self, mean: Any) -> None:
        """Return the mean to the user, and wait until the loop has come round with it.

        Args:
            mean: None if the step has not happened.
        """
        with self._changed:
            self._results.append(mean)
            self._changed.notify_all()
        self.rest()

    def rest(self) -> None:
        """Wait until the user waits for the next turn."""
        with self._changed:
            self._wait(lambda: self._at_rest)

    def end(self) -> None:
        """End the user's loop: all steps are made."""
        self.rest()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise the error in the user's thread, at its next call."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: condition() or self._left)
        if self._left:
            raise LoopLeft(self._left)

    # --- the user's thread

    def next(self) -> Turn | None:
        """Wait for the next turn; None: all steps are made."""
        with self._changed:
            self._at_rest = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn is not None or self._over or self._error is not None)
            self._refuse()
            turn, self._turn = self._turn, None
            return turn

    def give(self, given: Given) -> Any:
        """Return the mean of the gradients over the ring; None if the step has not happened."""
        with self._changed:
            self._given = given
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._results) or self._error is not None)
            self._refuse()
            return self._results.pop()

    def leave(self, why: str) -> None:
        """Record that the loop takes no further turn."""
        with self._changed:
            self._left = self._left or why
            self._changed.notify_all()

    def _refuse(self) -> None:
        if self._error is not None:
            raise self._error
