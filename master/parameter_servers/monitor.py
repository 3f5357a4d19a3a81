"""The master's view of a job's parameter servers: their addresses and their descriptions of themselves.

`edl run` starts them as processes (`processes`). A release of the chart has a StatefulSet, whose pods have
names that are known in advance (`RemoteServers`).

Promise: a server that does not answer delays nothing else. The core is notified after a second
(`ServerAway`), and again when the server answers. An added server that does not listen in time is given up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import grpc

from edl.contract import vital
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.ps import HANGS
from edl.net import tls

LOOK_SECONDS = 1.0  # between two calls of a server
AGAIN_SECONDS = 0.25  # between two calls of a server that did not answer
MOST_PAUSE_SECONDS = 30.0  # between two unanswered calls of `End`
ANSWER_SECONDS = 3.0
UNANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)  # not by the server
AWAY_SECONDS = 1.0  # without an answer, after which the core is notified
STARTING, RUNNING, SILENT = "starting", "running", "silent"  # a server's states in the status
RESTARTING = "restarting"

Emit: TypeAlias = Callable[[ev.Event], None]


class ParameterServers(Protocol):
    """The parameter servers of one job. A server that is restarted keeps its address."""

    async def start(self) -> None:
        """Start the servers, unless they are started elsewhere, and watch them.

        Raises:
            OSError: the directory of the servers' files cannot be written.
        """

    async def addresses(self) -> tuple[str, ...]:
        """Wait until all addresses are known; return host:port of each server, by index."""

    async def listening(self) -> tuple[str, ...]:
        """Wait until all servers listen; return host:port of each, by index."""

    def status(self) -> list[dict[str, Any]]:
        """Describe each server, by index, ready for JSON."""

    @property
    def wanted(self) -> int:
        """The requested number of servers."""

    def resize(self, servers: int) -> None:
        """Request this number of servers.

        `ServersReady` is emitted when they listen. Surplus servers are ended once the ring has reported that
        they hold no rows (`Arranged`).
        """

    def perform(self, effect: ef.Effect) -> None:
        """Perform an effect for servers; ignore all others."""

    async def close(self, ended: bool) -> None:
        """Stop watching the servers, and end those that this master has started.

        Args:
            ended: the job has ended, so files for restarted servers are not needed.
        """


async def end(addresses: Sequence[str], token: Callable[[], str], run_id: str) -> None:
    """Make all servers drop the rows of an ended run. Returns when each has answered, perhaps never.

    Args:
        token: returns the present token of the job.
    """

    async def one(address: str) -> None:
        pause = LOOK_SECONDS
        async with tls.aio_channel(address) as channel:
            stub = rpc.ParameterServerStub(channel)
            while True:
                metadata = (("authorization", f"Bearer {token()}"),)
                try:
                    await stub.End(pb.EndRequest(run_id=run_id), metadata=metadata, timeout=ANSWER_SECONDS)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                        return
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE_SECONDS)

    await asyncio.gather(*map(one, addresses))


class NoServers:
    """A job without parameter servers."""

    async def start(self) -> None:
        pass

    async def addresses(self) -> tuple[str, ...]:
        return ()

    async def listening(self) -> tuple[str, ...]:
        return ()

    def status(self) -> list[dict[str, Any]]:
        return []

    @property
    def wanted(self) -> int:
        return 0

    def resize(self, servers: int) -> None:
        pass

    def perform(self, effect: ef.Effect) -> None:
        pass

    async def close(self, ended: bool) -> None:
        pass


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
        self, emit: Emit, token: Callable[[], str], address: Callable[[int], str], servers: int,
        scale: Callable[[int], None] = lambda servers: None, listen_timeout: float = math.inf,
        running: Callable[[], int | None] = lambda: 0,
    ):  # fmt: skip
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
        self._arranged = 0  # number of servers with rows, as the ring reported to this master; 0: not yet
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
            self._wanted, self._told, self._resized = servers, 0, True
            self._most = max(self._most, servers)
            self._find()
            self._run(self._most)
            self._looked()

    def perform(self, effect: ef.Effect) -> None:
        if isinstance(effect, ef.Arranged):
            self._arranged = effect.servers
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
        return self._arranged or self._watch.arranged

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
        if self._have == self._wanted and not self._asked and there is None:
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
        self._emit(ev.ServersGivenUp(self._wanted, self._have, why))

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
        self, emit: Emit, token: Callable[[], str], servers: int, looked: Callable[[], None] = lambda: None,
        restarts: bool = False,
    ):  # fmt: skip
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
    def arranged(self) -> int:
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
