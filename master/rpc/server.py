# SPDX-License-Identifier: Apache-2.0
"""The master's gRPC server: streams become events, effects become messages.

Every call needs the job's token. A worker's stream is opened once, and its messages are in order. Messages of
a different run are refused and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import grpc
import structlog

import edl
from edl.contract import vital
from edl.contract.bounds import violation
from edl.contract.ids import RunId, WorkerId
from edl.contract.masters import SAYS_SECONDS
from edl.contract.proto import ADMITTED, storage_pb2_grpc
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.parameter_servers.base import NoServers, ParameterServers
from edl.master.rpc.authority import Alone, Authority
from edl.master.rpc.checkpoint_parts import CheckpointParts
from edl.master.rpc.messages import ended_before, event_of, hello_of, message_of
from edl.master.rpc.outbox import Letter, Outbox
from edl.master.rpc.rendezvous import Rendezvous
from edl.master.rpc.storage import Storage
from edl.net.listener import Context, Listener

MAX_UPDATES_SECONDS = 0.2
LAST_WORDS_SECONDS = 2.0

log = structlog.get_logger()
MAX_PREFLIGHTS = 2


def _work_in_bytes(server: MasterServer) -> tuple[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
    """Return a handler of workers' streams that sends serialised messages; other calls are as generated."""
    work = grpc.stream_stream_rpc_method_handler(
        server.Work, request_deserializer=pb.FromWorker.FromString, response_serializer=bytes
    )
    return pb.DESCRIPTOR.services_by_name["Master"].full_name, {"Work": work}


class Handler(Protocol):
    """The master's loop, as this server needs it: it answers calls and processes messages of streams."""

    run_id: RunId

    def emit(self, said: ev.Event | facts.Heartbeat) -> None:
        """Process an event or a heartbeat, in the order of arrival."""

    def status(self, now: float) -> dict[str, Any]:
        """The status of the job, ready for JSON."""

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        """Request a different number of workers or of parameter servers.

        Raises:
            EdlError: the number is not possible.
        """

    def stop(self, why: str, checkpoint: bool = False, force: bool = False, id: str = "") -> str:
        """Request the end of the job.

        Args:
            checkpoint: end only once the state is in a checkpoint.
            force: end even if the checkpoint fails.
            id: the id of this request.

        Raises:
            EdlError: the job writes no checkpoints.
        """

    def checkpoint(self) -> str:
        """Request a checkpoint.

        Raises:
            EdlError: the job writes no checkpoints.
        """

    def vacant(self) -> WorkerId | None:
        """Return a needed worker that was not started yet, for a process that connects without an id."""

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        """Return the worker that replaces an ended one in the same pod; wait a while until one is needed."""


class MasterServer(rpc.MasterServicer):
    """The server of the job for workers and commands.

    Args:
        config_json: the job's values, for the workers.
        output: the job's output directory, for the workers.
        outage_timeout: seconds that workers continue without a master; 0: they end with it.
        salvage: where workers save the model if saving it in `output` fails.
        authority: checked before each message to a worker.
        servers: the parameter servers whose addresses are sent to the workers.
        storage: serves the files on the master's volume; None if its pod has no such volume.
    """

    def __init__(
        self,
        handler: Handler,
        listener: Listener,
        config_json: str,
        output: str,
        outage_timeout: float = 0.0,
        salvage: str = "",
        authority: Authority = Alone(),  # noqa: B008
        servers: ParameterServers = NoServers(),  # noqa: B008
        storage: Storage | None = None,
    ):
        self._servers, self._storage = servers, storage
        self._addresses: tuple[str, ...] = ()  # of the servers, once they are known
        self._handler, self._run_id, self._authority = handler, handler.run_id, authority
        self._config_json, self._output, self._outage_timeout = config_json, output, outage_timeout
        self._salvage = salvage
        self._listener = listener
        self._telling: asyncio.Task[None] | None = None  # announces the acting master
        self._preflight_worker: WorkerId | None = None  # the worker that tests whether the model can be saved
        self._preflights = 0  # started so far; limited, as a preflight's memory may end the worker
        self._preflight_done = False
        self._streams: dict[WorkerId, Outbox] = {}
        self._fenced: dict[WorkerId, str] = {}
        self._rendezvous = Rendezvous()
        self._parts = CheckpointParts()
        self._changed = asyncio.Event()  # set, and replaced, at each change
        self._closing = False
        self.foreign = 0  # refused messages of a different run or generation

    async def start(self, address: str) -> int:
        """Listen on `address` (host:port, port 0 for any); returns the port.

        Raises:
            EdlError: the address is taken, or not one of this machine; or the certificate cannot be used.
        """
        port = await self._listener.start(address, self._serve)
        self._telling = vital.task(self._say_who_acts(), "acting master")
        return port

    def _serve(self, server: grpc.aio.Server) -> None:
        rpc.add_MasterServicer_to_server(self, server)
        server.add_registered_method_handlers(*_work_in_bytes(self))
        if self._storage is not None:
            storage_pb2_grpc.add_StorageServicer_to_server(self._storage, server)

    async def _say_who_acts(self) -> None:
        """Announce to the workers that this master acts, while others could act."""
        told: tuple[str, ...] = ()
        while True:
            standbys = self._authority.standbys
            if standbys or told:
                acting = pb.ActiveMaster(term=self._authority.term, standbys=standbys)
                # If messages wait, the authority is in doubt, and an announcement may wait already.
                heard = [worker for worker, outbox in self._streams.items() if not len(outbox)]
                self._send(heard, pb.ToWorker(active_master=acting))
            told = standbys
            await asyncio.sleep(SAYS_SECONDS)

    async def close(self) -> None:
        for outbox in self._streams.values():
            outbox.close()
        self._closing = True
        if self._telling is not None:
            self._telling.cancel()
        self.changed()
        await self._listener.close(LAST_WORDS_SECONDS)

    # --- effects

    def perform(self, effect: ef.ForWorkers) -> None:
        """Send the message of an effect to its workers."""
        match effect:
            case ef.Form(generation, members):
                self._rendezvous.open(generation, members)
            case ef.Fence(worker, why):
                self._fenced[worker] = why
                if (outbox := self._streams.pop(worker, None)) is not None:
                    outbox.close()
            case ef.Commit(worker) if (commit := self._parts.order(effect)) is not None:
                self._send((worker,), commit)
        if (order := message_of(effect)) is not None:
            self._send(*order)

    def acknowledge(self, saved: ev.Saved) -> None:
        """Confirm to a worker that its saved model is recorded."""
        self._send((saved.worker,), pb.ToWorker(ack=pb.Ack()))

    def take(self, config_json: str) -> None:
        """Send changed values of the job to the workers, in the same message as the first values."""
        self._config_json = config_json
        for worker in self._streams:
            self._send((worker,), pb.ToWorker(welcome=self._welcome(worker)))

    def _welcome(self, worker: WorkerId) -> pb.Welcome:
        return pb.Welcome(
            config=self._config_json,
            output=self._output,
            worker=worker,
            master_outage_timeout_seconds=self._outage_timeout,
            salvage=self._salvage,
            preflight=worker == self._preflight_worker,
            servers=self._addresses,
        )

    def changed(self) -> None:
        """Notify all watchers of a changed status."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _send(self, workers: Iterable[WorkerId], message: pb.ToWorker) -> None:
        letter = Letter.of(message, self._run_id, self._authority.term)
        for worker in workers:
            if (outbox := self._streams.get(worker)) is not None:
                outbox.put(letter)

    # --- calls

    async def Work(self, requests: AsyncIterator[pb.FromWorker], context: Context) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(((ADMITTED, "yes"),))  # the worker may send messages now
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("body") != "hello" or first.run_id not in ("", self._run_id):
            self.foreign += 1
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this is another job's master")
        assert first is not None
        if outside := violation(first):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, outside)
        if first.hello.term > (mine := self._authority.term):
            self._authority.outranked(first.hello.term)
            why = f"this master (term {mine}) is superseded by that of term {first.hello.term}"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
        worker = await self._who(first.hello)
        if worker is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no worker slot is available")
        assert worker is not None
        if first.hello.version != edl.__version__:
            why = f"the master is edl {edl.__version__}, the worker is edl {first.hello.version}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        if worker in self._fenced:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._fenced[worker])
        if worker in self._streams:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"worker {worker} has a stream already")
        outbox = self._streams[worker] = Outbox()
        preflight = (
            self._preflight_worker is None and self._preflights < MAX_PREFLIGHTS and not first.hello.resumes
        )
        if preflight:
            self._preflight_worker, self._preflights = worker, self._preflights + 1
        self._handler.emit(hello_of(worker, first.hello))
        listening = asyncio.create_task(self._listen(worker, requests, outbox))
        try:
            # It is heard meanwhile: a new master gives up workers that do not report their state soon, and
            # servers may take longer to listen.
            self._addresses = await self._servers.addresses()  # it needs them from its first step on
            if await self._authority.confirmed():
                welcome = pb.ToWorker(welcome=self._welcome(worker))
                yield Letter.of(welcome, self._run_id, self._authority.term).wire
            while (wire := await outbox.next()) is not None and await self._authority.confirmed():
                yield wire
            if worker in self._fenced:
                await context.abort(grpc.StatusCode.ABORTED, f"given up: {self._fenced[worker]}")
        finally:
            listening.cancel()
            if self._streams.get(worker) is outbox:
                del self._streams[worker]
            if self._preflight_worker == worker and not self._preflight_done:
                self._preflight_worker = None  # the next worker does it
            self._handler.emit(ev.Closed(worker, ev.STREAM_ENDED))

    async def _who(self, hello: pb.Hello) -> WorkerId | None:
        """Return the id of a worker that connects; None if it is not needed."""
        if hello.worker >= 0:
            return WorkerId(hello.worker)
        if hello.HasField("predecessor"):
            return await self._handler.replace_in_place(ended_before(hello.predecessor))
        worker = self._handler.vacant()
        while worker in self._streams:  # a worker connected with this id, and its event is not processed yet
            await asyncio.sleep(0)
            worker = self._handler.vacant()
        return worker

    async def _listen(self, worker: WorkerId, requests: AsyncIterator[pb.FromWorker], outbox: Outbox) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in requests:
                body = message.WhichOneof("body")
                if message.run_id != self._run_id:
                    self.foreign += 1
                elif outside := violation(message):
                    log.warning(f"worker {worker} is given up: {outside}")
                    self._fenced[worker] = outside
                    break
                elif body in ("addresses", "key_value"):
                    self._meet(worker, message)
                elif body == "checkpoint_part" and worker not in self._fenced:
                    if (whole := self._parts.hear(worker, message)) is not None:
                        self._handler.emit(whole)
                elif worker not in self._fenced and (event := event_of(worker, message)) is not None:
                    self._preflight_done |= worker == self._preflight_worker and isinstance(event, ev.Ready)
                    self._handler.emit(event)
                    if isinstance(event, facts.Heartbeat):
                        self.changed()
        outbox.close()

    def _meet(self, worker: WorkerId, message: pb.FromWorker) -> None:
        meeting = self._rendezvous
        if message.generation != meeting.generation:
            self.foreign += 1
        elif message.HasField("addresses"):
            try:
                for member, told in meeting.hear(worker, message.addresses):
                    self._send((member,), told)
            except ValueError as error:
                log.warning(f"the rendezvous of generation {meeting.generation}: {error}; ignored")
        else:
            others = [member for member in meeting.members if member != worker]
            self._send(others, pb.ToWorker(generation=message.generation, key_value=message.key_value))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Status]:
        while True:
            changed = self._changed
            yield pb.Status(json=json.dumps(self._handler.status(asyncio.get_running_loop().time())))
            if not request.follow or self._closing:
                return
            await changed.wait()
            if not self._closing:  # faster updates cannot be read; the last one is not delayed
                await asyncio.sleep(MAX_UPDATES_SECONDS)

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.Reply:
        try:
            workers = request.workers if request.HasField("workers") else None
            servers = request.servers if request.HasField("servers") else None
            return pb.Reply(text=self._handler.scale(workers, servers))
        except EdlError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> pb.Reply:
        try:
            return pb.Reply(text=self._handler.checkpoint())
        except EdlError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.Reply:
        try:
            return pb.Reply(
                text=self._handler.stop(request.why, request.checkpoint, request.force, request.id)
            )
        except EdlError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise
