# SPDX-License-Identifier: Apache-2.0
"""Rate limits: pauses after failures, and a budget that serves urgent requests first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random


class Backoff:
    """Exponential backoff, with jitter so that masters do not retry at the same time."""

    def __init__(self, first: float, most: float):
        self._first, self._most, self._failures = first, most, 0

    def next(self) -> float:
        """Return the pause in seconds before the next attempt: doubled each time, then cut at random."""
        pause = min(self._first * 2.0 ** min(self._failures, 16), self._most)
        self._failures += 1
        return pause * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._failures = 0


class Budget:
    """A token bucket that serves urgent requests first.

    Args:
        each: seconds per request.
        burst: greatest number of saved requests.
    """

    def __init__(self, each: float, burst: int):
        self._each, self._burst = each, burst
        self._left, self._at = float(burst), 0.0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, urgency: int) -> None:
        """Wait until a request of this urgency may be sent; lower urgencies are served first."""
        mine = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, next(self._order), mine))
        self._serve()
        await mine

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = loop.time()
        self._left = min(self._left + (now - self._at) / self._each, float(self._burst))
        self._at = now
        while self._waiting and self._left >= 1:
            _, _, first = heapq.heappop(self._waiting)
            if not first.done():  # a cancelled request takes no share
                first.set_result(None)
                self._left -= 1
        if self._waiting:
            self._timer = loop.call_later((1 - self._left) * self._each + 0.001, self._serve)
