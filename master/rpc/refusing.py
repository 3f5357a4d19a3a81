# SPDX-License-Identifier: Apache-2.0
"""The gRPC server of a master without a job: it listens at the address of the job's server, and refuses.

Promise: a call that would change the job is refused at once, with the reason from `_refuse`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.net.listener import Context, Listener

LAST_WORDS_SECONDS = 0.5


class RefusingServer(rpc.MasterServicer, ABC):
    """Listens and refuses calls, until `close`."""

    def __init__(self, listener: Listener):
        self._listener, self._over = listener, asyncio.Event()

    async def start(self, address: str) -> int:
        """Listen on `address` (host:port, port 0 for any); returns the port.

        Raises:
            EdlError: the address is taken, or not one of this machine; or the certificate cannot be used.
        """
        return await self._listener.start(address, self._serve)

    def _serve(self, server: grpc.aio.Server) -> None:
        rpc.add_MasterServicer_to_server(self, server)

    async def close(self) -> None:
        """Free the address."""
        self._over.set()
        await self._listener.close(LAST_WORDS_SECONDS)

    @abstractmethod
    async def _refuse(self, context: Any) -> NoReturn:
        """Abort the call with the reason."""

    # --- calls

    async def Work(
        self, requests: AsyncIterator[pb.FromWorker], context: Context
    ) -> AsyncIterator[pb.ToWorker]:
        await self._refuse(context)
        yield pb.ToWorker()

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.Reply:
        await self._refuse(context)

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.Reply:
        await self._refuse(context)

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.Reply:
        await self._refuse(context)
