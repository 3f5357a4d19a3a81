"""The worker's life line: one ordered stream to the master, on a thread of its own.

The main thread trains and may be inside a collective or the user's code for long; this
thread keeps sending heartbeats meanwhile, relays the rendezvous, and cuts the ring at once when
the master orders it. What the main thread must act upon it finds in the session (trainer/session/state.py).

When the master ends the stream, the worker is out of the job. The ring is cut, and the next
order is `End`. When the stream breaks, the master has died or cannot be reached: the worker goes on
with what it has, and looks for a master for as long as the last one has asked it to. The next one
gets the state of the worker, and nothing that was meant for its predecessor.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import psutil

from edl import tls
from edl.contract import addresses
from edl.contract.proto import ADMITTED
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.errors import EdlError
from trainer import log
from trainer.session.kvstore import KeyValueStore, parts
from trainer.session.state import Session

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),  # the master is on this machine or in this cluster
    # A master whose node is lost says nothing more: ask, so that a new one is looked for.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A new master may be at another address: resolve the name anew, and don't wait long to try.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
AGAIN_SECONDS = 0.5
# How a stream ends that a master has meant to end; with any other, it is the connection that broke.
MEANT = {
    grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED, grpc.StatusCode.UNAUTHENTICATED,
}  # fmt: skip


class NoMaster(EdlError):
    """The master cannot be reached or does not want this worker."""


class MasterStream:
    """The stream to the master.

    Args:
        address: host:port of the master.
        token: the job's token.
        worker: this worker's id.
    """

    def __init__(self, address: str, token: str, worker: int, run_id: str):
        self.session = Session(worker, self._send, threading.Event())
        self.config_json = ""
        self.output = self.salvage = ""
        self.rehearses = False
        self.store_port = 0
        self.address, self._token, self._run_id = address, token, run_id
        self._patience = 0.0
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._outbox: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue()
        self._welcomed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._store = KeyValueStore(self._relay)
        self._members: tuple[int, ...] = ()  # of the ring whose store it is, by rank
        self._drained = threading.Event()

    @property
    def run_id(self) -> str:
        """Of the job, once the master has said it."""
        return self._run_id

    # --- the main thread's side

    def open(self, timeout: float = 30.0) -> None:
        """Connect, and wait for the master's welcome.

        Raises:
            NoMaster: it did not come.
        """
        self._thread.start()
        if not self._welcomed.wait(timeout):
            why = tls.trouble(self.address, tls.authority())
            raise NoMaster(
                f"no answer from the master at {self.address} within {timeout:g} s{why and f': {why}'}"
            )
        if self.session.ended:
            raise NoMaster(self.session.ended)

    def start_heartbeats(self, seconds: float) -> None:
        self._loop.call_soon_threadsafe(lambda: self._keep(self._heartbeats(seconds)))

    def close(self, timeout: float = 5.0) -> None:
        """Send what is left to say, and end the stream."""
        self._closing = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._post, None)
        self._drained.wait(timeout)

    def _send(self, message: pb.FromWorker) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: there is no stream any more
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
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _talk(self) -> None:
        self.store_port = await self._store.start()
        while True:
            meant, why = await self._one_stream()
            if meant or not self._patience or self._closing or self.session.stopped:
                break
            print(f"lost the connection to the master ({why}); reconnecting", file=sys.stderr)
            if not await self._find_master():
                tried = await asyncio.to_thread(tls.trouble, self.address, tls.authority())
                found = f"no master was found within {self._patience:g} s{tried and f': {tried}'}"
                why = f"{found}; the last one: {why}"
                break
        self._end(why)

    async def _one_stream(self) -> tuple[bool, str]:
        """Talk to one master until the stream ends; whether that was meant, and why."""
        self._outbox = asyncio.Queue()
        for message in self.session.greeting():
            self._post(message)
        metadata = (("authorization", f"Bearer {self._token}"),)
        admitted: asyncio.Future[bool] = self._loop.create_future()
        try:
            async with tls.aio_channel(self.address, OPTIONS) as channel:
                stream = rpc.MasterStub(channel).Work(
                    self._sayings(admitted), metadata=metadata, wait_for_ready=True
                )
                # What is written to a call while it is refused hides why: gRPC then says INTERNAL.
                admitted.set_result(ADMITTED in dict(await stream.initial_metadata() or ()))
                async for message in stream:
                    self._hear(message)
                code = await stream.code()
                return code in MEANT, await stream.details() or "the master closed the stream"
        except grpc.aio.AioRpcError as error:
            return error.code() in MEANT, f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            return True, "the stream was cancelled"

    async def _find_master(self) -> bool:
        """Until a master listens at the address, for as long as the last one has asked for."""
        deadline = self._loop.time() + self._patience
        while self._loop.time() < deadline:
            async with tls.aio_channel(self.address, OPTIONS) as channel:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(5.0, deadline - self._loop.time())):
                        await channel.channel_ready()
                    return True
            await asyncio.sleep(AGAIN_SECONDS)
        return False

    async def _sayings(self, admitted: asyncio.Future[bool]) -> AsyncIterator[pb.FromWorker]:
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
        match message.WhichOneof("body"):
            case "welcome":
                self.config_json, self.output = message.welcome.config, message.welcome.output
                log.follow(self.config_json)
                self.salvage, self.rehearses = message.welcome.salvage, message.welcome.rehearse
                self.session.worker, self._run_id = message.welcome.worker, message.run_id
                self._patience = message.welcome.master_outage_timeout_seconds
                self._welcomed.set()
            case "key_value":
                self._store.put(message.generation, message.key_value.key, message.key_value.value)
            case "addresses":
                told = addresses.by_rank(message.addresses)
                for rank, address in enumerate(told):  # Gloo looks for its own among those for all others
                    key = f"{message.addresses.scope}/{rank}"
                    self._store.put(message.generation, key, address, times=len(told) - 1)
            case say:
                if say == "form":  # before the main thread can ask the store
                    self._store.open(message.generation)
                    self._members = tuple(message.form.members)
                elif say in ("cut", "stop"):
                    self._store.call_off()
                self.session.hear(message)

    def _relay(self, generation: int, key: str, value: bytes) -> None:
        """Horovod has put it into the store: its addresses, under a key that is named after its rank."""
        rank, size = self._members.index(self.session.worker), len(self._members)
        scope, _, name = key.rpartition("/")
        if name == str(rank) and (by_rank := parts(value, rank, size)):
            self.session.say(generation, addresses=addresses.from_member(scope, by_rank))
        else:
            self.session.say(generation, key_value=pb.KeyValue(key=key, value=value))

    async def _heartbeats(self, seconds: float) -> None:
        process = psutil.Process()
        since, records, ring = self._loop.time(), 0, 0
        while True:
            await asyncio.sleep(seconds)
            now, progress = self._loop.time(), self.session.progress
            if progress.generation != ring:
                since, records, ring = now, progress.records, progress.generation
            rate = (progress.records - records) / (now - since) if now > since else 0.0
            if now - since >= 1.0:
                since, records = now, progress.records
            self.session.heartbeat(rate, process.memory_info().rss)
