# SPDX-License-Identifier: Apache-2.0
"""An interceptor that cancels the calls of a gRPC server at random points.

A call is cancelled before it begins, at one of its `await`s, or a moment after it has reached an `await`.
gRPC does so when a caller disappears, a deadline passes or a connection ends. The seed determines the point.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from itertools import count
from typing import Any, TypeVar

import grpc

MARK = "cancelled"  # the metadata key of calls to cancel
MAX_AWAITS = 4  # of a call; later awaits are not cancelled
MAX_SECONDS = 0.002  # from the `await` to the cancellation
BEFORE = -1  # the call has not begun

T = TypeVar("T")
Call = Callable[[Any, Any], Coroutine[Any, Any, Any]]


class Cancelling(grpc.aio.ServerInterceptor):
    """Cancels the calls that were made by `making`, unless they end earlier.

    Args:
        seed: determines the points of cancellation.
        of_streams: the last `await` of a stream that is cancelled.
    """

    def __init__(self, seed: int, of_streams: int = MAX_AWAITS):
        self._dice, self._of_streams = random.Random(seed), of_streams
        self.cancelled: Counter[str] = Counter()  # by the call's name
        self.ended: Counter[str] = Counter()  # the calls that ended before their cancellation
        self._callers: dict[str, Callable[[], object]] = {}

    def making(self, begin: Callable[[list[tuple[str, str]]], T]) -> T:
        """Make a call that will be cancelled, on the caller's side too.

        Args:
            begin: begins the call with the given metadata.
        """
        number = str(len(self._callers))
        call: Any = begin([(MARK, number)])
        self._callers[number] = call.cancel
        return call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(details)
        number = dict(details.invocation_metadata or ()).get(MARK)
        if handler is None or number is None:
            return handler
        name = details.method.rpartition("/")[2]
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            call = self._of(name, str(number), handler.unary_unary, MAX_AWAITS)
            return grpc.unary_unary_rpc_method_handler(call, read, write)
        if handler.unary_stream is not None:
            call = self._of(name, str(number), _writing(handler.unary_stream), self._of_streams)
            return grpc.unary_stream_rpc_method_handler(call, read, write)
        call = self._of(name, str(number), _writing(handler.stream_stream), self._of_streams)
        return grpc.stream_stream_rpc_method_handler(call, read, write)

    def _of(self, name: str, number: str, call: Call, most_awaits: int) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            point = self._dice.randint(BEFORE, most_awaits)
            seconds = self._dice.choice((0.0, self._dice.uniform(0, MAX_SECONDS)))
            task = asyncio.ensure_future(_cancelled_at(point, seconds, partial(call, request, context)))
            if point == BEFORE:
                task.cancel()
            try:
                answered = await task
            except asyncio.CancelledError:
                self.cancelled[name] += 1
                self._callers[number]()
                raise
            self.ended[name] += 1
            return answered

        return answer


def _writing(call: Any) -> Call:
    """Make a coroutine of an async generator, which gRPC cancels between its messages and inside of it."""
    if not inspect.isasyncgenfunction(call):
        return call

    async def write(request: Any, context: Any) -> None:
        async for message in call(request, context):
            await context.write(message)

    return write


async def _cancelled_at(point: int, seconds: float, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Make the call. Its task is cancelled at its await number `point`, or `seconds` after that."""
    return await _CancelledAt(point, seconds, call())


class _CancelledAt:
    def __init__(self, point: int, seconds: float, coroutine: Coroutine[Any, Any, Any]):
        self._point, self._seconds, self._coroutine = point, seconds, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        go_on = partial(self._coroutine.send, None)
        for waits in count():
            try:
                awaited = go_on()
            except StopIteration as done:
                return done.value
            if waits == self._point:
                task = asyncio.current_task()
                assert task is not None
                if self._seconds:
                    asyncio.get_running_loop().call_later(self._seconds, task.cancel)
                else:
                    task.cancel()
            try:
                yield awaited
            except BaseException as error:
                go_on = partial(self._coroutine.throw, error)
            else:
                go_on = partial(self._coroutine.send, None)
        return None
