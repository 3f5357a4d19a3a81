# SPDX-License-Identifier: Apache-2.0
"""The standby masters, as this worker knows them: it reports to them that it has lost the acting master.

The acting master sends their addresses while all is well. So the worker need not look them up when the acting
master is lost: a Service and DNS may lead to the lost node for most of a minute. The worker keeps a stream to
each standby, and sends nothing on it while it receives messages from the acting master. A standby that
becomes the acting master sends its term there: then `called` is set.

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
    """The standby masters of one worker's stream.

    Args:
        token: the job's token.
        host: the Service's name, for which the certificate of every master is made.
        worker: returns this worker's id.
        options: the options of gRPC.
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
        self._changed = asyncio.Event()  # set, and replaced, when there is a new message to send
        self._alarm: asyncio.TimerHandle | None = None
        self.called = asyncio.Event()  # a standby has become the acting master
        self._caller = ("", 0)  # its address and term

    def hear(self, term: int) -> None:
        """A message of the acting master, of this term, was received."""
        self._heard_at = asyncio.get_running_loop().time()
        self._say(term, False)

    def lose(self) -> None:
        """The stream of the acting master broke."""
        self._say(self._term, True)

    def name(self, addresses: Collection[str]) -> None:
        """Set the addresses of the standby masters."""
        for address in self._streams.keys() - set(addresses):
            self._streams.pop(address).cancel()
        for address in set(addresses) - self._streams.keys():
            self._streams[address] = vital.task(self._attend(address), f"standby {address}")
        if self._streams and self._alarm is None:
            self._watch()

    def take_call(self) -> tuple[str, int]:
        """The address and term of the standby that has become the acting master."""
        self.called.clear()
        if stream := self._streams.pop(self._caller[0], None):  # it is no standby any more
            stream.cancel()
        return self._caller

    def _say(self, term: int, lost: bool) -> None:
        if (term, lost) != (self._term, self._is_lost):
            self._term, self._is_lost = term, lost
            self._changed.set()
            self._changed = asyncio.Event()

    def _watch(self) -> None:
        """Notice that the acting master, which sends a message every second, is silent."""
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
