# SPDX-License-Identifier: Apache-2.0
"""One contract for all rings: the local ring on threads, and Horovod's in processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.session.kvstore import KeyValueStore
from tests.contract.ring_member import serve

ROOT = Path(__file__).parents[2]
MEMBERS = 3
SECONDS = 120
ENDED = ""


class Member(ABC):
    """A member of a ring that follows orders."""

    def __init__(self) -> None:
        self.words: queue.SimpleQueue[str] = queue.SimpleQueue()

    @abstractmethod
    def do(self, order: str) -> None:
        """Send an order to the member; its answer arrives in `words`."""

    @abstractmethod
    def cut(self) -> None:
        """Cut the ring from a different thread than the one in the ring."""

    def says(self, word: str) -> str:
        """Wait for an answer that begins with `word`, and skip earlier answers."""
        while True:
            line = self.words.get(timeout=SECONDS)
            assert line != ENDED, f"the member ended, and never said {word!r}"
            if line.startswith(word):
                return line

    def does(self, order: str, word: str) -> str:
        self.do(order)
        return self.says(word)


class Engine(Protocol):
    """Members in one process or in several, and their rendezvous."""

    def members(self) -> list[Member]:
        """MEMBERS live members that are in no ring."""

    def rendezvous(self, members: list[Member]) -> None:
        """Prepare the rendezvous of these members for the next generation."""

    def call_off(self, members: list[Member]) -> None:
        """Cancel the generation; members that wait for it are notified."""

    def kill(self, member: Member) -> None: ...

    def close(self) -> None: ...


# --- threads


class LocalMember(Member):
    def __init__(self) -> None:
        super().__init__()
        self.ring = LocalRing()
        self.orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.alive = True
        self.thread = threading.Thread(target=serve, args=(self.ring, self.orders.get, self.words.put))
        self.thread.start()

    def do(self, order: str) -> None:
        self.orders.put(order)

    def cut(self) -> None:
        self.ring.cut()


class Local:
    def __init__(self) -> None:
        self._members = [LocalMember() for _ in range(MEMBERS)]

    def members(self) -> list[Member]:
        self._members = [m if m.alive else LocalMember() for m in self._members]
        return list(self._members)

    def rendezvous(self, members: list[Member]) -> None:
        group = InProcessGroup(len(members))
        for m in self._members:
            if m in members:
                m.ring.open(group)

    def call_off(self, members: list[Member]) -> None:
        for m in members:
            m.cut()

    def kill(self, member: Member) -> None:
        assert isinstance(member, LocalMember)
        member.alive = False
        if member.ring.group is not None:
            member.ring.group.cut("a member has died")
        member.do(ENDED)

    def close(self) -> None:
        for m in self._members:
            m.do(ENDED)
            m.thread.join(SECONDS)


# --- processes


class ProcessMember(Member):
    def __init__(self, port: int, number: int, secret: str):
        super().__init__()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.ring_member", str(port), f"member-{number}", secret],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.words.put(line.strip())
        self.words.put(ENDED)

    def kill(self) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def do(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def cut(self) -> None:
        self.do("cut")


class Horovod:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._store = KeyValueStore(lambda *_: None)
        self._port = asyncio.run_coroutine_threadsafe(self._store.start(), self._loop).result()
        self._numbers = itertools.count()
        self._members: list[ProcessMember] = []

    def members(self) -> list[Member]:
        alive = [m for m in self._members if m.process.poll() is None]
        new = [
            ProcessMember(self._port, next(self._numbers), self._store.secret)
            for _ in range(MEMBERS - len(alive))
        ]
        self._members = alive + new
        for m in new:
            m.says("here")
        return list(self._members)

    def rendezvous(self, members: list[Member]) -> None:
        self._loop.call_soon_threadsafe(self._store.open, next(self._numbers))

    def call_off(self, members: list[Member]) -> None:
        self._loop.call_soon_threadsafe(self._store.call_off)
        for m in members:
            m.cut()

    def kill(self, member: Member) -> None:
        assert isinstance(member, ProcessMember)
        member.kill()

    def close(self) -> None:
        for m in self._members:
            m.kill()
        asyncio.run_coroutine_threadsafe(self._store.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


# Most of the time, its members wait for each other.
HOROVOD = pytest.param(Horovod, marks=[pytest.mark.process, pytest.mark.waits], id="Horovod")


@pytest.fixture(scope="module", params=[Local, HOROVOD])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made: Engine = request.param()
    yield made
    made.close()


@pytest.fixture
def members(engine: Engine) -> Iterator[list[Member]]:
    ready = engine.members()
    yield ready
    engine.call_off(ready)  # a failed test may have left members waiting
    for m in engine.members():
        m.does("close", "closed")


def form(engine: Engine, members: list[Member]) -> None:
    """Form a ring of these members, in this order."""
    engine.rendezvous(members)
    for rank, m in enumerate(members):
        m.do(f"form {rank} {len(members)}")
    for m in members:
        m.says("formed")


def leave(members: list[Member]) -> None:
    for m in members:
        m.do("close")
    for m in members:
        m.says("closed")


def all_do(members: list[Member], orders: list[str], word: str) -> list[str]:
    for m, order in zip(members, orders, strict=True):
        m.do(order)
    return [m.says(word) for m in members]


# --- what they do


def test_every_rank_has_the_sum_of_all(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    for length in (1, 5, 2):
        sums = all_do(members, [f"sum {length} {2**rank}" for rank in range(MEMBERS)], "sum")
        assert sums == [f"sum {[7.0] * length}"] * MEMBERS
    leave(members)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_every_rank_has_what_the_root_gave(engine: Engine, members: list[Member], dtype: str) -> None:
    form(engine, members)
    for root in (0, 2):
        got = all_do(members, [f"broadcast {dtype} {root} {10 + rank}" for rank in range(MEMBERS)], dtype)
        assert got == [f"{dtype} {[10 + root] * 4}"] * MEMBERS
    leave(members)


def test_a_state_is_given_to_one_who_passes_it_on_while_the_ring_goes_on(
    engine: Engine, members: list[Member]
) -> None:
    form(engine, members)
    giver, *takers = members
    takers[0].do("pass 0")  # before the state is sent
    takers[1].do("take 1")
    giver.does("give 5 7", "given")
    giver.does("sum 1 1", "sum")
    for m in takers:
        assert m.says("took") == "took [(3000000, [5]), (3000000, [7])] [3.0]"
    leave(members)


def test_a_state_whose_giver_dies_does_not_come(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    giver, takers = members.pop(0), members
    takers[0].do("pass 0")
    takers[1].do("take 1")
    engine.kill(giver)
    engine.call_off(takers)
    for m in takers:
        assert "execution error" not in m.says("broken"), "it is said what has happened"


def test_one_alone_is_a_ring(engine: Engine, members: list[Member]) -> None:
    one = members[0]
    form(engine, [one])
    assert one.does("sum 2 3", "sum") == "sum [3.0, 3.0]"
    assert one.does("broadcast int64 0 5", "int64") == "int64 [5, 5, 5, 5]"
    leave([one])


def test_who_has_left_meets_others_in_other_ranks(engine: Engine, members: list[Member]) -> None:
    first, second, third = members
    for ring in ([first, second], [third, second, first], [third, first]):
        form(engine, ring)
        assert all_do(ring, ["sum 1 1"] * len(ring), "sum") == [f"sum [{len(ring)}.0]"] * len(ring)
        leave(ring)


@pytest.mark.parametrize("which", [0, 2], ids=["the first", "the last"])
def test_a_member_that_dies_breaks_it_for_all_and_they_meet_again(
    engine: Engine, members: list[Member], which: int
) -> None:
    form(engine, members)
    dying = members.pop(which)
    all_do([dying, *members], ["sums"] * MEMBERS, "another")
    engine.kill(dying)
    for m in members:
        m.says("broken")
    form(engine, members)
    assert all_do(members, ["sum 1 1", "sum 1 4"], "sum") == ["sum [5.0]"] * 2
    leave(members)


def test_a_cut_reaches_all_who_wait(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    waiting = members[1:]
    for m in waiting:  # they wait for the first member, which does not take part
        m.do("sum 3 1")
    members[0].cut()
    for m in waiting:
        m.says("broken")
    members[0].does("sum 3 1", "broken")
    form(engine, members)
    leave(members)


def test_a_generation_that_is_called_off_is_not_formed_and_the_next_one_is(
    engine: Engine, members: list[Member]
) -> None:
    engine.rendezvous(members)
    for rank in (0, 1):  # the third member does not take part
        members[rank].do(f"form {rank} {MEMBERS}")
    engine.call_off(members)
    for rank in (0, 1):
        members[rank].says("broken")
    form(engine, members)
    assert all_do(members, ["sum 1 1"] * MEMBERS, "sum") == ["sum [3.0]"] * MEMBERS
    leave(members)


def test_who_leaves_alone_breaks_it_for_the_others(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    leave(members[:1])
    for m in members[1:]:
        m.do("sum 1 1")
    for m in members[1:]:
        m.says("broken")


def test_a_ring_that_is_closed_is_not_cut(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    leave(members)
    members[0].cut()
    form(engine, members)
    assert all_do(members, ["sum 1 1"] * MEMBERS, "sum") == ["sum [3.0]"] * MEMBERS
    leave(members)
    members[0].does("close", "closed")


@pytest.mark.parametrize("engine", [HOROVOD], indirect=True)
def test_a_graph_sums_over_it_and_a_ring_that_breaks_there_is_broken(
    engine: Engine, members: list[Member]
) -> None:
    form(engine, members)
    for _ in range(2):
        sums = all_do(members, [f"graph {2**rank}" for rank in range(MEMBERS)], "graph")
        assert sums == [f"graph {[24.0]}"] * MEMBERS  # three times 1 + 2 + 4, plus 1
    dying = members.pop()
    all_do([dying, *members], ["graphs"] * MEMBERS, "another")
    engine.kill(dying)
    for m in members:
        why = m.says("broken")
        assert "allreduce" in why and "execution error" not in why
    form(engine, members)
    assert all_do(members, ["graph 1", "graph 4"], "graph") == [f"graph {[12.0]}"] * 2
    leave(members)


@pytest.mark.parametrize("engine", [HOROVOD], indirect=True)
def test_sums_of_one_tensor_in_a_graph_are_as_many_as_others_have_of_several(
    engine: Engine, members: list[Member]
) -> None:
    form(engine, members)
    sums = all_do(members, ["twice 1 1", "twice 2 4", "twice 4 8"], "twice")
    assert sums == [f"twice {[7.0, 13.0]}"] * MEMBERS
    leave(members)


@pytest.mark.parametrize("engine", [HOROVOD], indirect=True)
def test_a_sum_may_travel_in_half_the_bytes(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    found = all_do(members, ["half 4096", "half 1", "half 0.125"], "half")
    assert found == ["half 4096.0"] * MEMBERS, "which float16 rounds to"
    leave(members)
    form(engine, members[:1])
    members[0].does("half 1", "half")  # the first sum is made even by a member alone
    assert members[0].does("half 4097", "half") == "half 4097.0", "alone, nothing travels"
    leave(members[:1])


@pytest.mark.parametrize("engine", [HOROVOD], indirect=True)
def test_who_was_alone_sums_with_the_others_again(engine: Engine, members: list[Member]) -> None:
    one, *others = members
    for _ in range(2):
        form(engine, [one])
        for _ in range(3):  # from the second time on, no peer is involved
            assert one.does("twice 3 5", "twice") == f"twice {[3.0, 5.0]}"
        leave([one])
        form(engine, [*others, one])
        sums = all_do(members, ["twice 1 1", "twice 2 4", "twice 4 8"], "twice")
        assert sums == [f"twice {[7.0, 13.0]}"] * MEMBERS
        leave(members)
