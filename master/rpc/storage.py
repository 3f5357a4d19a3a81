# SPDX-License-Identifier: Apache-2.0
"""The files of a job on the volume of its master: checkpoints, and the results of its runs.

    /var/lib/edl/checkpoints          of the present run
    /var/lib/edl/earlier-checkpoints  of the run before it, if it was a different one
    /var/lib/edl/run-ID               the trained model of run ID, its exports and its history

The directory is the master's output directory, which also has the journal. Callers reach these folders only.

Promise: a file is complete and on the disk before its writer is answered. A broken stream leaves nothing.
Each stream holds one piece in memory.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc
import structlog

from edl.checkpoints import CheckpointError, Store
from edl.checkpoints.files import Files
from edl.checkpoints.master import PIECE
from edl.contract import artifacts
from edl.contract.proto import storage_pb2 as pb
from edl.contract.proto import storage_pb2_grpc as rpc
from edl.net.listener import Context

T = TypeVar("T")
EARLIER, RUN = "earlier-checkpoints", "run-"
STALL_SECONDS = 60.0  # without a further piece of a file
THREADS = 8  # files that are written or read at once; further callers wait

log = structlog.get_logger()


class Storage(rpc.StorageServicer):
    """The service of an acting master.

    Args:
        root: the master's output directory.
        run_id: the run whose results are written.
    """

    def __init__(self, root: Path, run_id: str):
        self._root, self._run_id = root, run_id
        self._places = {artifacts.CHECKPOINTS, f"{RUN}{run_id}"}
        self._threads = ThreadPoolExecutor(THREADS, "storage")

    def begin(self, resume: bool) -> None:
        """Set the checkpoints of an earlier run aside, unless the job resumes from them.

        Those that were set aside before are removed: no run needs them.
        """
        here, earlier = self._root / artifacts.CHECKPOINTS, self._root / EARLIER
        try:
            found = Store.open(str(here)).checkpoints()
            if resume or not found or found[-1].manifest.run == self._run_id:
                return
            shutil.rmtree(earlier, ignore_errors=True)
            os.rename(here, earlier)
        except (CheckpointError, OSError) as error:  # workers will report what they cannot read
            log.warning(f"the checkpoints of an earlier run are not set aside: {error}")
        else:
            log.info(f"the checkpoints of run {found[-1].manifest.run} are in {earlier} now")

    async def List(self, request: pb.ListFiles, context: Context) -> pb.FilesListed:
        if not request.of.directory:
            place = self._root.joinpath(*await self._parts(request.of, context, reads=True))
            files = Files(place)
            there = await self._do(context, lambda: files.all(request.prefix, lambda name: True))
        else:
            files, directory = await self._directory(request.of, context, reads=True)
            there = {"": await self._do(context, lambda: files.sizes(directory, request.prefix))}
        Directory = pb.FilesListed.Directory
        return pb.FilesListed(directories=[Directory(name=n, bytes=sizes) for n, sizes in there.items()])

    async def Write(self, requests: AsyncIterator[pb.FilePiece], context: Context) -> pb.FileDone:
        first = await anext(aiter(requests), pb.FilePiece())
        files, directory = await self._directory(first.file, context)
        pieces = _Received(requests, asyncio.get_running_loop())
        name = first.file.name
        await self._do(context, lambda: files.write(directory, name, pieces))
        return pb.FileDone()

    async def Create(self, request: pb.NewFile, context: Context) -> pb.FileCreated:
        files, directory = await self._directory(request.file, context)
        create = lambda: files.create(directory, request.file.name, request.data)  # noqa: E731
        return pb.FileCreated(created=await self._do(context, create))

    async def Read(self, request: pb.FileName, context: Context) -> AsyncIterator[pb.FilePiece]:
        files, directory = await self._directory(request, context, reads=True)
        file = await self._do(context, lambda: files.open(directory, request.name))
        try:
            sent = 0
            while data := await self._do(context, lambda: file.read(PIECE)):
                sent += len(data)
                yield pb.FilePiece(data=data)
            yield pb.FilePiece(last=True, nbytes=sent)
        finally:
            file.close()

    async def Rename(self, request: pb.RenameFile, context: Context) -> pb.FileDone:
        files, directory = await self._directory(request.file, context)
        if not _is_name(request.other):
            await _refuse(context, request.other)
        await self._do(context, lambda: files.rename(directory, request.file.name, request.other))
        return pb.FileDone()

    async def Remove(self, request: pb.RemoveFiles, context: Context) -> pb.FileDone:
        files, directory = await self._directory(request.of, context)
        for name in request.names:
            if not _is_name(name):
                await _refuse(context, name)
        await self._do(context, lambda: files.remove(directory, list(request.names)))
        return pb.FileDone()

    async def _parts(self, file: pb.FileName, context: Context, reads: bool) -> list[str]:
        """The components of the path of a directory, below the root. Files of earlier runs may be read."""
        inside = [] if file.directory in ("", ".") else file.directory.split("/")
        parts = [*file.place.split("/"), *inside]
        wrong = [part for part in [*parts, *filter(None, [file.name])] if not _is_name(part)]
        if wrong or not (parts[0] in self._places or (reads and parts[0].startswith((RUN, EARLIER)))):
            await _refuse(context, "/".join([*parts, file.name]))
        return parts

    async def _directory(self, file: pb.FileName, context: Context, reads: bool = False) -> tuple[Files, str]:
        *above, last = await self._parts(file, context, reads)
        return Files(self._root.joinpath(*above)), last

    async def _do(self, context: Context, act: Callable[[], T]) -> T:
        """Call `act` on a thread, and answer the caller if the file system fails.

        Raises:
            OSError: it failed; the call is over.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, act)
        except OSError as error:
            told = [error.errno or errno.EIO, error.strerror or str(error)]
            await context.abort(grpc.StatusCode.INTERNAL, json.dumps(told))
            raise


def _is_name(text: str) -> bool:
    """Whether this is the name of a file in its directory, and of no other place."""
    return bool(text) and text not in (".", "..") and not set("/\0") & set(text)


async def _refuse(context: Context, path: str) -> NoReturn:
    why = f"{path!r} is not a file of the checkpoints or of this run's results"
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
    raise AssertionError


class _Received:
    """The pieces of a file as they arrive, for the thread that writes them."""

    def __init__(self, requests: AsyncIterator[pb.FilePiece], loop: asyncio.AbstractEventLoop):
        self._requests, self._loop, self._nbytes = requests, loop, 0

    def __iter__(self) -> Iterator[memoryview]:
        while not (piece := self._next()).last:
            self._nbytes += len(data := piece.data)  # each access copies the bytes
            yield memoryview(data)
        if piece.nbytes != self._nbytes:
            raise OSError(errno.EPROTO, f"{self._nbytes} bytes arrived of {piece.nbytes}")

    def _next(self) -> pb.FilePiece:
        """Wait for the next piece.

        Raises:
            OSError: the stream broke, or nothing has arrived for long.
        """
        wait, coming = self._wait(), None
        try:
            coming = asyncio.run_coroutine_threadsafe(wait, self._loop)
            return coming.result(STALL_SECONDS)
        except BaseException as error:  # StopAsyncIteration, a cancelled call, a closed loop
            (wait.close if coming is None else coming.cancel)()
            raise OSError(errno.ECONNABORTED, "the stream broke before its last piece") from error

    async def _wait(self) -> pb.FilePiece:
        return await anext(aiter(self._requests), None) or pb.FilePiece(last=True, nbytes=-1)
