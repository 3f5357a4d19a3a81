"""Workers as processes of this machine: `edl run`'s backend.

    spawn   a fresh Python for each worker; the plain way
    fork    forked from a forkserver that has imported TensorFlow and run nothing; ready sooner

A worker runs in a session of its own, so that Ctrl-C at the terminal reaches only us, and
writes to a log file of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from edl.contract.ids import WorkerId
from master.core import events as ev


class Processes:
    """The processes of one job.

    Args:
        emit: takes Seen and Gone.
        address: of the master, for the workers.
        logs: directory of the workers' logs.
        secrets: environment of the workers beside this process's own.
        fork: start workers from a forkserver.
    """

    def __init__(
        self,
        emit: Callable[[ev.Event], None],
        address: str,
        logs: Path,
        secrets: dict[str, str],
        fork: bool,
    ):
        self._emit, self._address, self._logs, self._fork = emit, address, logs, fork
        self._environment = {**os.environ, **secrets, "PYTHONUNBUFFERED": "1"}
        self._environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        self._pids: dict[WorkerId, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._forkserver: asyncio.subprocess.Process | None = None
        self._ended: dict[WorkerId, asyncio.Event] = {}

    async def start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        if self._fork:
            with open(self._logs / "forkserver.log", "wb") as log:
                self._forkserver = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "trainer.forkserver",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                    env=self._environment, start_new_session=True,
                )  # fmt: skip
            self._keep(self._hear_forkserver())

    def perform(self, effect: ev.Effect) -> None:
        """Start or end a worker."""
        match effect:
            case ev.Create(worker):
                self._ended[worker] = asyncio.Event()
                self._keep(self._create(worker))
            case ev.Delete(worker, grace_period_seconds):
                self._keep(self._delete(worker, grace_period_seconds))

    async def close(self) -> None:
        """End whatever is left, by force. Returns when nothing is."""
        for worker in list(self._ended):
            self._signal(worker, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.gather(*(ended.wait() for ended in self._ended.values()))
        if self._forkserver is not None:
            with contextlib.suppress(ProcessLookupError):
                self._forkserver.kill()
            await self._forkserver.wait()
        for task in self._tasks:
            task.cancel()

    # --- both ways

    def _arguments(self, worker: WorkerId) -> list[str]:
        return ["--master", self._address, "--worker", str(worker)]

    def _log(self, worker: WorkerId) -> Path:
        return self._logs / f"worker-{worker}.log"

    async def _create(self, worker: WorkerId) -> None:
        if self._forkserver is not None:
            assert self._forkserver.stdin is not None
            order = {"worker": worker, "arguments": self._arguments(worker), "log": str(self._log(worker))}
            self._forkserver.stdin.write((json.dumps(order) + "\n").encode())
            return
        with open(self._log(worker), "wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "trainer", *self._arguments(worker),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        self._seen(worker, process.pid)
        self._gone(worker, await process.wait())

    async def _hear_forkserver(self) -> None:
        assert self._forkserver is not None and self._forkserver.stdout is not None
        async for line in self._forkserver.stdout:
            said = json.loads(line)
            if "pid" in said:
                self._seen(WorkerId(said["worker"]), said["pid"])
            else:
                self._gone(WorkerId(said["worker"]), said["code"])
        for worker in list(self._pids):  # the forkserver died: so has whoever could tell us more
            self._signal(worker, signal.SIGKILL)
            self._gone(worker, -signal.SIGKILL)

    def _seen(self, worker: WorkerId, pid: int) -> None:
        self._pids[worker] = pid
        self._emit(ev.Seen(worker, str(pid)))

    def _gone(self, worker: WorkerId, code: int) -> None:
        """`code` as in subprocess: negative is a signal."""
        self._pids.pop(worker, None)
        self._ended[worker].set()
        if code < 0:
            self._emit(ev.Gone(worker, signal=signal.Signals(-code).name))
        else:
            self._emit(ev.Gone(worker, code=code, free=code == PEER_BROKEN))

    async def _delete(self, worker: WorkerId, grace_period_seconds: float) -> None:
        if grace_period_seconds > 0:
            self._signal(worker, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_period_seconds):
                    await self._ended[worker].wait()
        self._signal(worker, signal.SIGKILL)

    def _signal(self, worker: WorkerId, number: signal.Signals) -> None:
        if pid := self._pids.get(worker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


PEER_BROKEN = 75  # the exit code of a worker that could not get out of a ring that its peers broke
