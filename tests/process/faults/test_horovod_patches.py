# SPDX-License-Identifier: Apache-2.0
"""The installed Horovod is the patched one: by its behaviour, not by its version.

Each test runs real ranks in processes of their own, and a real rendezvous store here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pytest
import pytest_asyncio

from edl.trainer.session.kvstore import Answer, KeyValueStore

ROOT = Path(__file__).parents[3]
ROOM = 128  # MiB
in_one_loop = pytest.mark.asyncio(loop_scope="module")


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


@dataclass
class Meeting:
    """A store, and ranks that meet there; the survivors of a test take part in the next one."""

    store: KeyValueStore
    port: int
    environment: dict[str, str]
    here: list[Rank] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def ranks(self, size: int) -> AsyncIterator[tuple[KeyValueStore, list[Rank]]]:
        """So many ranks, in no ring."""
        survivors = [rank for rank in self.here if rank.process.returncode is None]
        new = [await self._start() for _ in range(size - len(survivors))]
        self.here = new + survivors
        for rank in new:
            await rank.says("here", 60)
        try:
            yield self.store, self.here[:size]
        except BaseException:
            await self.end()  # their wait may be of any kind: the next test has new ranks
            raise
        finally:
            self.store.__dict__.pop("_get", None)  # it is not counted any more
        survivors = [rank for rank in self.here if rank.process.returncode is None]
        for rank in survivors:
            rank.do("close")
        for rank in survivors:
            await rank.says("closed")

    async def end(self) -> None:
        for rank in self.here:
            with contextlib.suppress(ProcessLookupError):
                rank.process.kill()
            await rank.process.communicate()

    async def _start(self) -> Rank:
        member = ["-m", "tests.contract.ring_member", str(self.port), secrets.token_hex(4), self.store.secret]
        command = [sys.executable, *member]
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, **self.environment}
        return Rank(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, limit=1 << 20, cwd=ROOT, env=environment
            )
        )


@contextlib.asynccontextmanager
async def a_meeting(**environment: str) -> AsyncIterator[Meeting]:
    store = KeyValueStore(lambda *_: None)
    found = Meeting(store, await store.start(), environment)
    try:
        yield found
    finally:
        await found.end()
        await store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def meeting() -> AsyncIterator[Meeting]:
    # Longer than any test: so none needs that an idle rank asks the others now and then.
    async with a_meeting(HOROVOD_IDLE_CYCLE_TIME="600000") as found:
        yield found


@pytest.mark.parametrize(
    "line",
    [
        "horovodrun -np 2 python train.py",
        "python -m horovod.runner -np 2 python train.py",
        "python -m horovod.run -np 2 python train.py",
        "python -c 'from horovod import run'",
        "python -c 'import horovod.runner.launch'",
    ],
)
def test_the_wheel_is_ours_and_names_the_way_in_place_of_a_runner(line: str) -> None:
    assert "+edl." in version("horovod")
    name, *words = shlex.split(line)
    command = [str(Path(sys.executable).with_name(name)), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Start scripts with `edl horovod`" in done.stderr.splitlines()[-1]


def questions(store: KeyValueStore) -> list[str]:
    """The keys that are asked for from now on."""
    asked: list[str] = []
    handle = store._get

    async def counting(key: str) -> Answer:
        asked.append(key)
        return await handle(key)

    store._get = counting  # type: ignore[method-assign]
    return asked


async def is_asked(store: KeyValueStore) -> None:
    """Until a rank is inside hvd.init, waiting for a peer."""
    async with asyncio.timeout(30):
        while not store._waiting:
            await asyncio.sleep(0.01)


@in_one_loop
async def test_a_rank_asks_once_for_each_peer(meeting: Meeting) -> None:
    async with meeting.ranks(3) as (store, found):
        asked = questions(store)
        store.open(1)
        for number, rank in enumerate(found):
            rank.do(f"form {number} 3")
        for rank in found:
            await rank.says("formed")
        for rank in found:
            rank.do("sum 3 1")
        assert await found[0].says("sum") == "sum [3.0, 3.0, 3.0]"
        assert len(asked) == 3 * 2, f"one mesh, no question asked twice: {asked}"


def wakings(rank: Rank) -> int:
    """How often a thread of the process has begun to wait."""
    tasks = Path(f"/proc/{rank.process.pid}/task").glob("*/status")
    return sum(
        int(line.split()[1])
        for task in tasks
        for line in task.read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    )


@in_one_loop
async def test_an_idle_ring_wakes_nobody_and_sums_at_once(meeting: Meeting) -> None:
    async with meeting.ranks(2) as (store, (one, other)):
        store.open(1)
        one.do("form 0 2")
        other.do("form 1 2")
        for rank in (one, other):
            await rank.says("formed")
        before = wakings(one)
        await asyncio.sleep(0.5)  # no event: that nothing happens is what is seen
        assert wakings(one) - before < 250, "an idle rank looks for something to sum 1,000 times a second"
        for times in range(2):  # the second time the ranks know the sums already
            for rank in (one, other):
                rank.do("twice 1 2")
            for rank in (one, other):
                assert await rank.says("twice") == "twice [2.0, 4.0]", times


@in_one_loop
async def test_a_sum_is_made_where_its_tensor_is_if_nobody_else_reads_that(meeting: Meeting) -> None:
    async with meeting.ranks(2) as (store, found):
        store.open(1)
        for number, rank in enumerate(found):
            rank.do(f"form {number} 2")
        for rank in found:
            await rank.says("formed")
        for number, rank in enumerate(found, 1):
            rank.do(f"kept {number}")
        assert [await rank.says("kept") for rank in found] == [
            "kept [1.0, 5.0, 2.0, 1.0]",
            "kept [2.0, 5.0, 3.0, 2.0]",
        ]
        for rank in found:
            rank.do(f"room {ROOM}")
        for rank in found:
            grown = int((await rank.says("room", 120)).split()[1])
            assert ROOM // 2 < grown < ROOM * 3 // 2, f"{grown} MiB for a sum of {ROOM}"


@in_one_loop
async def test_a_generation_that_is_called_off_fails_at_once_and_the_next_one_forms(meeting: Meeting) -> None:
    async with meeting.ranks(2) as (store, (one, other)):
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
            rank.do("sum 3 1")
        assert await one.says("sum") == "sum [2.0, 2.0, 2.0]"


@in_one_loop
async def test_a_cut_while_the_ring_is_formed_spares_the_question_to_the_store(meeting: Meeting) -> None:
    async with meeting.ranks(2) as (store, (one, _)):
        asked = questions(store)
        store.open(1)
        one.do("form 0 2")
        await is_asked(store)
        one.do("cut")
        await one.says("cut")
        store.call_off()
        await one.says("broken hvd.init")
        assert len(asked) == 1, f"a broken question is asked again, 0.5 s later: {asked}"


@in_one_loop
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06])
async def test_a_peer_that_dies_in_init_aborts_nobody(meeting: Meeting, delay: float) -> None:
    async with meeting.ranks(3) as (store, (first, second, dying)):
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
            rank.do("sums")
        for rank in (first, second):
            await rank.says("broken", 5)
        store.open(2)
        first.do("form 0 2")
        second.do("form 1 2")
        await first.says("formed")
        await second.says("formed")


@in_one_loop
async def test_a_peer_that_dies_in_an_operation_aborts_nobody(meeting: Meeting) -> None:
    async with meeting.ranks(3) as (store, members):
        for generation in range(1, 4):
            store.open(generation)
            alive = [m for m in members if m.process.returncode is None]
            if len(alive) == 1:
                break
            for number, rank in enumerate(alive):
                rank.do(f"form {number} {len(alive)}")
            for rank in alive:
                await rank.says("formed")
                rank.do("sums")
            await alive[0].says("another")
            alive[-1].process.send_signal(signal.SIGKILL)
            await alive[-1].process.wait()
            for rank in alive[:-1]:
                await rank.says("broken allreduce", 10)


@in_one_loop
async def test_a_sum_that_begins_while_the_engine_ends_is_broken() -> None:
    # Many threads begin sums, and the engine does not wait until no further sum comes.
    async with (
        a_meeting(HOROVOD_IDLE_CYCLE_TIME="0", TF_NUM_INTEROP_THREADS="16") as meeting,
        meeting.ranks(2) as (store, (one, other)),
    ):
        for generation in range(1, 101):
            store.open(generation)
            one.do("form 0 2")
            other.do("form 1 2")
            for rank in (one, other):
                await rank.says("formed")
                rank.do("many")
            for rank in (one, other):
                await rank.says("another")
            one.do("cut")
            for rank in (one, other):
                await rank.says("broken allreduce")
