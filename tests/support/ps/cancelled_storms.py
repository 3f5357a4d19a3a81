# SPDX-License-Identifier: Apache-2.0
"""Servers of this process whose callers go away, at random points, in many calls at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc
from edl.ps.rpc.service import OPTIONS, Service
from edl.ps.server import ParameterServer
from tests.support.ps.cancelled_calls import Cancelling
from tests.support.ps.requests import RUN

CALLS = int(os.environ.get("EDL_CANCELLED_CALLS", "100"))  # of each, in each mode
AT_ONCE = 25
SECONDS = 60.0  # for what must happen
REFUSED = (  # what others have done meanwhile, and a call that was cancelled
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
)

Requests = Sequence[tuple[str, Any]]


class Node:
    """A server of this process, and its caller."""

    def __init__(self, index: int, directory: Path, dice: random.Random):
        self._index, self._directory, self._dice = index, directory, dice
        self.cancelling = Cancelling(dice.randrange(10**6))
        self.failed: list[str] = []

    def of_run(self, run_id: str) -> ParameterServer:
        where = self._directory / f"log-{self._index}"
        return ParameterServer(
            self._index, 0, run_id, where, str(self._directory / "checkpoints"), snapshot_bytes=8192
        )

    async def start(self) -> None:
        self._service = Service(self.of_run(RUN), self.of_run)
        self._server = grpc.aio.server(interceptors=[self.cancelling], options=OPTIONS)
        self._service.register(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
        self._stub = ps_pb2_grpc.ParameterServerStub(self._channel)

    async def __call__(self, name: str, request: Any) -> Any:
        """Not cancelled."""
        return await getattr(self._stub, name)(request, timeout=SECONDS)

    async def cancelled(self, name: str, request: Any) -> None:
        """By the server, as `Cancelling` has it, or by the caller, or not."""
        stub = getattr(self._stub, name)
        call = self.cancelling.making(lambda mark: stub(request, metadata=mark, timeout=SECONDS))
        if self._dice.random() < 0.3:
            asyncio.get_running_loop().call_later(self._dice.uniform(0, 0.003), call.cancel)
        try:
            await call
        except asyncio.CancelledError:
            pass
        except grpc.aio.AioRpcError as error:
            if error.code() not in REFUSED:
                self.failed.append(f"{name}: {error.code().name}: {error.details()}")

    async def converse(self, asked: Requests) -> None:
        """One stream, with all of these, that ends at any moment."""
        stream = self.cancelling.making(lambda mark: self._stub.Converse(metadata=mark, timeout=SECONDS))

        async def say() -> None:
            for number, (name, request) in enumerate(asked):
                await stream.write(pb.Ask(number=number, method=name, request=request.SerializeToString()))
            await asyncio.wait_for(stream.read(), self._dice.uniform(0, 0.01))

        saying = asyncio.ensure_future(say())
        # gRPC's `write` waits for ever if the call is cancelled before its metadata were sent.
        stream.add_done_callback(lambda _: saying.cancel())
        ends = (TimeoutError, grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError)
        with contextlib.suppress(*ends):
            await saying
        stream.cancel()

    async def close(self) -> None:
        await self._channel.close()
        await self._server.stop(0)
        await self._service.close()


async def storm(names: set[str], world: Any, nodes: list[Node], dice: random.Random) -> None:
    made: Counter[str] = Counter()
    for name in sorted(names):
        while made[name] < CALLS:
            asked = await world.requests(name)
            if name == "Converse":
                calls = [nodes[0].converse(dice.sample(asked, 3)) for _ in range(AT_ONCE)]
            else:
                calls = [world.to(name, i).cancelled(name, request) for i, request in enumerate(asked)]
            await asyncio.wait_for(asyncio.gather(*calls, world.meanwhile(name)), SECONDS)
            made[name] += len(calls)
            await world.mend(name)
            await asyncio.wait_for(world.check(), SECONDS)
        assert not any(node.failed for node in nodes), nodes[0].failed + nodes[1].failed
    cancelled, ended = (
        nodes[0].cancelling.cancelled + nodes[1].cancelling.cancelled,
        nodes[0].cancelling.ended + nodes[1].cancelling.ended,
    )
    print({name: (made[name], cancelled[name], ended[name]) for name in sorted(names)})
    assert not {name for name in names if not cancelled[name]}
