# SPDX-License-Identifier: Apache-2.0
"""Stories of workers that fall silent: which are removed at once, which are awaited, how long and why."""

from __future__ import annotations

import pytest

from edl.contract.heartbeats import Activity
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, view
from edl.master.core.silence import BUSY_SECONDS, MAX_SECONDS, MIN_SECONDS
from edl.master.core.workers import AWAY
from tests.support.jobs.stories import Story, of, only

SILENCE = 3.0  # after which a worker counts as silent


def trained(seconds: float, steps: int = 5, start: float = 4.0, **how: object) -> Story:
    """One worker, which took `start` seconds to start, has trained alone for so many seconds."""
    story = Story(workers=1, **how)  # type: ignore[arg-type]
    story.tell(ev.Hello(WorkerId(0)), after=0)
    story.job.pool[WorkerId(0)].since = story.now
    story.tell(ev.Ready(WorkerId(0), Layout(100)), after=start)
    story.tell(ev.JoinedRing(WorkerId(0), story.job.ring.generation, 0), after=0)
    beats(story, seconds, steps)
    return story


def beats(story: Story, seconds: float, step: int) -> None:
    """The worker trains up to a step; its last heartbeat is at the end."""
    until = story.now + seconds
    while story.now < until - 1e-9:
        pause = min(1.0, until - story.now)
        story.tell(facts.Heartbeat(WorkerId(0), story.job.ring.generation, step + 1), after=pause)


def quiet(story: Story, seconds: float) -> list[ef.Effect]:
    """Time passes in which the master listens, and no worker says anything."""
    effects, until = [], story.now + seconds
    while story.now < until - 1e-9:
        effects += story.waits(min(0.25, until - story.now))
    return effects


def reason(story: Story) -> str:
    return str(view.status(story.job, story.now)["reason"])


def test_a_silent_worker_that_alone_holds_the_state_is_waited_for_and_goes_on() -> None:
    story = trained(10)
    assert not of(quiet(story, 4.5), ef.Fence)
    said = (
        "worker 0 sends no heartbeats, and no other worker holds the state of step 5. Removing it would lose "
        "50 records (10 s of training), and another worker would take 4 s to start. The job waits until the "
        "worker has been silent for 14 s; delete the worker to go on without its state now"
    )
    assert reason(story) == said
    assert story.noticed(Reason.WorkerUnreachable) == [said]
    effects = story.tell(facts.Heartbeat(WorkerId(0), story.job.ring.generation, 7), after=0)
    assert story.noticed(Reason.WorkerRecovered) == ["worker 0 is heard again after 4.5 s; its state is kept"]
    assert reason(story) == "1 worker (generation 1)"
    assert [type(e) for e in effects] == [ef.Notice]
    assert story.noticed(Reason.StateLost) == []
    quiet(story, SILENCE)
    assert len(story.noticed(Reason.WorkerUnreachable)) == 2, "its next silence is noticed as well"


def test_the_wait_ends_when_it_has_cost_as_much_as_the_state_is_worth() -> None:
    story = trained(10)
    assert not of(quiet(story, 13.9), ef.Fence)
    effects = quiet(story, 0.2)
    fence = only(effects, ef.Fence)
    assert (fence.worker, fence.reason) == (0, ef.FenceReason.HeartbeatTimeout)
    assert fence.why == "no heartbeat for 14.0 s"
    assert only(effects, ef.Create).worker == 1
    story.ready(1)
    (lost,) = story.noticed(Reason.StateLost)
    assert "50 records of training are lost" in lost


def test_no_wait_is_longer_than_its_bound_however_much_would_be_lost() -> None:
    story = trained(2 * MAX_SECONDS)
    assert not of(quiet(story, MAX_SECONDS - 1), ef.Fence)
    assert only(quiet(story, 1.1), ef.Fence).worker == 0


@pytest.mark.parametrize("ends", [ev.Gone(WorkerId(0), signal="SIGKILL"), ev.Closed(WorkerId(0), "deleted")])
def test_the_wait_ends_with_the_process(ends: ev.Event) -> None:
    story = trained(10)
    quiet(story, 5)
    assert only(story.tell(ends), ef.Create).worker == 1
    assert story.job.silences == {}
    assert reason(story) == "0 workers are ready, and training needs at least 1: 1 is pending"


def test_nothing_is_waited_for_where_nothing_would_be_lost() -> None:
    story = trained(0)
    assert only(quiet(story, SILENCE), ef.Fence).worker == 0
    assert story.noticed(Reason.WorkerUnreachable) == []


def test_what_is_in_a_checkpoint_is_not_lost() -> None:
    story = trained(20, checkpoint={"dir": "d", "seconds": 1000})
    story.tell(ev.Checkpointed(WorkerId(0), 5, "a", 100), after=0)
    beats(story, 2, step=7)
    quiet(story, SILENCE)
    assert "would lose 20 records (2 s of training)" in reason(story)
    assert only(quiet(story, 3.1), ef.Fence).worker == 0


def test_a_silent_holder_is_waited_for_while_a_newcomer_only_receives_its_state() -> None:
    story = trained(10)
    story.tell(ev.Scale(2))
    story.ready(1)
    story.out(0, step=5)
    form = story.job.ring
    assert form.members == (0, 1)
    story.tell(ev.JoinedRing(WorkerId(0), form.generation, 5))
    fences = of(quiet(story, SILENCE + 0.5), ef.Fence)
    assert [f.worker for f in fences] == [1], "it has no state"
    assert "worker 0 sends no heartbeats" in reason(story)


def test_steps_that_another_worker_has_are_not_lost() -> None:
    story = trained(10)
    story.tell(ev.Scale(2))
    story.ready(1)
    story.out(0, step=8)
    form = story.job.ring
    story.tell(*(ev.JoinedRing(w, form.generation, 8) for w in form.members))
    story.tell(ev.LeftRing(WorkerId(1), form.generation, 8, True, broken="worker 0 does not answer"))
    for _ in range(8):
        story.tell(facts.Heartbeat(WorkerId(1), form.generation, 8), after=0.5)
    assert not of([e for _, _, es in story.watchdog.history for e in es], ef.Fence)
    assert story.job.pool[WorkerId(0)].place == AWAY, "worker 1 goes on from step 8"
    assert story.noticed(Reason.StateLost) == []


def test_of_several_silent_holders_the_last_ones_are_waited_for() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    for _ in range(10):
        story.beats(0, 1, 2, after=0.5)
    story.tell(ev.Progress(story.job.ring.generation, 8))
    quiet(story, 5)
    away = [w.id for w in story.job.pool if w.place == AWAY]
    assert away == [0], "it fell silent before the others, which fell silent together"
    assert reason(story).startswith("workers 1 and 2 send no heartbeats")
    assert story.noticed(Reason.StateLost) == []


def together(story: Story) -> Story:
    """Three workers have trained for 10 s, and all of them fall silent now."""
    for _ in range(100):
        story.beats(0, 1, 2, after=1 / 30)
    story.tell(ev.Progress(story.job.ring.generation, 8))
    return story


def test_holders_that_are_silent_at_once_are_all_waited_for_and_the_first_that_answers_goes_on() -> None:
    story = together(Story(workers=3, joinDelaySeconds=0.5).running())
    assert not of(quiet(story, 6), ef.Fence)
    said = reason(story)
    assert said.startswith(
        "workers 0, 1 and 2 send no heartbeats, and no other worker holds the state of step 7. "
        "Removing them would lose 70 records (10 s of training)"
    )
    assert story.noticed(Reason.WorkerUnreachable) == [said]
    effects = story.tell(facts.Heartbeat(WorkerId(1), story.job.ring.generation, 8))
    assert only(effects, ef.Cut).members == (0, 1, 2), "worker 1 has the state, and answers"
    away = [w.id for w in story.job.pool if w.place == AWAY]
    assert away == [0, 2]
    effects = story.out(1, step=8, broken="workers 0 and 2 are lost") + story.waits(0.6)
    assert {form.step for form in of(effects, ef.Form)} == {8}
    assert story.noticed(Reason.StateLost) == []


def test_holders_that_stay_silent_are_all_removed_when_the_wait_has_cost_what_their_state_is_worth() -> None:
    story = together(Story(workers=3, joinDelaySeconds=0.5).running())
    assert not of(quiet(story, 9), ef.Fence)
    fenced = [f.worker for f in of(quiet(story, 3), ef.Fence)]
    assert fenced == [0, 1, 2]
    story.ready(3, 4, 5)
    assert len(story.noticed(Reason.StateLost)) == 1


def test_the_state_of_a_job_on_parameter_servers_is_not_lost_with_a_worker() -> None:
    story = trained(10, mode="ps")
    assert only(quiet(story, SILENCE), ef.Fence).worker == 0


def test_a_worker_that_is_asked_to_leave_is_not_let_go_to_a_silent_one() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    for _ in range(10):
        story.beats(0, 1, after=0.5)
    story.tell(ev.Progress(story.job.ring.generation, 8), ev.Leaving(WorkerId(1), "SIGTERM"))
    story.waits(1)
    story.out(1, step=8)
    fences = of(quiet(story, SILENCE + 0.1), ef.Fence)
    assert [f.worker for f in fences] == [0], "the leaving one still has the state"
    assert not of(quiet(story, 1), ef.Stop)


def test_a_silent_worker_ends_with_its_job() -> None:
    story = trained(100, gracePeriodSeconds=5)
    quiet(story, 10)
    assert only(story.tell(ev.StopAsked("enough")), ef.Stop).worker == 0
    assert only(quiet(story, 5.1), ef.End).phase == Phase.Stopped


def test_what_was_lost_once_is_not_counted_again() -> None:
    story = trained(60)
    story.kill(0)
    story.ready(1)
    assert len(story.noticed(Reason.StateLost)) == 1
    ring = story.job.ring.generation
    story.tell(ev.JoinedRing(WorkerId(1), ring, 0))
    for _ in range(5):
        story.tell(facts.Heartbeat(WorkerId(1), ring, 3), after=1)
    quiet(story, SILENCE)
    assert "would lose 20 records (5 s of training)" in reason(story)


START = 8.0  # seconds in which the workers of `one_silent` became ready


def one_silent(**how: object) -> Story:
    """Three workers train; worker 1 falls silent, and the others have formed the next ring at step 5."""
    story = Story(workers=3, joinDelaySeconds=0.5, **how)  # type: ignore[arg-type]
    story.running()
    for w in story.job.pool:
        w.since = w.ready_at - START
    story.beats(0, 1, 2)
    go_on(story, SILENCE, 0, 2)
    assert story.job.pool[WorkerId(1)].place == AWAY
    story.out(0, 2, step=5, broken="worker 1 is silent")
    assert story.job.ring.members == (0, 2)
    story.up(step=5)
    return story


def go_on(story: Story, seconds: float, *workers: int) -> list[ef.Effect]:
    """Time passes in which these workers send heartbeats."""
    effects, until = [], story.now + seconds
    while story.now < until - 1e-9:
        effects += story.waits(min(0.25, until - story.now)) + story.beats(*workers)
    return effects


def returns(story: Story, worker: int, generation: int, step: int = 4) -> list[ef.Effect]:
    """A worker that was stopped is heard again, and reports that it has left a ring."""
    out = ev.LeftRing(WorkerId(worker), Generation(generation), step, has_state=True, broken="it was cut")
    return story.tell(facts.Heartbeat(WorkerId(worker), Generation(generation), step), out)


def test_a_stopped_member_comes_back_with_its_memory_while_a_start_would_take_longer() -> None:
    story = one_silent()
    before = story.noticed(Reason.WorkerUnreachable)
    assert len(before) == 1 and "does not come back within 8.0 s" in before[0]
    assert "without heartbeats of worker 1" in reason(story)
    states = {w["id"]: w["state"] for w in view.status(story.job, story.now)["workers"]}
    assert states == {0: "member", 1: "silent", 2: "member"}
    effects = go_on(story, START - 0.6, 0, 2) + returns(story, 1, generation=1)
    assert not of(effects, ef.Fence) + of(effects, ef.Create), "it is neither given up nor replaced"
    assert only(effects, ef.Leave).members == (0, 2), "its ring is formed at once"
    form = only(story.out(0, 2, step=7), ef.Form)
    assert (set(form.members), form.step, form.joining) == ({0, 1, 2}, 7, (1,))
    assert form.root in (0, 2)
    assert len(story.job.pool) == 3
    assert len(story.noticed(Reason.WorkerRecovered)) == 1


def test_one_that_stays_away_is_fenced_and_replaced_after_the_time_of_a_start() -> None:
    story = one_silent()
    assert not of(go_on(story, START - 0.1, 0, 2), ef.Fence)
    effects = go_on(story, 0.3, 0, 2)
    assert only(effects, ef.Fence).worker == 1
    assert only(effects, ef.Create).worker == 3
    assert story.job.ring.members == (0, 2), "the ring trains on"
    before = story.job.stale
    returns(story, 1, generation=1)
    assert story.job.stale > before, "it is refused"


def test_one_that_falls_silent_again_and_again_is_replaced_in_the_end() -> None:
    story = one_silent()
    go_on(story, 6, 0, 2)
    returns(story, 1, generation=1)
    story.out(0, 2, step=7)
    assert len(story.job.ring.members) == 3
    story.up(step=7)
    story.beats(1)
    effects = go_on(story, SILENCE + 0.3, 0, 2)
    assert only(effects, ef.Cut).members == tuple(story.job.ring.members)
    assert not of(effects, ef.Fence)
    assert only(go_on(story, 2.1, 0, 2), ef.Fence).worker == 1, "it has used up what a start would take"


def test_a_late_report_of_an_older_ring_brings_no_worker_back() -> None:
    story = one_silent()
    story.tell(ev.LeftRing(WorkerId(1), Generation(0), 9, has_state=True))
    assert story.job.pool[WorkerId(1)].place == AWAY


def test_one_that_is_heard_again_must_leave_its_ring_like_any_member() -> None:
    story = one_silent(stepTimeoutSeconds=10, startupTimeoutSeconds=10)
    story.tell(facts.Heartbeat(WorkerId(1), Generation(1), 4))
    assert not of(go_on(story, 24, 0, 1, 2), ef.Fence)
    fence = only(go_on(story, 2, 0, 1, 2), ef.Fence)
    assert (fence.worker, fence.reason) == (1, ef.FenceReason.CutTimeout)


def test_the_last_state_of_a_job_is_that_of_the_one_that_is_away() -> None:
    story = one_silent()
    story.kill(0)
    effects = story.kill(2)
    assert not of(effects, ef.Form), "worker 1 may come back with step 4"
    assert "a silent worker may come back" in reason(story) or "without heartbeats" in reason(story)
    story.ready(*(e.worker for e in of(effects, ef.Create)))
    form = only(returns(story, 1, generation=1), ef.Form)
    assert (form.root, form.step) == (1, 4)


@pytest.mark.parametrize("ends", [ev.Gone(WorkerId(1), signal="SIGABRT"), ev.Closed(WorkerId(1), "gone")])
def test_the_end_of_one_that_is_away_is_no_failure(ends: ev.Event) -> None:
    story = one_silent()
    assert only(story.tell(ends), ef.Create).worker == 3
    assert story.job.failures.charged == []
    assert story.job.ring.members == (0, 2)


def test_one_that_is_away_is_the_first_to_go_when_the_job_shrinks() -> None:
    story = one_silent()
    effects = story.tell(ev.Scale(2))
    assert only(effects, ef.Stop).worker == 1
    assert not of(effects, ef.Leave)


def test_after_a_stall_of_the_master_one_that_is_away_is_heard_first() -> None:
    story = one_silent()
    assert not of(story.tell(ev.Tick(), after=START + 5), ef.Fence), "the timer is seen before the messages"
    assert not of(returns(story, 1, generation=1), ef.Fence)
    assert story.job.pool[WorkerId(1)].place != AWAY


def one_busy(lost: int | None = 2, **how: object) -> Story:
    """Three workers make a step a second; the ring breaks, and worker 1 does not leave it.

    Args:
        lost: a member that has died; None: the ring is to change.
    """
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5, **how)  # type: ignore[arg-type]
    story.running()
    story.waits(5)
    if lost is None:
        story.tell(ev.Leaving(WorkerId(2), "SIGTERM"))
        story.out(2, step=5)
    else:
        story.kill(lost)
    story.out(0, step=5, broken="reset")
    return story


def test_a_busy_member_of_a_ring_that_lost_another_holds_the_others_for_seconds_only() -> None:
    """A callback, write() or the body of an own loop cannot be ended by a cut."""
    story = one_busy()
    assert not of(story.waits(BUSY_SECONDS - 0.1), ef.Form)
    effects = story.waits(0.2)
    assert only(effects, ef.Form).members == (0,)
    (told,) = story.noticed(Reason.WorkerUnreachable)
    assert told.startswith("worker 1 has not left its ring 5.0 s after the cut: the ring goes on without it")
    assert len(story.job.pool) == 3, "worker 2 is replaced, and worker 1 is not"
    story.up(step=5)
    busy = facts.Heartbeat(
        WorkerId(1), Generation(1), 5, activity=Activity("is busy with on_epoch_end()", 41)
    )
    story.tell(busy)
    status = view.status(story.job, story.now, story.telemetry.beats)
    assert status["reason"] == (
        "1 worker (generation 2); when its call has returned, this worker will join the ring: "
        "worker 1 is busy with on_epoch_end(), for more than 30 s"
    )
    assert {w["id"]: w["state"] for w in status["workers"]}[1] == "member"
    assert only(returns(story, 1, generation=1, step=5), ef.Leave).members == (0,)
    form = only(story.out(0, step=7), ef.Form)
    assert (form.members, form.joining) == ((0, 1), (1,))


def test_a_busy_member_is_waited_for_if_the_ring_has_lost_none() -> None:
    """Else its return would be a change in which a different member is busy, and so on without an end."""
    story = one_busy(lost=None)
    assert not of(story.waits(60), ef.Form)
    assert only(returns(story, 1, generation=1, step=5), ef.Form).members == (0, 1)


@pytest.mark.parametrize("least", [1, 2])
def test_a_member_is_waited_for_as_long_as_steps_take_and_if_the_others_are_too_few(least: int) -> None:
    story = Story(workers=3, heartbeatTimeoutSeconds=600, joinDelaySeconds=0.5, least=least).running()
    story.waits(60)
    story.kill(2)
    story.out(0, step=4, broken="reset")  # 15 s a step
    assert not of(story.waits(29), ef.Form)
    assert len(of(story.waits(3), ef.Form)) == (least == 1)


def test_a_busy_member_that_falls_silent_is_awaited_as_any_silent_one() -> None:
    story = one_busy()
    story.waits(BUSY_SECONDS)
    story.up(step=5)
    story.tell(ev.Silent(WorkerId(1), 600.0, ()))
    assert not of(story.waits(MIN_SECONDS - 0.1), ef.Fence)
    assert only(story.waits(0.2), ef.Fence).worker == 1
