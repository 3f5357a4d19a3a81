# SPDX-License-Identifier: Apache-2.0
"""The members of the next ring, and its root: decisions of `edl.master.core.quorum`, without a job."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from edl.contract.ids import WorkerId
from edl.contract.phases import WorkerState
from edl.master.core.quorum import MAX_TAKERS, Limits, RingPlan, candidates, plan_ring
from edl.master.core.workers import WorkerRecord


def a_worker(
    id: int, state: str = "member", step: int | None = None, stopped: bool = False, made_in: int = 1
) -> WorkerRecord:
    """A worker; with a step it holds the state that the ring `made_in` has made."""
    return WorkerRecord(
        WorkerId(id),
        0.0,
        WorkerState(state),
        has_state=step is not None,
        step=step or 0,
        made_in=made_in,
        stopped=stopped,
    )


ANY = Limits(min_size=1, max_size=100)


def plan(workers: list[WorkerRecord], last: Sequence[int], limits: Limits) -> RingPlan:
    """Plan the ring that follows one with the members `last`."""
    return plan_ring(workers, [WorkerId(w) for w in last], limits)


def test_nobody_ready_is_no_ring_and_says_why() -> None:
    ring = plan([a_worker(0, "initializing")], (), ANY)
    assert (ring.members, ring.root, ring.reason) == (
        (),
        None,
        "0 workers are ready, and training needs at least 1",
    )


def test_the_first_ring_begins_from_its_first_member_and_all_take_its_state() -> None:
    ring = plan([a_worker(1, "ready"), a_worker(0, "ready")], (), ANY)
    assert (ring.members, ring.root, ring.sync) == ((0, 1), 0, True)


def test_survivors_keep_their_order_and_newcomers_follow() -> None:
    workers = [a_worker(0, "ready"), *(a_worker(i, step=4) for i in (3, 5, 7))]
    assert plan(workers, (7, 3, 5), ANY).members == (7, 3, 5, 0)


def test_one_that_still_reads_is_left_out_unless_it_is_needed() -> None:
    reads, ahead, behind, new = a_worker(0, step=4), a_worker(1, step=4), a_worker(2, step=3), a_worker(3)
    reads.reads = True
    assert plan([reads, ahead, new], (0, 1), ANY).members == (1, 3)
    assert plan([reads, behind], (0, 2), ANY).members == (0, 2), "it alone has the newest state"
    assert plan([reads, new], (0,), ANY).members == (0, 3)
    assert plan([reads, ahead], (0, 1), Limits(2, 3)).members == (0, 1), "one is too few"


def test_the_most_advanced_holder_is_the_root() -> None:
    ring = plan([a_worker(0, step=4), a_worker(1, step=5), a_worker(2, step=4)], (0, 1, 2), ANY)
    assert (ring.root, ring.sync, ring.joining) == (1, False, (0, 2))


def test_equals_need_no_sync() -> None:
    ring = plan([a_worker(0, step=5), a_worker(1, step=5)], (0, 1), ANY)
    assert (ring.sync, ring.joining) == (False, ())


def test_a_step_that_two_rings_have_made_is_two_states_and_the_later_one_is_sent() -> None:
    """After a roll-back, workers outside the ring still hold the earlier state of the same step."""
    workers = [a_worker(0, step=5, made_in=10), *(a_worker(w, step=5, made_in=12) for w in (1, 2))]
    ring = plan(workers, (0, 1, 2), ANY)
    assert (ring.root, ring.joining) == (1, (0,))


def test_step_0_with_a_newcomer_is_not_equal() -> None:
    assert plan([a_worker(0, step=0), a_worker(1, "ready")], (0,), ANY).joining == (1,)


def test_many_newcomers_wait_for_one_broadcast() -> None:
    def ring(newcomers: int) -> RingPlan:
        new = [a_worker(i, "ready") for i in range(2, 2 + newcomers)]
        return plan([a_worker(0, step=5), a_worker(1, step=5), *new], (0, 1), ANY)

    few, many = ring(2 * MAX_TAKERS), ring(2 * MAX_TAKERS + 1)
    assert (few.sync, len(few.joining)) == (False, 2 * MAX_TAKERS)
    assert (many.sync, many.joining) == (True, ())


def test_a_newcomer_that_claims_a_step_is_no_root() -> None:
    liar = a_worker(0, "ready")
    liar.step = 99
    assert plan([liar, a_worker(1, step=5)], (1,), ANY).root == 1


def test_one_that_leaves_is_taken_in_once_more_when_it_alone_has_the_last_step() -> None:
    ring = plan([a_worker(0, "draining", step=6), a_worker(1, step=5)], (0, 1), ANY)
    assert (ring.members, ring.root, ring.joining) == ((0, 1), 0, (1,))
    assert ring.reason == "1 worker; worker 0 transfers the state before it leaves"


def test_one_that_leaves_is_not_needed_when_a_stayer_has_as_much() -> None:
    ring = plan([a_worker(0, "draining", step=5), a_worker(1, step=5)], (0, 1), ANY)
    assert (ring.members, ring.root, ring.sync) == ((1,), 1, False)


def test_one_that_leaves_fills_a_gap_below_the_least_size() -> None:
    leaving = a_worker(0, "draining", step=5)
    assert plan([leaving, a_worker(1, step=5)], (0, 1), Limits(2, 2)).members == (1, 0)
    assert plan([a_worker(0, "draining"), a_worker(1, step=5)], (1,), Limits(2, 2)).members == ()


def test_one_that_was_told_to_end_fills_no_gap() -> None:
    told, leaving = a_worker(0, "draining", step=5, stopped=True), a_worker(2, "draining", step=5)
    stay = candidates([told, a_worker(1, step=5), leaving], (WorkerId(1),), Limits(2, 2))
    assert [w.id for w in stay] == [1, 2]


def test_the_ring_is_as_large_as_is_wanted_and_keeps_holders_first() -> None:
    workers = [a_worker(0, "ready"), a_worker(1, "ready"), a_worker(2, step=3)]
    assert plan(workers, (2,), Limits(1, 2)).members == (2, 0)


workers_of_all_kinds = st.lists(
    st.tuples(
        st.sampled_from(("pending", "starting", "initializing", "ready", "member", "draining")),
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    max_size=6,
).map(
    lambda kinds: [
        a_worker(i, state, step if state in ("member", "draining") else None)
        for i, (state, step) in enumerate(kinds)
    ]
)


@given(workers_of_all_kinds, st.permutations(range(6)), st.integers(1, 3), st.integers(1, 6))
def test_every_ring_is_a_possible_one(
    workers: list[WorkerRecord], old: list[int], least: int, most: int
) -> None:
    most = max(least, most)
    ring = plan(workers, old, Limits(least, most))
    by_id = {w.id: w for w in workers}
    if not ring.members:
        is_ready = [w for w in workers if w.is_ready]
        fill = [w for w in workers if w.state == "draining" and w.has_state]
        assert len(is_ready[:most]) + len(fill) < least
        here, why = min(len(is_ready), most) + len(fill), " (minWorkers)" if least > 1 else ""
        workers_are = "1 worker is" if here == 1 else f"{here} workers are"
        assert ring.reason == f"{workers_are} ready, and training needs at least {least}{why}"
        return
    members = [by_id[m] for m in ring.members]
    assert ring.root in ring.members
    assert len(set(ring.members)) == len(members) >= least
    assert len(members) <= most + 1, "at most one more, that hands its state over"
    assert all(w.is_ready or (w.state == "draining" and w.has_state) for w in members)
    candidates = [w for w in workers if w.has_state and (w.id in ring.members or w.state == "draining")]
    if candidates:
        root = by_id[ring.root]
        assert root.has_state
        assert root.step == max(w.step for w in candidates)
    lack = {w.id for w in members if (w.has_state, w.step) != (True, by_id[ring.root].step)}
    assert lack == (lack if ring.sync else set(ring.joining))
    assert not (ring.sync and ring.joining)
