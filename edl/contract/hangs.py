# SPDX-License-Identifier: Apache-2.0
"""A bound on how long a master or a parameter server waits for a thread of its own that hangs.

A disk or a mount that does not answer blocks the thread that reads or writes it inside the kernel, without an
error; a deadlock blocks threads as well. Such a thread uses no processor time at all, unlike one that has
much to do or waits in a loop. So a thread hangs if it has work and has used no processor time for long.
A stopped process (SIGSTOP) does not hang: only the seconds count in which the watching thread itself ran.

`watched` ends the process. `bounded` ends only the wait: a training can do without its store of checkpoints.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from edl.contract.vital import FAILED

LOOK_SECONDS = 1.0
WARN_SECONDS = 30.0  # until the stack of a thread that hangs is in the log
# Until the process ends. No shorter: starting it again does not repair its disk, and a server without log and
# copies loses its rows with its process.
END_SECONDS = 600.0
CAUSES = "its disk, mount or network does not answer"
PER_THREAD = 6  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of Linux
WRITE_SECONDS = 5.0  # for the last message; the log may be on the disk that hangs


T = TypeVar("T")
_left_behind: dict[str, threading.Thread] = {}  # by name, for `bounded`
_watch: _HangWatch | None = None  # None: no entry point of the product has begun here


def end_with_hangs(process: str) -> None:
    """End this process from now on when the running event loop hangs, or a thread in `watched`.

    Args:
        process: the name of this process, for messages.
    """
    global _watch
    _watch = _HangWatch(process)


@contextmanager
def watched() -> Iterator[None]:
    """End this process if the calling thread hangs here."""
    if _watch is None:
        yield
        return
    with _watch.work():
        yield


@dataclass
class _Work:
    """The work of one thread."""

    thread: int
    number: int  # of the thread in the kernel
    used: float = -1.0  # seconds of processor time when it was last looked at
    idle: float = 0.0  # seconds since then

    def look(self) -> None:
        """Measure the progress of the thread. To be called every LOOK_SECONDS."""
        # The kernel's number names the clock, as in glibc: pthread_getcpuclockid reads freed memory if the
        # thread has just ended.
        with suppress(OSError):  # the thread has ended
            used = time.clock_gettime(~self.number << 3 | PER_THREAD)
            self.idle = self.idle + LOOK_SECONDS if used == self.used else 0.0
            self.used = used

    @property
    def is_overdue(self) -> bool:
        """Whether it is time to report the thread, which happens every WARN_SECONDS."""
        return bool(self.idle) and self.idle % WARN_SECONDS < LOOK_SECONDS


def bounded(name: str, act: Callable[[], T]) -> T:
    """Call `act` on a thread of its own, and wait for it only while it makes progress.

    A thread that hangs inside the kernel cannot be ended, so it is left behind. Further calls of this name
    are refused as long as it is there, so that neither threads nor the values that they hold pile up.

    Args:
        name: what the call uses, for messages.

    Returns:
        what `act` returns.

    Raises:
        OSError: ETIMEDOUT, if this call hangs, or an earlier one still does.
        anything: what `act` raises.
    """
    earlier = _left_behind.get(name)
    if earlier is not None and earlier.is_alive():
        raise OSError(errno.ETIMEDOUT, f"an earlier call still has no answer: {CAUSES}")
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    assert thread.ident is not None and thread.native_id is not None
    work = _Work(thread.ident, thread.native_id)
    while not wait([outcome], LOOK_SECONDS).done:
        work.look()
        if work.idle >= END_SECONDS:
            _left_behind[name] = thread
            raise OSError(errno.ETIMEDOUT, f"no answer for {work.idle:.0f} s: {CAUSES}")
        if work.is_overdue:
            _report(work, f"a call of {name}", f"it is given up after {END_SECONDS:g} s")
    return outcome.result()


class _HangWatch:
    """Watches threads of this process, and ends it with a message when one hangs."""

    def __init__(self, process: str):
        self._process = process
        self._works: dict[int, _Work] = {}
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident(), threading.get_native_id()
        threading.Thread(target=self._watch, name="hangs", daemon=True).start()

    @contextmanager
    def work(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._works[thread] = _Work(thread, threading.get_native_id())
        try:
            yield
        finally:
            del self._works[thread]

    def _watch(self) -> None:
        answered = threading.Event()
        answered.set()
        of_loop: _Work | None = None
        while True:
            time.sleep(LOOK_SECONDS)
            if answered.is_set():
                answered.clear()
                of_loop = _Work(*self._loop_thread)
                try:
                    self._loop.call_soon_threadsafe(answered.set)
                except RuntimeError:  # the loop is closed
                    return
            for work in (*([of_loop] if of_loop is not None else []), *list(self._works.values())):
                self._look(work)

    def _look(self, work: _Work) -> None:
        work.look()
        if work.is_overdue:
            _report(work, self._process, f"if this lasts, {self._process} ends after {END_SECONDS:g} s")
        if work.idle >= END_SECONDS:
            _report(work, self._process, f"{self._process} ends")
            os._exit(FAILED)


def _report(work: _Work, name: str, then: str) -> None:
    """Write the stack of a thread that hangs to the log.

    Args:
        name: what has waited.
        then: what will happen.
    """
    frame = sys._current_frames().get(work.thread)
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    place = f" in {stack[-1].filename}:{stack[-1].lineno} ({stack[-1].name})" if stack else ""
    said = (
        f"edl: {name} has waited for {work.idle:.0f} s{place}, without using the processor: "
        f"a disk or mount that does not answer, or a deadlock; {then}"
    )
    text = "".join([*stack.format(), said, "\n"])
    writing = threading.Thread(target=lambda: print(text, end="", file=sys.stderr, flush=True), daemon=True)
    writing.start()
    writing.join(WRITE_SECONDS)
