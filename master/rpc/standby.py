# SPDX-License-Identifier: Apache-2.0
"""The gRPC server of a standby: it refuses the job's calls, and collects workers' reports of a lost master.

Promise: every call is refused at once, because a different master acts. A worker that has sent a report here
is notified at once when this master acts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc

from edl.contract.proto import ADMITTED, STANDS_BY
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError
from edl.master.rpc.refusing import RefusingServer
from edl.net import tls
from edl.net.listener import OPTIONS, Context, Listener


class StandbyServer(RefusingServer, rpc.StandbyServicer):
    """Listens at the address of the job's server, until `close`.

    Args:
        changed: called when a worker's report has changed.
        vouch: returns whether this standby vouches for the acting master of that term.
    """

    def __init__(
        self,
        listener: Listener,
        changed: Callable[[], None],
        vouch: Callable[[int], Awaitable[bool]],
    ):
        super().__init__(listener)
        self._changed, self._vouch = changed, vouch
        self._words: dict[object, pb.MasterReport] = {}  # by stream
        self._witnesses: set[int] = set()
        self._term = 0

    def _serve(self, server: grpc.aio.Server) -> None:
        super()._serve(server)
        rpc.add_StandbyServicer_to_server(self, server)

    def lost(self, term: int) -> list[int]:
        """Return the workers that have lost the master of this term."""
        return sorted({word.worker for word in self._words.values() if word.lost and word.term == term})

    @property
    def witnesses(self) -> frozenset[int]:
        """The workers that have sent a report here."""
        return frozenset(self._witnesses)

    async def close(self, term: int = 0) -> None:
        """Free the address.

        Args:
            term: the term in which this master acts now; 0 if it does not act.
        """
        self._term = term
        await super().close()

    # --- calls

    async def ReportMasterLost(
        self, requests: AsyncIterator[pb.MasterReport], context: Context
    ) -> AsyncIterator[pb.ActiveMaster]:
        await context.send_initial_metadata(((ADMITTED, "yes"),))
        stream = object()

        async def hear() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for word in requests:
                    self._words[stream] = word
                    self._witnesses.add(word.worker)
                    self._changed()

        hearing = asyncio.create_task(hear())
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((hearing, over), return_when=asyncio.FIRST_COMPLETED)
            if self._term:
                yield pb.ActiveMaster(term=self._term)
        finally:
            hearing.cancel()
            over.cancel()
            self._words.pop(stream, None)

    async def ConfirmLease(self, request: pb.LeaseRenewal, context: Context) -> pb.LeaseConfirmation:
        return pb.LeaseConfirmation(yes=not self._over.is_set() and await self._vouch(request.term))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Status]:
        await self._refuse(context)
        yield pb.Status()

    async def _refuse(self, context: Any) -> NoReturn:
        why = "this master stands by, and a different one acts: call the Service"
        await context.abort(grpc.StatusCode.UNAVAILABLE, why, ((STANDS_BY, "yes"),))
        raise AssertionError("unreachable: abort raises")


async def vouches(
    address: str,
    host: str,
    token: str,
    term: int,
    seconds: float,
    connect: Callable[[str, Sequence[tuple[str, Any]]], grpc.aio.Channel] = tls.aio_channel,
) -> bool:
    """Ask the standby at an address whether it vouches for the master of this term.

    Args:
        host: the name for which its certificate is valid.
        connect: creates a channel to host:port.
    """
    options = [*OPTIONS, ("grpc.ssl_target_name_override", host)]
    metadata = (("authorization", f"Bearer {token}"),)
    try:
        async with connect(address, options) as channel:
            call = rpc.StandbyStub(channel).ConfirmLease(
                pb.LeaseRenewal(term=term), metadata=metadata, timeout=seconds
            )
            return bool((await call).yes)
    except (grpc.aio.AioRpcError, EdlError):
        return False
