# SPDX-License-Identifier: Apache-2.0
"""A parameter server that does not answer: whether it is busy with what others have asked, or hangs."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.tokens import Tokens
from edl.master.core import events as ev
from edl.master.parameter_servers import monitor as of_master
from edl.master.parameter_servers.monitor import Watch
from edl.net.listener import Listener
from edl.ps.rpc.service import OPTIONS, READING, Service
from edl.ps.server import ParameterServer
from edl.trainer.ps_client import link
from edl.trainer.ps_client.calls import ServerAway
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from tests.support.ps.requests import RUN, pull, stage, start_generation, tables

pytestmark = pytest.mark.waits
SECONDS = 60.0  # for what must happen
PATIENCE = 10.0


class Busy(Service):
    """One whose thread for native work has much to do. Each time that it is asked whether it gets on, so many
    seconds have passed, and one more piece is done, as long as it does not hang."""

    def __init__(self, server: ParameterServer) -> None:
        super().__init__(server)
        self.probes, self.hangs, self.seconds = 0, False, 0.9 * PATIENCE
        self._pieces, self._left = threading.Semaphore(0), 0

    async def _probe(self, request: pb.ProbeRequest, context: Any) -> pb.Probed:
        self.probes += 1
        done = self._calls
        if not self.hangs and self._left:
            self.goes_on(1)
            while self._calls == done:  # the piece that was let go will be
                await asyncio.sleep(0)
        return await super()._probe(request, context)

    def has_to_do(self, pieces: int) -> list[asyncio.Task[Any]]:
        self._left += pieces
        wait = lambda _: self._pieces.acquire(timeout=SECONDS)  # noqa: E731
        return [asyncio.create_task(self._do(wait, None)) for _ in range(pieces)]

    def goes_on(self, pieces: int) -> None:
        self._left -= pieces
        self._pieces.release(pieces)


class There:
    """It, where it listens, and a worker's link to it."""

    def __init__(self, service: Busy, port: int):
        self.service, self.address = service, f"127.0.0.1:{port}"
        clock = lambda: service.probes * service.seconds  # noqa: E731
        self.link = ServerLink(0, self.address, "token", Interrupt(), clock, patience=PATIENCE)

    async def asks(self, method: str, request: Any) -> Any:
        return await asyncio.to_thread(lambda: self.link.begin(method, request).result())


@pytest.fixture
async def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[There]:
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.01)
    service = Busy(ParameterServer(0, 1, RUN, tmp_path / "log"))
    listener = Listener(Tokens("token"), options=OPTIONS, reading=READING)
    found = There(service, await listener.start("127.0.0.1:0", service.register))
    await found.asks("Declare", tables())
    await found.asks("StartGeneration", start_generation(1, 0))
    service.probes = 0
    yield found
    await service.end_conversations(0)
    await listener.close(0)
    await service.close()


async def test_one_that_is_busy_is_waited_for_much_longer_than_one_that_hangs(there: There) -> None:
    work = there.service.has_to_do(8)
    assert (await there.asks("Pull", pull(1, 0, [1]))).rows
    assert there.service.probes == 8, "each takes nearly as long as it may"
    await asyncio.gather(*work)


async def test_one_that_does_nothing_of_what_waits_is_called_away(there: There) -> None:
    work = there.service.has_to_do(3)
    there.service.hangs = True
    with pytest.raises(ServerAway, match=r"parameter server 0 .* does not answer"):
        await there.asks("Pull", pull(1, 0, [1]))
    assert there.service.probes == 3, "nothing was done between the first, the second and the third"
    there.service.goes_on(3)
    await asyncio.gather(*work)


async def test_one_that_has_nothing_to_do_is_waited_for_until_its_ring_is_there(there: There) -> None:
    asking = asyncio.ensure_future(there.asks("Pull", pull(2, 0, [1])))
    while there.service.probes < 8:
        await asyncio.sleep(0.01)
    assert not asking.done()
    await there.asks("StartGeneration", start_generation(2, 0))
    assert (await asyncio.wait_for(asking, SECONDS)).rows


async def test_a_worker_reports_why_a_server_whose_disk_is_full_has_it_try_again(
    there: There, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    interrupt = Interrupt()
    connection = ServerLink(0, there.address, "token", interrupt)
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwritev", full)
        call = connection.begin("Push", stage(1, 0))
        asking = asyncio.ensure_future(asyncio.to_thread(call.result))
        await until(lambda: (found := interrupt.longest(time.monotonic())) is not None and found.why)
        waits = interrupt.longest(time.monotonic())
    assert not (await asyncio.wait_for(asking, SECONDS)).empty, "it goes on when there is room"
    assert waits is not None and (waits.server, waits.call) == (0, "Push")
    assert "cannot be written (No space left on device)" in waits.why
    assert interrupt.longest(time.monotonic()) is None


@pytest.fixture
async def watched(
    there: There, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Watch, asyncio.Queue[ev.Event]]]:
    """By a master that has had an answer already."""
    for name, seconds in (("LOOK_SECONDS", 0.01), ("AGAIN_SECONDS", 0.05), ("AWAY_SECONDS", 0.5)):
        monkeypatch.setattr(of_master, name, seconds)
    said = asyncio.Queue[ev.Event]()
    watch = Watch(said.put_nowait, lambda: "token", 1)
    watch.find(0, there.address)
    await until(lambda: watch.answers(1))
    yield watch, said
    await watch.close()


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not happened():
            await asyncio.sleep(0.01)


async def test_the_master_does_not_say_of_one_that_is_busy_that_it_does_not_answer(
    there: There, watched: tuple[Watch, asyncio.Queue[ev.Event]]
) -> None:
    watch, said = watched
    work = there.service.has_to_do(30)  # pieces of 0.05 s each: three times as long as it may be away
    await asyncio.wait_for(asyncio.gather(*work), SECONDS)
    assert watch.answers(1) and there.service.probes >= 30
    assert said.empty()


async def test_the_master_says_of_one_that_does_nothing_that_it_does_not_answer(
    there: There, watched: tuple[Watch, asyncio.Queue[ev.Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_master, "ANSWER_SECONDS", 1.0)
    watch, said = watched
    there.service.hangs = True
    work = there.service.has_to_do(1)
    found = await asyncio.wait_for(said.get(), SECONDS)
    assert isinstance(found, ev.ServerAway) and found.seconds >= 0.5
    await until(lambda: not watch.answers(1))
    there.service.goes_on(1)
    assert isinstance(await asyncio.wait_for(said.get(), SECONDS), ev.ServerRecovered)
    await asyncio.gather(*work)
