"""The masters that stand by, as this worker knows them: where it says that it has lost the acting one.

The acting master names them while all is well, so that nobody has to be asked where they are once it has gone
(a Service and DNS may lead to the lost node for most of a minute). To each there is a stream, on which
nothing is said while the acting master is heard. One that acts says so there, with its term: `called` is set
then.

Lives on the loop of the worker's stream (trainer/session/client.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any, TypeAlias

import grpc

from edl.contract import vital
from edl.contract.masters import SILENT_SECONDS
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError

AGAIN_SECONDS = 0.5

Connect: TypeAlias = Callable[[str, Sequence[tuple[str, Any]]], grpc.aio.Channel]


class Standbys:
    """Those of one worker.

    Args:
        token: the job's.
        host: of the Service, for which the certificate of every master is made.
        worker: this worker's id, asked for when it says something.
        options: of gRPC.
        connect: makes a channel to host:port.
    """

    def __init__(
        self,
        token: str,
        host: str,
        worker: Callable[[], int],
        options: Collection[tuple[str, object]],
        connect: Connect,
    ):
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._host, self._worker, self._options, self._connect = host, worker, list(options), connect
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._term = 0  # of the acting master
        self._heard_at = 0.0
        self._is_lost = False
        self._changed = asyncio.Event()  # set, and replaced, when there is something else to say
        self._alarm: asyncio.TimerHandle | None = None
        self.called = asyncio.Event()  # one of them acts
        self._caller = ("", 0)  # where, and in which term

    def hear(self, term: int) -> None:
        """The acting master, of this term, has said something."""
        self._heard_at = asyncio.get_running_loop().time()
        self._say(term, False)

    def lose(self) -> None:
        """The stream of the acting master broke."""
        self._say(self._term, True)

    def name(self, addresses: Collection[str]) -> None:
        """These stand by."""
        for address in self._streams.keys() - set(addresses):
            self._streams.pop(address).cancel()
        for address in set(addresses) - self._streams.keys():
            self._streams[address] = vital.task(self._attend(address), f"standby {address}")
        if self._streams and self._alarm is None:
            self._watch()

    def take_call(self) -> tuple[str, int]:
        """Who acts: host:port and term."""
        self.called.clear()
        if stream := self._streams.pop(self._caller[0], None):  # it does not stand by any more
            stream.cancel()
        return self._caller

    def _say(self, term: int, lost: bool) -> None:
        if (term, lost) != (self._term, self._is_lost):
            self._term, self._is_lost = term, lost
            self._changed.set()
            self._changed = asyncio.Event()

    def _watch(self) -> None:
        """Notice when the acting master, who would say something every second, is silent."""
        loop = asyncio.get_running_loop()
        self._alarm = None
        if not self._streams:
            return
        due = self._heard_at + SILENT_SECONDS
        if due <= loop.time():
            self._say(self._term, True)
            due = loop.time() + SILENT_SECONDS
        self._alarm = loop.call_at(due, self._watch)

    async def _attend(self, address: str) -> None:
        options = [*self._options, ("grpc.ssl_target_name_override", self._host)]
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, EdlError):
                async with self._connect(address, options) as channel:
                    stream = rpc.StandbyStub(channel).ReportMasterLost(
                        self._words(), metadata=self._metadata, wait_for_ready=True
                    )
                    async for acting in stream:
                        if acting.term > self._term:
                            self._caller = (address, acting.term)
                            self.called.set()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _words(self) -> AsyncIterator[pb.MasterReport]:
        while True:
            changed = self._changed
            yield pb.MasterReport(worker=self._worker(), term=self._term, lost=self._is_lost)
            await changed.wait()
