# SPDX-License-Identifier: Apache-2.0
"""Files on the volume of the job's master: `master://checkpoints`, written and read over its gRPC port.

A release without a shared directory or an object store keeps its checkpoints and its trained model there.
Address, token and certificate are in the environment of workers and parameter servers.

Promise: a file appears only when all its bytes have arrived and are on the disk. At most one piece of it is
in memory, here and in the master. It is sent at `RATE` at most, so that training keeps the processors.
"""

from __future__ import annotations

import errno
import io
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import grpc

from edl.checkpoints.files import Files
from edl.contract.proto import storage_pb2 as pb
from edl.contract.proto import storage_pb2_grpc as rpc
from edl.contract.tokens import token_of_environment
from edl.errors import CheckpointError, EdlError
from edl.net import tls

SCHEME = "master://"
MASTER = "EDL_MASTER"  # in the environment of pods
PIECE = 1 << 20  # bytes in a message: a quarter of gRPC's limit, which the master's loop parses in 1 ms
RATE = 64 << 20  # bytes per second of one file
CALL_SECONDS = 60.0
STREAM_SECONDS = 600.0  # for a whole file; 1 GiB takes 16 s at the full rate
OPTIONS = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000))
# The master is away, or a master answers that does not act (yet). Any other status is an answer.
_PASSING = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}


class MasterAway(OSError):
    """The master does not answer now; it may later."""


class MasterPlace:
    """A `Place` on the volume of the job's master.

    Args:
        url: master://PLACE.

    Raises:
        CheckpointError: this process has no master, or its certificate cannot be read.
    """

    damage = Files.damage

    def __init__(self, url: str):
        self.where, self._place = url, url.removeprefix(SCHEME).strip("/")
        if not (address := os.environ.get(MASTER, "")):
            raise CheckpointError(
                f"{url} is on the volume of a release's master: only the release's own pods can open it"
            )
        try:
            self._stub = rpc.StorageStub(tls.channel(address, tls.authority(), OPTIONS))
        except EdlError as error:
            raise CheckpointError(f"{url}: {error}") from error

    def may_pass(self, error: OSError) -> bool:
        """Whether the master may answer later."""
        return isinstance(error, MasterAway)

    def all(self, prefix: str, wanted: Callable[[str], bool]) -> dict[str, dict[str, int]]:
        """The files of each wanted directory whose name begins with `prefix`, with their sizes in bytes."""
        found = self._call(self._stub.List, pb.ListFiles(of=self._name(), prefix=prefix))
        return {d.name: dict(d.bytes) for d in found.directories if wanted(d.name)}

    def sizes(self, directory: str, prefix: str = "") -> dict[str, int]:
        """The files of a directory whose name begins with `prefix`, with their sizes in bytes."""
        found = self._call(self._stub.List, pb.ListFiles(of=self._name(directory or "."), prefix=prefix))
        return dict(found.directories[0].bytes)

    def write(self, directory: str, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a new file. It is durable when this returns, and absent if this fails.

        Raises:
            OSError: the master failed, or the pieces did.
        """
        failed: list[BaseException] = []
        stream = _kept(failed, _paced(self._name(directory, name), pieces))
        try:
            self._call(self._stub.Write, stream, STREAM_SECONDS)
        except OSError:
            if failed:  # such as a value that is not finite: the stream was broken for it
                raise failed[0] from None
            raise

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """Create a file atomically. Return False if it exists."""
        made = pb.NewFile(file=self._name(directory, name), data=data)
        return bool(self._call(self._stub.Create, made).created)

    def open(self, directory: str, name: str) -> BinaryIO:
        """Open a file for reading from its beginning."""
        with _errors():
            call = self._stub.Read(
                self._name(directory, name), metadata=self._metadata, timeout=STREAM_SECONDS
            )
            return cast(BinaryIO, _Reader(call, next(call)))

    def rename(self, directory: str, name: str, other: str) -> None:
        self._call(self._stub.Rename, pb.RenameFile(file=self._name(directory, name), other=other))

    def remove(self, directory: str, names: Iterable[str]) -> None:
        """Remove these files in this order, and then the directory if it is empty."""
        self._call(self._stub.Remove, pb.RemoveFiles(of=self._name(directory), names=names))

    def _name(self, directory: str = "", name: str = "") -> pb.FileName:
        return pb.FileName(place=self._place, directory=directory, name=name)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {token_of_environment()}"),)

    def _call(self, method: Any, request: object, seconds: float = CALL_SECONDS) -> Any:
        with _errors():
            return method(request, metadata=self._metadata, timeout=seconds)


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the errors of a call into those of a file system.

    Raises:
        MasterAway: the master does not answer.
        OSError: the master's file system failed, or the master refused the call.
    """
    try:
        yield
    except grpc.RpcError as error:
        call = cast(grpc.Call, error)
        code, why = call.code(), call.details() or ""
        if code is grpc.StatusCode.INTERNAL and why.startswith("["):
            raise OSError(*json.loads(why)) from None
        if code in _PASSING:
            raise MasterAway(errno.EHOSTUNREACH, f"the master does not answer: {why}") from None
        raise OSError(errno.EACCES, f"the master refuses: {why}") from None


def _paced(file: pb.FileName, pieces: Iterable[memoryview]) -> Iterator[pb.FilePiece]:
    """The messages of a file, at `RATE` at most."""
    yield pb.FilePiece(file=file)
    began, sent = time.monotonic(), 0
    for piece in pieces:
        for start in range(0, len(piece), PIECE):
            data = bytes(piece[start : start + PIECE])
            sent += len(data)
            yield pb.FilePiece(data=data)
            if (ahead := sent / RATE - (time.monotonic() - began)) > 0:
                time.sleep(ahead)
    yield pb.FilePiece(last=True, nbytes=sent)


def _kept(failed: list[BaseException], pieces: Iterator[pb.FilePiece]) -> Iterator[pb.FilePiece]:
    """The same pieces; an error is added to `failed`, because gRPC only logs the errors of an iterator."""
    try:
        yield from pieces
    except Exception as error:
        failed.append(error)  # without a last piece, the master drops the file


class _Reader(io.RawIOBase):
    """A file that the master sends.

    Args:
        call: the stream.
        first: its first piece, which shows that the file exists.
    """

    def __init__(self, call: Any, first: pb.FilePiece):
        self._call, self._piece = call, memoryview(first.data)
        self._ended = first.last

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self._piece and not self._ended:
            with _errors():
                piece = next(self._call)
            self._piece, self._ended = memoryview(piece.data), piece.last
        count = min(len(room), len(self._piece))
        room[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def close(self) -> None:
        self._call.cancel()
        super().close()
