# SPDX-License-Identifier: Apache-2.0
"""A rank over NCCL that fails, dies or stops breaks the ring for all, and the others form the next one.

Horovod is compiled for NCCL, with patch 14, on top of a stand-in (tools/nccl_standin). A dead rank is silent
there, so only Gloo's connections or a cut show its death. After each fault the survivors have left the ring
and not exited, and their next ring sums and ends without an abort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.contract.ring_engines import (
    MEMBERS,
    HorovodOverNccl,
    Member,
    ProcessMember,
    all_do,
    form,
    leave,
    obeyed,
)

# The first test may have to compile Horovod.
pytestmark = [pytest.mark.process, pytest.mark.waits, pytest.mark.timeout(900)]

SUMS = pytest.mark.parametrize("sums", ["sums", "graphs"])
LAST = MEMBERS - 1


class Rings(HorovodOverNccl):
    """Rings over the stand-in, and the members that a test has seen in good order at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.in_order: list[Member] = []


@pytest.fixture(scope="module")
def engine() -> Iterator[Rings]:
    made = Rings()
    yield made
    made.close()


@pytest.fixture
def members(engine: Rings) -> Iterator[list[Member]]:
    """Members in no ring. Those that are not in good order at the end of a test are killed."""
    ready = engine.members()
    engine.in_order = []
    yield list(ready)
    for m in ready:
        if m not in engine.in_order:
            engine.kill(m)


def kill(engine: Rings, member: Member, others: list[Member]) -> None:
    engine.kill(member)


def stop(engine: Rings, member: Member, others: list[Member]) -> None:
    """Stop a member, which keeps its connections, and cut the ring of the others, as the master does."""
    assert isinstance(member, ProcessMember)
    member.stop()
    for m in others:
        m.cut()


Fault = Callable[[Rings, Member, list[Member]], None]
FAULTS = pytest.mark.parametrize("fault", [kill, stop])


def sum_and_leave(engine: Rings, members: list[Member]) -> None:
    """Form a ring, sum, and leave it in good order."""
    form(engine, members)
    sums = all_do(members, ["sum 3 1"] * len(members), "sum")
    assert sums == [f"sum {[float(len(members))] * 3}"] * len(members)
    leave(members)
    assert [engine.ends(m) for m in members] == [["destroyed"]] * len(members)
    engine.in_order = members


def form_and_sum(engine: Rings, members: list[Member], sums: str) -> None:
    """Form a ring whose members sum until it breaks, and wait for a first sum."""
    form(engine, members)
    all_do(members, [sums] * len(members), "another")


def broken(engine: Rings, members: list[Member]) -> list[str]:
    """Wait until these members have left their broken ring by an abort. Return their errors."""
    errors = [m.says("broken") for m in members]
    assert [engine.ends(m) for m in members] == [["aborted"]] * len(members)
    return errors


def test_a_ring_in_good_order_ends_without_an_abort(engine: Rings, members: list[Member]) -> None:
    sum_and_leave(engine, members[:2])
    sum_and_leave(engine, members)


@SUMS
@pytest.mark.parametrize("rank", [0, LAST])
@pytest.mark.parametrize("order", ["call", "async"])
def test_an_error_of_nccl_on_one_rank_breaks_the_sums_of_all(
    engine: Rings, members: list[Member], order: str, rank: int, sums: str
) -> None:
    form_and_sum(engine, members, sums)
    engine.order(members[rank], order)
    errors = broken(engine, members)
    if order == "call":  # an asynchronous error may be found between two sums
        assert "ncclAllReduce failed: unhandled system error" in errors[rank]
    sum_and_leave(engine, members)


def test_a_cut_ends_the_call_of_a_sum_that_stays_in_progress(engine: Rings, members: list[Member]) -> None:
    form_and_sum(engine, members, "sums")
    obeyed(engine.order(members[0], "hang"))
    for m in members:
        m.cut()
    broken(engine, members)
    sum_and_leave(engine, members)


@pytest.mark.parametrize("rank", [0, LAST])
def test_a_communicator_that_fails_on_one_rank_breaks_the_first_sum_of_all(
    engine: Rings, members: list[Member], rank: int
) -> None:
    form(engine, members)
    engine.order(members[rank], "init")
    for m in members:
        m.do("sum 3 1")
    errors = broken(engine, members)
    assert "ncclCommInitRank failed: invalid usage" in errors.pop(rank)
    for error in errors:
        assert "ncclCommInitRank failed on another rank" in error
    sum_and_leave(engine, members)


@SUMS
@FAULTS
def test_a_rank_that_is_lost_in_a_sum(engine: Rings, members: list[Member], fault: Fault, sums: str) -> None:
    form_and_sum(engine, members, sums)
    lost = members.pop()
    fault(engine, lost, members)
    broken(engine, members)
    sum_and_leave(engine, members)


@FAULTS
def test_a_rank_that_is_lost_while_communicators_are_made(
    engine: Rings, members: list[Member], fault: Fault
) -> None:
    form(engine, members)
    orders = [engine.order(m, "connect") for m in members]  # else a cut may find no communicator yet
    for m in members:
        m.do("sum 3 1")
    for order in orders:
        obeyed(order)
    fault(engine, members.pop(), members)
    broken(engine, members)
    sum_and_leave(engine, members)


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("finalize", [["aborted"], ["aborted"], ["aborted"]]),
        ("destroy", [[], ["destroyed"], ["destroyed"]]),  # since all have finalized
    ],
)
def test_a_rank_that_cannot_end_its_communicator_keeps_nobody_in_the_ring(
    engine: Rings, members: list[Member], order: str, ends: list[list[str]]
) -> None:
    form(engine, members)
    all_do(members, ["sum 3 1"] * MEMBERS, "sum")
    engine.order(members[0], order)
    leave(members)
    assert [engine.ends(m) for m in members] == ends
    sum_and_leave(engine, members)


@FAULTS
@pytest.mark.parametrize("order", ["finalize", "destroy"])
def test_a_rank_that_is_lost_while_communicators_end(
    engine: Rings, members: list[Member], order: str, fault: Fault
) -> None:
    form(engine, members)
    all_do(members, ["sum 3 1"] * MEMBERS, "sum")
    hangs = engine.order(members[LAST], order)
    for m in members:
        m.do("close")
    obeyed(hangs)
    lost = members.pop()
    fault(engine, lost, members)
    for m in members:
        m.says("closed")
    for m in members:
        engine.ends(m)  # aborted or destroyed: that depends on how far the lost rank came
    sum_and_leave(engine, members)
