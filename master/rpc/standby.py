"""The gRPC side of a master that stands by: it refuses the job's calls, and hears which workers have lost the
acting master.

Promise: whoever calls is told that another master acts, and never left to wait; and a worker that has said
its word here learns at once when this master acts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
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
    """Listens where the job's server will, until `close`.

    Args:
        changed: called when what workers say has changed.
        vouch: whether the acting master of that term may go on.
    """

    def __init__(
        self,
        listener: Listener,
        changed: Callable[[], None],
        vouch: Callable[[int], bool],
    ):
        super().__init__(listener)
        self._changed, self._vouch = changed, vouch
        self._words: dict[object, pb.Word] = {}  # by stream
        self._witnesses: set[int] = set()
        self._term = 0

    def _serve(self, server: grpc.aio.Server) -> None:
        super()._serve(server)
        rpc.add_StandbyServicer_to_server(self, server)

    def lost(self, term: int) -> list[int]:
        """The workers that have lost the master of this term."""
        return sorted({word.worker for word in self._words.values() if word.lost and word.term == term})

    @property
    def witnesses(self) -> frozenset[int]:
        """The workers that have said a word here."""
        return frozenset(self._witnesses)

    async def close(self, term: int = 0) -> None:
        """Free the address.

        Args:
            term: this master acts now; 0: it does not.
        """
        self._term = term
        await super().close()

    # --- calls

    async def Witness(self, requests: AsyncIterator[pb.Word], context: Context) -> AsyncIterator[pb.Acting]:
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
                yield pb.Acting(term=self._term)
        finally:
            hearing.cancel()
            over.cancel()
            self._words.pop(stream, None)

    async def Vouch(self, request: pb.Renewal, context: Context) -> pb.Vouched:
        return pb.Vouched(yes=not self._over.is_set() and self._vouch(request.term))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Status]:
        await self._refuse(context)
        yield pb.Status()

    async def _refuse(self, context: Any) -> NoReturn:
        why = "this master stands by, and another one acts: call the Service"
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
    """Whether the master that stands by at an address lets the one of this term go on.

    Args:
        host: for which its certificate is.
        connect: makes a channel to host:port.
    """
    options = [*OPTIONS, ("grpc.ssl_target_name_override", host)]
    metadata = (("authorization", f"Bearer {token}"),)
    try:
        async with connect(address, options) as channel:
            call = rpc.StandbyStub(channel).Vouch(pb.Renewal(term=term), metadata=metadata, timeout=seconds)
            return bool((await call).yes)
    except (grpc.aio.AioRpcError, EdlError):
        return False
