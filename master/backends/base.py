# SPDX-License-Identifier: Apache-2.0
"""The interface of backends, which start and end workers for the master's loop, and their tasks.

A backend is an adapter. It receives `Create` and `Delete` as effects, and emits the lifecycle of the workers
as events. `tests/contract/test_backend.py` checks every backend against this contract:

    start     returns when effects can be performed. Events may be emitted before it returns.
    perform   returns at once and never raises. Effects that are not meant for a backend are ignored.
                  Create(w)   starts w. An id is created once.
                  Delete(w)   ends w: with a signal first, and by force after the grace period. Unknown,
                              deleted and gone workers are ignored.
    replace_in_place
              A process in a pod reports how the worker process before it ended, and waits for the id of the
              worker that it will be. Gone is emitted for the earlier worker, unless it was emitted before.
              None: no worker is needed there, or pods of this backend do not outlive a worker.
    close     returns when nothing more is emitted. Each backend decides whether its workers then end.

    Seen      at most once for each worker, before its Gone: it runs. Omitted if a backend cannot observe it.
    Delayed   before Seen, whenever the reason changes: why the worker does not run yet.
    Gone      exactly once for each created worker, as its last event: however it ends, and also if it
              could not be started. Until `close`, no failure of the backend itself prevents it.
    Degraded  a part of the backend other than one worker does not work, or works again.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import structlog

from edl.contract.ids import WorkerId
from edl.formatting import plain
from edl.master.core import effects as ef
from edl.master.core import events as ev

log = structlog.get_logger()
MAX_LINE = 500  # characters
# Lines of a stack, as Python's faulthandler and the libraries of TensorFlow print it after the cause.
FRAME = re.compile(
    r"\s*(@ +0x|File \"|(Current )?[Tt]hread 0x|Extension modules: |\*\*\* |<no Python frame>)"
)

Emit: TypeAlias = Callable[[ev.Event], None]


class Backend(Protocol):
    """Starts and ends the workers of one job; the module's docstring has the contract of each method."""

    async def start(self) -> None:
        """Prepare for effects.

        Raises:
            EdlError: the backend cannot start; the text says why.
            OSError: the same.
        """

    def perform(self, effect: ef.ForBackend) -> None:
        """Perform an effect, for example start or end a worker."""

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        """Replace an ended worker in its pod; the module's docstring has the details."""

    async def close(self) -> None:
        """End the backend."""


class Tasks:
    """Background tasks, which are not awaited.

    An exception in a task is never lost: it is logged and passed to the function given at the task's start.
    """

    def __init__(self) -> None:
        self._all: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], failed: Callable[[Exception], None]) -> None:
        """Run `work` in the background; call `failed` with the exception if one ends it."""
        task = asyncio.get_running_loop().create_task(work)
        self._all.add(task)
        task.add_done_callback(partial(self._done, failed))

    def keep(self, part: str, run: Callable[[], Coroutine[Any, Any, None]], emit: Emit, pause: float) -> None:
        """Run `run` for ever. If it fails, emit that `part` is Degraded, and restart it after a pause.

        Once it has then run for ten pauses, emit that `part` works again.
        """
        self.start(self._keep(part, run, emit, pause), lambda error: None)

    async def join(self, seconds: float) -> None:
        """Wait until all tasks have ended, at most for `seconds`."""
        if self._all:
            await asyncio.wait(self._all, timeout=seconds)

    async def close(self) -> None:
        """Cancel the tasks that still run, and wait until they have ended."""
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
                log.error(f"{part}: failed, and is started again: {format_error(error)}", exc_info=error)
                failed = True
                emit(ev.Degraded(part, f"failed, and is started again ({format_error(error)})"))
            finally:
                work.cancel()
                await asyncio.wait({work})
            await asyncio.sleep(pause)

    def _done(self, failed: Callable[[Exception], None], task: asyncio.Task[None]) -> None:
        self._all.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, Exception):
                raise error
            log.error(f"a task of the backend failed: {format_error(error)}", exc_info=error)
            failed(error)


def last_line(log: Path, most: int = 1) -> str:
    """Return the last line of a process's log, for messages; empty if the log cannot be read.

    Args:
        most: so many of the last lines, without the frames of a stack.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 10 * MAX_LINE))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    found = [line.strip() for line in lines if line.strip() and not FRAME.match(line)]
    return plain("; ".join(found[-most:]))[-MAX_LINE:]


def format_error(error: Exception) -> str:
    """Describe the exception in one line: `PermissionError: [Errno 13] Permission denied: 'logs/...'`."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
