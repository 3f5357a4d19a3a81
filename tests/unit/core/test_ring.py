# SPDX-License-Identifier: Apache-2.0
"""The present ring: how it is left, and what is reported of it. `edl.master.core.ring`, without a job."""

from __future__ import annotations

import pytest

from edl.contract.ids import Generation, WorkerId
from edl.contract.reasons import Reason
from edl.contract.state_tables import ImpossibleStep
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.ring import BREAK, CHANGE, KEPT_CHANGES, LOSS, Earlier, Ring, RingState
from edl.master.core.workers import IN, OUT, UP, Pool

BOTH = (WorkerId(0), WorkerId(1))


def a_ring(workers: int = 2) -> tuple[Ring, Pool]:
    """A ring of so many workers, all in it."""
    pool = Pool()
    ring = Ring(pool)
    members = tuple(pool.add(0.0).id for _ in range(workers))
    ring.form(members, "start", now=0.0)
    for w in list(pool):
        pool.change(w, place=IN)
    return ring, pool


def test_where_there_is_no_ring_nobody_is_asked_to_leave_it() -> None:
    ring = Ring(Pool())
    assert ring.close("paused", CHANGE, 1.0) == []
    assert not ring.running and not ring.closing


def test_a_planned_change_asks_all_to_leave_once() -> None:
    ring, _ = a_ring()
    assert ring.close("worker 2 joins", CHANGE, 1.0) == [ef.Leave(Generation(1), BOTH)]
    assert ring.close("paused", CHANGE, 1.0) == []
    assert (ring.cause, ring.state) == ("worker 2 joins", RingState.LEAVING)


def test_what_was_planned_may_break_and_is_then_cut_once() -> None:
    ring, pool = a_ring()
    ring.close("worker 2 joins", CHANGE, 1.0)
    pool.change(pool[WorkerId(0)], place=OUT)
    assert ring.close("worker 0 is lost", LOSS, 2.0) == [ef.Cut(Generation(1), (WorkerId(1),))]
    assert ring.close("worker 1: reset", BREAK, 1.0) == []
    assert (ring.cause, ring.state) == ("worker 2 joins; worker 0 is lost", RingState.MEMBER_LOST)
    assert ring.cut_at == 2.0


def test_the_cause_of_a_change_is_the_worker_that_died_and_how() -> None:
    ring, _ = a_ring()
    ring.close("worker 2 joins", CHANGE, 1.0)
    ring.close("worker 1: allreduce: Connection reset by peer", BREAK, 1.0)
    ring.close("worker 0 is lost (its stream ended)", LOSS, 1.0)
    assert ring.cause == "worker 2 joins; worker 0 is lost (its stream ended)"
    ring.close("worker 1 is lost (its stream ended)", LOSS, 1.0)
    ring.name_cause("worker 0 is lost (its stream ended)", "worker 0 is lost (SIGKILL)")
    assert ring.cause == "worker 2 joins; worker 0 is lost (SIGKILL)"


def test_how_a_worker_died_is_also_named_once_the_next_ring_is_formed() -> None:
    ring, _ = a_ring()
    ring.close("worker 0 is lost (its stream ended)", LOSS, 4.0)
    ring.form(BOTH[1:], "worker 0 is lost (its stream ended)", now=5.0)
    change = ring.changes[-1]
    ring.name_cause("worker 0 is lost (its stream ended)", "worker 0 is lost (SIGKILL)")
    assert change.cause == "worker 0 is lost (SIGKILL)"
    change.tell()
    ring.name_cause("worker 0 is lost (SIGKILL)", "worker 0 is lost (SIGTERM)")
    assert change.cause == "worker 0 is lost (SIGKILL)", "it is as it was reported"


def test_who_is_out_already_is_not_told() -> None:
    ring, pool = a_ring()
    for w in list(pool):
        pool.change(w, place=OUT)
    assert ring.close("worker 1: reset", BREAK, 1.0) == []
    assert ring.closing


def test_the_next_ring_remembers_how_the_last_was_left() -> None:
    ring, _ = a_ring()
    ring.close("worker 0 is lost", LOSS, 1.0)
    ring.form(BOTH[1:], "worker 0 is lost", now=5.0)
    change = ring.changes[-1]
    assert (change.generation, change.from_size, change.planned, change.formed_at) == (2, 2, False, 5.0)
    assert (ring.generation, ring.members, ring.state) == (2, BOTH[1:], RingState.RUNNING)


def test_a_ring_after_a_pause_is_a_planned_change_unless_the_last_one_broke() -> None:
    for event, planned in ((CHANGE, True), (BREAK, False), (LOSS, False)):
        ring, _ = a_ring()
        ring.close("why", event, 1.0)
        ring.dissolve()
        assert not (ring.running or ring.closing or ring.members)
        ring.dissolve()
        ring.form(BOTH, "start again", now=5.0)
        assert (ring.changes[-1].planned, ring.changes[-1].from_size) == (planned, 0)


def test_no_ring_is_formed_beside_a_running_one() -> None:
    ring, _ = a_ring()
    with pytest.raises(ImpossibleStep, match="a ring that is running has no transition for 'form'"):
        ring.form(BOTH, "again", now=1.0)
    with pytest.raises(ImpossibleStep, match="a ring that is running has no transition for 'dissolve'"):
        ring.dissolve()


def test_it_is_up_when_all_who_live_in_it_are() -> None:
    ring, pool = a_ring()
    pool.change(pool[WorkerId(0)], place=UP)
    assert not ring.up
    pool.lose(pool[WorkerId(1)])
    assert ring.up


@pytest.mark.parametrize(
    ("from_size", "stepped", "reason", "text"),
    [
        (0, 0, Reason.RingBroken, "ring 0 -> 2 broke before its first step (start)"),
        (0, 2, Reason.RingFormed, "ring 0 -> 2 (start)"),
        (3, 1, Reason.RingReshaped, "ring 3 -> 2 in 0.50 s, 4 records redone (start)"),
        (3, 2, Reason.RingReshaped, "ring 3 -> 2 in 0.70 s, 8 records redone (start)"),
    ],
)
def test_what_a_change_cost_is_told_once(from_size: int, stepped: int, reason: Reason, text: str) -> None:
    ring, _ = a_ring()
    change = ring.changes[-1]
    change.from_size = from_size
    for worker, stall in zip(BOTH[:stepped], (0.5, 0.7), strict=False):
        assert change.note(ev.Stepped(worker, Generation(1), 1, stall, 4, 0.0))
        assert not change.note(ev.Stepped(worker, Generation(1), 1, 9.0, 9, 0.0)), (
            "the first step is reported once"
        )
    assert change.tell() == [ef.Notice(reason, text)]
    assert change.tell() == []


def test_of_a_long_job_the_last_changes_are_kept_and_the_sum_of_those_before() -> None:
    ring, _ = a_ring()
    for n in range(KEPT_CHANGES + 20):
        stepped = ev.Stepped(WorkerId(0), ring.generation, n, 5.0 if n == 3 else 0.1, 2, 0.0)
        assert ring.changes[-1].note(stepped)
        ring.close("worker 1 joins", CHANGE, float(n))
        ring.form(BOTH, "worker 1 joins", now=float(n))
    assert len(ring.changes) == KEPT_CHANGES
    assert ring.earlier == Earlier(changes=21, stall_seconds=5.0, redone_records=42)
    assert [change.generation for change in (ring.changes[0], ring.changes[-1])] == [22, KEPT_CHANGES + 21]
