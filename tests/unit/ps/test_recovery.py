# SPDX-License-Identifier: Apache-2.0
"""What follows from where parameter servers say they are: trainer/ps_client/recovery.py, without a call."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.ps_client.recovery import RecoveryPlan, ServerStates, has_dropped, plan_recovery, why_behind

STEP = 7
TWO, TWICE = ShardAssignment(2), ShardAssignment(3, 2)
LAST = Commit(STEP - 1, skipped=False, scale=1.0, learning_rate=0.1, iteration=STEP - 1, generation=4)


def at(step: int = STEP, of: ShardAssignment = TWO, generation: int = 4) -> pb.Position:
    return pb.Position(step=step, generation=generation, assignment=of.to_proto())


def ready(position: pb.Position, to: ShardAssignment, step: int = STEP) -> pb.Position:
    """The same, of one that can switch to another assignment."""
    found = deepcopy(position)
    found.ready.CopyFrom(to.to_proto())
    found.ready_step = step
    return found


EMPTY = pb.Position(empty=True)


def test_nobody_who_answers_says_nothing() -> None:
    none = ServerStates()
    assert (none.generation, none.needed, none.newest, none.lost) == (0, 0, None, [])


def test_of_two_assignments_the_one_of_the_newest_generation_counts() -> None:
    moved = ServerStates(
        {0: at(generation=5), 1: at(generation=5), 2: at(of=ShardAssignment(3), generation=4)}
    )
    assert (moved.generation, moved.needed, moved.newest) == (5, 2, TWO)


def test_a_server_that_fell_behind_counts_in_no_assignment_but_its_generation_does() -> None:
    without_rows = pb.Position(generation=9, empty=True)
    found = ServerStates({0: at(generation=5), 1: without_rows})
    assert (found.generation, found.newest, found.lost) == (9, TWO, [1])


def test_servers_that_are_ready_for_more_are_needed_unless_the_rows_are_all_where_they_were() -> None:
    assert ServerStates({0: ready(at(), ShardAssignment(4))}).needed == 4
    assert ServerStates({0: ready(at(), ShardAssignment(4)), 1: at()}).needed == 2
    assert ServerStates({0: at(), 1: ready(EMPTY, ShardAssignment(4))}).needed == 4


@pytest.mark.parametrize(
    ("found", "servers", "may_be"),
    [
        ({0: at(), 1: at()}, [], False),
        ({0: at(), 1: at()}, [2], False),
        ({0: at()}, [1, 2], True),
        ({0: EMPTY}, [2], True),
        ({0: ready(at(), ShardAssignment(3)), 1: at()}, [2], False),
        ({0: ready(at(), ShardAssignment(3))}, [2], True),
    ],
    ids=[
        "no server is away",
        "a further one",
        "one that has rows",
        "no server says",
        "that rows were to move to",
        "that rows may have moved to",
    ],
)
def test_who_is_away_may_have_rows_unless_all_others_say_where_they_are(
    found: dict[int, pb.Position], servers: list[int], may_be: bool
) -> None:
    assert ServerStates(found).may_be_on(servers) is may_be


def test_the_rows_are_in_the_assignment_that_all_its_servers_have() -> None:
    assert ServerStates({0: at(), 1: at(STEP - 1)}).choose_assignment(STEP, ShardAssignment(3), LAST) == (
        TWO,
        "",
    )


def test_the_wanted_assignment_is_chosen_where_all_are_ready_for_it() -> None:
    wanted = ShardAssignment(3)
    positions = {0: ready(at(), wanted), 1: ready(at(), wanted), 2: ready(EMPTY, wanted)}
    assert ServerStates(positions).choose_assignment(STEP, wanted, LAST) == (wanted, "")
    positions[2] = ready(EMPTY, wanted, STEP - 1)
    assert ServerStates(positions).choose_assignment(STEP, wanted, LAST) == (TWO, "")


def test_a_copy_that_lacks_rows_is_left_out_while_the_others_have_them() -> None:
    found = ServerStates({0: at(of=TWICE), 1: EMPTY, 2: at(of=TWICE)})
    assert found.choose_assignment(STEP, TWICE, LAST)[0] == TWICE.without((1,))
    away = ServerStates({0: at(of=TWICE), 2: at(of=TWICE)}, away=(1,))
    assert away.choose_assignment(STEP, TWICE, LAST) == (TWICE.without((1,)), "")


def test_where_rows_are_missing_it_is_said_why() -> None:
    of, why = ServerStates({0: at(), 1: EMPTY}).choose_assignment(STEP, TWO, LAST)
    assert not of.is_whole
    assert why == "parameter server 1 has lost its log and rows"


@pytest.mark.parametrize(
    ("position", "why"),
    [
        (at(), None),
        (at(STEP + 1), None),
        (EMPTY, "has lost its log and rows"),
        (at(of=ShardAssignment(3)), "lacks rows of 2 servers"),
        (at(generation=3), "was not in the last ring"),
        (at(STEP - 1, generation=5), f"has dropped what was staged for step {STEP}"),
        (at(STEP - 2), f"is at step {STEP - 2}, the ring at step {STEP}"),
    ],
)
def test_why_a_server_has_not_its_rows(position: pb.Position, why: str | None) -> None:
    found = ServerStates({1: position}).missing_reason(1, TWO, STEP, LAST)
    assert found == (why and f"parameter server 1 {why}")


def test_who_is_away_is_named_unless_it_can_be_done_without() -> None:
    assert ServerStates().missing_reason(1, TWO, STEP, LAST) == "parameter server 1 is away"
    assert ServerStates(away=(1,)).missing_reason(1, TWO, STEP, LAST) == ""


def test_staged_gradients_are_there_as_long_as_no_other_ring_has_gone_on() -> None:
    assert not has_dropped(at(STEP - 1), STEP, LAST)
    assert has_dropped(at(STEP - 1), STEP, replace(LAST, generation=3))
    assert has_dropped(at(STEP - 1), STEP, None)
    assert not has_dropped(at(), STEP, None), "it has made the step"
    assert not has_dropped(EMPTY, 1, None), "it has lost more than that"


def test_a_server_without_rows_is_behind_unless_the_job_begins() -> None:
    assert why_behind(0, EMPTY, 0) == why_behind(0, at(), STEP) == ""
    assert why_behind(0, EMPTY, STEP) == "parameter server 0 has lost its log and rows"
    assert why_behind(0, at(1_000), STEP) == "parameter server 0 is at step 1,000, the ring at step 7"


# --- steps in any order


def stands(
    of: ShardAssignment, assigned_in: int, fetched: ShardAssignment | None = None, since: int = 0
) -> pb.Position:
    """The state of a quiesced server. With what it has fetched, and in which generation."""
    position = pb.Position(generation=9, assignment=of.to_proto(), assigned_in=assigned_in)
    if fetched is not None:
        position.fetched.CopyFrom(fetched.to_proto())
        position.fetched_in = since
    return position


def test_servers_go_on_where_the_one_is_that_has_gone_over_last() -> None:
    assert plan_recovery({0: EMPTY, 1: EMPTY}) is None
    assert plan_recovery({0: stands(TWO, 3), 1: stands(TWO, 3)}) == RecoveryPlan(TWO, 3, 3)
    # One of them has gone over to three, and died since: what the others lack was fetched for that.
    moved = ShardAssignment(3)
    assert plan_recovery({0: stands(TWO, 3), 1: stands(TWO, 3), 2: stands(moved, 5)}) == RecoveryPlan(
        moved, 5, 5
    )


def test_who_is_away_or_has_lost_its_rows_is_out_where_others_have_them() -> None:
    here = stands(TWICE, 3)
    for found in ({0: here, 2: here}, {0: here, 1: EMPTY, 2: here}):
        assert plan_recovery(found) == RecoveryPlan(TWICE.without((1,)), 0, 3)
    # It comes back, and reports a state of when it was in.
    out = TWICE.without((1,))
    assert plan_recovery({0: stands(out, 5), 1: here, 2: stands(out, 5)}) == RecoveryPlan(out, 5, 5)
    # The others are away now, and it alone cannot have all rows: with a neighbour it can.
    assert plan_recovery({1: here}) == RecoveryPlan(TWICE, 3, 3, missing=(0, 2))
    assert plan_recovery({1: here, 2: stands(out, 5)}) == RecoveryPlan(out, 5, 5, missing=(0,))


def test_who_has_fetched_what_it_lacks_goes_over_with_the_others() -> None:
    of, to = ShardAssignment(2, 2), ShardAssignment(3, 2)
    fetched = pb.Position(empty=True, fetched=to.to_proto(), fetched_in=5)
    found = {0: stands(to, 5), 1: stands(of, 3, to, 5), 2: fetched}
    assert plan_recovery(found) == RecoveryPlan(to, 5, 5)
    assert plan_recovery(found | {2: EMPTY}) == RecoveryPlan(to.without((2,)), 0, 5)
    fetched.fetched_in = 4  # for a ring before, which came to nothing
    assert plan_recovery(found | {2: fetched}) == RecoveryPlan(to.without((2,)), 0, 5)
