"""The worker's life line: one ordered stream to the master, on a thread of its own.

The main thread trains and may be inside a collective or the user's code for long; this
thread keeps beating meanwhile, relays the rendezvous, and cuts the ring at once when the
master orders it. What the main thread must act upon it finds here: orders in a queue, new
leases, and whether the ring is to be left.

When the master ends the stream, the worker is out of the job. The ring is cut, and the next
order is `End`. When the stream breaks, the master is gone or cut off: the worker goes on with
what it has, and looks for a master for as long as the last one has asked it to. The next one
is told what the worker is by now, and nothing that was meant for its predecessor.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import psutil

import edl
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.contract.ranges import Range, RangeSet
from edl.errors import EdlError
from trainer.session.kvstore import KeyValueStore
from trainer.session.orders import End, Export, FormRing, Order
from trainer.session.state import SessionState

OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
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


@dataclass(frozen=True, slots=True)
class Progress:
    """What the beats tell. One value, replaced whole, so that a beat never mixes two steps."""

    generation: int = 0
    step: int = 0
    records: int = 0  # trained by this worker in this ring, for its rate
    loss: float | None = None
    safe: RangeSet | None = None  # the applied set of the last step that every rank has


class Session:
    """The stream to the master.

    Args:
        address: host:port of the master.
        token: the job's token.
        worker: this worker's id.
    """

    def __init__(self, address: str, token: str, worker: int, run_id: str):
        self.worker = worker
        self.config_json = ""
        self.output = ""
        self.store_port = 0
        self.progress = Progress()
        self.cut: Callable[[], None] = lambda: None  # the ring's; may be called from this thread
        self.address, self._token, self._run_id = address, token, run_id
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._grants: queue.SimpleQueue[Range] = queue.SimpleQueue()
        self._news = threading.Event()
        self._told = SessionState()
        self._patience = 0.0
        self._stopped = False
        self._leave_generation = -1
        self._cut_generation = -1
        self._ended = ""
        self._loop = asyncio.new_event_loop()
        self._outbox: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue()
        self._welcomed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._store = KeyValueStore(self._relay)
        self._heartbeat_due = asyncio.Event()
        self._drained = threading.Event()

    # --- the main thread's side

    def open(self, timeout: float = 30.0) -> None:
        """Connect, and wait for the master's welcome.

        Raises:
            NoMaster: it did not come.
        """
        self._thread.start()
        if not self._welcomed.wait(timeout):
            raise NoMaster(f"no answer from the master at {self.address} within {timeout:g} s")
        if self._ended:
            raise NoMaster(self._ended)

    def start_heartbeats(self, seconds: float) -> None:
        self._loop.call_soon_threadsafe(lambda: self._keep(self._heartbeats(seconds)))

    def say(self, generation: int = 0, **what: object) -> None:
        """Send one message, e.g. `say(g, joined_ring=pb.Up(step=3))`. From any thread; keeps the order."""
        message = pb.FromWorker(generation=generation, **what)  # type: ignore[arg-type]
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
            self._loop.call_soon_threadsafe(self._post, message)

    def send_heartbeat(self) -> None:
        """Do not wait for the next beat: there is news."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._heartbeat_due.set)

    def next_order(self) -> Order:
        """Wait for what to do next."""
        return self._orders.get()

    def new_leases(self) -> list[Range]:
        """Leases granted since the last call, of whatever generation: a lease stays with its worker."""
        leases = []
        with contextlib.suppress(queue.Empty):
            while True:
                leases.append(self._grants.get_nowait())
        return leases

    def wait_for_news(self, seconds: float) -> None:
        """Until a lease comes or the ring is to be left, at most `seconds`."""
        self._news.wait(seconds)
        self._news.clear()

    def must_leave(self, generation: int) -> bool:
        """Whether the master wants the members of `generation` to leave at a step boundary."""
        return self._leave_generation == generation

    def was_cut(self, generation: int) -> bool:
        return self._cut_generation == generation or bool(self._ended)

    def close(self, timeout: float = 5.0) -> None:
        """Send what is left to say, and end the stream."""
        self._stopped = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._post, None)
        self._drained.wait(timeout)

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
            if meant or not self._patience or self._stopped:
                break
            print(f"the master is gone ({why}): going on, and looking for a new one", file=sys.stderr)
            if not await self._find_master():
                why = f"no master for {self._patience:g} s; the last one: {why}"
                break
        self._end(why)

    async def _one_stream(self) -> tuple[bool, str]:
        """Talk to one master until the stream ends; whether that was meant, and why."""
        self._outbox = asyncio.Queue()
        hello = pb.Hello(worker=self.worker, version=edl.__version__, resumes=self._told.ready)
        self._post(pb.FromWorker(hello=hello))
        if self._told.ready:
            self._post(pb.FromWorker(generation=self._told.generation, resume=self._told.resume()))
        metadata = (("authorization", f"Bearer {self._token}"),)
        try:
            async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
                stream = rpc.MasterStub(channel).Work(self._sayings(), metadata=metadata, wait_for_ready=True)
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
            async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(5.0, deadline - self._loop.time())):
                        await channel.channel_ready()
                    return True
            await asyncio.sleep(AGAIN_SECONDS)
        return False

    async def _sayings(self) -> AsyncIterator[pb.FromWorker]:
        outbox = self._outbox
        while (message := await outbox.get()) is not None:
            message.run_id = self._run_id
            yield message

    def _post(self, message: pb.FromWorker | None) -> None:
        if message is not None:
            self._told.note(message)
        self._outbox.put_nowait(message)

    def _end(self, why: str) -> None:
        self._ended = why
        self._welcomed.set()
        self._orders.put(End(why, lost=True))
        self._store.call_off()
        self.cut()
        self._news.set()

    def _hear(self, message: pb.ToWorker) -> None:
        generation = message.generation
        match message.WhichOneof("body"):
            case "welcome":
                self.config_json, self.output = message.welcome.config, message.welcome.output
                self.worker, self._run_id = message.welcome.worker, message.run_id
                self._patience = message.welcome.master_outage_timeout_seconds
                self._welcomed.set()
            case "form":
                form = message.form
                self._store.open(generation)
                leases = RangeSet.of((r.start, r.stop) for r in form.leases)
                members = tuple(form.members)
                self._told.form(generation, members)
                self._orders.put(FormRing(generation, members, form.root, form.sync, leases))
            case "key_value":
                self._store.put(generation, message.key_value.key, message.key_value.value)
            case "grant":
                self._grants.put((message.grant.start, message.grant.stop))
                self._news.set()
            case "leave":
                self._leave_generation = generation
                self._news.set()
            case "cut":
                self._cut_generation = generation
                self._store.call_off()
                self.cut()
                self._news.set()
            case "export":
                self._orders.put(Export())
            case "stop":
                self._stopped = True
                self._orders.put(End(message.stop.why))
                self._leave_generation = self.progress.generation
                self._store.call_off()
                self.cut()
                self._news.set()

    def _relay(self, generation: int, key: str, value: bytes) -> None:
        self.say(generation, key_value=pb.KeyValue(key=key, value=value))

    async def _heartbeats(self, seconds: float) -> None:
        process = psutil.Process()
        since, records, ring = self._loop.time(), 0, 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._heartbeat_due.wait()
            self._heartbeat_due.clear()
            now, progress = self._loop.time(), self.progress
            if progress.generation != ring:
                since, records, ring = now, progress.records, progress.generation
            rate = (progress.records - records) / (now - since) if now > since else 0.0
            if now - since >= 1.0:
                since, records = now, progress.records
            beat = pb.Heartbeat(step=progress.step, rate=rate, memory=process.memory_info().rss)
            if progress.loss is not None:
                beat.loss = progress.loss
            if progress.safe is not None:
                beat.has_applied = True
                beat.applied.extend(pb.Range(start=a, stop=b) for a, b in progress.safe)
            self.say(progress.generation, heartbeat=beat)
