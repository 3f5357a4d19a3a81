"""The calls of ps.proto over gRPC.

Native work and the log have one thread of their own, so that the loop stays free to take and send bytes:
calls are done one after the other, in the order in which they came. A call of a generation that is not
settled yet waits.

A caller may go away at any moment: gRPC then cancels its call at the `await` that it has reached, while what
the native thread does for it goes on to its end. So nothing that other calls depend on may come after an
`await`: what is captured is copied, calls that wait for a generation look again, and a snapshot is used or
given up, whatever becomes of the call (tests/unit/test_calls_that_end.py).

Statuses: UNAUTHENTICATED without a token of the job; PERMISSION_DENIED, the one for reading is not enough;
INVALID_ARGUMENT, the request cannot be right; ABORTED, its generation has passed; FAILED_PRECONDITION, the
server is not in the state that was asked for (it was just started and knows no tables, or is at another
step); RESOURCE_EXHAUSTED, its memory limit; UNAVAILABLE, its disk is full; DATA_LOSS, a checkpoint cannot
be read (the server is empty then). After each of the others nothing has changed, and each has a text for
a person.

What the workers owe: at each step at least one of them calls `Pull` on every server, without ids if need be,
so that every server hears what became of every step.
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

from edl.contract import vital
from edl.contract.bounds import violation
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.shares import OPTIONS as PEER_OPTIONS
from edl.contract.rows.wire import Bytes, Pieces, carried, varint
from edl.errors import CheckpointError
from edl.net import tls
from edl.net.listener import OPTIONS as LISTENER_OPTIONS
from edl.net.listener import Reading
from edl.ps.errors import Invalid, Misplaced, OutOfMemory, Refused, Stale, Unavailable, Unreadable, Unsettled
from edl.ps.rpc.multiplex import Conversations
from edl.ps.server import Server
from edl.ps.storage.storage import Capture

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
OPTIONS = [
    *(option for option in LISTENER_OPTIONS if not option[0].endswith("_message_length")),
    ("grpc.max_receive_message_length", -1),  # as large as a step is
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.lookahead_bytes", 256 << 10),  # so much of a message comes before it is asked for
    # The calls of a worker whose node is lost end after 45 s (the kernel then gives up the connection), those
    # of one that is stopped after 90 s (gRPC waits a minute for the answer to a ping).
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

# What the token for reading is enough for: rows as they are now. With a generation, a call may take a step.
READING: Reading = {
    "/edl.ParameterServer/Pull": lambda request: not request.generation,
    "/edl.ParameterServer/List": lambda request: not request.generation,
    "/edl.ParameterServer/Describe": lambda _: True,
    "/edl.ParameterServer/Probe": lambda _: True,
}
SMALL = 1 << 18  # bytes of rows, ids and gradients: a fraction of a millisecond
ROW_TIMES = 8  # so much as an id takes a row, or so
PAGE = "/edl.ParameterServer/Page"
PAGE_BYTES = 8 << 20

log = structlog.get_logger()


class Service:
    """Answers the calls for one server, until `close`.

    Args:
        another: makes a server of another run, should one begin; None: this one is of one run for good.
        token: of the job, as it is now: with which it calls other servers.
        connect: makes a channel to one of these.
    """

    def __init__(
        self, server: Server, another: Callable[[str], Server] | None = None,
        token: Callable[[], str] = str, connect: Callable[..., Any] = tls.aio_channel,
    ):  # fmt: skip
        self._server, self._another, self._token, self._connect = server, another, token, connect
        self._native = ThreadPoolExecutor(1, "native")
        # The store of checkpoints may hang: neither copies nor the log wait for it.
        self._copies = ThreadPoolExecutor(1, "copies")
        self._beside = ThreadPoolExecutor(2, "beside")  # parts of checkpoints that are written
        self._snapshots = ThreadPoolExecutor(1, "snapshots")
        self._settled = asyncio.Event()
        self._busy = 0.0
        self._queued = 0  # calls that the thread for native work has not done yet
        self._calls = 0  # that are done
        self._snapshot: asyncio.Task[None] | None = None  # the last one
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
            "Settle": unary(self._settle, pb.SettleRequest, pb.Position),
            "Restore": unary(self._restore, pb.RestoreRequest, pb.Position),
            "Load": unary(self._load, None, pb.Position),
            "Pull": unary(self._pull, pb.PullRequest, None),
            "List": unary(self._list, pb.ListRequest, pb.Listed),
            "Stage": unary(self._stage, None, pb.Position),
            "WritePart": unary(self._write_part, pb.WritePartRequest, pb.Written),
            "Committed": unary(self._committed, pb.CommittedRequest, pb.Position),
            "Begin": unary(self._begin_job, None, pb.Progress),
            "Take": unary(self._any_order("take"), pb.TakeRequest, pb.Taken),
            "Push": unary(self._push, None, pb.Progress),
            "Drain": unary(self._any_order("drain"), pb.DrainRequest, pb.Progress),
            "Reopen": unary(self._any_order("reopen"), pb.ReopenRequest, pb.Progress),
            "Keep": unary(self._any_order("keep"), pb.KeepRequest, pb.Progress),
            "Kept": unary(self._any_order("kept"), pb.KeptRequest, pb.KeepRequest),
            "Fetch": unary(self._fetch, pb.FetchRequest, pb.Position),
            "Page": unary(self._page, pb.PageRequest, pb.PageOfRows),
            "Arrange": unary(self._arrange, pb.ArrangeRequest, pb.Position),
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
        """Calls that go on may take so many seconds to end; then their streams end."""
        await self._conversations.close(grace)

    async def close(self) -> None:
        """What was told is on the disk then."""
        if self._snapshot is not None:
            self._snapshot.cancel()
        await self._do(lambda _: self._server.close(), None)
        for threads in (self._native, self._copies, self._beside, self._snapshots):
            threads.shutdown(wait=False)

    # --- calls

    async def _declare(self, request: pb.Tables, _: Context) -> pb.Position:
        if self._another is not None and request.run_id != self._server.run_id:
            await self._settling(self._begin, request.run_id)  # calls that wait are of the run before
        return await self._do(lambda request: self._server.declare(request), request)

    async def _settle(self, request: pb.SettleRequest, _: Context) -> pb.Position:
        return await self._settling(lambda request: self._server.settle(request), request)

    async def _restore(self, request: pb.RestoreRequest, _: Context) -> pb.Position:
        return await self._settling(lambda request: self._server.restore(request), request)

    async def _load(self, request: Bytes, _: Context) -> pb.Position:
        return await self._when_settled(lambda request: self._server.load(request), request, len(request))

    async def _pull(self, request: pb.PullRequest, _: Context) -> bytes:
        def act(request: pb.PullRequest) -> bytes:
            return encode_rows(self._server.pull(request), self._server.version)

        size = ROW_TIMES * sum(len(asked.ids) for asked in request.ids)
        if request.HasField("last"):  # it may be the first to say what became of that step
            size += self._server.pending
        return await self._when_settled(act, request, size)

    async def _list(self, request: pb.ListRequest, _: Context) -> pb.Listed:
        return await self._when_settled(lambda request: self._server.listed(request), request)

    async def _stage(self, request: Bytes, _: Context) -> pb.Position:
        return await self._growing(lambda: self._server.stage(request), len(request))

    async def _begin_job(self, request: Bytes, _: Context) -> pb.Progress:
        return await self._growing(lambda: self._server.any_order.begin(request), max(len(request), SMALL))

    async def _push(self, request: Bytes, _: Context) -> pb.Progress:
        return await self._growing(lambda: self._server.any_order.push(request), len(request))

    def _any_order(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: Any, _: Context) -> Any:
            return await self._do(lambda request: getattr(self._server.any_order, name)(request), request)

        return call

    async def _write_part(self, request: pb.WritePartRequest, context: Context) -> pb.Written:
        def acting(request: pb.WritePartRequest) -> Capture:
            capture = self._server.capture(request)
            self._copies.submit(capture.copy)
            return capture

        capture = await self._when_settled(acting, request)
        await context.send_initial_metadata(())  # it is taken: the ring goes on
        try:
            part = await self._on(self._beside, lambda: self._server.write(capture, request))
        except (CheckpointError, OSError, ValueError) as error:
            return pb.Written(why=str(error))
        return pb.Written(name=part.name, nbytes=part.nbytes, sha256=bytes.fromhex(part.sha256))

    async def _committed(self, request: pb.CommittedRequest, _: Context) -> pb.Position:
        return await self._do(lambda request: self._server.committed(request), request)

    async def _fetch(self, request: pb.FetchRequest, _: Context) -> pb.Position:
        """Pages of several servers at the same time; what the log says is one after the other."""
        sources = await self._do(lambda request: self._server.fetch(request), request)
        if sources:
            tables = range(len(self._server.tables))
            async with asyncio.TaskGroup() as tasks:
                for source in sources:
                    tasks.create_task(self._fetch_of(source, request, tables))
            return await self._do(lambda request: self._server.fetched(request), request)
        return await self._do(lambda _: self._server.position(), None)

    async def _fetch_of(self, source: int, request: pb.FetchRequest, tables: Iterable[int]) -> None:
        metadata = (("authorization", f"Bearer {self._token()}"),)
        async with self._connect(request.addresses[source], PEER_OPTIONS) as channel:
            call: Any = channel.unary_unary(PAGE, pb.PageRequest.SerializeToString)
            for table in tables:
                asked = pb.PageRequest(
                    run_id=request.run_id, generation=request.generation, step=request.step,
                    of=request.of, to=request.to, index=self._server.index, table=table, most=PAGE_BYTES,
                )  # fmt: skip
                while True:
                    try:
                        raw = await call(asked, metadata=metadata)
                    except grpc.aio.AioRpcError as error:
                        raise _of_peer(source, error) from error
                    page = await self._do(lambda raw: self._server.take_page(request, raw), raw, len(raw))
                    if not page.next:
                        break
                    asked.bucket = page.next

    async def _page(self, request: pb.PageRequest, _: Context) -> pb.PageOfRows:
        return await self._when_settled(lambda request: self._server.page(request), request, PAGE_BYTES)

    async def _arrange(self, request: pb.ArrangeRequest, _: Context) -> pb.Position:
        return await self._settling(lambda request: self._server.arrange(request), request)

    async def _end(self, request: pb.EndRequest, _: Context) -> pb.Position:
        if self._another is not None and request.run_id == self._server.run_id:
            await self._settling(self._drop, request.run_id)
        return await self._do(lambda _: self._server.position(), request)

    async def _describe(self, _request: pb.DescribeRequest, _: Context) -> pb.Description:
        return await self._do(lambda busy: self._server.describe(busy), self._busy)

    async def _probe(self, _request: pb.ProbeRequest, _: Context) -> pb.Probed:
        return pb.Probed(done=self._calls, waiting=self._queued)

    async def _write_snapshot(self, capture: Capture) -> None:
        name = ""
        try:
            name = await self._on(self._snapshots, lambda: self._server.write_snapshot(capture))
        except Exception as error:  # whatever it is: as long as this one is pending, there is no other one
            log.warning(f"the snapshot of step {capture.step} cannot be written: {error}")
        try:
            await self._do(lambda name: self._server.use_snapshot(capture, name), name)
        except Unavailable as error:
            log.warning(str(error))

    async def _growing(self, act: Callable[[], T], size: int) -> T:
        """A call that makes the log longer by so many bytes."""
        loop = asyncio.get_running_loop()

        def acting(_: None) -> T:
            answer = act()
            if (capture := self._server.snapshot()) is not None:
                loop.call_soon_threadsafe(self._begin_snapshot, capture)
            return answer

        return await self._when_settled(acting, None, size)

    def _begin_snapshot(self, capture: Capture) -> None:
        self._snapshot = vital.task(self._write_snapshot(capture), "snapshot")

    def _begin(self, run_id: str) -> None:
        """From now on be a server of that run. What there is of another one has ended with it."""
        if run_id != self._server.run_id:
            assert self._another is not None
            log.info(f"run {run_id} begins; the rows of run {self._server.run_id or '(none)'} are dropped")
            self._server.close()
            self._server = self._another(run_id)

    def _drop(self, run_id: str) -> None:
        """That run has ended. Wait for another one."""
        if run_id and run_id == self._server.run_id:
            assert self._another is not None
            log.info(f"run {run_id} has ended; its rows are dropped")
            self._server.close()
            self._server = self._another("")

    # --- how they are done

    def _answering(
        self, call: Callable[[Any, Context], Awaitable[Any]]
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """A refusal becomes a status."""

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

    async def _when_settled(self, act: Callable[[Any], T], request: Any, size: int = SMALL) -> T:
        while True:
            changed = self._settled
            try:
                return await self._do(act, request, size)
            except Unsettled:
                await changed.wait()  # the caller's deadline ends it

    async def _settling(self, act: Callable[[Any], T], request: Any) -> T:
        """A call after which those that wait for a generation look again, also if its caller has gone."""
        loop = asyncio.get_running_loop()

        def acting(request: Any) -> T:
            try:
                return act(request)
            finally:
                loop.call_soon_threadsafe(self._wake)

        return await self._do(acting, request, PAGE_BYTES)

    def _wake(self) -> None:
        """Calls that wait for a generation look again."""
        self._settled.set()
        self._settled = asyncio.Event()

    async def _do(self, act: Callable[[Any], T], request: Any, size: int = SMALL) -> T:
        """Have `act` done for the request, after what was asked before.

        Args:
            act: looks up `self._server` itself: another run may have begun by the time when it has its turn.
            size: how much there is to do. A little is done here: handing it to the other thread takes longer.
        """

        def timed() -> T:
            began = time.perf_counter()
            try:
                return act(request)
            finally:
                self._busy += time.perf_counter() - began

        if size < SMALL and not self._queued and not self._server.is_copying:
            return timed()
        self._queued += 1
        loop = asyncio.get_running_loop()
        doing = self._native.submit(timed)
        # Not when the caller gives up, but when the thread is free again.
        doing.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return await asyncio.wrap_future(doing)

    def _done(self) -> None:
        self._queued -= 1
        self._calls += 1

    async def _on(self, threads: Executor, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, act)


def _of_peer(source: int, error: grpc.aio.AioRpcError) -> Refused:
    """What it means for the caller that another server has not given its rows."""
    words = f"parameter server {source}: {error.details() or error.code().name}"
    for kind in (Stale, Misplaced):
        if error.code() is _STATUS[kind]:
            return kind(words)
    return Unavailable(words)


def encode_rows(found: list[np.ndarray], version: int = 0) -> bytes:
    """pb.Rows, with one copy of the rows."""
    pieces: Pieces = []
    for rows in found:
        pieces += carried(pb.Rows.ROWS_FIELD_NUMBER, [rows.data.cast("B") if rows.size else b""])
    if version:
        pieces.append(b"\x10" + varint(version))
    return b"".join(pieces)
