# SPDX-License-Identifier: Apache-2.0
"""The parameter servers of a job with mode=auto, which has servers only if its model needs them.

Until the core has decided, there are no servers, and nothing waits for them.

Promise: once the core has decided for servers, it is notified when all of them listen, or why they cannot.
A job without servers costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from edl.contract import vital
from edl.formatting import plain
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.base import Emit, NoServers, ParameterServers


class DeferredServers:
    """Parameter servers that are made once the mode is decided.

    Args:
        emit: called with ServersReady and ServerExited.
        make: makes the servers of the decided job, which may be `NoServers`.
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

    def perform(self, effect: ef.ForServers) -> None:
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
