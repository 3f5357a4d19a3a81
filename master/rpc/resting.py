"""The gRPC side of a master that has nothing to train: its run has ended, or none can begin.

Promise: whoever asks is told how it has ended, and a worker that was left behind is told to end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from edl.contract.proto import edl_pb2 as pb
from edl.master.rpc.refusing import RefusingServer
from edl.net.listener import Context, Listener


class RestingServer(RefusingServer):
    """Listens where the job's server will, until `close`, and says how the run has ended.

    Args:
        phase: in which the run has ended; Failed if none can begin.
        reason: how, or why not.
    """

    def __init__(self, listener: Listener, phase: str, reason: str):
        super().__init__(listener)
        self._ended = f"the job has ended: {phase}: {reason}"
        self._status = json.dumps({"phase": phase, "reason": reason})

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Status]:
        yield pb.Status(json=self._status)
        if request.follow:
            await self._over.wait()

    async def _refuse(self, context: Any) -> NoReturn:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._ended)
        raise AssertionError("unreachable: abort raises")
