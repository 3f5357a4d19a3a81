# SPDX-License-Identifier: Apache-2.0
"""Waits of a worker for something beside its ring, such as its records, that the ring can end.

All members of a ring wait for the slowest one. So a wait ends when the ring is cut, and soon after the
members were ordered to leave it: the thing that was awaited is given up, and this worker leaves the ring
without it. A read of records cannot be interrupted, and a second thread must not use the same reader. So the
read goes on beside the ring, and this worker joins a later ring when it has returned (trainer/worker.py).

`longest` says what this worker waits for; heartbeats report it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from edl.contract.heartbeats import WAITS, Activity
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
        self._is_between = False  # whether this worker has left a ring, and has not entered the next one
        self._running: dict[object, tuple[float, Callable[[], str]]] = {}  # beginning, and what is awaited
        self._gave_up = False  # whether this ring has ended a wait

    def enter(self, generation: int) -> None:
        """This worker enters a ring, which can end its waits from now on. Those from before end."""
        with self._changed:
            self._generation, self._gave_up, self._is_between = generation, False, False
            self._changed.notify_all()

    def leave(self) -> bool:
        """Note that this worker has left its ring; returns whether the ring has ended a wait.

        All waits end until the next ring: a thread may begin one late, for a batch of the ring that was left.
        """
        with self._changed:
            self._generation, self._is_between = NO_RING, True
            self._changed.notify_all()
            return self._gave_up

    def wake(self) -> None:
        """The ring may have been cut: look."""
        with self._changed:
            self._changed.notify_all()

    def result(self, awaited: Future[T], what: Callable[[], str]) -> T:
        """Return the result of a future, when it is done.

        Args:
            what: names what is awaited, for the status.

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
                self._gave_up = self._gave_up or generation == self._generation
                raise RingBroken(f"the ring has ended while this worker waited for {what()}")
        return awaited.result()

    def _ended(self, generation: int) -> bool:
        return self._is_between or generation != self._generation or self._is_over(generation)

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
        return Activity(f"{WAITS} {what()}", self._clock() - since)


def when_done(awaited: Collection[Future[None]], act: Callable[[], None]) -> None:
    """Call `act` once all of these are done, on the thread of the last one."""
    lock, left = threading.Lock(), [len(awaited)]

    def done(_: Future[None]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        act()

    for each in awaited:
        each.add_done_callback(done)
