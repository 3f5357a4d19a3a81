# SPDX-License-Identifier: Apache-2.0
"""The master's gRPC side, with real connections and without a job."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

import edl
from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import Generation, RunId, WorkerId
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.contract.tokens import Tokens
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts
from edl.master.parameter_servers.base import NoServers
from edl.master.rpc.authority import Alone
from edl.master.rpc.server import MasterServer
from edl.net.listener import Listener
from edl.trainer.session.client import MasterStream
from edl.trainer.session.orders import End

pytestmark = pytest.mark.waits

PING_MS = 200
# A worker's, fifty times as fast.
KEEPALIVE = [("grpc.keepalive_time_ms", PING_MS), ("grpc.http2.max_pings_without_data", 0)]


class Idle:
    """A job in which nothing happens."""

    run_id = RunId("run-1")

    def emit(self, said: ev.Event | facts.Heartbeat) -> None: ...

    def status(self, now: float) -> dict[str, Any]:
        return {"phase": "Starting"}

    def scale(self, workers: int | None, servers: int | None = None) -> str:
        return ""

    def stop(self, why: str, checkpoint: bool = False, force: bool = False, id: str = "") -> str:
        return ""

    def checkpoint(self) -> str:
        return ""

    def vacant(self) -> WorkerId | None:
        return None

    async def replace_in_place(self, ended: ev.Gone) -> WorkerId | None:
        return None


async def test_a_token_is_changed_while_the_master_runs(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("first")
    told: list[str] = []
    server = MasterServer(Idle(), Listener(Tokens("first", secret, told.append)), "{}", "")
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def admits(token: str | None) -> bool:
            metadata = () if token is None else (("authorization", f"Bearer {token}"),)
            call = rpc.MasterStub(channel).Stop(pb.StopRequest(why="x"), metadata=metadata)
            code = await call.code()
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
            return bool(code is grpc.StatusCode.OK)

        async def admitted() -> list[str]:
            return [token for token in ("first", "second", "third", "", "-kept") if await admits(token)]

        assert await admitted() == ["first"]
        assert not await admits(None)
        secret.write_text("second\n")
        assert await admitted() == ["first", "second"], "workers that run know the first one"
        assert len(told) == 1
        secret.unlink()  # for a moment, or for good
        assert await admitted() == ["first", "second"]
        secret.write_text("third")
        assert await admitted() == ["first", "second", "third"]
        with capture_logs() as logs:
            assert not await admits("fourth")
            assert not await admits("fourth")
        assert len([e for e in logs if "a caller was refused" in e["event"]]) <= 1
    await server.close()
    anew = Tokens("third", secret)
    assert not anew.accept("Bearer second")
    (tmp_path / "token-kept").write_text("first\nsecond")
    assert anew.accept("Bearer second"), "as the master keeps it for the next one"


async def test_a_worker_whose_token_is_unknown_says_so_by_its_exit_code() -> None:
    server = MasterServer(Idle(), Listener(Tokens("a-token")), "{}", "")
    port = await server.start("127.0.0.1:0")
    command = [sys.executable, "-m", "edl.trainer", "--master", f"127.0.0.1:{port}", "--worker", "0"]
    worker = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "EDL_TOKEN": "an-older-one"}, stderr=asyncio.subprocess.PIPE
    )
    _, said = await worker.communicate()
    await server.close()
    assert "UNAUTHENTICATED: the job's token is missing or wrong" in said.decode()
    assert worker.returncode == WorkerExit.UNAUTHENTICATED


async def test_a_worker_that_comes_back_is_heard_before_the_parameter_servers_listen() -> None:
    """A new master gives up a worker that does not report its state within ten seconds."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    listen = asyncio.Event()

    class Hearing(Idle):
        def emit(self, said: ev.Event | facts.Heartbeat) -> None:
            heard.put_nowait(type(said).__name__)

    class Starting(NoServers):
        async def addresses(self) -> tuple[str, ...]:
            await listen.wait()
            return ("a:1",)

    server = MasterServer(Hearing(), Listener(Tokens("a-token")), "{}", "", servers=Starting())
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(20):
        stream = rpc.MasterStub(channel).Work(metadata=[("authorization", "Bearer a-token")])
        hello = pb.Hello(worker=0, version=edl.__version__, resumes=True)
        await stream.write(pb.FromWorker(run_id="run-1", hello=hello))
        await stream.write(pb.FromWorker(run_id="run-1", generation=7, resume=pb.Resume(joined=True)))
        assert [await heard.get() for _ in range(2)] == ["Hello", "Resume"]
        server.perform(ef.Leave(Generation(7), (WorkerId(0),)))
        listen.set()
        assert list((await stream.read()).welcome.servers) == ["a:1"], "the welcome comes before any order"
        assert (await stream.read()).HasField("leave")
        stream.cancel()
    await server.close()


async def test_the_last_words_of_a_worker_reach_the_next_master() -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    class Hearing(Idle):
        def emit(self, said: ev.Event | facts.Heartbeat) -> None:
            heard.put_nowait(type(said).__name__)

    first = MasterServer(Hearing(), Listener(Tokens("a-token")), "{}", "", outage_timeout=20.0)
    port = await first.start("127.0.0.1:0")
    stream = MasterStream(f"127.0.0.1:{port}", "a-token", 0, "")
    async with asyncio.timeout(30):
        await asyncio.to_thread(stream.open)
        stream.session.say(ready=pb.Ready(model="a"))
        assert [await heard.get() for _ in range(2)] == ["Hello", "Ready"]
        await first.close()
        stream.session.fail(ValueError("bad"))
        closing = asyncio.create_task(asyncio.to_thread(stream.close, 20.0))
        await asyncio.sleep(1.0)  # for nothing to happen: no master listens
        while not heard.empty():
            heard.get_nowait()
        second = MasterServer(Hearing(), Listener(Tokens("a-token")), "{}", "", outage_timeout=20.0)
        await second.start(f"127.0.0.1:{port}")
        assert [await heard.get() for _ in range(3)] == ["Hello", "Resume", "Failed"]
        await asyncio.wait_for(closing, 10.0)
    await second.close()


async def test_one_worker_makes_the_preflight_and_one_other_if_that_is_lost() -> None:
    server = MasterServer(Idle(), Listener(Tokens("a-token")), "{}", "")
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def comes(worker: int) -> tuple[Any, bool]:
            """A worker with its stream, and whether it makes the preflight."""
            stream = rpc.MasterStub(channel).Work(metadata=[("authorization", "Bearer a-token")])
            await stream.write(pb.FromWorker(hello=pb.Hello(worker=worker, version=edl.__version__)))
            return stream, (await stream.read()).welcome.preflight

        async def goes(stream: Any) -> None:
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF

        first, preflight = await comes(0)
        assert preflight
        assert not (await comes(1))[1]
        await goes(first)
        second, preflight = await comes(2)
        assert preflight, "the first was lost before it was ready"
        await goes(second)
        assert not (await comes(3))[1], "it may be the preflight that they die of"
    await server.close()


async def test_who_only_pings_for_long_keeps_its_connection() -> None:
    server = MasterServer(Idle(), Listener(Tokens("a-token")), "{}", "")
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=KEEPALIVE) as channel:
        request, token = pb.WatchRequest(follow=True), [("authorization", "Bearer a-token")]
        watching = rpc.MasterStub(channel).Watch(request, metadata=token)
        assert json.loads((await watching.read()).json) == {"phase": "Starting"}
        await asyncio.sleep(20 * PING_MS / 1000)  # pings, and nothing else
        server.changed()
        assert json.loads((await watching.read()).json) == {"phase": "Starting"}
    await server.close()


class Reign(Alone):
    """The authority of a master of this term, with a record of what happens to it."""

    def __init__(self, term: int):
        self.term = term
        self.speaks = asyncio.Event()
        self.outranked_by: asyncio.Queue[int] = asyncio.Queue()

    async def confirmed(self) -> bool:
        await self.speaks.wait()
        return True

    def outranked(self, term: int) -> None:
        self.outranked_by.put_nowait(term)


async def test_a_worker_obeys_no_master_of_a_smaller_term_and_says_which_it_has_seen() -> None:
    def master(reign: Reign) -> MasterServer:
        return MasterServer(
            Idle(), Listener(Tokens("a-token")), "{}", "", outage_timeout=60.0, authority=reign
        )

    newer, older, newest = Reign(2), Reign(1), Reign(3)
    server = master(newer)
    port = await server.start("127.0.0.1:0")
    stream = MasterStream(f"127.0.0.1:{port}", "a-token", 0, "")
    welcomed = asyncio.create_task(asyncio.to_thread(stream.open, 30.0))
    done, _ = await asyncio.wait((welcomed,), timeout=1.0)
    assert not done, "a master without authority says nothing"
    newer.speaks.set()
    await welcomed
    await server.close()
    server = master(older)
    older.speaks.set()
    await server.start(f"127.0.0.1:{port}")
    assert await older.outranked_by.get() == 2
    assert await older.outranked_by.get() == 2, "it looks on"
    await server.close()
    server = master(newest)
    newest.speaks.set()
    await server.start(f"127.0.0.1:{port}")
    while not server._streams:
        await asyncio.sleep(0.05)
    server.perform(ef.Stop(WorkerId(0), "enough"))
    order = await asyncio.to_thread(stream.session.next_order)
    assert order == End("enough")
    stream.close()
    await server.close()
    assert newest.outranked_by.empty()
