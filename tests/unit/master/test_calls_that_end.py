# SPDX-License-Identifier: Apache-2.0
"""Calls of a master whose callers disappear at random points: afterwards the master answers all calls.

EDL_CANCELLED_CALLS is the number of calls of each kind, as in tests/unit/ps/test_calls_that_end.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

import edl
from edl.contract.ids import Generation, RunId, WorkerId
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.contract.tokens import Tokens
from edl.errors import EdlError
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.parameter_servers.base import NoServers
from edl.master.rpc.authority import Alone
from edl.master.rpc.server import MasterServer
from edl.master.rpc.standby import StandbyServer
from edl.net.listener import OPTIONS, Listener, TokenCheck
from tests.support.ps.cancelled_calls import Cancelling

pytestmark = pytest.mark.waits
CALLS = int(os.environ.get("EDL_CANCELLED_CALLS", "100"))  # of each kind
AT_ONCE = 25
SECONDS = 60.0  # for what must happen
MAX_AWAITS = 20  # of a stream, which awaits its messages and its answers
MAX_SECONDS = 0.05  # until a caller cancels its call
RUN = RunId("run-1")
WORKERS = 8  # ids for which workers' streams compete
TOKEN = ("authorization", "Bearer a-token")
GIVEN_UP = 100  # a worker that is refused
MASTER = {method.name for method in pb.DESCRIPTOR.services_by_name["Master"].methods}
STANDBY = {method.name for method in pb.DESCRIPTOR.services_by_name["Standby"].methods}
Call = tuple[Callable[[Any], Any], list[Any], bool]  # the arguments of `Callers.cancelled`
ENDS = (grpc.RpcError, asyncio.CancelledError, asyncio.InvalidStateError)


@pytest.fixture
def dice() -> random.Random:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


class CancellingListener(Listener):
    """A listener whose calls are cancelled as `Cancelling` has it."""

    def __init__(self, dice: random.Random):
        super().__init__(Tokens("a-token"))
        self.cancelling = Cancelling(dice.randrange(10**6), MAX_AWAITS)

    async def start(self, address: str, serve: Callable[[grpc.aio.Server], None]) -> int:
        interceptors = [TokenCheck(self._tokens), self.cancelling]
        self._server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
        serve(self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return port


class Recording:
    """A job that records what its workers' streams report."""

    run_id = RUN

    def __init__(self, dice: random.Random):
        self._dice = dice
        self.open: set[WorkerId] = set()
        self.heard: Counter[str] = Counter()

    def emit(self, said: ev.Event | facts.Heartbeat) -> None:
        kind, worker = type(said).__name__, getattr(said, "worker", None)
        self.heard[kind] += 1
        if isinstance(said, ev.Hello):
            assert worker not in self.open, f"worker {worker} has two streams"
            self.open.add(said.worker)
        else:
            assert worker in self.open, f"{kind} of worker {worker}, which has no stream"
        if isinstance(said, ev.Closed):
            self.open.remove(said.worker)

    def status(self, now: float) -> dict[str, Any]:
        return {"phase": "Training"}

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        return f"workers {workers}"

    def stop(self, why: str, checkpoint: bool = False, force: bool = False, id: str = "") -> str:
        return f"ends: {why}"

    def checkpoint(self) -> str:
        raise EdlError("the job writes no checkpoints")

    def vacant(self) -> WorkerId | None:
        return next((WorkerId(w) for w in range(WORKERS, 4 * WORKERS) if w not in self.open), None)

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        await asyncio.sleep(self._dice.uniform(0, 0.005))
        worker = WorkerId(4 * WORKERS + ended.worker)
        return worker if worker not in self.open else None


class Waiting(Alone):
    """An authority that confirms itself a moment later."""

    async def confirmed(self) -> bool:
        await asyncio.sleep(0)
        return True


class Waited(NoServers):
    """Servers whose addresses are known a moment later."""

    async def addresses(self) -> tuple[str, ...]:
        await asyncio.sleep(0)
        return ("127.0.0.1:1",)


class Callers:
    """The callers of one server. Some disappear."""

    def __init__(self, listener: CancellingListener, port: int, dice: random.Random):
        self._cancelling, self._dice = listener.cancelling, dice
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.master, self.standby = rpc.MasterStub(self.channel), rpc.StandbyStub(self.channel)

    async def cancelled(self, begin: Callable[[Any], Any], says: list[Any], endless: bool) -> None:
        """Make one call, which the server cancels, or the caller, or which ends earlier.

        Args:
            says: the messages of a stream.
            endless: the call does not end by itself.
        """
        call = self._cancelling.making(lambda mark: begin([TOKEN, *mark]))
        doing = asyncio.ensure_future(self._converse(call, says))
        if says:  # gRPC's `write` waits for ever if the call is cancelled before its metadata were sent
            call.add_done_callback(lambda _: doing.cancel())
        seconds = self._dice.uniform(0, MAX_SECONDS)
        if self._dice.random() < 0.3:
            asyncio.get_running_loop().call_later(seconds, call.cancel)
        elif endless:
            await asyncio.gather(call.initial_metadata(), return_exceptions=True)
            asyncio.get_running_loop().call_later(seconds, call.cancel)
        await asyncio.gather(doing, return_exceptions=True)
        call.cancel()
        error = None if doing.cancelled() else doing.exception()
        assert error is None or isinstance(error, ENDS), error

    async def _converse(self, call: Any, says: list[Any]) -> None:
        if not hasattr(call, "read"):  # unary
            await call
            return
        for message in says:
            await call.write(message)
        while await call.read() is not grpc.aio.EOF:
            pass


async def storm(
    callers: Callers,
    names: set[str],
    calls: Callable[[str], list[Call]],
    check: Callable[[], Awaitable[None]],
) -> None:
    made: Counter[str] = Counter()
    for name in sorted(names):
        while made[name] < CALLS:
            some = [callers.cancelled(*call) for call in calls(name)]
            await asyncio.wait_for(asyncio.gather(*some), SECONDS)
            made[name] += len(some)
            await asyncio.wait_for(check(), SECONDS)
    cancelled, ended = callers._cancelling.cancelled, callers._cancelling.ended
    print({name: (made[name], cancelled[name], ended[name]) for name in sorted(names)})
    assert not {name for name in names if not cancelled[name]}


async def until(happened: Callable[[], object]) -> None:
    while not happened():
        await asyncio.sleep(0.002)


def said(**body: Any) -> pb.FromWorker:
    return pb.FromWorker(run_id=RUN, **body)


def hello(worker: int, **more: Any) -> pb.FromWorker:
    return said(hello=pb.Hello(worker=worker, version=edl.__version__, **more))


@pytest.fixture
async def master(dice: random.Random) -> AsyncIterator[tuple[MasterServer, Recording, Callers]]:
    job, listener = Recording(dice), CancellingListener(dice)
    server = MasterServer(job, listener, "{}", "", authority=Waiting(), servers=Waited())
    callers = Callers(listener, await server.start("127.0.0.1:0"), dice)
    yield server, job, callers
    await callers.channel.close()
    await server.close()


async def test_a_master_answers_after_calls_that_end_early(
    master: tuple[MasterServer, Recording, Callers], dice: random.Random
) -> None:
    server, job, callers = master
    generation = 0
    server.perform(ef.Fence(WorkerId(GIVEN_UP), "given up", ef.FenceReason.HeartbeatTimeout))

    def work(number: int) -> list[Any]:
        """The messages of one worker's stream."""
        first = dice.choice(
            (
                hello(number % WORKERS),
                hello(-1),
                hello(-1, predecessor=pb.Predecessor(place=number % WORKERS)),
                hello(GIVEN_UP),
                said(heartbeat=pb.Heartbeat()),
            )
        )
        return [
            first,
            said(ready=pb.Ready(layout=pb.Layout(records=100))),
            said(generation=generation, key_value=pb.KeyValue(key="k", value=b"v")),
            said(heartbeat=pb.Heartbeat(step=1)),
            said(saved=pb.Saved(model="m")),
        ]

    def calls(name: str) -> list[Call]:
        stub, many = getattr(callers.master, name), range(AT_ONCE)
        if name == "Work":
            return [(lambda metadata: stub(metadata=metadata), work(number), True) for number in many]
        requests: dict[str, list[Any]] = {
            "Watch": [pb.WatchRequest(follow=True) for _ in many],
            "Scale": [pb.ScaleRequest(workers=number) for number in many],
            "Stop": [pb.StopRequest(why="enough") for _ in many],
            "Checkpoint": [pb.CheckpointRequest() for _ in many],
        }
        return [
            (lambda metadata, asked=asked: stub(asked, metadata=metadata), [], name == "Watch")  # type: ignore[misc]
            for asked in requests[name]
        ]

    async def check() -> None:
        """Two workers meet in a ring; users watch, scale and stop the job."""
        nonlocal generation
        server.changed()
        await until(lambda: not job.open and not server._streams)
        generation += 1
        members, streams = (WorkerId(0), WorkerId(1)), []
        for worker in members:
            streams.append(callers.master.Work(metadata=[TOKEN]))
            await streams[-1].write(hello(worker))
            welcome = (await streams[-1].read()).welcome
            assert (welcome.worker, [*welcome.servers]) == (worker, ["127.0.0.1:1"])
        form = ef.Form(Generation(generation), members, members[0], False, 1, (1, 1), Layout(100))
        server.perform(form)
        for stream in streams:
            assert [*(await stream.read()).form.members] == [*members]
        await streams[0].write(said(generation=generation, key_value=pb.KeyValue(key="k", value=b"v")))
        assert (await streams[1].read()).key_value.value == b"v"
        for stream in streams:
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        watching = callers.master.Watch(pb.WatchRequest(), metadata=[TOKEN])
        assert json.loads((await watching.read()).json) == {"phase": "Training"}
        assert (await callers.master.Scale(pb.ScaleRequest(workers=3), metadata=[TOKEN])).text == "workers 3"
        assert (await callers.master.Stop(pb.StopRequest(why="so"), metadata=[TOKEN])).text == "ends: so"
        with pytest.raises(grpc.RpcError, match="writes no checkpoints"):
            await callers.master.Checkpoint(pb.CheckpointRequest(), metadata=[TOKEN])

    await storm(callers, MASTER, calls, check)
    print(dict(job.heard))
    assert job.heard["Hello"] == job.heard["Closed"]
    assert job.heard["Ready"], "no cancelled stream had reached the job"


async def test_a_standby_answers_after_calls_that_end_early(dice: random.Random) -> None:
    listener, changes = CancellingListener(dice), asyncio.Event()

    async def vouch(term: int) -> bool:
        return term == 1

    standby = StandbyServer(listener, changes.set, vouch)
    callers = Callers(listener, await standby.start("127.0.0.1:0"), dice)

    def calls(name: str) -> list[Call]:
        def begin(metadata: Any) -> Any:
            if name == "ConfirmLease":
                return callers.standby.ConfirmLease(pb.LeaseRenewal(term=1), metadata=metadata)
            return callers.standby.ReportMasterLost(metadata=metadata)

        reports = [pb.MasterReport(worker=w, term=1, lost=True) for w in range(3)]
        call = (begin, [], False) if name == "ConfirmLease" else (begin, reports, True)
        return [call] * AT_ONCE

    async def reports(worker: int) -> Any:
        stream: Any = callers.standby.ReportMasterLost(metadata=[TOKEN])
        await stream.write(pb.MasterReport(worker=worker, term=1, lost=True))
        await until(lambda: worker in standby.lost(1))
        return stream

    async def check() -> None:
        """A worker's report counts while its stream is open; the standby vouches for the master of term 1."""
        await until(lambda: not standby._words)
        stream = await reports(7)
        assert standby.lost(1) == [7]
        stream.cancel()
        for term in (1, 2):
            answer = await callers.standby.ConfirmLease(pb.LeaseRenewal(term=term), metadata=[TOKEN])
            assert answer.yes == (term == 1)

    await storm(callers, STANDBY, calls, check)
    await until(lambda: not standby._words)
    last = await reports(8)
    closing = asyncio.ensure_future(standby.close(term=3))
    assert (await asyncio.wait_for(last.read(), SECONDS)).term == 3
    await closing
    await callers.channel.close()
