# SPDX-License-Identifier: Apache-2.0
"""The network between hosts in simulated time, and gRPC on it.

A cut link is silent, like a broken cable. Messages arrive when the link is healed, unless their sender has
given up. A connection whose other end has died is reset. `Channel` and `Wire` replace grpc.aio's channels and
the master's `Listener`. Stubs, servicers and everything above them are the shipped code.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from edl.errors import EdlError
from tests.simulator.clock import Clock
from tests.simulator.processes import Process

POLL_SECONDS = 0.1
KEEPALIVE_SECONDS = (10.0, 16.0)  # time after which a worker's stream over a cut link breaks
CONNECT_SECONDS = (5.0, 20.0)  # time after which a first attempt over a cut link fails
LATENCY = 200  # the rate of the exponential distribution, 1 / mean seconds


class Network:
    """Hosts, the cuts between them, and the listeners.

    Args:
        resolve: returns the address behind a Service's address; "" if the Service has no endpoint.
    """

    def __init__(self, clock: Clock, chance: random.Random, resolve: Callable[[str], str]):
        self.clock, self.random, self.resolve = clock, chance, resolve
        self.cuts: dict[frozenset[str], float] = {}  # the time of each cut
        self.healed: dict[frozenset[str], float] = {}
        self.listeners: dict[str, Wire] = {}

    def cut(self, a: str, b: str) -> None:
        self.cuts.setdefault(frozenset((a, b)), self.clock.now)

    def heal(self, pairs: Iterable[tuple[str, str]] | None) -> None:
        """Heal these pairs; None for all pairs."""
        for pair in list(self.cuts) if pairs is None else map(frozenset, pairs):
            if self.cuts.pop(pair, None) is not None:
                self.healed[pair] = self.clock.now

    def are_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self.cuts

    def were_cut(self, a: str, b: str, within: float) -> bool:
        """Whether the link is cut, or was cut within the last `within` seconds."""
        pair = frozenset((a, b))
        return pair in self.cuts or self.clock.now - self.healed.get(pair, -1e9) < within


class Pipe:
    """One direction of a connection: it keeps the order, and adds the network's latency.

    Args:
        receive: called on the loop of `target`, unless `target` has died.
    """

    def __init__(self, network: Network, source: str, target: Process, receive: Callable[[Any], None]):
        self._network, self._source, self._target, self._receive = network, source, target, receive
        self._at = 0.0
        self._queue: deque[Any] = deque()
        self._due, self._polls = 0, False

    def put(self, item: Any) -> None:
        clock = self._network.clock
        self._at = max(clock.now + self._network.random.expovariate(LATENCY), self._at)
        self._queue.append(item)
        clock.later(self._at - clock.now, self._arrives)

    def _arrives(self) -> None:
        self._due += 1
        self._pump()

    def _pump(self) -> None:
        if self._network.are_cut(self._source, self._target.host):
            if not self._polls:
                self._polls = True
                self._network.clock.later(POLL_SECONDS, self._poll)
            return
        while self._due:
            self._due -= 1
            item = self._queue.popleft()
            if self._target.alive:
                self._target.call_soon(self._receive, item)

    def _poll(self) -> None:
        self._polls = False
        self._pump()


# --- gRPC, a client's side


class Channel:
    """A channel like grpc.aio's, from one process to host:port."""

    def __init__(self, network: Network, process: Process, address: str):
        self._network, self._process, self._address = network, process, address
        self._calls: list[Call] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()

    def stream_stream(self, path: str, **how: Any) -> Callable[..., Call]:
        def call(requests: Any = None, metadata: Any = None, wait_for_ready: bool = False) -> Call:
            return self._call(path, how, requests, wait_for_ready)

        return call

    def unary_unary(self, path: str, **how: Any) -> Callable[..., Any]:
        async def call(request: Any, metadata: Any = None, timeout: float | None = None) -> Any:
            async def once() -> AsyncIterator[Any]:
                yield request

            stream = self._call(path, how, once(), True)
            try:
                async with asyncio.timeout(timeout):
                    return await anext(aiter(stream))
            except (TimeoutError, StopAsyncIteration):
                stream.cancel()
                raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED) from None

        return call

    def unary_stream(self, path: str, **how: Any) -> Callable[..., Any]:
        return lambda request: None  # there are no watchers

    async def channel_ready(self) -> None:
        await self._connected(True)

    async def _connected(self, waits: bool) -> Wire:
        """Wait for the listener at the channel's address."""
        network, clock = self._network, self._network.clock
        gives_up = clock.now + network.random.uniform(*CONNECT_SECONDS)
        while True:
            await asyncio.sleep(network.random.expovariate(LATENCY))
            address = network.resolve(self._address)
            host = address.rpartition(":")[0]
            cut = network.are_cut(self._process.host, host)
            if not cut and (wire := network.listeners.get(address)) is not None and wire.process.alive:
                return wire
            if not waits and (not cut or clock.now > gives_up):
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, details="failed to connect")
            await asyncio.sleep(POLL_SECONDS)

    def _call(self, path: str, how: dict[str, Any], requests: Any, waits: bool) -> Call:
        call = Call(self._network, self._process, lambda: self._connected(waits), path, how, requests)
        self._calls.append(call)
        return call


class Call:
    """The client's side of a stream."""

    def __init__(
        self,
        network: Network,
        process: Process,
        connect: Callable[[], Any],
        path: str,
        how: dict[str, Any],
        requests: Any,
    ):
        self._network, self._process, self._path = network, process, path
        self._write, self._read = how["request_serializer"], how["response_deserializer"]
        self._meta: Any = None
        self._messages: deque[bytes] = deque()
        self._end: tuple[grpc.StatusCode, str, Any] | None = None
        self._news = asyncio.Event()
        self._to_server: Pipe | None = None
        self._task = process.create_task(self._runs(connect, requests))

    async def _runs(self, connect: Callable[[], Any], requests: Any) -> None:
        try:
            wire: Wire = await connect()
        except grpc.aio.AioRpcError as error:
            self._over(error.code(), error.details() or "", ())
            return
        here, there = self._process, wire.process
        answers = Pipe(self._network, there.host, here, self._hears)
        serving = wire.serve(self._path, answers)
        self._to_server = Pipe(self._network, here.host, there, serving.hears)
        here.when_killed.append(lambda: self._to_server.put(("reset",)) if serving.alive else None)
        there.when_killed.append(lambda: answers.put(("reset",)) if self._end is None else None)
        self._keepalive(there.host)
        self._to_server.put(("open",))
        async for request in requests:
            if self._end is not None:
                return
            self._to_server.put(("message", self._write(request)))
        self._to_server.put(("half-closed",))

    def _keepalive(self, host: str) -> None:
        """Break the stream after a long cut, like gRPC's keepalive."""
        if self._end is not None or not self._process.alive:
            return
        since = self._network.cuts.get(frozenset((self._process.host, host)))
        patience = self._network.random.uniform(*KEEPALIVE_SECONDS)
        if since is not None and self._network.clock.now - since > patience:
            self._process.call_soon(self._over, grpc.StatusCode.UNAVAILABLE, "keepalive watchdog timeout", ())
            assert self._to_server is not None
            self._to_server.put(("reset",))
            return
        self._network.clock.later(1.0, lambda: self._keepalive(host))

    def _hears(self, item: tuple[Any, ...]) -> None:
        match item:
            case ("metadata", pairs):
                self._meta = pairs
            case ("message", data):
                self._messages.append(data)
            case ("end", code, details, trailing):
                self._over(code, details, trailing)
            case ("reset",):
                self._over(grpc.StatusCode.UNAVAILABLE, "Socket closed", ())
        self._news.set()

    def _over(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        if self._end is None:
            self._end = (code, details, trailing)
        self._news.set()

    def cancel(self) -> None:
        if self._end is None:
            if self._to_server is not None:
                self._to_server.put(("reset",))
            self._task.cancel()
            self._over(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def initial_metadata(self) -> Any:
        while self._meta is None and self._end is None:
            await self._more()
        return self._meta

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while True:
                while self._messages:
                    yield self._read(self._messages.popleft())
                if self._end is not None:
                    break
                await self._more()
        except asyncio.CancelledError:
            self.cancel()
            raise
        code, details, trailing = self._end
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, None, grpc.aio.Metadata(*trailing), details)

    async def code(self) -> grpc.StatusCode:
        assert self._end is not None
        return self._end[0]

    async def details(self) -> str:
        assert self._end is not None
        return self._end[1]


# --- gRPC, a server's side


class Wire:
    """The replacement of `edl.net.listener.Listener`, for one process."""

    def __init__(self, network: Network, process: Process):
        self._network, self.process = network, process
        self._handlers: dict[str, Any] = {}
        self._servings: list[Serving] = []
        self._address = ""

    async def start(self, address: str, serve: Callable[[Any], None]) -> int:
        if address in self._network.listeners:
            raise EdlError(f"cannot listen on {address}: it is taken")
        serve(self)
        self._address, self._network.listeners[address] = address, self
        self.process.when_killed.append(self._vanishes)
        return int(address.rpartition(":")[2])

    def _vanishes(self) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]

    async def close(self, grace: float) -> None:
        """Accept no further calls, and cancel the running ones after the grace period."""
        self._vanishes()
        tasks = [s.task for s in self._servings if s.task is not None and not s.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for serving in self._servings:
            serving.stop("the server was shut down")

    def serve(self, path: str, answers: Pipe) -> Serving:
        serving = Serving(self.process, self._handlers[path], answers)
        self._servings = [s for s in self._servings if s.alive]
        self._servings.append(serving)
        return serving

    # the interface for the generated code

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None: ...

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class Serving:
    """The server's side of a stream, and the context of its servicer."""

    def __init__(self, process: Process, handler: Any, answers: Pipe):
        self._process, self._handler, self._answers = process, handler, answers
        self._requests: deque[bytes] = deque()
        self._half_closed = False
        self._news = asyncio.Event()
        self.alive = True
        self.task: asyncio.Task[None] | None = None

    def hears(self, item: tuple[Any, ...]) -> None:
        match item:
            case ("open",) if self.alive:
                self.task = self._process.create_task(self._serve())
                self.task.add_done_callback(self._process.ended)
            case ("message", data):
                self._requests.append(data)
            case ("half-closed",):
                self._half_closed = True
            case ("reset",):
                self.alive = False
                if self.task is not None:
                    self.task.cancel()
        self._news.set()

    def stop(self, why: str) -> None:
        if self.alive:
            if self.task is not None:
                self.task.cancel()
            self._ends(grpc.StatusCode.UNAVAILABLE, why, ())

    async def _serve(self) -> None:
        handler = self._handler
        try:
            if handler.request_streaming:
                async for answer in handler.stream_stream(self._heard(), self):
                    self._answers.put(("message", handler.response_serializer(answer)))
            else:
                answer = await handler.unary_unary(await anext(self._heard()), self)
                self._answers.put(("message", handler.response_serializer(answer)))
            self._ends(grpc.StatusCode.OK, "", ())
        except _Aborted as aborted:
            self._ends(*aborted.how)

    async def _heard(self) -> AsyncIterator[Any]:
        while True:
            while self._requests:
                yield self._handler.request_deserializer(self._requests.popleft())
            if self._half_closed:
                return
            self._news.clear()
            await self._news.wait()

    def _ends(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        if self.alive:
            self.alive = False
            self._answers.put(("end", code, details, trailing))

    async def send_initial_metadata(self, pairs: Any) -> None:
        self._answers.put(("metadata", pairs))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        raise _Aborted(code, details, trailing)


class _Aborted(Exception):
    def __init__(self, *how: Any):
        super().__init__(*how)
        self.how = how
