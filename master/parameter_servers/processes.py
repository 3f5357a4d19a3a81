"""Parameter servers as processes of this machine: those of `edl run` and `edl master`.

Each has a folder for its log, an address that it keeps, and one task that lives with it: it starts a process,
waits until that listens, then until it ends, and starts the next one, which reads the log and is where the
one before it was. One that dies again and again is started less and less often; one that refuses its
arguments, or never comes to listen, fails the job with its last words; if it was to be a further one, the
rows stay where they are.

Promise: no process outlives `close`, nor the master's own end, however that comes: its standard input is a
pipe that only the master holds, and it exits when that ends.
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
from edl.master.backends.base import Tasks, described, last_line
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.monitor import RESTARTING, Emit, Further, Watch

REFUSED = 2  # exit code: its arguments are invalid, or its address is taken
MOST_IN_VAIN = 5  # starts in a row that come to nothing
SETTLED_SECONDS = 3.0  # one that has listened for so long has begun well
MOST_PAUSE_SECONDS = 30.0
LOOK_SECONDS = 0.05  # for the address of one that starts
ENDING_SECONDS = 3.0  # to end by itself


@dataclass(frozen=True)
class Plan:
    """What the servers of a job are to be.

    Args:
        folder: for their logs and addresses.
        logs: for what they print.
        host: on which they listen.
        memory_limit: bytes of each; 0: there is none.
        checkpoints: directory or address; empty: none are written.
        logged: they write logs.
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
        """Where it writes down what it is told."""
        return self.folder / f"log-{index}"

    def address_of(self, index: int) -> Path:
        return self.folder / f"address-{index}"

    def arguments(self, index: int, listen: str) -> list[str]:
        """Of the process."""
        return [
            "--index", str(index), "--listen", listen,
            "--run-id", self.run_id,
            "--token-file", str(self.folder / TOKEN), "--log-dir", str(self.told_of(index)),
            "--address-file", str(self.address_of(index)), "--attached",
            *([] if self.logged else ["--no-log"]),
            *(["--checkpoint-dir", self.checkpoints] if self.checkpoints else []),
            *(["--memory-limit", str(self.memory_limit)] if self.memory_limit else []),
        ]  # fmt: skip


TOKEN = "token"  # the file, in the servers' folder


@dataclass
class _Server:
    index: int
    address: str = ""  # where it listens, or listened last
    pid: int = 0
    starts: int = 0
    listened: bool = False  # ever
    in_vain: int = 0  # starts in a row that came to nothing
    state: str = "starting"
    leaving: bool = False  # it is not needed any more
    over: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # it runs no process again
    ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # and none of its files is left
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)


class ServerProcesses:
    """The servers of one job.

    Args:
        emit: takes ServerListens, ServerExited, ServersReady, ServersGivenUp, ServerAnswers, ServerAway and
            ProbeUnanswered.
        token: of the job.
        command: the server's program; by default `ps` of this installation.
        environment: of the processes.
        patience: seconds for further servers to come to listen.
    """

    def __init__(
        self,
        emit: Emit,
        plan: Plan,
        token: str,
        command: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        patience: float = math.inf,
    ):
        self._emit, self._plan, self._token = emit, plan, token
        self._command, self._environment = command or module_command("edl.ps"), environment
        self._servers = [_Server(index) for index in range(plan.servers)]
        self._watch = Watch(emit, lambda: token, plan.servers, restarts=True)
        self._tasks = Tasks()
        self._known = asyncio.Event()  # all addresses are
        self._wanted = self._have = plan.servers
        self._further = Further(patience, self._too_late)
        self._asked = False  # for that number, and nobody has been told that so many listen
        self._leaving: list[_Server] = []
        self._closing = False

    async def start(self) -> None:
        """Start them all. If an earlier master of this job had servers, they go on where those were."""
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
        return await self.addresses()  # they are known when they do

    def _addresses(self) -> tuple[str, ...]:
        """Of those that have listened, up to the first one that has not."""
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
        self._further.wait_for(servers)
        self._tell_if_ready()

    def perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.RestartServer(index) if index < len(self._servers):
                _signal(self._servers[index], signal.SIGKILL)
            case ef.Arranged():
                self._arranged(effect)

    def _arranged(self, effect: ef.Arranged) -> None:
        self._have = effect.servers
        # Otherwise the core decided before it learned of the number that is wanted now: that one stands.
        if not self._asked and self._wanted == effect.wanted:
            self._wanted = effect.servers
            self._further.forget()
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
            self._further.forget()
            self._emit(ev.ServersReady(self._wanted, self._addresses()))

    def _too_late(self, seconds: float) -> None:
        silent = next(server for server in self._servers if not server.listened)
        self._give_up(f"parameter server {silent.index} does not listen after {seconds:.0f} s")

    def _give_up(self, why: str) -> None:
        """The rows stay where they are."""
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
        """End them, by force if need be. Returns when none is left."""
        self._closing = True
        self._further.forget()
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
                await before.ended.wait()  # it has the place of this one
            await self._live(server)
        finally:
            server.over.set()

    async def _end(self, server: _Server) -> None:
        """End a server that has no rows any more. Send SIGTERM, then SIGKILL after ENDING_SECONDS; remove its
        log and its address when it has ended."""
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
        """One process after the other."""
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
            if listened_at is None or code >= 0:  # nobody has killed it: it says why
                why += self._last_words(server)
            first = server.starts == 1 and code == REFUSED
            if listened_at is None and (first or server.in_vain >= MOST_IN_VAIN):
                if server.index < self._have:
                    self._emit(ev.ServerExited(server.index, why, fatal=True))
                    return
                self._give_up(f"parameter server {server.index} cannot be started: {why}")
            lived = loop.time() - began
            self._emit(ev.ServerExited(server.index, why, max(0.0, pause - lived)))
            await asyncio.sleep(max(0.0, pause - lived))
            pause = min(max(2 * pause, 1.0), MOST_PAUSE_SECONDS)

    async def _run(self, server: _Server) -> tuple[int, float | None]:
        """One process, from its start to its end: its exit code, and when it began to listen, if it did."""
        loop, file = asyncio.get_running_loop(), self._plan.address_of(server.index)
        began = loop.time()
        file.unlink(missing_ok=True)
        # It keeps the address that the workers know.
        keeps = server.address and (server.listened or not server.in_vain)
        listen = server.address if keeps else f"{self._plan.host}:0"
        with open(self._plan.log_of(server.index), "ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command, *self._plan.arguments(server.index, listen),
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
                env=dict(self._environment), start_new_session=True,
            )  # fmt: skip
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

    def _last_words(self, server: _Server) -> str:
        words = last_line(self._plan.log_of(server.index))
        return f": {words}" if words else ""

    def _failed(self, server: _Server, error: Exception) -> None:
        _signal(server, signal.SIGKILL)
        why = f"it cannot be started: {described(error)}"
        if server.index < self._have:
            self._emit(ev.ServerExited(server.index, why, fatal=True))
        else:
            self._give_up(f"parameter server {server.index}: {why}")


def _signal(server: _Server, number: signal.Signals) -> None:
    if server.process is not None and server.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            server.process.send_signal(number)
