"""Watches the calls of the user's code that read data: one that does not return is this worker's failure.

A ring waits for its slowest member, and a worker whose main thread hangs still sends heartbeats: without
this, one call that never returns would stop the whole job, and nobody would know which.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

# Around a call; the function says which call it is, if anybody has to know.
Watch: TypeAlias = Callable[[Callable[[], str]], AbstractContextManager[None]]


def unwatched(call: Callable[[], str]) -> AbstractContextManager[None]:
    """For who waits as long as it takes."""
    return nullcontext()


class Watchdog:
    """Watches the calls of all threads.

    Args:
        seconds: that a call may take.
        hung: called, on a thread of its own, for the first call that takes longer, with what happened and the
            stack of the thread that hangs.
    """

    def __init__(self, seconds: float, hung: Callable[[str, str], None]):
        self._seconds, self._hung = seconds, hung
        self._calls: dict[int, tuple[float, Callable[[], str]]] = {}  # of each thread
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    @contextmanager
    def watch(self, call: Callable[[], str]) -> Iterator[None]:
        """Around one call of this thread; calls are not nested."""
        me = threading.get_ident()
        self._calls[me] = time.monotonic(), call
        try:
            yield
        finally:
            del self._calls[me]

    def _look(self) -> None:
        while True:
            time.sleep(self._seconds / 4)
            now = time.monotonic()
            for thread, (began, call) in list(self._calls.items()):
                if now - began > self._seconds:
                    self._tell(thread, call)
                    return

    def _tell(self, thread: int, call: Callable[[], str]) -> None:
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        faulthandler.dump_traceback(all_threads=True)
        why = f"{call()} has not returned for {self._seconds:g} s (elastic.stepTimeoutSeconds)"
        self._hung(why, stack)
