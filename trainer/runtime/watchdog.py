# SPDX-License-Identifier: Apache-2.0
"""Limits on the time of the user's code: a call that does not return is this worker's failure.

A ring waits for its slowest member, and a worker whose main thread hangs still sends heartbeats: without a
limit, one call that never returns would stop the whole job, without a hint which call it is.

    watch     a call of one function of the user's: read(), feed(), a callback, get_config()
    Compute   a step or an evaluation batch: the worker's own computation. Time in which the worker waits
              for other workers or for parameter servers does not count.

A computation that takes much longer than all before it is named long before its limit. It is not ended so
early, because a step may be slow for a reason (a longer batch, a busy machine).

A watched call that returns without the worker's file descriptors has closed them (os.closerange). Nothing can
be reported then, so the process ends with an exit code that says it.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from edl.contract.exit_codes import WorkerExit
from edl.contract.heartbeats import Activity
from edl.trainer.runtime.termination import leave

STEP_TIMEOUT, STARTUP_TIMEOUT = "elastic.stepTimeoutSeconds", "elastic.startupTimeoutSeconds"
READING = "read"  # the names of threads that read records begin with it
LOOKS = 4  # that the watchdog makes within the time that a call may take
# A computation is named when it takes so many times as long as the longest one before it, but not sooner.
SLOW_TIMES, SLOW_SECONDS = 100, 60.0


Hung: TypeAlias = Callable[[str, str], None]  # takes the message and the stack


def never() -> bool:
    """Return False: the `waits` of calls that wait for no other process."""
    return False


@dataclass(frozen=True)
class Limit:
    """A limit on the time of a call.

    Args:
        seconds: the time limit of the call.
        setting: the value of the job that says so.
        waits: True while the call waits for other processes; that time does not count.
        hung: takes the message and the stack when the call hangs; None for the watchdog's own.
        slow_seconds: the time after which the call is reported, once, and goes on.
        slow: takes the message and the stack then.
    """

    seconds: float
    setting: str = STEP_TIMEOUT
    waits: Callable[[], bool] = never
    hung: Hung | None = None
    slow_seconds: float = math.inf
    slow: Hung = lambda why, stack: None


@dataclass(eq=False)
class Call:
    """A call that is watched; `describe` names it, for the message."""

    describe: Callable[[], str]
    limit: Limit
    began: float = field(default_factory=time.monotonic)
    is_named: bool = False  # as slow

    def goes_on(self) -> None:
        """The call has made progress: its time begins anew."""
        self.began = time.monotonic()


class Watch(Protocol):
    """The type of `Watchdog.watch`, which limits the time of a call."""

    def __call__(self, call: Callable[[], str], limit: Limit | None = None) -> AbstractContextManager[Call]:
        """Watch a call while the context lasts.

        Args:
            call: describes the call, for messages.
            limit: the call's time limit; None for the watchdog's.
        """
        ...


@contextmanager
def unwatched(call: Callable[[], str], limit: Limit | None = None) -> Iterator[Call]:
    """A `Watch` that watches nothing."""
    yield Call(call, Limit(math.inf))


class Watchdog:
    """Watches the calls of all threads, on a thread of its own.

    Args:
        seconds: the time limit of a call.
        hung: takes the message and the stack of the first call that takes longer.
    """

    def __init__(self, seconds: float, hung: Hung):
        self._limit, self._hung = Limit(seconds), hung
        self._calls: dict[Call, int] = {}  # and the thread of each
        self._sentinel = _Sentinel()
        self._changed = threading.Condition()
        self._look_seconds = seconds / LOOKS
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    @contextmanager
    def watch(self, call: Callable[[], str], limit: Limit | None = None) -> Iterator[Call]:
        """Watch one call of this thread. Watched calls may be nested: each has its own limit.

        Args:
            call: names it, for the message.
            limit: the time limit; None for the watchdog's own.
        """
        now = Call(call, limit or self._limit)
        look_seconds = min(now.limit.seconds, now.limit.slow_seconds) / LOOKS
        if look_seconds < self._look_seconds:
            with self._changed:
                self._look_seconds = look_seconds
                self._changed.notify()
        self._calls[now] = threading.get_ident()
        try:
            yield now
        finally:
            del self._calls[now]
            if not self._sentinel.is_open:
                print(f"{call()} has closed file descriptors of its worker", file=sys.stderr, flush=True)
                leave(WorkerExit.DESCRIPTORS_CLOSED)

    def longest(self, reading: bool = False) -> Activity | None:
        """The longest running call, without those that wait for other processes; None without one.

        Args:
            reading: of the calls of threads that read records; else of those of other threads.
        """
        now, names = time.monotonic(), {thread.ident: thread.name for thread in threading.enumerate()}
        running = [
            call
            for call, thread in list(self._calls.items())
            if names.get(thread, "").startswith(READING) == reading and not call.limit.waits()
        ]
        if not running:
            return None
        call = min(running, key=lambda call: call.began)
        return Activity(call.describe(), now - call.began)

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._look_seconds)
            for call, thread in list(self._calls.items()):
                if call.limit.waits():
                    call.goes_on()
                    continue
                seconds = time.monotonic() - call.began
                if seconds > call.limit.slow_seconds and not call.is_named:
                    call.is_named = True
                    call.limit.slow(f"{call.describe()} has not returned for {seconds:.0f} s", _stack(thread))
                if seconds > call.limit.seconds:
                    self._tell(thread, call)
                    return

    def _tell(self, thread: int, call: Call) -> None:
        stack, limit = _stack(thread), call.limit
        faulthandler.dump_traceback(all_threads=True)
        why = f"{call.describe()} has not returned for {round(limit.seconds, 2):g} s ({limit.setting})"
        (limit.hung or self._hung)(why, stack)


class Compute:
    """Watches steps and evaluation batches.

    The first step with a number of records that this process has not computed before may compile functions of
    the user's for it (`tf.function(jit_compile=True)`): it may take `first_seconds` in addition. So user code
    that hangs there is found later than in any other step.

    Args:
        seconds: the time limit of a step.
        first_seconds: see above.
        waits: True while this worker waits for other workers or for parameter servers.
        warn: takes a message about a computation that takes much longer than all before it.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        seconds: float,
        first_seconds: float,
        waits: Callable[[], bool] = never,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._watchdog, self._seconds, self._first_seconds = watchdog, seconds, first_seconds
        self._waits, self._known, self._warn = waits, set[tuple[str, int]](), warn
        self._longest: dict[str, float] = {}  # seconds, by kind

    @contextmanager
    def __call__(self, kind: str, what: Callable[[], str], records: int) -> Iterator[Call]:
        """Watch one step or evaluation batch.

        Args:
            kind: of computation, such as "step".
            what: names it, for the message.
            records: the number of records of this worker's part.
        """
        seconds, setting = self._seconds, STEP_TIMEOUT
        longest, is_known = self._longest.get(kind, 0.0), (kind, records) in self._known
        if not is_known:
            seconds, setting = seconds + self._first_seconds, f"{STEP_TIMEOUT} + {STARTUP_TIMEOUT}"

        def slow(why: str, stack: str) -> None:
            print(stack, file=sys.stderr, flush=True)
            self._warn(
                f"{why}; the longest one so far took {longest:.3g} s. If it does not return, this worker "
                f"ends after {seconds:g} s ({setting}). The stack is in its log"
            )

        slow_seconds = max(SLOW_SECONDS, SLOW_TIMES * longest) if is_known else math.inf
        limit = Limit(seconds, setting, self._waits, slow_seconds=slow_seconds, slow=slow)
        with self._watchdog.watch(what, limit) as call:
            yield call
        self._known.add((kind, records))  # not if it raised: the model may not be compiled yet
        if is_known:
            self._longest[kind] = max(longest, time.monotonic() - call.began)


class Computing(Protocol):
    """A `Compute`, as the loop sees it."""

    def __call__(self, kind: str, what: Callable[[], str], records: int) -> AbstractContextManager[object]:
        """Watch a computation while the context lasts.

        Args:
            kind: computations of a kind have a common time limit.
            what: describes the computation, for messages.
            records: the number of its records.
        """
        ...


def uncounted(kind: str, what: Callable[[], str], records: int) -> AbstractContextManager[object]:
    """A `Computing` without a limit."""
    return unwatched(what)


class _Sentinel:
    """A descriptor that only code which closes descriptors it does not own can close."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("edl-sentinel")
        self._inode = os.fstat(self._descriptor).st_ino

    @property
    def is_open(self) -> bool:
        """Whether the descriptor still is this file: user code may have closed it, and reused its number."""
        try:
            return os.fstat(self._descriptor).st_ino == self._inode
        except OSError:
            return False


def _stack(thread: int) -> str:
    """The stack of the hanging thread, innermost call last.

    If the thread is inside TensorFlow, a Python function that the model's graph calls may run on a thread of
    TensorFlow. The stacks of such functions follow.
    """
    frames = sys._current_frames()
    own = frames.get(thread)
    stacks = ["".join(traceback.format_stack(own))] if own else []
    for other, frame in frames.items():
        lines = traceback.format_stack(frame)
        if other != thread and any("script_ops.py" in line for line in lines):
            stacks.append("in a function that the model's graph calls:\n" + "".join(lines))
    return "\n".join(stacks)


class Doing:
    """The present stage of a worker's start, for a message if it hangs there."""

    def __init__(self) -> None:
        self._now = ""

    def now(self, what: str) -> None:
        """Name the stage that begins."""
        self._now = what

    def words(self) -> str:
        """The present stage, for messages."""
        return self._now
