# SPDX-License-Identifier: Apache-2.0
"""One fork server for all jobs of a test session, because its imports take six seconds of a core.

It is edl's own program (trainer/forkserver.py). Each order brings the environment of its worker, and a number
that no other order has, so that jobs of different tests do not meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from edl.contract.ids import WorkerId
from edl.contract.own_modules import module_command
from edl.contract.workers import worker_environment
from edl.master.backends.base import Emit
from edl.master.backends.launchers import Launched, LauncherLost

ROOT = Path(__file__).parents[3]


Order = tuple[asyncio.AbstractEventLoop, asyncio.Future[int], asyncio.Future[int]]
"""The loop that waits for one worker, its process id, and its exit code."""


class SharedForkServer:
    """The process, started with the first worker, and again if it has exited."""

    def __init__(self, log: Path):
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: subprocess.Popen[bytes] | None = None  # the process that has started a worker
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._orders: dict[int, Order] = {}  # by their number, until the worker has ended

    async def fork(self, arguments: list[str], environment: Mapping[str, str], log: Path) -> Launched:
        """Start a worker.

        Raises:
            LauncherLost: the fork server exited meanwhile.
        """
        loop = asyncio.get_running_loop()
        number, started, exited = next(self._numbers), loop.create_future(), loop.create_future()
        order = {"worker": number, "arguments": arguments, "log": str(log), "environment": dict(environment)}
        with self._lock:
            self._orders[number] = loop, started, exited
        stdin = self._running().stdin
        assert stdin is not None
        stdin.write((json.dumps(order) + "\n").encode())
        stdin.flush()
        return Launched(await started, exited)

    async def imports(self) -> None:
        """Wait until the process has imported what workers need, so that no job's time limit counts that."""
        process = self._running()
        if self._ready is not process:
            first = await self.fork(["--help"], os.environ, self._log.with_name("help.log"))
            await first.exit_code
            self._ready = process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    module_command("edl.trainer.forkserver"),
                    start_new_session=True,
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=os.environ | worker_environment(os.environ),
                )
            threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        return self._process

    def _listen(self, said: IO[bytes]) -> None:
        with said:
            for line in said:
                message = json.loads(line)
                number = message["worker"]
                with self._lock:
                    loop, started, exited = self._orders[number]
                    if "code" in message:
                        del self._orders[number]
                future, value = (started, message["pid"]) if "pid" in message else (exited, message["code"])
                _call(loop, lambda f=future, v=value: f.done() or f.set_result(v))
        with self._lock:
            lost, self._orders = self._orders, {}
        for loop, started, exited in lost.values():
            for future in (started, exited):
                error = LauncherLost(f"the shared fork server exited; its log is {self._log}")
                _call(loop, lambda f=future, e=error: f.done() or f.set_exception(e))


# Not Callable[[], ...]: a lambda in a loop binds its variables by default arguments.
def _call(loop: asyncio.AbstractEventLoop, act: Callable[..., object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: its test is over, and waits for nothing
        loop.call_soon_threadsafe(act)


class Launcher:
    """A job's part of the shared fork server (master/backends/launchers.py: Launcher).

    Args:
        arguments: of every worker; `--worker ID` is added.
        environment: of all of them.
    """

    def __init__(self, server: SharedForkServer, arguments: Sequence[str], environment: Mapping[str, str]):
        self._server, self._arguments, self._environment = server, arguments, environment

    async def start(self, logs: Path, emit: Emit) -> None:
        pass

    async def launch(self, worker: WorkerId, log: Path, more: Sequence[str] = ()) -> Launched:
        arguments = [*self._arguments, "--worker", str(worker), *more]
        return await self._server.fork(arguments, self._environment, log)

    async def close(self) -> None:
        pass
