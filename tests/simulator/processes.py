# SPDX-License-Identifier: Apache-2.0
"""Processes with their own asyncio loops, in simulated time.

The code on these loops is the shipped code, unchanged. A process can be stopped (SIGSTOP: its callbacks run
when it continues, and time has passed) or killed (its callbacks never run).
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tests.simulator.clock import Clock


class Process(asyncio.AbstractEventLoop):
    """One process, which is its own event loop.

    Args:
        host: the host of the process.
        failed: takes each uncaught error.
    """

    def __init__(self, clock: Clock, host: str, failed: Callable[[BaseException], None]):
        self.clock, self.host, self._failed = clock, host, failed
        self.alive, self.frozen = True, False
        self.when_killed: list[Callable[[], None]] = []
        self._held: list[events.Handle] = []  # callbacks that were due while stopped
        self._tasks: list[asyncio.Task[Any]] = []
        self._due: dict[int, events.Handle] = {}  # callbacks in the future
        self._last: deque[events.Handle] | None = None  # callbacks that run during `bury`

    def start(self, main: Coroutine[Any, Any, Any]) -> None:
        self.call_soon(lambda: self.create_task(main).add_done_callback(self.ended))

    def ended(self, task: asyncio.Task[Any]) -> None:
        """Report the error of a finished task. Done-callback for tasks that no code awaits."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def stop_for(self, seconds: float) -> None:
        self.frozen = True
        self.clock.later(seconds, self._go_on)

    def _go_on(self) -> None:
        self.frozen = False
        held, self._held = self._held, []
        for handle in held:
            self._run(handle)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            for act in self.when_killed:
                act()

    def bury(self) -> None:
        """End all pending tasks silently after the run. No time passes."""
        self.alive, self.when_killed, self._failed = False, [], lambda error: None
        last = self._last = deque(self._due.values())
        for _ in range(20):  # a task may have to be cancelled more than once
            if not (pending := [task for task in self._tasks if not task.done()]):
                break
            for task in pending:
                task.cancel()
            for _ in range(10_000):
                if not last:
                    break
                self._do(last.popleft())

    # --- asyncio's side

    def _run(self, handle: events.Handle) -> None:
        if not self.alive:
            return
        if self.frozen and not handle.cancelled():
            self._held.append(handle)
            return
        self._do(handle)

    def _do(self, handle: events.Handle) -> None:
        self._due.pop(id(handle), None)
        if handle.cancelled():
            return
        events._set_running_loop(self)
        try:
            handle._run()
        finally:
            events._set_running_loop(None)

    def time(self) -> float:
        return self.clock.now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> events.Handle:  # type: ignore[override]
        handle = events.Handle(callback, args, self, context)
        self._at(self.clock.now, handle)
        return handle

    def _at(self, when: float, handle: events.Handle) -> None:
        if self._last is not None:
            if when <= self.clock.now:  # no time passes, so a timer would be due again for ever
                self._last.append(handle)
        else:
            self._due[id(handle)] = handle
            self.clock.later(max(when - self.clock.now, 0.0), lambda: self._run(handle))

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        handle = events.TimerHandle(when, callback, args, self, context)
        self._at(when, handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None: ...

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Any = None, **more: Any
    ) -> asyncio.Task[Any]:
        """Make a task of this loop. Python 3.13 added arguments, which the product does not pass."""
        assert not more
        task = asyncio.Task(coro, loop=self, name=name)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it may be killed
        self._tasks.append(task)
        if len(self._tasks) > 200:
            self._tasks = [t for t in self._tasks if not t.done()]
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._failed(error if isinstance(error, BaseException) else RuntimeError(str(context)))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def close(self) -> None: ...
