# SPDX-License-Identifier: Apache-2.0
"""Multiplexing of calls to one server over one stream (ps.proto, Converse; server side: ps/rpc/multiplex.py).

Promise: a call is answered, or fails as a separate call would: with the server's status, or with that of the
stream if the stream ends. A stream that has ended is not restarted: the next call opens a new one.

A thread of gRPC sends the requests, and a thread of this module receives the answers.
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
    """A call failed with this status."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(f"{code.name}: {details}")
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Asked:
    """A running call, with the interface of gRPC's futures."""

    def __init__(self, conversation: Conversation, number: int, read: Callable[[bytes], Any]):
        self._conversation, self.number, self._read = conversation, number, read
        self._pending = threading.Lock()
        self._pending.acquire()
        self._answer: pb.Answer | Failed | None = None  # None: cancelled

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            Failed: the call failed.
            FutureTimeoutError: there is no answer yet.
            FutureCancelledError: the call was cancelled.
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
        """Drop the answer. No effect after the answer."""
        self._conversation.ends(self.number, None)

    def ends(self, answer: pb.Answer | Failed | None) -> None:
        """Complete the call. Called once."""
        self._answer = answer
        self._pending.release()


class Conversation:
    """One stream. Thread-safe.

    Args:
        channel: to the server.
        metadata: the metadata of the stream.
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
        """Start a call. Returns at once.

        Args:
            read: parser of the answer.
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
        """Start no more calls. The stream ends when the running ones are answered."""
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
