# SPDX-License-Identifier: Apache-2.0
"""Simulated time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """A queue of future actions, ordered by time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), action))

    def go_on(self) -> Callable[[], object]:
        """Advance the time to the next action, and return this action."""
        assert self._heap, "nothing more will happen, and the job has not ended"
        self.now, _, action = heapq.heappop(self._heap)
        return action
