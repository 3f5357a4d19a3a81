# SPDX-License-Identifier: Apache-2.0
"""The gRPC server of a master that has nothing to train: its run has ended, or none can start.

Promise: calls are answered with how the run has ended; a worker that still runs is refused, and so ends.
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
    """Listens at the address of the job's server, until `close`, and answers with how the run has ended.

    Args:
        phase: the phase in which the run has ended; Failed if none can start.
        reason: how it has ended, or why none can start.
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
