# SPDX-License-Identifier: Apache-2.0
"""The master's view of parameter servers: it polls the description that each server gives of itself.

Promise: a server that does not answer delays nothing else. The core is notified after a second
(`ServerAway`), and again when the server answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from edl.contract import vital
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.master.core import events as ev
from edl.master.core.ps import HANGS
from edl.master.parameter_servers.base import ANSWER_SECONDS, LOOK_SECONDS, Emit
from edl.net import tls

AGAIN_SECONDS = 0.25  # between two calls of a server that did not answer
UNANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)  # not by the server
AWAY_SECONDS = 1.0  # without an answer, after which the core is notified
STARTING, RUNNING, SILENT = "starting", "running", "silent"  # a server's states in the status
RESTARTING = "restarting"


@dataclass
class _Server:
    """The state of one server."""

    index: int
    address: str = ""
    told: pb.Description | None = None  # its last answer
    told_at: float = 0.0
    pulled: float = 0.0  # rows a second, between its last two answers
    busy: float = 0.0  # fraction of that time in which it worked
    restarts: int = 0  # restarts that its counters show
    silent_since: float | None = None
    asked_at: float | None = None  # time of a call without an answer yet
    has_ended: bool = False  # its process has ended, and the next one has not answered yet
    unanswered: int = 0  # number of calls in a row that its process has not answered
    lagged: int = 0  # the newest generation when it was last found in an earlier one
    told_away: str = ""  # its state as reported to the core while it does not answer
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        if self.told is None:
            return STARTING
        return RUNNING if self.silent_since is None else SILENT

    def note(self, told: pb.Description, now: float) -> bool:
        """Record an answer. True if the server may have been away before it."""
        before, seconds = self.told, now - self.told_at
        back = self.silent_since is not None
        self.told, self.told_at, self.silent_since, self.has_ended = told, now, None, False
        if before is None or seconds <= 0:
            return False
        if told.busy_seconds < before.busy_seconds:  # it never falls within one process
            self.restarts += 1
            self.pulled = self.busy = 0.0
            back = True
        else:
            self.pulled = (told.rows_pulled - before.rows_pulled) / seconds
            self.busy = min((told.busy_seconds - before.busy_seconds) / seconds, 1.0)
        return back

    def away_for(self, now: float) -> float:
        """Return the seconds since the server stopped answering; 0 if it answers."""
        since = self.silent_since if self.silent_since is not None else self.asked_at
        return 0.0 if since is None else now - since

    @property
    def does(self) -> str:
        """The server's state while it does not answer."""
        return RESTARTING if self.has_ended else STARTING if self.told is None else HANGS


class Watch:
    """Polls the description of each server.

    Args:
        emit: called with ServerAway, ServerRecovered and ProbeUnanswered.
        token: returns the present token of the job.
        servers: the number of servers.
        looked: called after each answer.
        restarts: whether the core restarts processes that hang. On Kubernetes, the kubelet restarts them by
            the chart's liveness probe, which keeps a log in the pod.
    """

    def __init__(
        self,
        emit: Emit,
        token: Callable[[], str],
        servers: int,
        looked: Callable[[], None] = lambda: None,
        restarts: bool = False,
    ):
        self._emit, self._token, self._looked, self._restarts = emit, token, looked, restarts
        self._servers = [_Server(index) for index in range(servers)]
        self._telling: asyncio.Task[None] | None = None

    def resize(self, servers: int) -> None:
        """Change the number of watched servers."""
        for gone in self._servers[servers:]:
            if gone.task is not None:
                gone.task.cancel()
        del self._servers[servers:]
        self._servers += [_Server(index) for index in range(len(self._servers), servers)]

    @property
    def assigned(self) -> int:
        """The number of servers that hold the rows, from the first server of the newest generation.

        Other servers may be away or out, and may have missed the last move. 0 if no server has reported it.
        """
        told = [server.told for server in self._servers if server.told is not None]
        if told and (run := told[0].run_id):
            told = [one for one in told if one.run_id == run]
        newest = max(told, key=lambda one: one.position.generation, default=None)
        return newest.assignment.servers if newest is not None else 0

    def answers(self, servers: int) -> bool:
        """True if the first `servers` servers answer."""
        return all(server.state == RUNNING for server in self._servers[:servers])

    def find(self, index: int, address: str) -> None:
        """Record the address at which a server listens, and start to poll it."""
        server = self._servers[index]
        server.has_ended, server.told_away, server.unanswered = False, "", 0
        if server.silent_since is not None:
            server.silent_since = asyncio.get_running_loop().time()
        if server.address == address:
            return
        if server.task is not None:
            server.task.cancel()
        server.address = address
        server.task = vital.task(self._ask(server), f"ask server {index}")
        if self._telling is None:
            self._telling = vital.task(self._tell(), "silent servers")

    def ended(self, index: int) -> None:
        """Record that a server's process has ended; it will be replaced."""
        server = self._servers[index]
        server.has_ended, server.unanswered = True, 0
        if server.silent_since is None:
            server.silent_since = asyncio.get_running_loop().time()

    def status(self) -> list[dict[str, Any]]:
        """Describe each server, by index, ready for JSON."""
        pulled = sum(server.pulled for server in self._servers)
        return [
            {
                "index": server.index,
                "address": server.address,
                "state": server.state,
                "restarts": server.restarts,
                "share": server.pulled / pulled if pulled > 0 else None,
                "pulled_per_second": server.pulled,
                "busy": server.busy,
                **_in_numbers(server.told or pb.Description()),
            }
            for server in self._servers
        ]

    async def close(self) -> None:
        """Stop polling."""
        tasks = [task for task in (self._telling, *(s.task for s in self._servers)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, server: _Server) -> None:
        """Poll a server, for ever."""
        loop = asyncio.get_running_loop()
        async with tls.aio_channel(server.address) as channel:
            stub = rpc.ParameterServerStub(channel)
            while True:
                server.asked_at = loop.time()
                if (told := await self._described(server, stub)) is not None:
                    self._answered(server, told, loop.time())
                else:
                    self._unanswered(server, server.asked_at)
                await asyncio.sleep(LOOK_SECONDS if server.silent_since is None else AGAIN_SECONDS)

    async def _described(self, server: _Server, stub: rpc.ParameterServerStub) -> pb.Description | None:
        """Return a server's description, once it has completed earlier calls.

        None if it does not answer, or has made no progress with earlier calls for ANSWER_SECONDS.
        """
        loop = asyncio.get_running_loop()
        metadata = (("authorization", f"Bearer {self._token()}"),)
        describing: Any = stub.Describe(pb.DescribeRequest(), metadata=metadata)
        ended = asyncio.Event()
        describing.add_done_callback(lambda _: ended.set())
        done, since = -1, loop.time()
        try:
            while loop.time() < since + ANSWER_SECONDS:
                server.asked_at = loop.time()  # its process is presumably alive
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_SECONDS):
                        await ended.wait()
                    return await describing  # type: ignore[no-any-return]
                probed = await stub.Probe(pb.ProbeRequest(), metadata=metadata, timeout=ANSWER_SECONDS)
                server.unanswered = 0
                if not probed.waiting or probed.done != done:
                    done, since = probed.done, loop.time()
            return None
        except grpc.aio.AioRpcError as error:
            if error.code() in UNANSWERED:
                self._left_unanswered(server)
            return None
        finally:
            describing.cancel()

    def _left_unanswered(self, server: _Server) -> None:
        """Report a call without an answer, although the process of the server runs and listens."""
        if self._restarts and not server.has_ended:
            server.unanswered += 1
            self._emit(ev.ProbeUnanswered(server.index, server.unanswered))

    def _answered(self, server: _Server, told: pb.Description, now: float) -> None:
        server.asked_at, server.unanswered = None, 0
        back = server.note(told, now)
        if self._lags(server, told) or back or server.told_away:
            server.told_away = ""
            self._emit(ev.ServerRecovered(server.index))
        self._looked()

    def _unanswered(self, server: _Server, asked: float) -> None:
        if server.silent_since is None:
            server.silent_since = asked
        server.pulled = server.busy = 0.0

    def _lags(self, server: _Server, told: pb.Description) -> bool:
        """True, once for each ring, if a server answers although the last ring continued without it.

        It may have hung for a moment that this master has not noticed.
        """
        newest = max(s.told.position.generation for s in self._servers if s.told is not None)
        if told.position.generation >= newest or server.lagged == newest:
            return False
        server.lagged = newest
        return True

    async def _tell(self) -> None:
        """Report servers that do not answer to the core, for ever."""
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            self._tell_of_silent(asyncio.get_running_loop().time())

    def _tell_of_silent(self, now: float) -> None:
        for server in self._servers:
            seconds = server.away_for(now)
            if seconds >= AWAY_SECONDS and server.told_away != server.does:
                server.told_away = server.does
                self._emit(ev.ServerAway(server.index, seconds, server.does))


def _in_numbers(told: pb.Description) -> dict[str, Any]:
    return {
        "step": told.position.step,
        "empty": told.position.empty,
        "tables": {table.name: table.rows for table in told.tables},
        "rows": sum(table.rows for table in told.tables),
        "memory": told.memory,
        "memory_limit": told.memory_limit,
        "rows_pulled": told.rows_pulled,
        "rows_staged": told.rows_staged,
        "busy_seconds": told.busy_seconds,
        "log_bytes": told.log_bytes,
    }
