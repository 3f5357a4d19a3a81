# SPDX-License-Identifier: Apache-2.0
"""Multiplexing of calls over one stream (ps.proto, Converse).

A separate gRPC call costs three to four times as much as a message of a stream: headers, thread wake-ups and
call state.

Promise: a call is answered as if it were a separate call, even if other calls of its stream wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows import wire

Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

log = structlog.get_logger()


class Conversations:
    """All streams of one server.

    Args:
        handlers: of the calls that can be multiplexed, each with one request and one answer.
    """

    def __init__(self, handlers: Handlers):
        self._handlers = handlers
        self._streams: dict[asyncio.Task[Any], set[asyncio.Task[None]]] = {}  # and their calls
        self._ending = False

    @property
    def handler(self) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.stream_stream_rpc_method_handler(self._converse)

    async def close(self, grace: float) -> None:
        """Give running calls `grace` seconds to end, then end all streams. New streams are rejected."""
        self._ending = True
        if going := [call for calls in self._streams.values() for call in calls]:
            await asyncio.wait(going, timeout=grace)
        for stream in self._streams:
            stream.cancel()

    async def _converse(self, _: Any, context: Context) -> None:
        stream, calls, writing = asyncio.current_task(), set[asyncio.Task[None]](), asyncio.Lock()
        assert stream is not None
        if self._ending:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        self._streams[stream] = calls
        try:
            while (raw := await context.read()) is not grpc.aio.EOF:
                call = asyncio.create_task(self._answer(_Ask.of(raw), context, writing))
                calls.add(call)
                call.add_done_callback(calls.discard)
            if calls:
                await asyncio.wait(calls)
        except asyncio.CancelledError:
            if not self._ending:  # on shutdown the stream ends as if the worker had ended it
                raise
        finally:
            del self._streams[stream]
            for call in calls:
                call.cancel()

    async def _answer(self, ask: _Ask, context: Context, writing: asyncio.Lock) -> None:
        try:
            answer = await self._answered(ask)
        except _Aborted as aborted:
            answer = pb.Answer(number=ask.number, code=aborted.code, why=aborted.why).SerializeToString()
        except Exception as error:
            log.exception(f"{ask.method} failed")
            why = f"unexpected {type(error).__name__}: {error}"
            code = grpc.StatusCode.UNKNOWN.value[0]
            answer = pb.Answer(number=ask.number, code=code, why=why).SerializeToString()
        try:
            async with writing:
                await context.write(answer)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the caller has gone

    async def _answered(self, ask: _Ask) -> bytes:
        handler = self._handlers.get(ask.method)
        if handler is None or handler.unary_unary is None:
            raise _Aborted(grpc.StatusCode.UNIMPLEMENTED, f"unknown call {ask.method!r}")
        read, write = handler.request_deserializer, handler.response_serializer
        try:
            # Handlers without a deserializer parse the bytes themselves and get a view.
            request: Any = ask.request if read is None else read(bytes(ask.request))
        except Exception as error:
            raise _Aborted(grpc.StatusCode.INVALID_ARGUMENT, f"{ask.method}: {error}") from error
        found = await handler.unary_unary(request, _CONTEXT)  # type: ignore[arg-type]
        answer = found if write is None else write(found)
        return b"".join([b"\x08", wire.varint(ask.number), *wire.carried(_ANSWER, [answer])])


@dataclass(frozen=True, slots=True)
class _Ask:
    """pb.Ask, whose request is a view of the received bytes."""

    number: int
    method: str
    request: wire.Bytes

    @classmethod
    def of(cls, raw: bytes) -> _Ask:
        found: dict[int, Any] = {number: held for number, held, _, _ in wire.fields(raw)}
        return cls(found.get(1, 0), str(found.get(2, b""), "utf-8"), found.get(3, b""))


_ANSWER = pb.Answer.ANSWER_FIELD_NUMBER


class _Aborted(Exception):
    def __init__(self, code: grpc.StatusCode, why: str):
        super().__init__(why)
        self.code, self.why = code.value[0], why


class _CallOfStream:
    """The servicer context of a multiplexed call."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise _Aborted(code, details)


_CONTEXT = _CallOfStream()
