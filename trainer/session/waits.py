# SPDX-License-Identifier: Apache-2.0
"""Waits of a worker for something beside its ring, such as its records, that the ring can end.

All members of a ring wait for the slowest one. So a wait ends when the ring is cut, and soon after the
members were ordered to leave it: the thing that was awaited is given up, and this worker leaves the ring
without it. A read of records cannot be interrupted, and a second thread must not use the same reader. So the
read goes on beside the ring, its result is dropped, and this worker joins the next ring when it has returned
(`given_up`).

`longest` says what this worker waits for; heartbeats report it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from edl.contract.heartbeats import Activity
from edl.contract.ids import NO_RING
from edl.trainer.ring.base import RingBroken

T = TypeVar("T")


class Waits:
    """The waits of one worker. Thread-safe.

    Args:
        is_over: whether the ring of a generation was cut.
        clock: monotonic seconds.
    """

    def __init__(self, is_over: Callable[[int], bool], clock: Callable[[], float] = time.monotonic):
        self._is_over, self._clock = is_over, clock
        self._changed = threading.Condition()
        self._generation: int = NO_RING  # of the ring that this worker is in
        self._running: dict[object, tuple[float, Callable[[], str]]] = {}  # beginning, and what is awaited
        self._given_up: Callable[[], Future[None]] | None = None

    def enter(self, generation: int) -> None:
        """This worker enters a ring, which can end its waits from now on."""
        with self._changed:
            self._generation, self._given_up = generation, None

    def leave(self) -> Callable[[], Future[None]] | None:
        """This worker has left its ring: waits that began in it end.

        Returns:
            the `idle` of a wait that the ring has ended; None if it has ended none.
        """
        with self._changed:
            self._generation, given_up = NO_RING, self._given_up
            self._given_up = None
            self._changed.notify_all()
        return given_up

    def wake(self) -> None:
        """The ring may have been cut: look."""
        with self._changed:
            self._changed.notify_all()

    def result(self, awaited: Future[T], what: Callable[[], str], idle: Callable[[], Future[None]]) -> T:
        """Return the result of a future, when it is done.

        Args:
            what: names what is awaited, for the status.
            idle: returns a future that is done when the thread or process is free for other work; it is
                called if the ring ends this wait.

        Raises:
            RingBroken: the ring has ended the wait.
            Exception: the future's.
        """
        if awaited.done():
            return awaited.result()
        generation = self._generation
        awaited.add_done_callback(lambda _: self.wake())
        with self.named(what), self._changed:
            self._changed.wait_for(lambda: awaited.done() or self._ended(generation))
            if not awaited.done():
                if generation == self._generation:
                    self._given_up = idle
                raise RingBroken(f"the ring has ended while this worker waited for {what()}")
        return awaited.result()

    def _ended(self, generation: int) -> bool:
        return generation != self._generation or self._is_over(generation)

    @contextmanager
    def named(self, what: Callable[[], str]) -> Iterator[None]:
        """Inside this context, this worker waits for what is named."""
        key = object()
        self._running[key] = self._clock(), what
        try:
            yield
        finally:
            del self._running[key]

    def longest(self) -> Activity | None:
        """The longest running wait, or None."""
        running = list(self._running.values())
        if not running:
            return None
        since, what = min(running, key=lambda wait: wait[0])
        return Activity(f"waits for {what()}", self._clock() - since)
