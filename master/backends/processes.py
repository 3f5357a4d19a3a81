"""Workers as processes of this machine: the backend of `edl run`.

    Spawn        starts a fresh Python interpreter for each worker; the default
    ForkServer   forks workers from a process that has only imported TensorFlow; they are ready sooner

Each worker runs in its own session, so that Ctrl-C at the terminal reaches only the master, and writes to
its own log file. One task accompanies each worker from its start to its `Gone`. If that task fails (missing
program, log file or fork server), the worker ends with this reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from edl import scratch
from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.errors import EdlError
from edl.exit_announcements import VARIABLE, Announcement
from edl.full_disk import log_file
from edl.master.backends.base import Emit, Tasks, described, last_line
from edl.master.core import effects as ef
from edl.master.core import events as ev

MARK = "EDL_WORKER_MARK"  # in the environment of a worker, and of all processes that it starts
MEMORY = "edl-state"  # name of the memory file, visible in /proc
ENDING_SECONDS = 2.0  # for a process to exit after its stream has ended
CLOSE_SECONDS = 10.0  # for killed processes to be reaped


class LauncherLost(EdlError):
    """The process that would have reported the worker's exit has ended itself."""


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

    async def close(self) -> None: ...


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
                    *self._command, "--worker", str(worker), *more,
                    stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file,
                    env={**self._environment, MARK: mark, VARIABLE: str(announcement.write)},
                    pass_fds=(announcement.write,), start_new_session=True,
                )  # fmt: skip
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
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


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
        self._emit: Emit = _nobody
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
            launched = await self._launch(
                worker, log, more
            )  # the fork server exited before it read the order; this starts a new one
        if self._failing:
            self._failing = ""
            self._emit(ev.Degraded(PART, ""))
        return launched

    async def close(self) -> None:
        self._emit = _nobody
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
                        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                        env=self._environment, start_new_session=True,
                    )  # fmt: skip
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
            why = f"the fork server sent an invalid message ({described(error)})"
        code = await process.wait()
        self._lost(
            LauncherLost(f"{why or f'the fork server exited with code {code}'}; its log is {self._log}")
        )

    def _lost(self, lost: LauncherLost) -> None:
        """Fail pending starts. For running workers, watch their pids for the exit; its code is unknown."""
        self._failing = str(lost)
        self._emit(ev.Degraded(PART, f"{lost}; another one is started"))
        for worker, started in self._started.items():
            self._exited.pop(worker).cancel()
            if not started.done():
                started.set_exception(lost)
        for worker, exited in self._exited.items():
            self._tasks.start(_watch(self._pids.pop(worker), exited), exited.set_exception)
        self._started, self._exited = {}, {}


PART = "fork server"


def _nobody(event: ev.Event) -> None:
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
        exited.set_exception(LauncherLost("it has ended, and its fork server is not there to tell how"))


def _end_group(pid: int) -> None:
    """Kill the process group that an ended worker has left behind.

    The worker had its own session. The id of its group is not reused while a process is in the group.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class Memories:
    """Anonymous memory files of this process for copies of the state, one for each live worker.

    A worker that starts gets the copy that a crashed worker has left.
    """

    def __init__(self) -> None:
        self._left: deque[int] = deque()  # free files, as descriptors; those with a copy come first
        self._of: dict[WorkerId, int] = {}

    def give(self, worker: WorkerId) -> str:
        """Assign a memory file to a worker; return its path."""
        memory = self._of[worker] = self._left.popleft() if self._left else os.memfd_create(MEMORY)
        return f"/proc/{os.getpid()}/fd/{memory}"

    def take_back(self, worker: WorkerId, crashed: bool) -> None:
        """Reclaim the memory of an ended worker; keep the copy only after a crash.

        After an orderly exit, other workers hold the state, or it is not needed.
        """
        if (memory := self._of.pop(worker, None)) is None:
            return
        if crashed:
            self._left.appendleft(memory)
        else:
            os.ftruncate(memory, 0)
            self._left.append(memory)

    def close(self) -> None:
        for memory in (*self._left, *self._of.values()):
            os.close(memory)
        self._left.clear()
        self._of.clear()


@dataclass(eq=False)
class _Worker:
    id: WorkerId
    pid: int = 0  # 0: not started yet
    deleted: bool = False  # its deletion was requested
    started: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set once `Gone` is emitted


class Processes:
    """The processes of one job.

    Args:
        emit: called with Seen and Gone.
        launcher: starts the processes.
        logs: directory of the workers' logs.
        memories: memory for copies of the state; None if copies are off.
    """

    def __init__(self, emit: Emit, launcher: Launcher, logs: Path, memories: Memories | None = None):
        self._emit, self._launcher, self._logs, self._memories = emit, launcher, logs, memories
        self._workers: dict[WorkerId, _Worker] = {}
        self._tasks = Tasks()
        self._closing = False

    async def start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        await self._launcher.start(self._logs, self._emit)

    def perform(self, effect: ef.Effect) -> None:
        """Start or end a worker."""
        match effect:
            case ef.Create(worker):
                w = self._workers[worker] = _Worker(worker)
                self._tasks.start(self._live(w), partial(self._failed, w))
            case ef.Delete(worker, grace_period_seconds):
                known = self._workers.get(worker)
                if known is not None and not known.gone.is_set():
                    known.deleted = True
                    self._tasks.start(self._delete(known, grace_period_seconds), partial(self._failed, known))

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None

    async def close(self) -> None:
        """Kill all remaining processes; return when none is left."""
        self._closing = True
        for w in self._workers.values():
            self._signal(w, signal.SIGKILL)
        await self._tasks.join(CLOSE_SECONDS)
        await self._launcher.close()
        await self._tasks.close()
        await asyncio.to_thread(scratch.remove_abandoned)  # directories of killed workers
        if self._memories is not None:
            self._memories.close()

    async def _live(self, w: _Worker) -> None:
        more = ["--memory", await self._memory(w)] if self._memories is not None else []
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
            self._end(w, ev.Gone(w.id, signal=signal.Signals(-code).name))
        else:
            # A worker that could not report its failure to the master has logged it.
            why = last_line(log) if code == WorkerExit.FAILED else ""
            self._end(w, ev.Gone(w.id, code=code, free=code == WorkerExit.PEER_BROKEN, why=why))

    async def _memory(self, w: _Worker) -> str:
        """Assign memory to a worker that starts; first wait until earlier, deleted workers have exited.

        A stream ends before its process is seen to have ended, and the copy of a crashed worker is needed.
        """
        assert self._memories is not None
        ending = [o for o in self._workers.values() if o.deleted and o.pid and o.id < w.id]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                for other in ending:
                    await other.gone.wait()
        return self._memories.give(w.id)

    async def _delete(self, w: _Worker, grace_period_seconds: float) -> None:
        if not w.started.is_set():
            self._end(w, ev.Gone(w.id, free=True, why="it was not started yet"))
            return
        if grace_period_seconds > 0:
            self._signal(w, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_period_seconds):
                    await w.gone.wait()
        self._signal(w, signal.SIGKILL)

    def _failed(self, w: _Worker, error: Exception) -> None:
        why = str(error) if isinstance(error, EdlError) else described(error)
        self._signal(w, signal.SIGKILL)
        self._end(w, ev.Gone(w.id, why=why if w.pid else f"its process cannot be started: {why}"))

    def _end(self, w: _Worker, gone: ev.Gone) -> None:
        if not w.gone.is_set():
            w.gone.set()
            del self._workers[w.id]
            if self._memories is not None:
                self._memories.take_back(
                    w.id, crashed=gone.code is None or gone.code == WorkerExit.PEER_BROKEN
                )
            self._emit(gone)

    def _signal(self, w: _Worker, number: signal.Signals) -> None:
        if w.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(w.pid, number)
