"""Limits on the time of the user's code: a call that does not return is this worker's failure.

A ring waits for its slowest member, and a worker whose main thread hangs still sends heartbeats: without a
limit, one call that never returns would stop the whole job, without a hint which call it is.

    watch     a call of one function of the user's: read(), feed(), a callback, get_config()
    Compute   a step or an evaluation batch: the worker's own computation. Time in which the worker waits
              for other workers or for parameter servers does not count.

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
from edl.trainer.runtime.termination import leave

STEP_TIMEOUT, STARTUP_TIMEOUT = "elastic.stepTimeoutSeconds", "elastic.startupTimeoutSeconds"
LOOKS = 4  # that the watchdog makes within the time that a call may take


Hung: TypeAlias = Callable[[str, str], None]  # takes the message and the stack


def never() -> bool:
    """For calls that wait for no other process."""
    return False


@dataclass(frozen=True)
class Limit:
    """A limit on the time of a call.

    Args:
        seconds: the time limit of the call.
        setting: the value of the job that says so.
        waits: True while the call waits for other processes; that time does not count.
        hung: takes the message and the stack when the call hangs; None for the watchdog's own.
    """

    seconds: float
    setting: str = STEP_TIMEOUT
    waits: Callable[[], bool] = never
    hung: Hung | None = None


@dataclass(eq=False)
class Call:
    """A call that is watched; `describe` names it, for the message."""

    describe: Callable[[], str]
    limit: Limit
    began: float = field(default_factory=time.monotonic)

    def goes_on(self) -> None:
        """The call has made progress: its time begins anew."""
        self.began = time.monotonic()


class Watch(Protocol):
    """`Watchdog.watch`."""

    def __call__(
        self, call: Callable[[], str], limit: Limit | None = None
    ) -> AbstractContextManager[Call]: ...


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
        if now.limit.seconds / LOOKS < self._look_seconds:
            with self._changed:
                self._look_seconds = now.limit.seconds / LOOKS
                self._changed.notify()
        self._calls[now] = threading.get_ident()
        try:
            yield now
        finally:
            del self._calls[now]
            if not self._sentinel.is_open:
                print(f"{call()} has closed file descriptors of its worker", file=sys.stderr, flush=True)
                leave(WorkerExit.DESCRIPTORS_CLOSED)

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._look_seconds)
            for call, thread in list(self._calls.items()):
                if call.limit.waits():
                    call.goes_on()
                elif time.monotonic() - call.began > call.limit.seconds:
                    self._tell(thread, call)
                    return

    def _tell(self, thread: int, call: Call) -> None:
        stack, limit = _stack(thread), call.limit
        faulthandler.dump_traceback(all_threads=True)
        why = f"{call.describe()} has not returned for {round(limit.seconds, 2):g} s ({limit.setting})"
        (limit.hung or self._hung)(why, stack)


class Compute:
    """Watches steps and evaluation batches.

    The first step with a number of records that this process has not computed before may compile the model
    for it (XLA): it may take `first_seconds` in addition. So user code that hangs there is found later than
    in any other step.

    Args:
        seconds: the time limit of a step.
        first_seconds: see above.
        waits: True while this worker waits for other workers or for parameter servers.
    """

    def __init__(
        self, watchdog: Watchdog, seconds: float, first_seconds: float, waits: Callable[[], bool] = never
    ):
        self._watchdog, self._seconds, self._first_seconds = watchdog, seconds, first_seconds
        self._waits, self._known = waits, set[tuple[str, int]]()

    @contextmanager
    def __call__(self, kind: str, what: Callable[[], str], records: int) -> Iterator[Call]:
        """Watch one step or evaluation batch.

        Args:
            kind: of computation, such as "step".
            what: names it, for the message.
            records: the number of records of this worker's part.
        """
        seconds, setting = self._seconds, STEP_TIMEOUT
        if (kind, records) not in self._known:
            seconds, setting = seconds + self._first_seconds, f"{STEP_TIMEOUT} + {STARTUP_TIMEOUT}"
        with self._watchdog.watch(what, Limit(seconds, setting, self._waits)) as call:
            yield call
        self._known.add((kind, records))  # not if it raised: the model may not be compiled yet


class Computing(Protocol):
    """A `Compute`, as the loop sees it."""

    def __call__(
        self, kind: str, what: Callable[[], str], records: int
    ) -> AbstractContextManager[object]: ...


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
        self._now = what

    def words(self) -> str:
        return self._now
