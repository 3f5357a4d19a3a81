# SPDX-License-Identifier: Apache-2.0
"""Calls over one stream, to a server that ends it, or that answers what cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from edl.trainer.ps_client.multiplex import CALL, Failed

SECONDS = 60.0  # for what must happen
INVALID = b"\xff\xff"  # no message of protobuf


class Server:
    """Answers each call with what the test gives."""

    def __init__(self) -> None:
        self.answers: Callable[[pb.Ask], bytes | None] = lambda ask: _answer(ask, b"")
        self.streams = 0
        self.end = threading.Event()  # set when a stream has ended
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._converse)
        service, _, method = CALL.removeprefix("/").partition("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _converse(self, asks: Iterator[bytes], _: Any) -> Iterator[bytes]:
        self.streams += 1
        try:
            for raw in asks:
                if (answer := self.answers(pb.Ask.FromString(raw))) is not None:
                    yield answer
        finally:
            self.end.set()

    def close(self) -> None:
        self._server.stop(None).wait()


def _answer(ask: pb.Ask, answer: bytes) -> bytes:
    return pb.Answer(number=ask.number, answer=answer).SerializeToString()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def link(server: Server) -> ServerLink:
    return ServerLink(0, server.address, "token", Interrupt())


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_that_cannot_be_read_fails_every_call_that_waits(server: Server, whole: bool) -> None:
    """
    Args:
        whole: the answer is of its call, and what it carries is invalid.
    """
    server.answers = lambda ask: None
    to = link(server)
    waits = to.start("Describe", pb.DescribeRequest())
    server.answers = lambda ask: _answer(ask, INVALID) if whole else INVALID
    invalid = to.start("Probe", pb.ProbeRequest())
    for call in [invalid] if whole else [invalid, waits]:
        with pytest.raises(Failed, match="INTERNAL: the server has sent an invalid answer") as error:
            call.result(timeout=SECONDS)
        assert error.value.code() is grpc.StatusCode.INTERNAL, "as of a call of its own"
    server.answers = lambda ask: _answer(ask, pb.Probed(done=3).SerializeToString())
    assert to.start("Probe", pb.ProbeRequest()).result(timeout=SECONDS).done == 3
    assert server.streams == (1 if whole else 2)


def test_a_stream_that_is_not_used_any_more_ends_when_its_calls_are_answered(server: Server) -> None:
    goes_on = threading.Event()
    server.answers = lambda ask: (goes_on.wait(SECONDS), _answer(ask, b""))[1]
    to = link(server)
    waits = to.start("Probe", pb.ProbeRequest())
    to.connect_anew()
    goes_on.set()
    assert waits.result(timeout=SECONDS).done == 0
    assert server.end.wait(SECONDS)
    assert to.start("Probe", pb.ProbeRequest()).result(timeout=SECONDS).done == 0
    assert server.streams == 2
