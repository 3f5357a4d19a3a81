"""The gRPC side of a master that has nothing to train: its run has ended, or none can begin.

Promise: whoever asks is told how it has ended, and a worker that was left behind is told to end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.listener import Context, Listener

LAST_WORDS_SECONDS = 0.5


class RestingServer(rpc.MasterServicer):
    """Listens where the job's server will, until `close`.

    Args:
        phase: in which the run has ended; Failed if none can begin.
        reason: how, or why not.
    """

    def __init__(self, listener: Listener, phase: str, reason: str):
        self._listener, self._over = listener, asyncio.Event()
        self._ended = f"the job has ended: {phase}: {reason}"
        self._status = json.dumps({"phase": phase, "reason": reason})

    async def start(self, address: str) -> int:
        """Listen on `address` (host:port, port 0 for any); returns the port.

        Raises:
            EdlError: the address is taken, or is none of this machine; or the certificate cannot be used.
        """
        return await self._listener.start(address, self._serve)

    def _serve(self, server: grpc.aio.Server) -> None:
        rpc.add_MasterServicer_to_server(self, server)

    async def close(self) -> None:
        """Free the address."""
        self._over.set()
        await self._listener.close(LAST_WORDS_SECONDS)

    # --- calls

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Status]:
        yield pb.Status(json=self._status)
        if request.follow:
            await self._over.wait()

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

    async def _refuse(self, context: Any) -> NoReturn:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._ended)
        raise AssertionError("unreachable: abort raises")
