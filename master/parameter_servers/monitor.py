"""The parameter servers of a job, as the master knows them: where they listen, what they say of themselves.

Who starts them is a backend's business: `edl run` has processes (master.backends.servers), a release of the
chart has a StatefulSet, whose pods have names that are known beforehand (`Named`).

Promise: a server that does not answer delays nobody, and the core is told after a second (`ServerAway`), and
again when it answers. One that is to be a further one, and does not come to listen, is given up.
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

LOOK_SECONDS = 1.0  # between two questions to a server
AGAIN_SECONDS = 0.25  # between two to one that did not answer
MOST_PAUSE_SECONDS = 30.0  # between two that it does not answer
ANSWER_SECONDS = 3.0
UNANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)  # not by the server
AWAY_SECONDS = 1.0  # without an answer, after which the core is told
STARTING, RUNNING, SILENT = "starting", "running", "silent"  # a server's states, for people
RESTARTING = "restarting"

Emit: TypeAlias = Callable[[ev.Event], None]


class ParameterServers(Protocol):
    """Those of one job. A server that comes back is where it was."""

    async def start(self) -> None:
        """Have them started, if that is to be done, and watched.

        Raises:
            OSError: the directory for what they need cannot be written.
        """

    async def addresses(self) -> tuple[str, ...]:
        """host:port of each, by index, as soon as all are known."""

    async def listening(self) -> tuple[str, ...]:
        """The same, as soon as all listen."""

    def status(self) -> list[dict[str, Any]]:
        """A description of each, by index, ready for JSON."""

    @property
    def wanted(self) -> int:
        """How many there are to be."""

    def resize(self, servers: int) -> None:
        """From now on there are to be so many. `ServersReady` is emitted when these listen; those that are
        too many are ended when the ring says that they have no rows any more (`Arranged`)."""

    def perform(self, effect: ef.Effect) -> None:
        """What effects say to servers; those of others are ignored."""

    async def close(self, ended: bool) -> None:
        """
        Args:
            ended: the job has: what they have written for their successors is not needed any more.
        """


async def end(addresses: Sequence[str], token: Callable[[], str], run_id: str) -> None:
    """Have all servers drop the rows of a run that has ended. Returns when each has answered: perhaps never.

    Args:
        token: of the job, as it is now.
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
    """A job without any."""

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
    """Servers that are started elsewhere, at addresses that are known beforehand.

    Args:
        emit: takes ServerAway, ServerRecovered, ServersReady and ServersGivenUp.
        token: of the job, as it is now.
        address: of the server of this index.
        servers: how many there are to be.
        scale: has as many run: those that are not among them have no rows.
        patience: seconds for further ones to come to listen.
        running: how many there are; None: that is not known yet.
    """

    def __init__(
        self, emit: Emit, token: Callable[[], str], address: Callable[[int], str], servers: int,
        scale: Callable[[int], None] = lambda servers: None, listen_timeout: float = math.inf,
        running: Callable[[], int | None] = lambda: 0,
    ):  # fmt: skip
        self._running = running
        self._begins = True  # a ring of an earlier master may be about to move rows to servers that run
        self._emit, self._address, self._wanted, self._scale = emit, address, servers, scale
        self._pending = PendingServers(listen_timeout, self._give_up)
        self._scaled = 0
        self._watch = Watch(emit, token, servers, self._looked)
        self._listening = asyncio.Event()  # all that were wanted did, once
        self._told = 0  # of so many it was said that they are ready
        self._asked = 0  # so many the core was told of last; 0: of none
        self._resized = False  # by people
        self._arranged = 0  # the ring has said that so many have the rows; 0: it has not, to this master
        # That may have rows, or are to get some: all of them run until the ring says who has the rows.
        self._most = servers
        self._started = False

    async def start(self) -> None:
        self._started = True
        self._find()

    async def addresses(self) -> tuple[str, ...]:
        # With the servers of an order that an earlier master was given: they may have rows, and the next
        # master may have no reason to name them to this worker.
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
            # Otherwise the core decided before it learned of the number that is wanted now: that one stands.
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
        """How many servers have the rows, or 0 if that is not known. What the ring has said counts first:
        servers answer up to a second late, and one that has lost its log does not know."""
        return self._arranged or self._watch.arranged

    def _find(self) -> None:
        self._watch.resize(self._most)
        for index in range(self._most) if self._started else ():
            self._watch.find(index, self._address(index))

    def _looked(self) -> None:
        """A server has said what it has: also under an earlier master rows may have been on their way."""
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
            return  # until another server says otherwise, of a newer generation
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
        self._told = self._wanted  # so that nobody waits for it any more, unless it is wanted again
        self._emit(ev.ServersGivenUp(self._wanted, self._have, why))

    async def close(self, ended: bool) -> None:
        self._pending.forget()
        await self._watch.close()


class PendingServers:
    """Servers that are to be further ones, while they do not all listen.

    Args:
        patience: seconds for them to come.
        give_up: is called with these, when they have passed.
    """

    def __init__(self, listen_timeout: float, give_up: Callable[[float], None]):
        self._listen_timeout, self._give_up = listen_timeout, give_up
        self._servers = 0
        self._timer: asyncio.TimerHandle | None = None

    def wait_for(self, servers: int) -> None:
        """There are to be so many. The time counts from the first time that this number is named."""
        if servers == self._servers:
            return
        self.forget()
        self._servers = servers
        if self._listen_timeout < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._listen_timeout, self._give_up, self._listen_timeout)

    def forget(self) -> None:
        """They listen, or are not wanted any more."""
        self._servers = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass
class _Server:
    """What is known of one."""

    index: int
    address: str = ""
    told: pb.Description | None = None  # its last answer
    told_at: float = 0.0
    pulled: float = 0.0  # rows a second, between its last two answers
    busy: float = 0.0  # how much of that time it has worked
    restarts: int = 0  # that its counters show
    silent_since: float | None = None
    asked_at: float | None = None  # and there is no answer yet
    has_ended: bool = False  # its process has, and the next one has not answered yet
    unanswered: int = 0  # calls in a row that its process has left without an answer
    lagged: int = 0  # the generation of others, when it was last found to be in an earlier one
    told_away: str = ""  # what the core has been told that it does, not answering
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        if self.told is None:
            return STARTING
        return RUNNING if self.silent_since is None else SILENT

    def note(self, told: pb.Description, now: float) -> bool:
        """It has answered. Whether it may have been away before."""
        before, seconds = self.told, now - self.told_at
        back = self.silent_since is not None
        self.told, self.told_at, self.silent_since, self.has_ended = told, now, None, False
        if before is None or seconds <= 0:
            return False
        if told.busy_seconds < before.busy_seconds:  # which only grows, but in another process
            self.restarts += 1
            self.pulled = self.busy = 0.0
            back = True
        else:
            self.pulled = (told.rows_pulled - before.rows_pulled) / seconds
            self.busy = min((told.busy_seconds - before.busy_seconds) / seconds, 1.0)
        return back

    def away_for(self, now: float) -> float:
        """Seconds for which it has not answered; 0: it does."""
        since = self.silent_since if self.silent_since is not None else self.asked_at
        return 0.0 if since is None else now - since

    @property
    def does(self) -> str:
        """While it does not answer."""
        return RESTARTING if self.has_ended else STARTING if self.told is None else HANGS


class Watch:
    """Asks each server now and then what it has and does.

    Args:
        emit: takes ServerAway, ServerRecovered and ProbeUnanswered.
        token: of the job, as it is now.
        servers: how many there are.
        looked: is called after each answer.
        restarts: whether the core restarts processes that hang. On Kubernetes the kubelet does, by the
            chart's liveness probe, which keeps a log that is in the pod.
    """

    def __init__(
        self, emit: Emit, token: Callable[[], str], servers: int, looked: Callable[[], None] = lambda: None,
        restarts: bool = False,
    ):  # fmt: skip
        self._emit, self._token, self._looked, self._restarts = emit, token, looked, restarts
        self._servers = [_Server(index) for index in range(servers)]
        self._telling: asyncio.Task[None] | None = None

    def resize(self, servers: int) -> None:
        """There are so many from now on."""
        for gone in self._servers[servers:]:
            if gone.task is not None:
                gone.task.cancel()
        del self._servers[servers:]
        self._servers += [_Server(index) for index in range(len(self._servers), servers)]

    @property
    def arranged(self) -> int:
        """On how many servers the rows are, as the first of those says that are in the newest generation: one
        that is away, or that the ring does without, may have missed the last move. 0: none says."""
        told = [server.told for server in self._servers if server.told is not None]
        if told and (run := told[0].run_id):
            told = [one for one in told if one.run_id == run]
        newest = max(told, key=lambda one: one.position.generation, default=None)
        return newest.assignment.servers if newest is not None else 0

    def answers(self, servers: int) -> bool:
        """Whether the first so many do."""
        return all(server.state == RUNNING for server in self._servers[:servers])

    def find(self, index: int, address: str) -> None:
        """A server listens there."""
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
        """Its process has; another one takes its place."""
        server = self._servers[index]
        server.has_ended, server.unanswered = True, 0
        if server.silent_since is None:
            server.silent_since = asyncio.get_running_loop().time()

    def status(self) -> list[dict[str, Any]]:
        """A description of each, by index, ready for JSON."""
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
        """Ask no more."""
        tasks = [task for task in (self._telling, *(s.task for s in self._servers)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, server: _Server) -> None:
        """For ever."""
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
        """What it says of itself, when it has done what others have asked before; None: it does not answer,
        or has done nothing of that for ANSWER_SECONDS."""
        loop = asyncio.get_running_loop()
        metadata = (("authorization", f"Bearer {self._token()}"),)
        describing: Any = stub.Describe(pb.DescribeRequest(), metadata=metadata)
        ended = asyncio.Event()
        describing.add_done_callback(lambda _: ended.set())
        done, since = -1, loop.time()
        try:
            while loop.time() < since + ANSWER_SECONDS:
                server.asked_at = loop.time()  # its process lives, as far as is known
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
        """A call has no answer, although the process of the server runs and listens."""
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
        """Whether the last ring has gone on without it, though it answers: so it may have hung for a moment
        that nobody here has noticed. Once for each ring."""
        newest = max(s.told.position.generation for s in self._servers if s.told is not None)
        if told.position.generation >= newest or server.lagged == newest:
            return False
        server.lagged = newest
        return True

    async def _tell(self) -> None:
        """For ever: the core hears of those that do not answer."""
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
