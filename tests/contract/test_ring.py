# SPDX-License-Identifier: Apache-2.0
"""One contract for all rings: a local one on threads, Horovod's in processes, with or without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.ring_engines import (
    MEMBERS,
    Engine,
    Gloo,
    Horovod,
    HorovodOverNccl,
    Local,
    Member,
    all_do,
    form,
    leave,
)

# Most of the time, their members wait for each other.
WAITS = [pytest.mark.process, pytest.mark.waits]
HOROVOD = [
    pytest.param(Horovod, marks=WAITS, id="Horovod"),
    # Its first test may have to compile Horovod.
    pytest.param(HorovodOverNccl, marks=[*WAITS, pytest.mark.timeout(900)], id="Horovod-NCCL"),
]


WITHOUT_FRAMEWORK = [Local, pytest.param(Gloo, marks=WAITS, id="Gloo")]


@pytest.fixture(scope="module", params=[*WITHOUT_FRAMEWORK, *HOROVOD])
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


# --- what they do


def test_every_rank_has_the_sum_of_all(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    for length in (1, 5, 2):
        sums = all_do(members, [f"sum {length} {2**rank}" for rank in range(MEMBERS)], "sum")
        assert sums == [f"sum {[7.0] * length}"] * MEMBERS
    leave(members)


@pytest.mark.parametrize("engine", WITHOUT_FRAMEWORK, indirect=True)
def test_sums_of_arrays_keep_their_type(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    for dtype, values, expected in [
        ("float64", (2.0**60, 1.0, 2.0**10), 2.0**60 + 2.0**10),  # float32 would lose the second
        ("int64", (2**40, 1, 2), 2**40 + 3),
        ("int32", (-1, 5, 2), 6),
    ]:
        sums = all_do(members, [f"exact {dtype} {value}" for value in values], "exact")
        assert sums == [f"exact {dtype} [{expected}]"] * MEMBERS
    leave(members)


@pytest.mark.parametrize("engine", WITHOUT_FRAMEWORK[1:], indirect=True)
def test_the_ring_of_a_script_imports_no_framework(engine: Engine, members: list[Member]) -> None:
    assert all_do(members, ["framework"] * MEMBERS, "framework") == ["framework False"] * MEMBERS


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


@pytest.mark.parametrize("engine", HOROVOD, indirect=True)
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


@pytest.mark.parametrize("engine", HOROVOD, indirect=True)
def test_sums_of_one_tensor_in_a_graph_are_as_many_as_others_have_of_several(
    engine: Engine, members: list[Member]
) -> None:
    form(engine, members)
    sums = all_do(members, ["twice 1 1", "twice 2 4", "twice 4 8"], "twice")
    assert sums == [f"twice {[7.0, 13.0]}"] * MEMBERS
    leave(members)


@pytest.mark.parametrize("engine", HOROVOD, indirect=True)
def test_a_sum_may_travel_in_half_the_bytes(engine: Engine, members: list[Member]) -> None:
    form(engine, members)
    found = all_do(members, ["half 4096", "half 1", "half 0.125"], "half")
    assert found == ["half 4096.0"] * MEMBERS, "which float16 rounds to"
    leave(members)
    form(engine, members[:1])
    members[0].does("half 1", "half")  # the first sum is made even by a member alone
    assert members[0].does("half 4097", "half") == "half 4097.0", "alone, nothing travels"
    leave(members[:1])


@pytest.mark.parametrize("engine", HOROVOD, indirect=True)
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
