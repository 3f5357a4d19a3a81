# SPDX-License-Identifier: Apache-2.0
"""Workers as processes of this machine: the backend of `edl run`.

A launcher (`launchers`) starts the processes. One task accompanies each worker from its start to its `Gone`.
If that task fails (missing program, log file or fork server), the worker ends with this reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edl import scratch
from edl.contract import artifacts
from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.errors import EdlError
from edl.master.backends.base import Emit, Tasks, format_error, last_line
from edl.master.backends.gpus import Gpus
from edl.master.backends.launchers import Launcher, LauncherLost
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.failures import OUTSIDE_SIGNALS

CLOSE_SECONDS = 10.0  # for killed processes to be reaped
LAST_LINES = 3  # of the log of a crashed worker, for the reason
NOT_STARTED = "it was not started yet"


@dataclass(eq=False)
class _Worker:
    id: WorkerId
    pid: int = 0  # 0: not started yet
    deleted: bool = False  # its deletion was requested
    waits: bool = False  # for a place on a GPU
    started: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set once `Gone` is emitted


class Processes:
    """The processes of one job.

    Args:
        emit: called with Seen and Gone.
        launcher: starts the processes.
        logs: directory of the workers' logs.
        gpus: the GPUs for the workers; None to place workers on no GPU.
    """

    def __init__(
        self,
        emit: Emit,
        launcher: Launcher,
        logs: Path,
        gpus: Gpus | None = None,
    ):
        self._emit, self._launcher, self._logs = emit, launcher, logs
        self._gpus = gpus or Gpus()
        self._workers: dict[WorkerId, _Worker] = {}
        self._tasks = Tasks()
        self._closing = False

    async def start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        await self._launcher.start(self._logs, self._emit)

    def perform(self, effect: ef.ForBackend) -> None:
        """Start or end a worker."""
        match effect:
            case ef.Create(worker):
                w = self._workers[worker] = _Worker(worker)
                self._tasks.start(self._live(w), partial(self._failed, w))
            case ef.Delete(worker, grace_period_seconds):
                known = self._workers.get(worker)
                if known is not None and not known.gone.is_set():
                    known.deleted = True
                    self._gpus.leaves(worker)
                    self._tasks.start(self._delete(known, grace_period_seconds), partial(self._failed, known))

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None

    async def close(self) -> None:
        """Kill all remaining processes; return when none is left."""
        self._closing = True
        for w in list(self._workers.values()):
            self._signal(w, signal.SIGKILL)
            if w.waits:
                self._end(w, ev.Gone(w.id, free=True, why=NOT_STARTED))
        await self._tasks.join(CLOSE_SECONDS)
        await self._launcher.close()
        await self._tasks.close()
        await asyncio.to_thread(scratch.remove_abandoned)  # directories of killed workers
        await asyncio.to_thread(scratch.remove_abandoned, self._logs.parent, artifacts.SAVING)

    async def _live(self, w: _Worker) -> None:
        more = await self._gpu(w)
        if more is not None:
            try:
                await self._run(w, more)
            finally:
                self._gpus.release(w.id)

    async def _run(self, w: _Worker, more: Sequence[str]) -> None:
        """Start a worker's process, and wait until it has ended.

        Args:
            more: additional arguments of this worker.
        """
        log = self._logs / f"worker-{w.id}.log"
        launched = await self._launcher.launch(w.id, log, more)
        w.pid = launched.pid
        if w.gone.is_set() or self._closing:  # it was deleted while it was being started
            self._signal(w, signal.SIGKILL)
        else:
            w.started.set()
            self._emit(ev.Seen(w.id, str(w.pid)))
        try:
            code = await launched.exit_code
        except LauncherLost as error:
            _end_group(w.pid)
            w.pid = 0
            self._end(w, ev.Gone(w.id, free=True, why=str(error)))
            return
        _end_group(w.pid)
        w.pid = 0  # from now on the pid may belong to a different process
        if code < 0:
            name = signal.Signals(-code).name
            ends = last_line(log, LAST_LINES) if name not in OUTSIDE_SIGNALS else ""
            self._end(w, ev.Gone(w.id, signal=name, why=f"its log ends with: {ends}" if ends else ""))
        else:
            # A worker that could not report its failure to the master has logged it.
            why = last_line(log) if code == WorkerExit.FAILED else ""
            self._end(w, ev.Gone(w.id, code=code, free=code == WorkerExit.PEER_BROKEN, why=why))

    async def _gpu(self, w: _Worker) -> list[str] | None:
        """Wait for a place on a GPU; return the arguments that name it, or None if the worker is gone."""
        while (more := self._gpus.assign(w.id)) is None:
            if not w.waits:
                w.waits = True
                self._emit(ev.Delayed(w.id, "all GPUs are in use (local.gpusPerWorker)"))
            await self._gpus.wait()
            if w.gone.is_set():
                return None
        w.waits = False
        return more

    async def _delete(self, w: _Worker, grace_period_seconds: float) -> None:
        if not w.started.is_set():
            self._end(w, ev.Gone(w.id, free=True, why=NOT_STARTED))
            return
        if grace_period_seconds > 0:
            self._signal(w, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_period_seconds):
                    await w.gone.wait()
        self._signal(w, signal.SIGKILL)

    def _failed(self, w: _Worker, error: Exception) -> None:
        why = str(error) if isinstance(error, EdlError) else format_error(error)
        self._signal(w, signal.SIGKILL)
        # A worker is lost by a signal to its fork server as by one to itself.
        number = error.signal if isinstance(error, LauncherLost) else ""
        self._end(
            w, ev.Gone(w.id, signal=number, why=why if w.pid else f"its process cannot be started: {why}")
        )

    def _end(self, w: _Worker, gone: ev.Gone) -> None:
        if not w.gone.is_set():
            w.gone.set()
            del self._workers[w.id]
            if w.waits:
                self._gpus.release(w.id)  # so that its task ends
            self._emit(gone)

    def _signal(self, w: _Worker, number: signal.Signals) -> None:
        if w.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(w.pid, number)


def _end_group(pid: int) -> None:
    """Kill the process group that an ended worker has left behind.

    The worker had its own session. The id of its group is not reused while a process is in the group.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
