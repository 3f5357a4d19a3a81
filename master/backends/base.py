"""What starts and ends workers, as the master's loop knows it, and the tasks with which it does so.

A backend is an adapter: `Create` and `Delete` come in as effects, and what becomes of the workers goes
out as events. The contract, which `tests/contract/test_backend.py` holds every backend to:

    start     returns when effects can be performed. Events may be emitted before it returns.
    perform   returns at once and never raises. Effects that are not a backend's are ignored.
                  Create(w)   w is started. An id is created once.
                  Delete(w)   w ends: politely, and by force when the grace is over. A worker that is
                              unknown, or is deleted or gone already, is left alone.
    replace_in_place
              A process in a pod reports how the worker process before it ended, and waits for the id of the
              worker that it will be. Gone is emitted for the earlier worker, unless it was emitted before.
              None: no worker is needed there, or pods of this backend do not outlive a worker.
    close     returns when nothing more is emitted. Whether the workers end with it is the backend's own.

    Seen      at most once for each worker, before its Gone: it runs. A backend that cannot tell omits it.
    Delayed   before Seen, as often as the reason changes: why the worker does not run yet.
    Gone      exactly once for each worker that was created, and the last that is emitted of it: however
              it ends, and also when it could not be started. Until `close`, no failure of the backend
              itself prevents it.
    Degraded  a part of the backend other than one worker does not work, or works again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import structlog

from edl.contract.ids import WorkerId
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.text import plain

log = structlog.get_logger()
MOST_LINE = 500  # characters

Emit: TypeAlias = Callable[[ev.Event], None]


class Backend(Protocol):
    """What starts and ends the workers of one job; the module says what each method promises."""

    async def start(self) -> None:
        """Be ready for effects.

        Raises:
            EdlError: it cannot be; the text says why.
            OSError: the same.
        """

    def perform(self, effect: ef.Effect) -> None:
        """Start or end a worker, or whatever else the effect asks of a backend."""

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        """Have another worker live in the place of one that has ended."""

    async def close(self) -> None:
        """End the backend."""


class Tasks:
    """The tasks that nobody awaits.

    An exception in one is never lost: it is logged, and given to the function that was named at its start.
    """

    def __init__(self) -> None:
        self._all: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], failed: Callable[[Exception], None]) -> None:
        """Have `work` done; `failed` is called with the exception that ends it, if one does."""
        task = asyncio.get_running_loop().create_task(work)
        self._all.add(task)
        task.add_done_callback(partial(self._done, failed))

    def keep(self, part: str, run: Callable[[], Coroutine[Any, Any, None]], emit: Emit, pause: float) -> None:
        """Have `run` run for ever. When it fails, `part` is Degraded, and it is started again after a pause;
        when it has then lasted for ten times as long, `part` works again."""
        self.start(self._keep(part, run, emit, pause), lambda error: None)

    async def join(self, seconds: float) -> None:
        """Until all have ended, or the time is up."""
        if self._all:
            await asyncio.wait(self._all, timeout=seconds)

    async def close(self) -> None:
        """Cancel those that have not ended, and wait until they have."""
        tasks = list(self._all)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(
        self, part: str, run: Callable[[], Coroutine[Any, Any, None]], emit: Emit, pause: float
    ) -> None:
        failed = False
        while True:
            work = asyncio.create_task(run())
            try:
                if failed and not (await asyncio.wait({work}, timeout=10 * pause))[0]:
                    failed = False
                    emit(ev.Degraded(part, ""))
                await work
                return
            except Exception as error:
                log.error(f"{part}: failed, and is started again: {described(error)}", exc_info=error)
                failed = True
                emit(ev.Degraded(part, f"failed, and is started again ({described(error)})"))
            finally:
                work.cancel()
                await asyncio.wait({work})
            await asyncio.sleep(pause)

    def _done(self, failed: Callable[[Exception], None], task: asyncio.Task[None]) -> None:
        self._all.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, Exception):
                raise error
            log.error(f"a task of the backend failed: {described(error)}", exc_info=error)
            failed(error)


def last_line(log: Path) -> str:
    """Return what a process has printed last, for people; empty if that cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 10 * MOST_LINE))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return plain(lines[-1])[-MOST_LINE:] if lines else ""


def described(error: Exception) -> str:
    """The exception in one line: `PermissionError: [Errno 13] Permission denied: 'logs/worker-0.log'`."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
