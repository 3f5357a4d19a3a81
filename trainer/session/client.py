# SPDX-License-Identifier: Apache-2.0
"""The worker's stream to its master: one ordered stream, on a thread of its own.

The main thread may be inside a collective or the user's code for long. This thread keeps sending heartbeats
meanwhile, relays the rendezvous, and cuts the ring at once when the master orders it. Orders for the main
thread go into the session (trainer/session/state.py).

When the master ends the stream, the worker is out of the job: the ring is cut, and the next order is `End`.
When the stream breaks, the master has died or cannot be reached. The worker continues, and looks for a master
as long as the last master has allowed it to. It sends its state to the next master, and none of the messages
that were meant for the former one. A standby master (trainer/session/standbys.py) can also call the worker
when it becomes the acting one. Then the old stream, which may be silent for long before it breaks, is given
up.

Promise: no order is obeyed from a master whose term is smaller than a term that this worker has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

from edl.contract import addresses, vital
from edl.contract.bounds import violation
from edl.contract.heartbeats import Usage
from edl.contract.proto import ADMITTED, STANDS_BY
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError
from edl.net import tls
from edl.trainer.runtime import log
from edl.trainer.runtime.gpu_usage import GpuUsage
from edl.trainer.session.kvstore import KeyValueStore, parts
from edl.trainer.session.standbys import Connect, Standbys
from edl.trainer.session.state import Session

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A master whose node is lost closes no connection: ping it, so that the worker looks for a new one.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
HEARTBEATS = 6  # in the time after which the master takes a worker for dead
AGAIN_SECONDS = 0.5
# Between two looks whether a member that must leave its ring is held up; and the looks after which it breaks
# the ring. A server that has just come back answers meanwhile, and no step is repeated.
LEAVE_AGAIN_SECONDS, HELD_UP_LOOKS = 0.2, 3
# The status codes of a stream that a master has ended; with any other, the connection broke.
MEANT = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNAUTHENTICATED,
}


class NoMaster(EdlError):
    """The master cannot be reached or rejects this worker."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a stream has ended.

    Args:
        meant: whether the master has ended it.
        welcomed: whether the master had sent a message on it.
        stands_by: whether a standby master has refused it.
    """

    why: str
    meant: bool = False
    welcomed: bool = False
    stands_by: bool = False


class MasterStream:
    """The stream to the master.

    Args:
        address: host:port of the master.
        token: the job's token.
        worker: this worker's id.
        connect: makes a channel to host:port.
        predecessor: how the former process of this pod has ended, if this process replaces it.
    """

    def __init__(
        self,
        address: str,
        token: str,
        worker: int,
        run_id: str,
        connect: Connect = tls.aio_channel,
        predecessor: pb.Predecessor | None = None,
    ):
        self.session = Session(worker, self._send, threading.Event())
        self.config_json = ""
        self.output = self.salvage = ""
        self.servers: tuple[str, ...] = ()  # host:port of the parameter servers, by index
        self.runs_preflight = False
        self.opened_at = 0.0  # when the master's welcome came, of `time.monotonic`
        self.store_port = 0
        self.address, self._token, self._run_id, self._connect = address, token, run_id, connect
        self._predecessor = predecessor
        self._term = 0  # the greatest term of a master so far
        self._caller = ""  # the address of the master that has called last; it is tried first
        self._patience = 0.0
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._outbox: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue()
        self._welcomed = threading.Event()
        self._admitted = threading.Event()  # the master accepts messages on the stream
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._store = KeyValueStore(self._relay)
        self.store_secret = self._store.secret
        self._members: tuple[int, ...] = ()  # of the store's ring, by rank
        self._drained = threading.Event()

    @property
    def run_id(self) -> str:
        """The job's run id, once the master has sent it."""
        return self._run_id

    @property
    def token(self) -> str:
        """The job's token."""
        return self._token

    # --- the main thread's side

    def open(self, timeout: float = 30.0) -> None:
        """Connect, and wait for the master's welcome: twice as long if this process replaces a former one.

        Raises:
            NoMaster: the welcome did not come.
        """
        timeout = timeout if self._predecessor is None else 2 * timeout
        self._thread.start()
        # An master sends the welcome when its parameter servers listen, too. From its admission on, the
        # master limits the time that a worker may take to start.
        while not self._welcomed.wait(timeout) and self._admitted.is_set():
            log.log.info("waiting for the master's welcome")
        if not self._welcomed.is_set():
            why = tls.trouble(self.address, tls.authority())
            raise NoMaster(
                f"no answer from the master at {self.address} within {timeout:g} s{why and f': {why}'}"
            )
        if self.session.ended:
            raise NoMaster(self.session.ended)
        self.opened_at = time.monotonic()

    def start_heartbeats(self, timeout: float) -> None:
        """Send heartbeats from now on. Thread-safe.

        Args:
            timeout: seconds of silence after which the master takes this worker for dead.
        """
        self._loop.call_soon_threadsafe(lambda: self._keep(self._heartbeats(timeout / HEARTBEATS)))

    def close(self, timeout: float = 5.0) -> None:
        """Send the remaining messages, and end the stream."""
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._post, None)
        self._drained.wait(timeout)

    def _send(self, message: pb.FromWorker) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the stream with it
            self._loop.call_soon_threadsafe(self._post, message)

    # --- the link's own thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self._loop.run_until_complete(self._talk())
        finally:
            self._drained.set()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = vital.task(coroutine, "heartbeats")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self) -> None:
        self.store_port = await self._store.start()
        host = self.address.rpartition(":")[0].strip("[]")
        self._standbys = Standbys(self._token, host, lambda: self.session.worker, OPTIONS, self._connect)
        at, until = self.address, 0.0
        while True:
            ended = await self._one_stream(at)
            why = ended.why
            self._standbys.lose()
            if ended.welcomed:
                until = self._loop.time() + self._patience
            unheard = ended.stands_by and not self._welcomed.is_set()  # `open` limits the time
            over = self.session.stopped or (self._closing and not self._outbox.qsize())
            if ended.meant or over or not (self._patience or unheard):
                break
            if not ended.welcomed:  # at once it would be refused again
                await asyncio.sleep(AGAIN_SECONDS)
            if unheard:
                continue
            print(f"lost the connection to the master ({why}); reconnecting", file=sys.stderr)
            if not (at := await self._find_master(until)):
                tried = await asyncio.to_thread(tls.trouble, self.address, tls.authority())
                found = f"no master was found within {self._patience:g} s{tried and f': {tried}'}"
                why = f"{found}; the last one: {why}"
                break
        self._standbys.name(())
        self._end(why)

    async def _one_stream(self, address: str) -> _Ended:
        """Run a stream to the master at this address.

        It lasts until it breaks, or until a standby master becomes the acting one.
        """
        talking = self._loop.create_task(self._converse(address))
        called = self._loop.create_task(self._standbys.called.wait())
        try:
            await asyncio.wait((talking, called), return_when=asyncio.FIRST_COMPLETED)
            if not talking.done():
                return _Ended("a different master acts", welcomed=True)
            return _Ended("the stream was cancelled", True) if talking.cancelled() else talking.result()
        finally:
            called.cancel()
            talking.cancel()
            await asyncio.wait((talking,))

    async def _converse(self, address: str) -> _Ended:
        self._outbox = asyncio.Queue()
        for message in self.session.greeting():
            if message.HasField("hello"):
                message.hello.term = self._term
                if self._predecessor is not None and not self._welcomed.is_set():
                    message.hello.predecessor.CopyFrom(self._predecessor)
            self._post(message)
        if self._closing:  # the last report, which is among them, did not reach the former master
            self._post(None)
        metadata = (("authorization", f"Bearer {self._token}"),)
        admitted: asyncio.Future[bool] = self._loop.create_future()
        welcomed = False
        try:
            async with self._channel(address) as channel:
                waits = address == self.address  # a master that has called may be gone already
                stream = rpc.MasterStub(channel).Work(
                    self._messages(admitted), metadata=metadata, wait_for_ready=waits
                )
                # Messages written to a refused call hide the reason: gRPC reports INTERNAL then.
                listens = ADMITTED in dict(await stream.initial_metadata() or ())
                if listens:
                    self._admitted.set()
                admitted.set_result(listens)
                async for message in stream:
                    if message.term < self._term:
                        why = f"a master of term {message.term} speaks, and one of term {self._term} acts"
                        return _Ended(why)
                    if outside := violation(message):
                        return _Ended(
                            f"a message of the master cannot be right: {outside}", welcomed=welcomed
                        )
                    welcomed = True
                    self._hear(message)
                code = await stream.code()
                why = await stream.details() or "the master closed the stream"
                return _Ended(why, code in MEANT, welcomed)
        except grpc.aio.AioRpcError as error:
            self._admitted.clear()
            stands_by = STANDS_BY in dict(error.trailing_metadata() or ())
            return _Ended(
                f"{error.code().name}: {error.details()}", error.code() in MEANT, welcomed, stands_by
            )

    def _channel(self, address: str) -> grpc.aio.Channel:
        """A channel to the master at this address; all masters' certificates are for the Service's name."""
        host = self.address.rpartition(":")[0].strip("[]")
        named = [("grpc.ssl_target_name_override", host)] if address != self.address else []
        return self._connect(address, [*OPTIONS, *named])

    async def _find_master(self, deadline: float) -> str:
        """The address of a listening master; empty if none is found until `deadline`, on the loop's clock."""
        while self._loop.time() < deadline:
            if self._standbys.called.is_set():
                self._caller, self._term = self._standbys.take_call()
            for address in filter(None, (self._caller, self.address)):
                if await self._listens(address, min(5.0, deadline - self._loop.time())):
                    return address
                if self._standbys.called.is_set():
                    break
            else:
                self._caller = ""
                await asyncio.sleep(AGAIN_SECONDS)
        return ""

    async def _listens(self, address: str, seconds: float) -> bool:
        """Whether a server listens at this address within `seconds`, or until a master calls."""
        async with self._channel(address) as channel:
            ready = self._loop.create_task(channel.channel_ready())
            called = self._loop.create_task(self._standbys.called.wait())
            await asyncio.wait((ready, called), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            called.cancel()
            if ready.done():
                return True
            ready.cancel()
            await asyncio.wait((ready,))
            return False

    async def _messages(self, admitted: asyncio.Future[bool]) -> AsyncIterator[pb.FromWorker]:
        outbox = self._outbox
        if not await admitted:
            return
        while (message := await outbox.get()) is not None:
            message.run_id = self._run_id
            yield message

    def _post(self, message: pb.FromWorker | None) -> None:
        if message is not None:
            self.session.state.note(message)
        self._outbox.put_nowait(message)

    def _end(self, why: str) -> None:
        self._store.call_off()
        self.session.end(why)
        self._welcomed.set()

    def _hear(self, message: pb.ToWorker) -> None:
        self._term = message.term
        self._standbys.hear(message.term)
        match message.WhichOneof("body"):
            case "active_master":
                self._standbys.name(message.active_master.standbys)
            case "welcome":
                self.config_json, self.output = message.welcome.config, message.welcome.output
                log.follow(self.config_json)
                self.salvage, self.runs_preflight = message.welcome.salvage, message.welcome.preflight
                self.session.worker, self._run_id = message.welcome.worker, message.run_id
                self.servers = tuple(message.welcome.servers)
                self._patience = message.welcome.master_outage_timeout_seconds
                self._welcomed.set()
            case "key_value":
                self._store.put(message.generation, message.key_value.key, message.key_value.value)
            case "addresses":
                by_rank = addresses.by_rank(message.addresses)
                # Gloo looks for its own address among those for all others.
                for rank, address in enumerate(by_rank):
                    key = f"{message.addresses.scope}/{rank}"
                    self._store.put(message.generation, key, address, times=len(by_rank) - 1)
            case body:
                if body == "form":  # before the main thread can ask the store
                    self._store.open(message.generation)
                    self._members = tuple(message.form.members)
                elif body in ("cut", "stop"):
                    self._store.call_off()
                self.session.hear(message)
                if body == "leave":
                    self._loop.call_later(LEAVE_AGAIN_SECONDS, self._leave, message.generation)

    def _leave(self, generation: int, held_up: int = 0) -> None:
        """Break a ring that this worker must leave if it waits for something else; look until it has left.

        Args:
            held_up: the number of looks in a row that have found the worker waiting.
        """
        session = self.session
        if not (session.must_leave(generation) and session.state.is_inside(generation)):
            return
        held_up = held_up + 1 if (what := session.held_up()) else 0
        if held_up == HELD_UP_LOOKS:
            log.log.warning(f"leaving the ring now: {what}")
            session.break_ring()
        else:
            self._loop.call_later(LEAVE_AGAIN_SECONDS, self._leave, generation, held_up)

    def _relay(self, generation: int, key: str, value: bytes) -> None:
        """Send a value of the local Horovod to the other members.

        Horovod's addresses are under a key named after its rank.
        """
        rank, size = self._members.index(self.session.worker), len(self._members)
        scope, _, name = key.rpartition("/")
        if name == str(rank) and (by_rank := parts(value, rank, size)):
            self.session.say(generation, addresses=addresses.from_member(scope, by_rank))
        else:
            self.session.say(generation, key_value=pb.KeyValue(key=key, value=value))

    async def _heartbeats(self, seconds: float) -> None:
        process, gpu = psutil.Process(), GpuUsage()
        since, records, ring = self._loop.time(), 0, 0
        while True:
            await asyncio.sleep(seconds)
            now, progress = self._loop.time(), self.session.progress
            if progress.generation != ring:
                since, records, ring = now, progress.records, progress.generation
            rate = (progress.records - records) / (now - since) if now > since else 0.0
            if now - since >= 1.0:
                since, records = now, progress.records
            self.session.heartbeat(rate, Usage(process.memory_info().rss, gpu.last))
