# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of workers on this machine.

    Spawn        starts a fresh Python interpreter for each worker; the default
    ForkServer   forks workers from a process that has only imported TensorFlow; they are ready sooner

Each worker runs in its own session, so that Ctrl-C at the terminal reaches only the master, and writes to
its own log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edl.contract.ids import WorkerId
from edl.errors import EdlError
from edl.exit_announcements import VARIABLE, Announcement
from edl.full_disk import log_file
from edl.master.backends.base import Emit, Tasks, format_error
from edl.master.core import events as ev

MARK = "EDL_WORKER_MARK"  # in the environment of a worker, and of all processes that it starts
EXEC_SECONDS = 0.5  # in which a process gets through `exec`, even on a busy machine
PART = "fork server"  # the part of the job that `Degraded` names


class LauncherLost(EdlError):
    """The process that would have started the worker, or reported its exit, has ended itself.

    Args:
        signal: the name of the signal that has ended it; "" for none.
    """

    def __init__(self, message: str, signal: str = ""):
        super().__init__(message)
        self.signal = signal


@dataclass(frozen=True)
class Launched:
    """A running process.

    Args:
        exit_code: as in subprocess: negative is a signal. Raises LauncherLost if the process has ended and
            its exit code is unknown.
    """

    pid: int
    exit_code: Awaitable[int]


class Launcher(Protocol):
    """Starts the processes of workers."""

    async def start(self, logs: Path, emit: Emit) -> None:
        """Prepare for the first launch. `emit` is called with Degraded."""

    async def launch(self, worker: WorkerId, log: Path, more: Sequence[str] = ()) -> Launched:
        """Start the process of a worker.

        Args:
            more: additional arguments of this worker.

        Raises:
            OSError: the program cannot be executed, or the log cannot be written.
            LauncherLost: the launcher itself failed.
        """

    async def close(self) -> None:
        """End the launcher itself. The backend has ended the workers before."""
        ...


class Spawn:
    """Starts a fresh process for each worker.

    Args:
        command: the worker's program; `--worker ID` is added.
        environment: the environment of the workers.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._command, self._environment = command, environment

    async def start(self, logs: Path, emit: Emit) -> None:
        pass

    async def launch(self, worker: WorkerId, log: Path, more: Sequence[str] = ()) -> Launched:
        announcement, mark = Announcement(), secrets.token_hex(8)
        try:
            with open(log_file(log), "wb") as file:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--worker",
                    str(worker),
                    *more,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env={**self._environment, MARK: mark, VARIABLE: str(announcement.write)},
                    pass_fds=(announcement.write,),
                    start_new_session=True,
                )
        finally:
            announcement.started()
        return Launched(process.pid, _exit_code(process, announcement, mark))

    async def close(self) -> None:
        pass


async def _exit_code(process: asyncio.subprocess.Process, announcement: Announcement, mark: str) -> int:
    code = await process.wait()
    await asyncio.to_thread(_end_marked, f"{MARK}={mark}".encode())
    return announcement.believed(code)


def _end_marked(mark: bytes) -> None:
    """Kill the processes that an ended worker has left behind, also those in sessions of their own.

    All have inherited the mark in their environment.
    """
    until = time.monotonic() + EXEC_SECONDS
    while _kill_marked(mark) and time.monotonic() < until:
        time.sleep(0.01)


def _kill_marked(mark: bytes) -> bool:
    """Kill the processes that have the mark. True if another look is due.

    A process that was killed may just have started one more, and one within `exec` shows no environment yet.
    """
    again = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            environment = path.read_bytes()
            if mark in environment.split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                again = True
            elif not environment and (path.parent / "exe").readlink():  # threads of the kernel have none
                again = True
    return again


class ForkServer:
    """Forks workers from one process, the fork server. If it exits, it is restarted; its workers live on.

    Args:
        command: the fork server's program (trainer/forkserver.py has the protocol).
        arguments: the arguments of every worker; `--worker ID` is added.
        environment: the environment of the fork server and of all workers.
    """

    def __init__(self, command: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]):
        self._command, self._arguments, self._environment = command, arguments, environment
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._log = Path()
        self._emit: Emit = _ignore
        self._tasks = Tasks()
        self._failing = ""  # why the last fork server exited, until a new one works
        self._started: dict[WorkerId, asyncio.Future[int]] = {}
        self._exited: dict[WorkerId, asyncio.Future[int]] = {}
        self._pids: dict[WorkerId, int] = {}  # of the workers whose exit the fork server will report

    async def start(self, logs: Path, emit: Emit) -> None:
        """Start the fork server early, because its imports take seconds."""
        self._log, self._emit = logs / "forkserver.log", emit
        with contextlib.suppress(OSError):  # `launch` tries again, and reports the failure for its worker
            await self._running()

    async def launch(self, worker: WorkerId, log: Path, more: Sequence[str] = ()) -> Launched:
        try:
            launched = await self._launch(worker, log, more)
        except LauncherLost:
            # The fork server exited before it read the order; this starts a new one.
            launched = await self._launch(worker, log, more)
        if self._failing:
            self._failing = ""
            self._emit(ev.Degraded(PART, ""))
        return launched

    async def close(self) -> None:
        self._emit = _ignore
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._listener is not None:
            await self._listener
        await self._tasks.close()

    async def _launch(self, worker: WorkerId, log: Path, more: Sequence[str]) -> Launched:
        process = await self._running()
        loop = asyncio.get_running_loop()
        started = self._started[worker] = loop.create_future()
        exited = self._exited[worker] = loop.create_future()
        order = {
            "worker": worker,
            "arguments": [*self._arguments, "--worker", str(worker), *more],
            "log": str(log),
        }
        assert process.stdin is not None
        process.stdin.write((json.dumps(order) + "\n").encode())
        return Launched(await started, exited)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._listener is None or self._listener.done():
                with open(self._log, "ab") as log:
                    self._process = await asyncio.create_subprocess_exec(
                        *self._command,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        env=self._environment,
                        start_new_session=True,
                    )
                self._listener = asyncio.create_task(self._listen(self._process))
            return self._process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read the fork server's messages until it exits; then resolve all waiting futures."""
        assert process.stdout is not None
        why = ""
        try:
            async for line in process.stdout:
                said = json.loads(line)
                worker = WorkerId(said["worker"])
                if "pid" in said:
                    told = self._pids[worker] = said["pid"]
                    future = self._started.pop(worker)
                else:
                    told = said["code"]
                    future = self._exited.pop(worker)
                    del self._pids[worker]
                if not future.done():  # else the waiting task was cancelled
                    future.set_result(told)
        except (ValueError, KeyError, TypeError) as error:
            process.kill()
            why = f"the fork server sent an invalid message ({format_error(error)})"
        code = await process.wait()
        why = f"{why or f'the fork server exited with code {code}'}; its log is {self._log}"
        self._lost(LauncherLost(why, signal.Signals(-code).name if code < 0 else ""))

    def _lost(self, lost: LauncherLost) -> None:
        """Fail pending starts. For running workers, watch their pids for the exit; its code is unknown."""
        self._failing = str(lost)
        self._emit(ev.Degraded(PART, f"{lost}; a new one is started"))
        for worker, started in self._started.items():
            self._exited.pop(worker).cancel()
            if not started.done():
                started.set_exception(lost)
        for worker, exited in self._exited.items():
            self._tasks.start(_watch(self._pids.pop(worker), exited), exited.set_exception)
        self._started, self._exited = {}, {}


def _ignore(event: ev.Event) -> None:
    pass


async def _watch(pid: int, exited: asyncio.Future[int]) -> None:
    """Wait until a process that is not our child has ended; its exit code is unknown."""
    ended = asyncio.Event()
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
    if not exited.done():
        exited.set_exception(LauncherLost("its exit code is unknown, because its fork server has ended"))
