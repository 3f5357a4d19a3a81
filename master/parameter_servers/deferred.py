"""The parameter servers of a job of which only its workers can say whether it needs any (mode=auto).

Until the core has decided, there are none, and nobody waits for any. Then they are those of a job that had
them from its beginning.

Promise: once the core has said that there are servers, it is told when all of them listen, or why they never
will. A job without servers pays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from edl.contract import vital
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.monitor import Emit, NoServers, ParameterServers
from edl.text import plain


class Undecided:
    """Those of one job.

    Args:
        emit: takes ServersReady and ServerExited.
        make: the servers of the job as it has been decided, which may be none.
    """

    def __init__(self, emit: Emit, make: Callable[[], ParameterServers]):
        self._emit, self._make = emit, make
        self._servers: ParameterServers = NoServers()
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        pass

    async def addresses(self) -> tuple[str, ...]:
        return await self._servers.addresses()

    async def listening(self) -> tuple[str, ...]:
        return await self._servers.listening()

    def status(self) -> list[dict[str, Any]]:
        return self._servers.status()

    @property
    def wanted(self) -> int:
        return self._servers.wanted

    def resize(self, servers: int) -> None:
        self._servers.resize(servers)

    def perform(self, effect: ef.Effect) -> None:
        if isinstance(effect, ef.ModeDecided):
            self._servers = self._make()
            self._starting = vital.task(self._start(), "start of servers")
        self._servers.perform(effect)

    async def close(self, ended: bool) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._servers.close(ended)

    async def _start(self) -> None:
        try:
            await self._servers.start()
        except OSError as error:
            why = f"it cannot be started: {plain(str(error))}"
            self._emit(ev.ServerExited(0, why, fatal=True))
            return
        if addresses := await self._servers.listening():
            self._emit(ev.ServersReady(min(self._servers.wanted, len(addresses)), addresses))
