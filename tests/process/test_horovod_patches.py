"""That the patched Horovod is the one installed: by what it does, not by what it says.

Each test runs real ranks in processes of their own, and a real rendezvous store here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import sys
from collections.abc import AsyncIterator
from importlib.metadata import version

import pytest
from aiohttp import web

from trainer.session.kvstore import KeyValueStore

RANK = """
import os, queue, sys, threading
os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_GLOO_IFACE="lo",
                  HOROVOD_GLOO_TIMEOUT_SECONDS="60", TF_CPP_MIN_LOG_LEVEL="3")
import numpy as np
from trainer.ring.horovod import HorovodRing
from trainer.ring.base import RingBroken
import tensorflow as tf
port, rank, size = map(int, sys.argv[1:])
ring = HorovodRing(port, "lo", f"rank-{rank}")
def say(text): print(text, flush=True)
def form(rank, size):
    try:
        ring.form(rank, size)
        return True
    except RingBroken as error:
        ring.cut(); ring.close()
        say("broken " + str(error))
        return False
orders = queue.SimpleQueue()
def listen():
    for line in sys.stdin:
        if line.strip() == "cut":
            ring.cut()  # at once, whatever the main thread is waiting for
            say("cut")
        else:
            orders.put(line)
threading.Thread(target=listen, daemon=True).start()
say("here")
while True:
    match orders.get().split():
        case ["form", r, n]:
            if form(int(r), int(n)): say("formed")
        case ["steps"]:
            try:
                while True:
                    total = ring.reduce(tf.ones([200000]))
                    say("step")
            except RingBroken as error:
                ring.cut(); ring.close()
                say("broken " + str(error))
        case ["step"]:
            say(f"sum {float(ring.reduce(tf.ones([3]))[0])}")
        case ["close"]:
            ring.close(); say("closed")
"""


class Rank:
    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n".encode())

    async def says(self, word: str, seconds: float = 30) -> str:
        """The next line that begins with `word`; a rank that dies first fails the test."""
        assert self.process.stdout is not None
        async with asyncio.timeout(seconds):
            while line := (await self.process.stdout.readline()).decode():
                if line.startswith(word):
                    return line.strip()
        raise AssertionError(f"the rank ended ({await self.process.wait()}) and never said {word!r}")


@contextlib.asynccontextmanager
async def ranks(size: int) -> AsyncIterator[tuple[KeyValueStore, list[Rank]]]:
    store = KeyValueStore(lambda *_: None)
    port = await store.start()
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            RANK,
            str(port),
            str(rank),
            str(size),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        for rank in range(size)
    ]
    found = [Rank(p) for p in processes]
    try:
        for rank in found:
            await rank.says("here", 60)
        yield store, found
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
        await store.close()


def test_the_wheel_is_ours_and_has_no_runner() -> None:
    assert "+edl." in version("horovod")
    assert importlib.util.find_spec("horovod.runner") is None


def questions(store: KeyValueStore) -> list[str]:
    """The keys that are asked for from now on."""
    asked: list[str] = []
    handle = store._get

    async def counting(key: str) -> web.Response:
        asked.append(key)
        return await handle(key)

    store._get = counting  # type: ignore[method-assign]
    return asked


async def is_asked(store: KeyValueStore) -> None:
    """Until a rank is inside hvd.init, waiting for a peer."""
    async with asyncio.timeout(30):
        while not store._waiting:
            await asyncio.sleep(0.01)


async def test_a_rank_asks_once_for_each_peer() -> None:
    async with ranks(3) as (store, found):
        asked = questions(store)
        store.open(1)
        for number, rank in enumerate(found):
            rank.do(f"form {number} 3")
        for rank in found:
            await rank.says("formed")
        for rank in found:
            rank.do("step")
        assert await found[0].says("sum") == "sum 3.0"
        assert len(asked) == 3 * 2, f"one mesh, no question asked twice: {asked}"


async def test_a_generation_that_is_called_off_fails_at_once_and_the_next_one_forms() -> None:
    async with ranks(2) as (store, (one, other)):
        asked = questions(store)
        store.open(1)
        one.do("form 0 2")
        await is_asked(store)
        store.call_off()
        await one.says("broken hvd.init")
        assert len(asked) == 1, f"410 should not be asked for again: {asked}"
        store.open(2)
        one.do("form 0 2")
        other.do("form 1 2")
        await one.says("formed")
        await other.says("formed")
        for rank in (one, other):
            rank.do("step")
        assert await one.says("sum") == "sum 2.0"


async def test_a_cut_while_the_ring_is_formed_spares_the_question_to_the_store() -> None:
    async with ranks(2) as (store, (one, _)):
        asked = questions(store)
        store.open(1)
        one.do("form 0 2")
        await is_asked(store)
        one.do("cut")
        await one.says("cut")
        store.call_off()
        await one.says("broken hvd.init")
        assert len(asked) == 1, f"a broken question is asked again, 0.5 s later: {asked}"


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06])
async def test_a_peer_that_dies_in_init_aborts_nobody(delay: float) -> None:
    async with ranks(3) as (store, (first, second, dying)):
        store.open(1)
        for number, rank in enumerate((first, second, dying)):
            rank.do(f"form {number} 3")
        await asyncio.sleep(delay)
        dying.process.send_signal(signal.SIGKILL)
        await dying.process.wait()
        store.call_off()
        for rank in (first, second):
            rank.do("cut")  # as the master orders it
        # A rank that was through already finds out in its first operation.
        for rank in (first, second):
            rank.do("steps")
        for rank in (first, second):
            await rank.says("broken", 5)
        store.open(2)
        first.do("form 0 2")
        second.do("form 1 2")
        await first.says("formed")
        await second.says("formed")


async def test_a_peer_that_dies_in_an_operation_aborts_nobody() -> None:
    async with ranks(3) as (store, members):
        for generation in range(1, 4):
            store.open(generation)
            alive = [m for m in members if m.process.returncode is None]
            if len(alive) == 1:
                break
            for number, rank in enumerate(alive):
                rank.do(f"form {number} {len(alive)}")
            for rank in alive:
                await rank.says("formed")
                rank.do("steps")
            await alive[0].says("step")
            alive[-1].process.send_signal(signal.SIGKILL)
            await alive[-1].process.wait()
            for rank in alive[:-1]:
                await rank.says("broken allreduce", 10)
