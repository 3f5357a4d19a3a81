# SPDX-License-Identifier: Apache-2.0
"""What the master needs of a job's parameter servers, however they are started.

`edl run` starts them as processes (`processes`). A release of the chart has a StatefulSet, whose pods have
names that are known in advance (`remote`). If the mode is not decided yet, both wait for it (`deferred`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import grpc

from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc as rpc
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.net import tls

LOOK_SECONDS = 1.0  # between two calls of a server
ANSWER_SECONDS = 3.0
MAX_PAUSE_SECONDS = 30.0  # between two unanswered calls of `End`

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
        they hold no rows (`Assigned`).
        """

    def perform(self, effect: ef.ForServers) -> None:
        """Perform an effect for servers."""

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
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

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

    def perform(self, effect: ef.ForServers) -> None:
        pass

    async def close(self, ended: bool) -> None:
        pass
