# SPDX-License-Identifier: Apache-2.0
"""The backends that are held to the contract, each with the world in which its workers live."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.master.backends.base import Backend
from edl.master.backends.external import External
from edl.master.backends.gpus import Gpus
from edl.master.backends.launchers import ForkServer, Spawn
from edl.master.backends.processes import Processes
from edl.master.core import effects as ef
from edl.master.core import events as ev
from tests.support.fakes.backend import FakeBackend
from tests.support.fakes.kubernetes_api import serving
from tests.support.kubernetes.small_server import SECOND, driving, install

SECONDS = 20.0

# A worker that announces itself, and ends as a file orders, or at SIGTERM.
WORKER = """
import os, pathlib, signal, subprocess, sys, time
from edl.exit_announcements import announce, announce_as_told
announce_as_told()
orders, worker = pathlib.Path(sys.argv[1]), sys.argv[sys.argv.index("--worker") + 1]
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True:
    order = orders / worker
    if order.exists():
        what = order.read_text()
        if what.startswith("-"):
            os.kill(os.getpid(), int(what[1:]))
        if what.startswith("daemon"):
            left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            (orders / "left").write_text(str(left.pid))
            os._exit(1)
        if what.startswith("user"):
            os._exit(int(what[4:]))
        announce(int(what))
        os._exit(int(what))
    time.sleep(0.01)
"""

# A fork server with trainer/forkserver.py's protocol, for the worker above.
FORK_SERVER = """
import json, os, signal, sys, threading
def reap(pid, worker):
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(1, (json.dumps({"worker": worker, "code": code}) + "\\n").encode())
for line in sys.stdin:
    order = json.loads(line)
    program = [sys.executable, "-c", sys.argv[1], *order["arguments"]]
    to_log = [(os.POSIX_SPAWN_OPEN, 1, order["log"], os.O_WRONLY | os.O_CREAT, 0o600)]
    pid = os.posix_spawn(sys.executable, program, os.environ, file_actions=to_log)
    os.write(1, (json.dumps({"worker": order["worker"], "pid": pid}) + "\\n").encode())
    threading.Thread(target=reap, args=(pid, order["worker"]), daemon=True).start()
"""


class Log:
    """The events that a backend has emitted."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self._news = asyncio.Event()

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)
        self._news.set()

    def of(self, kind: type, worker: int) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and getattr(e, "worker", None) == worker]

    async def until(self, happens: Callable[[], Any]) -> Any:
        """Wait for and return the first true value of `happens`, called after every event."""
        async with asyncio.timeout(SECONDS):
            while not (value := happens()):
                self._news.clear()
                await self._news.wait()
            return value

    async def seen(self, worker: int) -> ev.Seen:
        (seen,) = await self.until(lambda: self.of(ev.Seen, worker))
        return seen

    async def gone(self, worker: int) -> ev.Gone:
        return (await self.until(lambda: self.of(ev.Gone, worker)))[0]


class World(Protocol):
    """A backend with its environment, and a test's actions on that environment."""

    log: Log

    @property
    def backend(self) -> Backend: ...

    def end(self, worker: int, code: int) -> None:
        """Let the worker's process end by itself; a negative code is a signal."""

    def break_starts(self) -> None:
        """Make all further starts of workers fail."""


class InProcesses:
    def __init__(self, folder: Path, fork: bool, gpus: Gpus | None = None):
        self.log, self._orders = Log(), folder / "orders"
        self._orders.mkdir()
        self.command = [sys.executable, "-c", WORKER, str(self._orders)]
        self.logs = folder / "logs"
        spawn = Spawn(self.command, {})
        server = ForkServer([sys.executable, "-c", FORK_SERVER, WORKER], [str(self._orders)], {})
        self.launcher = server if fork else spawn
        self.backend = Processes(self.log.emit, self.launcher, self.logs, gpus)

    def end(self, worker: int, code: int) -> None:
        self.order(worker, str(code))

    def order(self, worker: int, what: str) -> None:
        order = self._orders / f"{worker}.part"
        order.write_text(what)
        order.rename(self._orders / str(worker))

    def break_starts(self) -> None:
        self.launcher._command = ["/no/such/program"]
        if isinstance(self.launcher, ForkServer) and self.launcher._process is not None:
            self.launcher._process.kill()


class AtKubernetes:
    def __init__(self, server: Any, driven: Any):
        self.log, self._server, self.backend = Log(), server, driven.backend
        driven.heard.append(self.log.emit)

    def end(self, worker: int, code: int) -> None:
        self._server.end_pod(f"edl-worker-{worker}", code if code >= 0 else 128 - code)

    def break_starts(self) -> None:
        self._server.refuse("create", "pods", 403, "Forbidden", "no right to create pods", times=1000)


class InFake:
    def __init__(self) -> None:
        self.log = Log()
        later = asyncio.get_running_loop().call_later
        self.fake = self.backend = FakeBackend(self.log.emit, later, end_seconds=0.01)

    def end(self, worker: int, code: int) -> None:
        w = WorkerId(worker)
        gone = ev.Gone(w, code=code, free=code == WorkerExit.PEER_BROKEN)
        self.fake.exit(w, ev.Gone(w, signal="SIGSEGV") if code < 0 else gone)

    def break_starts(self) -> None:
        self.fake.hold("there is no room")


class ByOthers:
    def __init__(self) -> None:
        self.log = Log()
        self.backend = External(self.log.emit, "127.0.0.1:1")


@asynccontextmanager
async def a_world(kind: str, folder: Path) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as stack:
        if kind == "kubernetes":
            server = await stack.enter_async_context(serving(SECOND))
            install(server)
            yield AtKubernetes(server, await stack.enter_async_context(driving(server)))
            return
        worlds: dict[str, Callable[[], Any]] = {
            "spawn": lambda: InProcesses(folder, fork=False),
            "fork": lambda: InProcesses(folder, fork=True),
            "fake": InFake,
            "external": ByOthers,
        }
        world = worlds[kind]()
        await world.backend.start()
        try:
            yield world
        finally:
            await world.backend.close()


WATCHING = ("spawn", "fork", "kubernetes", "fake")  # backends that see processes


def create(world: World, *workers: int) -> None:
    for worker in workers:
        world.backend.perform(ef.Create(WorkerId(worker)))


def delete(world: World, worker: int, grace: float = 1.0) -> None:
    world.backend.perform(ef.Delete(WorkerId(worker), grace))
