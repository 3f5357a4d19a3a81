# SPDX-License-Identifier: Apache-2.0
"""Stories of the ring: members join and die at each moment, and the state from which it continues."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.heartbeats import Activity
from edl.contract.ids import Generation, WorkerId
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.master.core.rendezvous import READ_SECONDS
from edl.master.core.ring import RingState
from tests.support.jobs.stories import Story, of, only


def reason(story: Story) -> str:
    return str(view.status(story.job, story.now)["reason"])


def test_a_newcomer_joins_at_a_step_boundary_and_takes_the_state() -> None:
    story = Story(workers=2).running(0)
    assert only(story.ready(1), ef.Leave).members == (0,)
    form = only(story.out(0, step=4), ef.Form)
    assert (form.members, form.root, form.step, form.sync, form.joining) == ((0, 1), 0, 4, False, (1,))


def test_who_comes_while_another_is_sent_the_state_waits_until_it_has_it() -> None:
    story = Story(workers=3).running(0)
    story.ready(1)
    form = only(story.out(0, step=4), ef.Form)
    assert not of(story.tell(ev.JoinedRing(WorkerId(0), form.generation, 4)), ef.Leave)
    assert not of(story.ready(2) + story.waits(1), ef.Leave)
    assert only(story.tell(ev.JoinedRing(WorkerId(1), form.generation, 9)), ef.Leave).members == (0, 1)


def test_one_that_leaves_stays_until_it_has_handed_over_the_state() -> None:
    story = Story(workers=1).running(0)
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    story.ready(1)
    form = only(story.out(0, step=4), ef.Form)
    assert (form.members, form.joining) == ((0, 1), (1,))
    assert not of(story.tell(ev.JoinedRing(WorkerId(0), form.generation, 4)), ef.Leave)
    assert only(story.tell(ev.JoinedRing(WorkerId(1), form.generation, 9)), ef.Leave).members == (0, 1)


def reading(story: Story, worker: int, seconds: float, what: str) -> facts.Heartbeat:
    activity = Activity(what, seconds)
    return facts.Heartbeat(WorkerId(worker), story.job.ring.generation, 1, activity=activity)


def told(story: Story) -> str:
    return str(view.status(story.job, story.now, story.telemetry.beats)["reason"])


def test_the_status_says_which_member_the_next_step_waits_for() -> None:
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5).running()
    what = "waits for records of step 12: m.py: read(4096, 4160)"
    story.tell(reading(story, 2, 2.9, what))
    assert told(story) == "3 workers (generation 1)"
    story.tell(reading(story, 2, 41.0, what))
    assert told(story) == f"no step is made: waiting for worker 2, which {what}, for more than 30 s"
    story.beats(2)
    assert told(story) == "3 workers (generation 1)"


def test_the_status_says_what_the_first_state_is_read_from() -> None:
    story = Story(workers=2, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5)
    story.ready(0, 1)
    story.waits(1)
    forming = told(story)
    assert forming.startswith("the ring of generation 1 is being formed and waits for workers 0 and 1")
    what = "waits for its first state (checkpoint.dir, initFrom.path)"
    story.tell(reading(story, 0, 2.9, what))
    assert told(story) == forming
    story.tell(reading(story, 0, 3.1, what))
    assert told(story) == f"{forming}; worker 0 {what}, for more than 3 s"


def test_a_member_whose_reads_have_not_returned_joins_a_later_ring() -> None:
    """The others step on without it: they would wait for it in the next ring, too."""
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5).running()
    story.kill(1)
    story.out(0, step=4, broken="reset")
    out = ev.LeftRing(WorkerId(2), story.job.ring.generation, 4, True, broken="cut", reads=True)
    assert not of(story.tell(out), ef.Form)
    assert only(story.waits(READ_SECONDS), ef.Form).members == (0,)
    story.up(4)
    assert not of(story.waits(30), ef.Leave)
    story.tell(reading(story, 2, 41.0, "is busy with read(0, 64)"))
    assert told(story).endswith("will join the ring: worker 2 is busy with read(0, 64), for more than 30 s")
    assert only(story.ready(3), ef.Leave).members == (0,), "a replacement of worker 1 has come meanwhile"
    assert only(story.out(0, step=6), ef.Form).members == (0, 3), "worker 2 still reads"
    story.up(6)
    assert only(story.tell(ev.RecordsRead(WorkerId(2))), ef.Leave).members == (0, 3)
    story.out(0, step=9)
    assert only(story.out(3, step=9), ef.Form).members == (0, 3, 2)


def test_the_member_whose_read_returns_first_goes_on_if_all_were_reading() -> None:
    """A ring of all of them would wait for the slowest, and so would the next planned change."""
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5).running()
    generation = story.job.ring.generation
    story.kill(1)
    for worker in (0, 2):
        out = ev.LeftRing(WorkerId(worker), generation, 4, True, broken="cut", reads=True)
        assert not of(story.tell(out), ef.Form)
    assert not of(story.waits(READ_SECONDS), ef.Form)
    assert told(story) == "each worker waits for its records"
    assert not of(story.tell(ev.RecordsRead(WorkerId(0))), ef.Form)
    assert only(story.waits(READ_SECONDS), ef.Form).members == (0,)
    story.up(4)
    assert not of(story.waits(30), ef.Leave)
    assert only(story.tell(ev.RecordsRead(WorkerId(2))), ef.Leave).members == (0,)


def test_members_whose_reads_return_soon_are_all_in_the_next_ring() -> None:
    """With a source that takes a while for each batch, a loss is one change of the ring and not two."""
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5).running()
    generation = story.job.ring.generation
    story.kill(1)
    for worker in (0, 2):
        story.tell(ev.LeftRing(WorkerId(worker), generation, 4, True, broken="cut", reads=True))
    assert not of(story.tell(ev.RecordsRead(WorkerId(2)), after=1.0), ef.Form)
    assert only(story.tell(ev.RecordsRead(WorkerId(0)), after=0.1), ef.Form).members == (0, 2)
    assert not story.noticed(Reason.RingPending)


def test_a_planned_change_leaves_out_no_member_however_slow_its_reads_are() -> None:
    """Else its return would be a change, in which the reads of others have not returned, without an end."""
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5)
    story.ready(0, 1)
    story.waits(1)
    story.up(0)
    assert only(story.ready(2), ef.Leave)
    generation = story.job.ring.generation
    story.tell(ev.LeftRing(WorkerId(0), generation, 4, True, broken="waits for records", reads=True))
    out = ev.LeftRing(WorkerId(1), generation, 4, True, broken="reset")
    assert only(story.tell(out), ef.Form).members == (0, 1, 2)
    assert not of(story.tell(ev.RecordsRead(WorkerId(0))), ef.Leave)


def test_a_ring_that_a_member_breaks_because_it_must_leave_has_not_broken_by_itself() -> None:
    """Or a slow source would fail the job, after some changes of the ring in a row."""
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5)
    story.ready(0, 1)
    story.waits(1)
    for member in (0, 1):
        story.tell(ev.JoinedRing(WorkerId(member), story.job.ring.generation, 0))
    assert only(story.ready(2), ef.Leave)
    story.out(0, step=0, broken="worker 0 waits for records")
    assert only(story.out(1, step=0, broken="reset"), ef.Form).members == (0, 1, 2)


def test_a_killed_member_is_cut_out_replaced_and_never_charged() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5)
    story.running()
    effects = story.kill(1)
    assert only(effects, ef.Cut).members == (0, 2)
    assert only(effects, ef.Create).worker == 3
    assert (
        reason(story)
        == "the ring of generation 1 is being left by workers 0 and 2: worker 1 is lost (SIGKILL)"
    )
    assert not of(story.out(0, step=4, broken="reset"), ef.Form), "worker 2 is still in the old ring"
    form = only(story.out(2, step=5, broken="reset"), ef.Form)
    assert (form.members, form.root, form.joining) == ((0, 2), 2, (0,)), "worker 2 alone has step 5"
    waits = "is being formed and waits for workers 0 and 2 (worker 1 is lost (SIGKILL))"
    assert reason(story) == f"the ring of generation 2 {waits}"
    story.tell(ev.JoinedRing(WorkerId(2), form.generation, 5))
    assert reason(story) == "2 workers (generation 2)", "it trains, and worker 0 receives the state"
    assert story.job.train.done == 5
    assert story.job.failures.charged == []


def test_survivors_at_the_same_step_need_no_broadcast() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5)
    story.running()
    story.kill(1)
    assert not only(story.out(0, 2, broken="reset"), ef.Form).sync


def test_when_all_holders_are_gone_the_job_says_so_and_starts_again() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    story.tell(ev.Progress(story.job.ring.generation, 4))
    story.kill(0)
    story.kill(1)
    assert story.job.phase == "Waiting"
    form = only([*story.ready(2), *story.ready(3)], ef.Form)
    assert (form.root, form.members) == (2, (2, 3))
    (lost,) = story.noticed(Reason.StateLost)
    assert "30 records of training are lost" in lost
    assert story.job.train.done == 0
    assert story.job.restarts == 1


def test_messages_of_an_older_ring_change_nothing_and_are_counted() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    before = view.summary(story.job)
    old = Generation(story.job.ring.generation - 1)
    effects = story.tell(
        ev.LeftRing(WorkerId(0), old, 9, True, broken="late"),
        ev.JoinedRing(WorkerId(1), old, 9),
        ev.Stepped(WorkerId(0), old, 9, 9.0, 9, 9.0),
    )
    assert effects == []
    assert view.summary(story.job) == before | {"stale_messages": before["stale_messages"] + 3}


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_whoever_is_killed_the_others_go_on_in_their_order(rank: int) -> None:
    story = Story(workers=4, joinDelaySeconds=0.5).running()
    story.kill(rank)
    rest = [w for w in range(4) if w != rank]
    form = only(story.out(*rest, step=4, broken="reset"), ef.Form)
    assert (form.members, form.root, form.sync) == (tuple(rest), rest[0], False)


@pytest.mark.parametrize("dead", [(0, 1), (1, 3), (0, 1, 2), (1, 2, 3)])
def test_two_or_all_but_one_killed_at_once(dead: tuple[int, ...]) -> None:
    story = Story(workers=4, joinDelaySeconds=0.5).running()
    cuts = [e for w in dead for e in of(story.kill(w), ef.Cut)]
    assert len(cuts) == 1, "one order is enough"
    rest = tuple(w for w in range(4) if w not in dead)
    assert only(story.out(*rest, step=4, broken="reset"), ef.Form).members == rest
    assert story.job.restarts == 0


def test_a_kill_while_the_ring_is_formed_cuts_those_who_wait_in_it() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5)
    story.ready(0, 1, 2)
    story.tell(ev.JoinedRing(WorkerId(0), story.job.ring.generation, 0))
    assert only(story.kill(2), ef.Cut).members == (0, 1)
    g = story.job.ring.generation
    story.tell(ev.LeftRing(WorkerId(0), g, 0, True, broken="cut"))
    form = only(story.tell(ev.LeftRing(WorkerId(1), g, 0, False, broken="cut")), ef.Form)
    assert (form.members, form.root, form.joining) == ((0, 1), 0, (1,)), "worker 1 has not synced"


def test_the_root_dies_in_the_broadcast_and_who_has_its_state_is_the_next_root() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    story.kill(1)
    story.out(0, step=5, broken="reset")
    assert only(story.out(2, step=4, broken="reset"), ef.Form).root == 0
    story.tell(ev.JoinedRing(WorkerId(2), story.job.ring.generation, 5))  # it has taken the state over
    story.kill(0)
    form = only(story.out(2, step=5, broken="cut"), ef.Form)
    assert (form.members, form.root) == ((2,), 2)
    assert story.job.train.done == 5


def test_when_the_only_one_with_the_last_step_dies_the_ring_goes_on_from_the_step_before() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    story.kill(1)
    story.out(0, step=5, broken="reset")
    story.out(2, step=4, broken="reset")
    story.kill(0)
    form = only(story.out(2, step=4, broken="cut"), ef.Form)
    assert form.root == 2
    assert story.job.train.done == 4, "what worker 0 alone had is trained again"
    assert story.job.restarts == 0


def test_a_leave_that_breaks_is_cut_and_counts_as_unplanned() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    story.out(1)
    effects = story.kill(2)
    assert only(effects, ef.Cut).members == (0,)
    form = only(story.out(0, broken="cut"), ef.Form)
    assert form.members == (1,)
    assert not story.job.ring.changes[-1].planned


def test_what_a_broken_ring_cost_is_told_in_one_line() -> None:
    story = Story(workers=4, joinDelaySeconds=0.5).running()
    story.kill(3)
    story.out(0, 1, 2, step=4, broken="reset")
    g = story.job.ring.generation
    story.tell(*(ev.JoinedRing(WorkerId(w), g, 4) for w in range(3)))
    story.tell(*(ev.Stepped(WorkerId(w), g, 5, 0.1 * (w + 1), 8, 0.05) for w in range(3)))
    line = "ring 4 -> 3 in 0.30 s, 24 records redone (worker 3 is lost (SIGKILL))"
    assert story.noticed(Reason.RingReshaped) == [line]
    story.tell(ev.Stepped(WorkerId(0), g, 5, 9.0, 8, 0.05))
    assert story.job.ring.changes[-1].stall_seconds == pytest.approx(0.3), "the first step is reported once"


def test_a_ring_after_a_wait_is_there_because_workers_are_back() -> None:
    story = Story(workers=2, least=2, joinDelaySeconds=0.5).running()
    story.kill(1)
    story.out(0, step=4, broken="reset")
    waits = "1 worker is ready, and training needs at least 2 (minWorkers): 1 is pending"
    assert story.noticed(Reason.RingPending) == [f"the ring is pending: {waits}"]
    story.ready(2)
    change = story.job.ring.changes[-1]
    assert (change.cause, change.from_size) == ("enough workers are ready again", 0)


def test_when_only_an_older_state_is_left_the_job_goes_on_from_it_and_says_what_is_lost() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"), ev.Leaving(WorkerId(1), "SIGTERM"))
    form = only(story.out(0, 1, step=4), ef.Form)
    (alone,) = form.members  # it is leaving too, but no other worker can train
    story.tell(ev.JoinedRing(alone, form.generation, 4), ev.Progress(form.generation, 8))
    form = only(story.kill(alone), ef.Form)
    assert form.members != (alone,)
    assert story.job.train.done == 4
    (lost,) = story.noticed(Reason.StateLost)
    assert lost.endswith("30 records of training are lost, the job goes on from step 4")


DUPLICATE = "allreduce: ncclCommInitRank failed: invalid usage: Duplicate GPU detected"
ELSEWHERE = "allreduce: ncclCommInitRank failed on another rank"


def breaks(story: Story, *errors: str) -> list[ef.Effect]:
    """All members leave their ring, which has made no step, with these errors."""
    outs = zip(story.job.ring.members, errors, strict=True)
    return [e for worker, error in outs for e in story.out(worker, step=0, broken=error)]


def seconds_to_the_next_ring(story: Story) -> float:
    began = story.now
    while not story.job.ring.running:
        story.beats(*(w.id for w in story.job.pool))
        story.waits(0.25)
        assert story.now < began + 60
    return story.now - began


def test_rings_that_cannot_be_formed_fail_the_job_with_their_error() -> None:
    story, pauses = Story(workers=3, least=3, maxFailures=3), []
    story.ready(0, 1, 2)
    for _ in range(3):
        breaks(story, ELSEWHERE, ELSEWHERE, DUPLICATE)
        pauses.append(seconds_to_the_next_ring(story))
    assert pauses == pytest.approx([1.0, 5.0, 25.0], abs=0.3)
    breaks(story, ELSEWHERE, ELSEWHERE, DUPLICATE)
    assert story.job.ending == (
        Phase.Failed,
        f"4 rings in a row broke before the first step, and no worker was lost: {DUPLICATE}; {ELSEWHERE}",
    )
    assert story.job.failures.charged == [], "no worker is to blame"


def test_a_ring_that_waits_for_its_next_attempt_says_why_and_how_long() -> None:
    story = Story(workers=2, least=2, maxFailures=3)
    story.ready(0, 1)
    breaks(story, "hvd.init: connection refused", "hvd.init: connection refused")
    expected = (
        "the ring broke before the first step, and no worker was lost: hvd.init: connection refused; "
        "the next one is formed 1 s later; the job fails when 4 in a row break"
    )
    assert reason(story) == expected
    story.ready(2)
    assert reason(story) == expected, "and a worker that comes does not change that"
    only(story.waits(1.1), ef.Form)


def test_a_step_ends_a_row_of_broken_rings() -> None:
    story = Story(workers=2, least=2, maxFailures=1)
    story.ready(0, 1)
    for _ in range(5):
        breaks(story, "reset", "reset")
        assert seconds_to_the_next_ring(story) == pytest.approx(1.0, abs=0.3)
        story.up()
        breaks(story, "reset", "reset")  # it has made a step, so the next one is formed at once
        assert story.job.ring.running
    assert story.job.ending is None


def test_rings_that_break_because_members_die_do_not_count() -> None:
    story = Story(workers=2, least=2, maxFailures=1)
    story.ready(0, 1)
    for newest in range(2, 12):
        first, second = story.job.ring.members
        story.out(first, step=0, broken="connection closed by peer")  # before the death is known
        story.tell(ev.Gone(second, signal="SIGKILL", free=True))
        story.ready(newest)
        assert story.job.ring.running, "the next ring is formed at once"
    assert story.job.ending is None


def test_a_ring_that_a_leaving_member_breaks_did_not_break_by_itself() -> None:
    """The last worker that holds the state has to end, and waits for records in a ring of its own."""
    story = Story(workers=1).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    only(story.out(0, step=4), ef.Form)
    assert only(story.out(0, step=4, broken="the ring has ended"), ef.Form).members == (0,), "at once"
    assert not story.noticed(Reason.RingPending)


@pytest.mark.parametrize(
    ("least", "why"),
    [(1, "it has not left its ring, which was cut"), (2, "still inside a ring that was cut 50 s ago")],
)
def test_a_member_that_does_not_leave_a_cut_ring_is_removed_and_its_process_deleted(
    least: int, why: str
) -> None:
    limits: dict[str, Any] = {"stepTimeoutSeconds": 30, "startupTimeoutSeconds": 10, "least": least}
    story = Story(workers=3, joinDelaySeconds=0.5, **limits).running()
    story.kill(0)
    story.out(1, step=4, broken="reset")
    began = story.now
    formed = []
    while story.now < began + 49:  # worker 2 sends heartbeats, and does not leave
        effects = story.waits(1.0) + story.beats(1, 2)
        formed += of(effects, ef.Form)
        assert not of(effects, ef.Fence)
    assert [form.members for form in formed] == ([] if least == 2 else [(1,)]), "the others go on"
    assert story.next_deadline() is not None
    effects = story.waits(2.0)
    fence = only(effects, ef.Fence)
    assert (fence.worker, fence.reason) == (2, ef.FenceReason.CutTimeout)
    assert fence.why == why
    assert [delete.worker for delete in of(effects, ef.Delete)] == [2]
    story.tell(ev.Gone(WorkerId(2), signal="SIGKILL"))
    assert story.job.failures.charged == [], "the cause is unknown, so nothing is charged"


def test_a_ring_that_is_left_at_a_step_boundary_may_take_as_long_as_its_step() -> None:
    story = Story(workers=2, stepTimeoutSeconds=30, startupTimeoutSeconds=10).running(0)
    story.ready(1)
    assert story.job.ring.state is RingState.LEAVING
    for _ in range(60):
        assert not of(story.waits(1.0) + story.beats(0, 1), ef.Fence)
