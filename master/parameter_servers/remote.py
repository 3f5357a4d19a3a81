# SPDX-License-Identifier: Apache-2.0
"""Servers that are started elsewhere, and when their requested number is ready.

Promise: rows move to added servers once all of these listen. An added server that does not listen in time is
given up, and the rows stay where they are. No server that may hold rows is ended.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.parameter_servers.base import Emit
from edl.master.parameter_servers.monitor import Watch


class RemoteServers:
    """Servers that are started elsewhere, at addresses that are known in advance.

    Args:
        emit: called with ServerAway, ServerRecovered, ServersReady and ServersGivenUp.
        token: returns the present token of the job.
        address: returns the address of the server with this index.
        servers: the requested number of servers.
        scale: scales to a number of running servers; servers beyond it hold no rows.
        listen_timeout: seconds for added servers to listen.
        running: returns the number of running servers; None if unknown.
    """

    def __init__(
        self,
        emit: Emit,
        token: Callable[[], str],
        address: Callable[[int], str],
        servers: int,
        scale: Callable[[int], None] = lambda servers: None,
        listen_timeout: float = math.inf,
        running: Callable[[], int | None] = lambda: 0,
    ):
        self._running = running
        self._begins = True  # a ring of an earlier master may be moving rows to running servers
        self._emit, self._address, self._wanted, self._scale = emit, address, servers, scale
        self._pending = PendingServers(listen_timeout, self._give_up)
        self._scaled = 0
        self._watch = Watch(emit, token, servers, self._looked)
        self._listening = asyncio.Event()  # set once all requested servers have listened
        self._told = 0  # the number that was reported as ready or given up
        self._asked = 0  # the last number that was reported to the core as ready; 0: none
        self._resized = False  # by a user
        self._before = 0  # number that may hold rows without the user's requests; 0: unknown
        self._assigned = 0  # number of servers with rows, as the ring reported to this master; 0: not yet
        # Servers that may hold rows or will get some: all run until the ring reports which hold the rows.
        self._most = servers
        self._started = False

    async def start(self) -> None:
        self._started = True
        self._find()

    async def addresses(self) -> tuple[str, ...]:
        # Include servers that were requested from an earlier master: they may hold rows, and the next master
        # may have no reason to send their addresses to this worker.
        self._most = max(self._most, self._have, self._running() or 0)
        return tuple(self._address(index) for index in range(self._most))

    async def listening(self) -> tuple[str, ...]:
        await self._listening.wait()
        return await self.addresses()

    def status(self) -> list[dict[str, Any]]:
        return self._watch.status()

    @property
    def wanted(self) -> int:
        return self._wanted

    def resize(self, servers: int) -> None:
        if servers != self._wanted:
            if not self._resized and (running := self._running()) is not None:
                self._before = max(self._wanted, running)
            self._wanted, self._told, self._resized = servers, 0, True
            self._most = max(self._most, servers)
            self._find()
            self._run(self._most)
            self._looked()

    def perform(self, effect: ef.ForServers) -> None:
        if isinstance(effect, ef.Assigned):
            self._assigned = effect.servers
            # Otherwise the core decided before it knew the present request, and the request stays valid.
            answers = self._told == self._wanted == effect.wanted
            if answers:
                self._wanted = self._told = effect.servers
                self._pending.forget()
            if answers or self._asked == effect.wanted:
                self._asked = 0
            self._most = max(self._wanted, effect.servers)
            self._find()
            self._run(self._most)

    def _run(self, servers: int) -> None:
        if servers != self._scaled:
            self._scaled = servers
            self._scale(servers)

    @property
    def _have(self) -> int:
        """The number of servers that hold the rows; 0 if unknown.

        The ring's report counts first: servers answer up to a second late, and a server that has lost its log
        does not know the number.
        """
        return self._assigned or self._watch.assigned

    def _find(self) -> None:
        self._watch.resize(self._most)
        for index in range(self._most) if self._started else ():
            self._watch.find(index, self._address(index))

    def _looked(self) -> None:
        """Check, after an answer of a server, whether the requested servers are ready.

        Rows may also have been moving under an earlier master.
        """
        if self._watch.answers(self._wanted):
            self._listening.set()
        if not (self._have or self._resized) or self._told == self._wanted:
            return
        there = self._running() if self._begins else 0
        if self._have == self._wanted and not self._asked and None is there:
            return
        if self._have == self._wanted and not self._asked and (there or 0) <= self._wanted:
            self._begins = False
            self._most = self._wanted
            self._pending.forget()
            self._run(self._wanted)
            return  # until a server of a newer generation reports a different number
        self._most = max(self._most, self._have, there or 0)
        self._find()
        self._run(self._most)
        self._pending.wait_for(self._wanted)
        if self._watch.answers(self._wanted):
            self._begins = False
            self._told = self._asked = self._wanted
            self._pending.forget()
            addresses = tuple(self._address(index) for index in range(self._most))
            self._emit(ev.ServersReady(self._wanted, addresses))

    def _give_up(self, seconds: float) -> None:
        silent = next((i for i in range(self._wanted) if not self._watch.answers(i + 1)), self._wanted - 1)
        why = f"parameter server {silent} does not answer at {self._address(silent)} after {seconds:.0f} s"
        self._told = self._wanted  # so that it is not awaited, unless it is requested again
        self._emit(ev.ServersGivenUp(self._wanted, self._have or self._before, why))

    async def close(self, ended: bool) -> None:
        self._pending.forget()
        await self._watch.close()


class PendingServers:
    """The timeout of requested servers that do not all listen yet.

    Args:
        listen_timeout: seconds for them to listen.
        give_up: called with these seconds after the timeout.
    """

    def __init__(self, listen_timeout: float, give_up: Callable[[float], None]):
        self._listen_timeout, self._give_up = listen_timeout, give_up
        self._servers = 0
        self._timer: asyncio.TimerHandle | None = None

    def wait_for(self, servers: int) -> None:
        """Wait for this number of servers. The timeout starts at the first call with this number."""
        if servers == self._servers:
            return
        self.forget()
        self._servers = servers
        if self._listen_timeout < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._listen_timeout, self._give_up, self._listen_timeout)

    def forget(self) -> None:
        """Stop waiting: the servers listen, or are not needed."""
        self._servers = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
