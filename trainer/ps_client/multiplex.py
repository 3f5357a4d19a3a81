"""Calls to one server over one stream (ps.proto, Converse; the server's side is ps/rpc/multiplex.py).

Promise: a call has its answer, or fails as a call of its own would: with the server's status, or with that of
the stream, when that ends. A stream that has ended is not begun again: the next call makes another one.

Two threads: one of gRPC sends what is asked, and one of ours takes the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows import wire

CALL = "/edl.ParameterServer/Converse"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Failed(grpc.RpcError):
    """A call was not answered."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(f"{code.name}: {details}")
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Asked:
    """A call that was made, as gRPC's futures are."""

    def __init__(self, conversation: Conversation, number: int, read: Callable[[bytes], Any]):
        self._conversation, self.number, self._read = conversation, number, read
        self._pending = threading.Lock()
        self._pending.acquire()
        self._answer: pb.Answer | Failed | None = None  # None: nobody waits for it any more

    def result(self, timeout: float | None = None) -> Any:
        """The answer.

        Raises:
            Failed: there is none.
            FutureTimeoutError: not yet.
            FutureCancelledError: it was cancelled.
        """
        if not self._pending.acquire(timeout=-1 if timeout is None else timeout):
            raise grpc.FutureTimeoutError
        self._pending.release()
        answer = self._answer
        if answer is None:
            raise grpc.FutureCancelledError
        if isinstance(answer, Failed):
            raise answer
        if answer.code:
            raise Failed(_CODES.get(answer.code, grpc.StatusCode.UNKNOWN), answer.why)
        try:
            return self._read(answer.answer)
        except DecodeError as error:
            raise Failed(
                grpc.StatusCode.INTERNAL, f"the server has sent an invalid answer: {error}"
            ) from error

    def cancel(self) -> None:
        """Nobody waits for it any more. Nothing, if it is answered."""
        self._conversation.ends(self.number, None)

    def ends(self, answer: pb.Answer | Failed | None) -> None:
        """Once."""
        self._answer = answer
        self._pending.release()


class Conversation:
    """One stream, for any number of threads.

    Args:
        channel: to the server.
        metadata: with which it begins.
    """

    def __init__(self, channel: grpc.Channel, metadata: Sequence[tuple[str, str]]):
        self._asks = SimpleQueue[bytes | None]()
        self._numbers, self._lock = count(1), threading.Lock()
        self._open: dict[int, Asked] = {}
        self._failed: Failed | None = None
        begin: Any = channel.stream_stream(CALL)  # of bytes to bytes
        self._stream = begin(iter(self._asks.get, None), metadata=metadata)
        threading.Thread(target=self._take, name="answers", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        return self._failed is not None

    def ask(self, method: str, request: bytes, read: Callable[[bytes], Any]) -> Asked:
        """Call it. Returns at once.

        Args:
            read: of what is answered.
        """
        with self._lock:
            asked = Asked(self, next(self._numbers), read)
            if self._failed is not None:
                asked.ends(self._failed)
                return asked
            self._open[asked.number] = asked
        head = pb.Ask(number=asked.number, method=method).SerializeToString()
        self._asks.put(b"".join([head, *wire.carried(pb.Ask.REQUEST_FIELD_NUMBER, [request])]))
        return asked

    def close(self) -> None:
        """Make no more calls. The stream ends when those that were made are answered."""
        self._asks.put(None)

    def ends(self, number: int, answer: pb.Answer | None) -> None:
        with self._lock:
            asked = self._open.pop(number, None)
        if asked is not None:
            asked.ends(answer)

    def _take(self) -> None:
        try:
            for raw in self._stream:
                answer = pb.Answer.FromString(raw)
                self.ends(answer.number, answer)
            failed = Failed(grpc.StatusCode.UNAVAILABLE, "the server has ended the stream")
        except grpc.RpcError as error:
            failed = Failed(error.code(), error.details() or "")
        except DecodeError as error:
            failed = Failed(grpc.StatusCode.INTERNAL, f"the server has sent an invalid answer: {error}")
            self._stream.cancel()
        self.close()
        with self._lock:
            self._failed, left = failed, list(self._open.values())
            self._open.clear()
        for asked in left:
            asked.ends(failed)
