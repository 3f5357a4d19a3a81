# SPDX-License-Identifier: Apache-2.0
"""The gRPC service of ps.proto.

Numerical work and the log run on one thread, so that the event loop stays free to receive and send. Calls are
executed one after the other, in the order of arrival. A call whose generation has not started yet waits.

A caller may disappear at any moment: gRPC then cancels its call at the current `await`, while the work on the
native thread runs to completion. So nothing that other calls depend on may follow an `await`: captures are
copied, calls waiting for a generation are woken, and snapshots are used or dropped, even if the call is
cancelled (tests/unit/ps/test_calls_that_end.py).

Statuses:
    UNAUTHENTICATED: no token of the job.
    PERMISSION_DENIED: the read token is not enough for the call.
    INVALID_ARGUMENT: the request is invalid in every state.
    ABORTED: its generation is stale.
    FAILED_PRECONDITION: the server is in another state, for example at another step or without tables.
    RESOURCE_EXHAUSTED: the memory limit.
    UNAVAILABLE: the disk is full.
    DATA_LOSS: a checkpoint cannot be read; the server is empty then.
After every other status the server is unchanged. Each status has a message for people.

Workers must call `Pull` on every server at each step, at least one of them and without ids if need be: so
every server learns the result of every step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import grpc
import numpy as np
import structlog
from google.protobuf.message import Message  # type: ignore[import-untyped]

from edl.contract import hangs, vital
from edl.contract.bounds import violation
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.shares import OPTIONS as PEER_OPTIONS
from edl.contract.rows.wire import Bytes, Pieces, carried, varint
from edl.errors import CheckpointError
from edl.net import tls
from edl.net.listener import OPTIONS as LISTENER_OPTIONS
from edl.net.listener import Reading
from edl.ps.errors import (
    GenerationPending,
    Invalid,
    Misplaced,
    OutOfMemory,
    Refused,
    Stale,
    Unavailable,
    Unreadable,
)
from edl.ps.rpc.multiplex import Conversations
from edl.ps.server import ParameterServer
from edl.ps.storage.capture import Capture

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
OPTIONS = [
    *(option for option in LISTENER_OPTIONS if not option[0].endswith("_message_length")),
    ("grpc.max_receive_message_length", -1),  # a step may be of any size
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.lookahead_bytes", 256 << 10),  # bytes of a message received ahead of reads
    # Calls of a worker on a lost node end after 45 s, when the kernel drops the connection. Calls of a
    # stopped worker end after 90 s, because gRPC waits a minute for the answer to a ping.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
]
_STATUS = {
    Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    Stale: grpc.StatusCode.ABORTED,
    Misplaced: grpc.StatusCode.FAILED_PRECONDITION,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    Unreadable: grpc.StatusCode.DATA_LOSS,
}

# Calls that the read token allows: current rows only. A call with a generation may apply a step.
READING: Reading = {
    "/edl.ParameterServer/Pull": lambda request: not request.generation,
    "/edl.ParameterServer/List": lambda request: not request.generation,
    "/edl.ParameterServer/Describe": lambda request: not request.kept,
    "/edl.ParameterServer/Probe": lambda _: True,
}
SMALL = 1 << 18  # bytes of rows, ids and gradients: handled within a fraction of a millisecond
ROW_TIMES = 8  # assumed ratio of the sizes of a row and an id
PAGE = "/edl.ParameterServer/Page"
PAGE_BYTES = 8 << 20

log = structlog.get_logger()


class Service:
    """Serve the calls of one server, until `close`.

    Args:
        another: creates a server for a new run; None: the server is for one run only.
        token: returns the job's current token, for calls of other servers.
        connect: creates a channel to another server.
    """

    def __init__(
        self,
        server: ParameterServer,
        another: Callable[[str], ParameterServer] | None = None,
        token: Callable[[], str] = str,
        connect: Callable[..., Any] = tls.aio_channel,
    ):
        self._server, self._another, self._token, self._connect = server, another, token, connect
        self._native = ThreadPoolExecutor(1, "native")
        # The checkpoint store may hang: copies and the log must not wait for it.
        self._copies = ThreadPoolExecutor(1, "copies")
        self._beside = ThreadPoolExecutor(2, "beside")  # writes shards of checkpoints
        self._snapshots = ThreadPoolExecutor(1, "snapshots")
        self._started = asyncio.Event()
        self._busy = 0.0
        self._queued = 0  # calls queued or running on the native thread
        self._calls = 0  # completed
        self._snapshot: asyncio.Task[None] | None = None  # the newest
        self._conversations = Conversations({})

    def register(self, server: grpc.aio.Server) -> None:
        def unary(
            call: Callable[[Any, Context], Awaitable[Any]], request: Any, reply: Any
        ) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_unary_rpc_method_handler(
                self._answering(call),
                request_deserializer=None if request is None else request.FromString,
                response_serializer=None if reply is None else reply.SerializeToString,
            )

        handlers = {
            "Declare": unary(self._declare, pb.Tables, pb.Position),
            "StartGeneration": unary(self._start_generation, pb.StartGenerationRequest, pb.Position),
            "Restore": unary(self._restore, pb.RestoreRequest, pb.Position),
            "Pull": unary(self._pull, pb.PullRequest, None),
            "List": unary(self._list, pb.ListRequest, pb.Listed),
            "WritePart": unary(self._write_part, pb.WritePartRequest, pb.Written),
            "Committed": unary(self._committed, pb.CommittedRequest, pb.Position),
            "Begin": unary(self._begin_job, None, pb.Progress),
            "Lease": unary(self._async_call("lease"), pb.LeaseRequest, pb.LeasedSteps),
            "Push": unary(self._push, None, pb.Progress),
            "Drain": unary(self._async_call("drain"), pb.DrainRequest, pb.Progress),
            "Reschedule": unary(self._async_call("reschedule"), pb.RescheduleRequest, pb.Progress),
            "Keep": unary(self._async_call("keep"), pb.KeepRequest, pb.Progress),
            "Fetch": unary(self._fetch, pb.FetchRequest, pb.Position),
            "Page": unary(self._page, pb.PageRequest, pb.PageOfRows),
            "Assign": unary(self._assign, pb.AssignRequest, pb.Position),
            "End": unary(self._end, pb.EndRequest, pb.Position),
            "Describe": unary(self._describe, pb.DescribeRequest, pb.Description),
            "Probe": unary(self._probe, pb.ProbeRequest, pb.Probed),
        }
        over_a_stream = {name: handler for name, handler in handlers.items() if name != "WritePart"}
        self._conversations = Conversations(over_a_stream)
        handlers["Converse"] = self._conversations.handler
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("edl.ParameterServer", handlers),)
        )

    async def end_conversations(self, grace: float) -> None:
        """Give running calls `grace` seconds to end, then end their streams."""
        await self._conversations.close(grace)

    async def close(self) -> None:
        """Stop the threads and flush the log to the disk."""
        if self._snapshot is not None:
            self._snapshot.cancel()
        await self._do(lambda _: self._server.close(), None)
        for threads in (self._native, self._copies, self._beside, self._snapshots):
            threads.shutdown(wait=False)

    # --- calls

    async def _declare(self, request: pb.Tables, _: Context) -> pb.Position:
        if self._another is not None and request.run_id != self._server.run_id:
            await self._then_wake(self._begin, request.run_id)  # waiting calls belong to the previous run
        return await self._do(lambda request: self._server.declare(request), request)

    async def _start_generation(self, request: pb.StartGenerationRequest, _: Context) -> pb.Position:
        return await self._then_wake(lambda request: self._server.mode.start_generation(request), request)

    async def _restore(self, request: pb.RestoreRequest, _: Context) -> pb.Position:
        return await self._then_wake(lambda request: self._server.mode.restore(request), request)

    async def _pull(self, request: pb.PullRequest, _: Context) -> bytes:
        def act(request: pb.PullRequest) -> bytes:
            return encode_rows(self._server.pull(request), self._server.version)

        size = ROW_TIMES * sum(len(asked.ids) for asked in request.ids)
        if request.HasField("last"):  # it may be the first call after that step, and apply it
            size += self._server.mode.pending
        return await self._when_started(act, request, size)

    async def _list(self, request: pb.ListRequest, _: Context) -> pb.Listed:
        return await self._when_started(lambda request: self._server.listed(request), request)

    async def _begin_job(self, request: Bytes, _: Context) -> pb.Progress:
        return await self._growing(lambda: self._server.mode.begin(request), max(len(request), SMALL))

    async def _push(self, request: Bytes, _: Context) -> pb.Progress:
        return await self._growing(lambda: self._server.mode.push(request), len(request))

    def _async_call(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: Any, _: Context) -> Any:
            return await self._do(lambda request: getattr(self._server.async_server, name)(request), request)

        return call

    async def _write_part(self, request: pb.WritePartRequest, context: Context) -> pb.Written:
        def acting(request: pb.WritePartRequest) -> Capture:
            capture = self._server.capture(request)
            self._copies.submit(capture.copy)
            return capture

        capture = await self._when_started(acting, request)
        await context.send_initial_metadata(())  # the state is captured: the ring continues
        try:
            part = await self._on(self._beside, lambda: self._server.write(capture, request))
        except (CheckpointError, OSError, ValueError) as error:
            return pb.Written(why=str(error))
        return pb.Written(name=part.name, nbytes=part.nbytes, sha256=bytes.fromhex(part.sha256))

    async def _committed(self, request: pb.CommittedRequest, _: Context) -> pb.Position:
        return await self._do(lambda request: self._server.committed(request), request)

    async def _fetch(self, request: pb.FetchRequest, _: Context) -> pb.Position:
        """Fetch pages of several servers concurrently; log them one after the other."""
        sources = await self._do(lambda request: self._server.mode.fetch(request), request)
        if sources:
            tables = range(len(self._server.tables))
            async with asyncio.TaskGroup() as tasks:
                for source in sources:
                    tasks.create_task(self._fetch_of(source, request, tables))
            return await self._do(lambda request: self._server.mode.fetched(request), request)
        return await self._do(lambda _: self._server.position(), None)

    async def _fetch_of(self, source: int, request: pb.FetchRequest, tables: Iterable[int]) -> None:
        metadata = (("authorization", f"Bearer {self._token()}"),)
        async with self._connect(request.addresses[source], PEER_OPTIONS) as channel:
            call: Any = channel.unary_unary(PAGE, pb.PageRequest.SerializeToString)
            for table in tables:
                asked = pb.PageRequest(
                    run_id=request.run_id,
                    generation=request.generation,
                    step=request.step,
                    of=request.of,
                    to=request.to,
                    index=self._server.index,
                    table=table,
                    most=PAGE_BYTES,
                )
                while True:
                    try:
                        raw = await call(asked, metadata=metadata)
                    except grpc.aio.AioRpcError as error:
                        raise _of_peer(source, error) from error
                    page = await self._do(
                        lambda raw: self._server.mode.take_page(request, raw), raw, len(raw)
                    )
                    if not page.next:
                        break
                    asked.bucket = page.next

    async def _page(self, request: pb.PageRequest, _: Context) -> pb.PageOfRows:
        return await self._when_started(lambda request: self._server.mode.page(request), request, PAGE_BYTES)

    async def _assign(self, request: pb.AssignRequest, _: Context) -> pb.Position:
        return await self._then_wake(lambda request: self._server.mode.assign(request), request)

    async def _end(self, request: pb.EndRequest, _: Context) -> pb.Position:
        if self._another is not None and request.run_id == self._server.run_id:
            await self._then_wake(self._drop, request.run_id)
        return await self._do(lambda _: self._server.position(), request)

    async def _describe(self, request: pb.DescribeRequest, _: Context) -> pb.Description:
        return await self._do(lambda request: self._server.describe(self._busy, request.kept), request)

    async def _probe(self, _request: pb.ProbeRequest, _: Context) -> pb.Probed:
        return pb.Probed(done=self._calls, waiting=self._queued)

    async def _write_snapshot(self, capture: Capture) -> None:
        name = ""
        try:
            name = await self._on(self._snapshots, lambda: self._server.write_snapshot(capture))
        except Exception as error:  # of any kind: a pending snapshot blocks all later ones
            log.warning(f"the snapshot of step {capture.step} cannot be written: {error}")
        try:
            await self._do(lambda name: self._server.use_snapshot(capture, name), name)
        except Unavailable as error:
            log.warning(str(error))

    async def _growing(self, act: Callable[[], T], size: int) -> T:
        """Execute a call that adds `size` bytes to the log, and start a snapshot if one is due."""
        loop = asyncio.get_running_loop()

        def acting(_: None) -> T:
            answer = act()
            if (capture := self._server.snapshot()) is not None:
                loop.call_soon_threadsafe(self._begin_snapshot, capture)
            return answer

        return await self._when_started(acting, None, size)

    def _begin_snapshot(self, capture: Capture) -> None:
        self._snapshot = vital.task(self._write_snapshot(capture), "snapshot")

    def _begin(self, run_id: str) -> None:
        """Replace the server by one of the new run; the rows of the previous run are dropped."""
        if run_id != self._server.run_id:
            assert self._another is not None
            log.info(f"run {run_id} begins; the rows of run {self._server.run_id or '(none)'} are dropped")
            self._server.close()
            self._server = self._another(run_id)

    def _drop(self, run_id: str) -> None:
        """Drop the rows of the run, which has ended, and wait for the next run."""
        if run_id and run_id == self._server.run_id:
            assert self._another is not None
            log.info(f"run {run_id} has ended; its rows are dropped")
            self._server.close()
            self._server = self._another("")

    # --- execution

    def _answering(
        self, call: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """Map `Refused` errors to gRPC statuses."""

        async def answer(request: Any, context: Context) -> Any:
            try:
                if isinstance(request, Message) and (outside := violation(request)):
                    raise Invalid(outside)
                return await call(request, context)
            except* Refused as errors:
                error = errors.exceptions[0]
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                await context.abort(_STATUS[type(error)], str(error))

        return answer

    async def _when_started(self, act: Callable[[Any], T], request: Any, size: int = SMALL) -> T:
        while True:
            changed = self._started
            try:
                return await self._do(act, request, size)
            except GenerationPending:
                await changed.wait()  # at most until the caller's deadline

    async def _then_wake(self, act: Callable[[Any], T], request: Any) -> T:
        """Execute a call and then wake calls that wait for a generation, even if its caller has gone."""
        loop = asyncio.get_running_loop()

        def acting(request: Any) -> T:
            try:
                return act(request)
            finally:
                loop.call_soon_threadsafe(self._wake)

        return await self._do(acting, request, PAGE_BYTES)

    def _wake(self) -> None:
        """Wake all calls that wait for a generation."""
        self._started.set()
        self._started = asyncio.Event()

    async def _do(self, act: Callable[[Any], T], request: Any, size: int = SMALL) -> T:
        """Execute `act` for the request, after all earlier calls.

        Args:
            act: must look up `self._server` itself: a new run may have replaced the server before `act` runs.
            size: bytes of work. A small call runs on the event loop: the hand-over to the native thread would
            take
                longer.
        """

        def timed() -> T:
            began = time.perf_counter()
            try:
                return act(request)
            finally:
                self._busy += time.perf_counter() - began

        if size < SMALL and not self._queued and not self._server.is_copying:
            return timed()

        def on_native() -> T:
            with hangs.watched():
                return timed()

        self._queued += 1
        loop = asyncio.get_running_loop()
        doing = self._native.submit(on_native)
        # Counted when the thread is free again, not when the caller gives up.
        doing.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return await asyncio.wrap_future(doing)

    def _done(self) -> None:
        self._queued -= 1
        self._calls += 1

    async def _on(self, threads: Executor, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, act)


def _of_peer(source: int, error: grpc.aio.AioRpcError) -> Refused:
    """The error for the caller of a server whose peer has not sent its rows."""
    words = f"parameter server {source}: {error.details() or error.code().name}"
    for kind in (Stale, Misplaced):
        if error.code() is _STATUS[kind]:
            return kind(words)
    return Unavailable(words)


def encode_rows(found: list[np.ndarray], version: int = 0) -> bytes:
    """Encode pb.Rows with a single copy of the rows, for which protobuf would need three."""
    pieces: Pieces = []
    for rows in found:
        pieces += carried(pb.Rows.ROWS_FIELD_NUMBER, [rows.data.cast("B") if rows.size else b""])
    if version:
        pieces.append(b"\x10" + varint(version))
    return b"".join(pieces)
