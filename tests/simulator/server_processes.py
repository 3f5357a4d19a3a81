# SPDX-License-Identifier: Apache-2.0
"""The processes of parameter servers in simulated time.

They run the shipped code (ps/), with its log in memory and without its own threads. They are stopped, and
killed with or without their disk.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from edl.ps.rpc.service import Service
from edl.ps.server import ParameterServer
from edl.trainer.ps_client.multiplex import Failed
from tests.simulator.disk import Disk, MemoryLog
from tests.simulator.processes import Process

if TYPE_CHECKING:
    from tests.simulator.servers import Servers

T = TypeVar("T")
RUN = "a-run"
SERVICE = "/edl.ParameterServer/"
LATENCY = 500  # the rate of the exponential distribution, 1 / mean seconds
Then = Callable[["bytes | Failed"], None]


class SimulatedService(Service):
    """The service without threads: background work takes time, and work on the rows takes none."""

    def __init__(self, place: Place, server: ParameterServer):
        super().__init__(server, token=lambda: "token", connect=lambda to, _: Peer(place, to))
        self._place = place

    @property
    def server(self) -> ParameterServer:
        return self._server

    async def _do(self, act: Callable[[Any], T], request: Any, size: int = 0) -> T:
        return act(request)

    async def _on(self, threads: Executor, act: Callable[[], T]) -> T:
        done = act()
        await self._place.passes(self._place.servers.random.choice((0.0, 0.005, 0.1)))
        return done

    @property
    def handlers(self) -> Callable[[str], grpc.RpcMethodHandler[Any, Any]]:
        """Returns the handler of each call by its name."""
        found: list[Any] = []
        self.register(SimpleNamespace(add_generic_rpc_handlers=found.extend))  # type: ignore[arg-type]
        (generic,) = found
        return lambda name: generic.service(SimpleNamespace(method=SERVICE + name))


class Place:
    """The place of one server: its disk, and its process, if it lives."""

    def __init__(self, servers: Servers, index: int):
        self.servers, self.index = servers, index
        self.address = f"ps-{index}"
        self.disk = Disk()
        self.wanted = True  # False: it is not restarted
        self._process: Process | None = None
        self._calls: dict[_Serving, None] = {}  # ordered, so that a seed's run is always the same
        self.start()

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def frozen(self) -> bool:
        return self._process is not None and self._process.frozen

    @property
    def server(self) -> ParameterServer | None:
        """The server in the process's memory; None without a process."""
        return self._service.server if self._process is not None else None

    def start(self) -> None:
        if self._process is not None or not self.wanted:
            return
        world = self.servers.world
        self._process = Process(world.clock, self.address, self._failed)  # type: ignore[abstract]  # a loop in part
        checkpoints = world.config.checkpoint.dir
        server = ParameterServer(
            self.index,
            0,
            RUN,
            Path("simulated"),
            checkpoints,
            warn=self._warned,
            log=MemoryLog(self.disk),
            clock=lambda: world.clock.now,
        )
        self._service = SimulatedService(self, server)
        self._handlers = self._service.handlers

    def kill(self, lose: bool = False) -> None:
        """Kill the process. Pending calls fail because their connection is reset."""
        if lose:
            self.disk = Disk()
        if self._process is None:
            return
        process, self._process = self._process, None
        process.kill()
        calls, self._calls = self._calls, {}
        for call in calls:
            call.ends(Failed(grpc.StatusCode.UNAVAILABLE, "the connection was reset"))

    def stop_for(self, seconds: float) -> None:
        if self._process is not None and not self._process.frozen:
            self._process.stop_for(seconds)

    def bury(self) -> None:
        if self._process is not None:
            self._process.bury()

    def _failed(self, error: BaseException) -> None:
        raise error

    def _warned(self, text: str) -> None:
        if self.servers.world.talk:
            print(f"{self.servers.clock.now:9.3f} {self.address}: {text}")

    async def passes(self, seconds: float) -> None:
        """Wait for this time on the process's loop."""
        assert self._process is not None
        over = self._process.create_future()
        self._process.call_later(seconds, over.set_result, None)
        await over

    # --- calls

    def ask(self, method: str, request: bytes, then: Then, begun: Callable[[], None] = lambda: None) -> None:
        """Receive a call.

        Args:
            then: takes the answer, or the error.
            begun: called when a long call reports that it has begun.
        """
        if self._process is None:
            then(Failed(grpc.StatusCode.UNAVAILABLE, "connection refused"))
            return
        process, call = self._process, _Serving(then, begun)
        self._calls[call] = None
        process.call_soon(lambda: process.create_task(self._serve(method, request, call)))

    async def _serve(self, method: str, request: bytes, call: _Serving) -> None:
        handler = self._handlers(method)
        read, write = handler.request_deserializer, handler.response_serializer
        asked: Any = request if read is None else read(request)
        try:
            found: Any = await handler.unary_unary(asked, call)  # type: ignore[misc, arg-type]
            call.ends(found if write is None else write(found))
        except Failed as failed:
            call.ends(failed)
        except Exception as error:
            raised = error  # raised on the clock, where it ends the run: a task would swallow it
            self.servers.clock.later(0.0, lambda: self._failed(raised))
        finally:
            self._calls.pop(call, None)


class _Serving:
    """The servicer's side of a call (grpc's context), until it is answered."""

    def __init__(self, then: Then, begun: Callable[[], None]):
        self._then, self._begun = then, begun

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise Failed(code, details)

    async def send_initial_metadata(self, pairs: object) -> None:
        self._begun()

    def ends(self, answer: bytes | Failed) -> None:
        then, self._then = self._then, lambda answer: None
        then(answer)


class Peer:
    """A channel from one server to a different server."""

    def __init__(self, place: Place, address: str):
        self._place, self._to = place, place.servers.at(address)

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def unary_unary(self, path: str, serializer: Callable[[Any], bytes]) -> Callable[..., Any]:
        place, to, servers = self._place, self._to, self._place.servers

        async def call(request: Any, metadata: object = None) -> bytes:
            process = place._process
            assert process is not None
            answer, raw = process.create_future(), serializer(request)

            def comes_back(found: bytes | Failed) -> None:
                servers.clock.later(
                    servers.random.expovariate(LATENCY), lambda: process.call_soon(take, found)
                )

            def take(found: bytes | Failed) -> None:
                if not answer.done():
                    answer.set_result(found)

            method = path.removeprefix(SERVICE)
            later = servers.random.expovariate(LATENCY)
            servers.clock.later(later, lambda: to.ask(method, raw, comes_back))
            servers.called(to, method)
            found: bytes | Failed = await answer
            if isinstance(found, Failed):
                raise grpc.aio.AioRpcError(
                    found.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), details=found.details()
                )
            return found

        return call
