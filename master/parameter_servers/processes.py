# SPDX-License-Identifier: Apache-2.0
"""Parameter servers as processes of this machine, for `edl run` and `edl master`.

Each server has a folder for its log, a fixed address, and one task. The task starts a process, waits until it
listens, and then until it exits. It then starts the next process, which reads the log and so restores the
state of the one before. Restarts back off if a server dies again and again. A server that rejects its
arguments or never listens fails the job, with the last line of its log. If it was an added server, the rows
stay where they are instead.

Promise: no process outlives `close` or the end of the master, however it ends. Its standard input is a pipe
that only the master holds, and it exits when the pipe is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from edl.contract import artifacts
from edl.contract.own_modules import module_command
from edl.master.backends.base import Tasks, format_error, last_line
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.base import Emit
from edl.master.parameter_servers.monitor import RESTARTING, Watch
from edl.master.parameter_servers.remote import PendingServers

REFUSED = 2  # exit code: its arguments are invalid, or its address is taken
MAX_IN_VAIN = 5  # failed starts in a row
SETTLED_SECONDS = 3.0  # a process that has listened for so long resets the pause between restarts
MAX_PAUSE_SECONDS = 30.0
LOOK_SECONDS = 0.05  # between two looks for the address of a starting server
ENDING_SECONDS = 3.0  # for a process to exit after SIGTERM


@dataclass(frozen=True)
class Plan:
    """The specification of a job's servers.

    Args:
        folder: directory for their logs of rows and their addresses.
        logs: directory for their output.
        host: the host name on which they listen.
        memory_limit: bytes of each server; 0: no limit.
        checkpoints: directory or address of checkpoints; empty: they write none.
        logged: whether they write logs of rows.
    """

    servers: int
    run_id: str
    folder: Path
    logs: Path
    host: str
    memory_limit: int = 0
    checkpoints: str = ""
    logged: bool = True

    def log_of(self, index: int) -> Path:
        return self.logs / f"ps-{index}.log"

    def told_of(self, index: int) -> Path:
        """Return the directory of a server's log of rows."""
        return self.folder / f"log-{index}"

    def address_of(self, index: int) -> Path:
        return self.folder / f"address-{index}"

    def arguments(self, index: int, listen: str) -> list[str]:
        """Return the arguments of a server's process."""
        return [
            "--index",
            str(index),
            "--listen",
            listen,
            "--run-id",
            self.run_id,
            "--token-file",
            str(self.folder / TOKEN),
            "--log-dir",
            str(self.told_of(index)),
            "--address-file",
            str(self.address_of(index)),
            "--attached",
            *([] if self.logged else ["--no-log"]),
            *(["--checkpoint-dir", self.checkpoints] if self.checkpoints else []),
            *(["--memory-limit", str(self.memory_limit)] if self.memory_limit else []),
        ]


TOKEN = "token"  # the file, in the servers' folder


@dataclass
class _Server:
    index: int
    address: str = ""  # where it listens, or last listened
    pid: int = 0
    starts: int = 0
    listened: bool = False  # at any time
    in_vain: int = 0  # failed starts in a row
    state: str = "starting"
    leaving: bool = False  # it is being removed
    over: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # its last process has ended
    ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # its files are removed, too
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)


class ServerProcesses:
    """The servers of one job.

    Args:
        emit: called with ServerListens, ServerExited, ServersReady, ServersGivenUp, ServerRecovered,
            ServerAway and ProbeUnanswered.
        token: the token of the job.
        command: the server's program; by default `ps` of this installation.
        environment: the environment of the processes.
        listen_timeout: seconds for added servers to listen.
    """

    def __init__(
        self,
        emit: Emit,
        plan: Plan,
        token: str,
        command: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        listen_timeout: float = math.inf,
    ):
        self._emit, self._plan, self._token = emit, plan, token
        self._command, self._environment = command or module_command("edl.ps"), environment
        self._servers = [_Server(index) for index in range(plan.servers)]
        self._watch = Watch(emit, lambda: token, plan.servers, restarts=True)
        self._tasks = Tasks()
        self._known = asyncio.Event()  # set once all addresses are known
        self._wanted = self._have = plan.servers
        self._pending = PendingServers(listen_timeout, self._too_late)
        self._asked = False  # a number was requested, and not reported as ready or given up yet
        self._leaving: list[_Server] = []
        self._closing = False

    async def start(self) -> None:
        """Start all servers. They continue with the logs and addresses of an earlier master's servers."""
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        self._plan.logs.mkdir(parents=True, exist_ok=True)
        artifacts.write_whole(self._plan.folder / TOKEN, self._token, mode=0o600)
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.address = self._plan.address_of(server.index).read_text(encoding="utf-8").strip()
            self._start(server)

    async def addresses(self) -> tuple[str, ...]:
        await self._known.wait()
        return self._addresses()

    async def listening(self) -> tuple[str, ...]:
        return await self.addresses()  # addresses are known once the servers listen

    def _addresses(self) -> tuple[str, ...]:
        """Return the addresses of the servers before the first one that has never listened."""
        return tuple(server.address for server in takewhile(lambda s: s.listened, self._servers))

    def _start(self, server: _Server) -> None:
        self._tasks.start(self._life(server), lambda error: self._failed(server, error))

    @property
    def wanted(self) -> int:
        return self._wanted

    def resize(self, servers: int) -> None:
        if servers == self._wanted or self._closing:
            return
        self._wanted, self._asked = servers, True
        more = [_Server(index) for index in range(len(self._servers), servers)]
        self._servers += more
        self._watch.resize(len(self._servers))
        for server in more:
            self._start(server)
        self._pending.wait_for(servers)
        self._tell_if_ready()

    def perform(self, effect: ef.ForServers) -> None:
        match effect:
            case ef.RestartServer(index) if index < len(self._servers):
                _signal(self._servers[index], signal.SIGKILL)
            case ef.Assigned():
                self._assigned(effect)

    def _assigned(self, effect: ef.Assigned) -> None:
        self._have = effect.servers
        # Otherwise the core decided before it knew the present request, and the request stays valid.
        if not self._asked and self._wanted == effect.wanted:
            self._wanted = effect.servers
            self._pending.forget()
        needed = max(self._wanted, effect.servers)
        for server in self._servers[needed:]:
            server.leaving = True
            self._leaving.append(server)
            self._tasks.start(self._end(server), lambda error: None)
        del self._servers[needed:]
        self._watch.resize(needed)

    def _tell_if_ready(self) -> None:
        if self._asked and all(server.listened for server in self._servers[: self._wanted]):
            self._asked = False
            self._pending.forget()
            self._emit(ev.ServersReady(self._wanted, self._addresses()))

    def _too_late(self, seconds: float) -> None:
        silent = next(server for server in self._servers if not server.listened)
        self._give_up(f"parameter server {silent.index} does not listen after {seconds:.0f} s")

    def _give_up(self, why: str) -> None:
        """Report that added servers are given up, so that the rows stay where they are."""
        if self._asked:
            self._asked = False
            self._emit(ev.ServersGivenUp(self._wanted, self._have, why))

    def status(self) -> list[dict[str, Any]]:
        told = self._watch.status()
        for server, described_by_itself in zip(self._servers, told, strict=True):
            described_by_itself["handle"] = str(server.pid) if server.pid else ""
            described_by_itself["restarts"] = max(server.starts - 1, 0)
            if server.state != "running":
                described_by_itself["state"] = server.state
        return told

    async def close(self, ended: bool) -> None:
        """End all servers, by force if necessary; return when none is left."""
        self._closing = True
        self._pending.forget()
        await self._watch.close()
        for server in [*self._servers, *self._leaving]:
            _signal(server, signal.SIGTERM)
        await self._tasks.join(ENDING_SECONDS)
        for server in [*self._servers, *self._leaving]:
            _signal(server, signal.SIGKILL)
        await self._tasks.join(ENDING_SECONDS)
        await self._tasks.close()
        if ended:
            await asyncio.to_thread(shutil.rmtree, self._plan.folder, ignore_errors=True)

    async def _life(self, server: _Server) -> None:
        try:
            for before in [one for one in self._leaving if one.index == server.index]:
                await before.ended.wait()  # it uses the same folder and address file
            await self._live(server)
        finally:
            server.over.set()

    async def _end(self, server: _Server) -> None:
        """End a server without rows.

        Send SIGTERM, then SIGKILL after ENDING_SECONDS; remove its log and its address when it has ended.
        """
        try:
            _signal(server, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENDING_SECONDS):
                    await server.over.wait()
            _signal(server, signal.SIGKILL)
            await server.over.wait()
            await asyncio.to_thread(shutil.rmtree, self._plan.told_of(server.index), ignore_errors=True)
            self._plan.address_of(server.index).unlink(missing_ok=True)
        finally:
            self._leaving.remove(server)
            server.ended.set()

    async def _live(self, server: _Server) -> None:
        """Run the processes of a server, one after the other."""
        loop, pause = asyncio.get_running_loop(), 0.0
        while not (self._closing or server.leaving):
            began = loop.time()
            code, listened_at = await self._run(server)
            server.pid, server.process, server.state = 0, None, RESTARTING
            if self._closing or server.leaving:
                return
            self._watch.ended(server.index)
            if listened_at is None:
                server.in_vain += 1
            elif loop.time() - listened_at >= SETTLED_SECONDS:
                pause = 0.0
            why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if listened_at is None or code >= 0:  # it was not killed, so its log may have the reason
                why += self._log_tail(server)
            first = server.starts == 1 and code == REFUSED
            if listened_at is None and (first or server.in_vain >= MAX_IN_VAIN):
                if server.index < self._have:
                    self._emit(ev.ServerExited(server.index, why, fatal=True))
                    return
                self._give_up(f"parameter server {server.index} cannot be started: {why}")
            lived = loop.time() - began
            self._emit(ev.ServerExited(server.index, why, max(0.0, pause - lived)))
            await asyncio.sleep(max(0.0, pause - lived))
            pause = min(max(2 * pause, 1.0), MAX_PAUSE_SECONDS)

    async def _run(self, server: _Server) -> tuple[int, float | None]:
        """Run one process; return its exit code, and when it began to listen (None if it did not)."""
        loop, file = asyncio.get_running_loop(), self._plan.address_of(server.index)
        began = loop.time()
        file.unlink(missing_ok=True)
        # Keep the address, because the workers know it.
        keeps = server.address and (server.listened or not server.in_vain)
        listen = server.address if keeps else f"{self._plan.host}:0"
        with open(self._plan.log_of(server.index), "ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *self._plan.arguments(server.index, listen),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(self._environment),
                start_new_session=True,
            )
        server.process, server.pid, server.starts = process, process.pid, server.starts + 1
        if self._closing or server.leaving:
            _signal(server, signal.SIGKILL)
        ended = loop.create_task(process.wait())
        listened_at = None
        while not ended.done() and listened_at is None:
            with contextlib.suppress(OSError):
                if address := file.read_text(encoding="utf-8").strip():
                    listened_at = loop.time()
                    self._listens(server, address, listened_at - began)
            await asyncio.wait({ended}, timeout=LOOK_SECONDS)
        return await ended, listened_at

    def _listens(self, server: _Server, address: str, seconds: float) -> None:
        server.address, server.in_vain, server.state, server.listened = address, 0, "running", True
        self._watch.find(server.index, address)
        self._emit(ev.ServerListens(server.index, seconds, server.starts > 1))
        if all(each.listened for each in self._servers[: self._plan.servers]):
            self._known.set()
        self._tell_if_ready()

    def _log_tail(self, server: _Server) -> str:
        words = last_line(self._plan.log_of(server.index))
        return f": {words}" if words else ""

    def _failed(self, server: _Server, error: Exception) -> None:
        _signal(server, signal.SIGKILL)
        why = f"it cannot be started: {format_error(error)}"
        if server.index < self._have:
            self._emit(ev.ServerExited(server.index, why, fatal=True))
        else:
            self._give_up(f"parameter server {server.index}: {why}")


def _signal(server: _Server, number: signal.Signals) -> None:
    if server.process is not None and server.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            server.process.send_signal(number)
