# SPDX-License-Identifier: Apache-2.0
"""Stories of workers: surplus ones, lost ones, and charged failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edl.cli.shared import output
from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from edl.master.core.failures import MAX_IN_VAIN
from edl.master.core.workers import AWAY
from tests.support.jobs.stories import Story, of, only


def test_one_that_is_told_to_go_leaves_with_nothing_redone() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5)
    story.running()
    effects = story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    assert only(effects, ef.Leave).members == (0, 1, 2)
    assert only(effects, ef.Create).worker == 3
    effects = story.out(0, 1, 2)
    assert only(effects, ef.Form).members == (1, 2)
    assert only(effects, ef.Stop).worker == 0
    story.up(1)
    assert story.job.ring.changes[-1].planned
    assert story.noticed(Reason.RingReshaped) == ["ring 3 -> 2 in 0.20 s, 0 records redone (worker 0 leaves)"]


def test_the_last_holder_hands_the_state_over_before_it_may_go() -> None:
    story = Story(workers=1).running()
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    assert not of(story.ready(1), ef.Stop)
    form = only(story.out(0, step=7), ef.Form)
    assert (form.members, form.root) == ((0, 1), 0)
    g = story.job.ring.generation
    story.tell(ev.JoinedRing(WorkerId(0), g, 7), ev.JoinedRing(WorkerId(1), g, 7))
    effects = story.out(0, 1, step=8)
    assert only(effects, ef.Form).members == (1,)
    assert only(effects, ef.Stop).worker == 0


def test_scaling_in_keeps_the_oldest_and_lets_the_starting_go_first() -> None:
    story = Story(workers=4, joinDelaySeconds=0.5)
    story.ready(0, 1, 2)
    story.tell(ev.Tick(), after=1)
    story.up()
    effects = story.tell(ev.Scale(2))
    assert only(effects, ef.Delete).worker == 3, "no worker is connected there yet"
    assert only(effects, ef.Leave)
    assert only(story.out(0, 1, 2), ef.Form).members == (0, 1)


def test_scaling_in_prefers_whoever_holds_the_state_to_an_older_one_that_does_not() -> None:
    story = Story(workers=3, joinDelaySeconds=0).running(2)
    story.ready(0)
    effects = story.tell(ev.Scale(1))
    assert {w.id for w in story.job.pool.staying} == {2}
    assert only(effects, ef.Delete).worker == 1


def test_a_silent_member_is_cut_off_and_after_a_while_fenced_and_refused_when_it_thaws() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    story.beats(0, 1)
    for _ in range(6):
        story.beats(0, after=0.49)
    assert only(story.waits(0.1), ef.Cut).members == (0, 1)
    for _ in range(10):
        story.beats(0, after=0.49)
    assert only(story.waits(1), ef.Fence).worker == 1
    before = story.job.stale
    assert only(story.tell(ev.Hello(WorkerId(1))), ef.Fence).worker == 1
    story.tell(ev.LeftRing(WorkerId(1), story.job.ring.generation, 9, True))
    assert story.job.stale == before + 2
    story.tell(ev.Gone(WorkerId(1), code=3))
    assert story.job.failures.charged == []


def test_one_that_never_becomes_ready_is_given_up_and_charged() -> None:
    story = Story(workers=1)
    story.tell(ev.Seen(WorkerId(0), "pid"))
    assert not of(story.waits(60), ef.Delete), "after a minute without an event there may be some to be read"
    effects = story.waits(1)
    assert only(effects, ef.Delete).worker == 0
    assert [f.why for f in story.job.failures.charged] == [
        "worker 0 was not ready after 60 s (it was starting)"
    ]
    assert of(story.waits(1), ef.Create)


def test_one_that_waits_for_capacity_is_not_given_up() -> None:
    story = Story(workers=1)
    assert not of(story.tell(ev.Tick(), after=10_000), ef.Delete)


def test_one_that_ends_by_itself_is_charged() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    story.tell(ev.Gone(WorkerId(1), code=0))
    assert [f.why for f in story.job.failures.charged] == ["worker 1 exited unexpectedly with exit code 0"]


def test_a_survivor_that_a_peers_death_aborted_is_not_charged() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5)
    story.running()
    story.kill(0)
    story.tell(ev.Gone(WorkerId(1), signal="SIGABRT"))
    assert story.job.failures.charged == []


def test_failures_beyond_the_budget_fail_the_job_with_the_traceback() -> None:
    story = Story(workers=1, maxFailures=1)
    story.tell(ev.Hello(WorkerId(0)), ev.Failed(WorkerId(0), "ValueError: no", "Traceback: line 1"))
    assert story.job.ending is None
    story.tell(ev.Tick(), after=1)
    story.tell(ev.Hello(WorkerId(1)), ev.Failed(WorkerId(1), "ValueError: no", "Traceback: line 2"))
    assert story.job.ending == ("Failed", "ValueError: no")
    assert story.job.failures.traceback == "Traceback: line 2"
    story.tell(ev.Gone(WorkerId(1), code=1))
    assert story.job.phase == "Failed"


def test_a_fatal_failure_is_not_tried_again() -> None:
    story = Story(workers=2)
    effects = story.tell(
        ev.Hello(WorkerId(0)), ev.Failed(WorkerId(0), "the model is not compiled", fatal=True)
    )
    assert story.job.ending == ("Failed", "the model is not compiled")
    assert not of(effects, ef.Create)


def test_a_mistake_of_the_model_is_told_once_and_not_tried_again_until_a_worker_was_ready() -> None:
    mistake = ev.Failed(WorkerId(0), "TypeError: no (mine.py, line 3, in model)", "Traceback", mistake=True)
    story = Story(workers=2)
    effects = story.tell(ev.Hello(WorkerId(0)), mistake, ev.Gone(WorkerId(0), code=1))
    assert story.job.ending == ("Failed", "TypeError: no (mine.py, line 3, in model)")
    assert story.job.failures.charged == [] and not of(effects, ef.Create)

    story = Story(workers=2)
    story.running()
    story.kill(0)
    story.tell(ev.Tick(), after=5)
    newcomer = WorkerId(2)
    story.tell(ev.Hello(newcomer), ev.Failed(newcomer, "TypeError: no", "Traceback", mistake=True))
    assert story.job.ending is None, "the others train: it may be its node's"
    assert [f.why for f in story.job.failures.charged] == ["TypeError: no"]


def test_workers_that_die_early_are_not_replaced_in_a_hot_loop() -> None:
    story = Story(workers=1)
    pauses = []
    for worker in range(4):
        story.tell(ev.Seen(WorkerId(worker), "pid"), ev.Gone(WorkerId(worker), signal="SIGKILL"))
        died = story.now
        while story.job.pool.next_id == worker + 1:
            story.waits(0.25)
        pauses.append(round(story.now - died, 3))
    assert pauses == [0.5, 1.0, 2.0, 4.0]


def test_the_status_says_how_long_and_why_lost_workers_are_not_replaced() -> None:
    story = Story(workers=2, startupTimeoutSeconds=600).running(0)

    def reason() -> str:
        return str(view.status(story.job, story.now)["reason"])

    trains = reason()
    for worker in range(1, 5):
        assert reason() == trains, f"worker {worker} starts"
        story.tell(ev.Seen(WorkerId(worker), "pid"), ev.Gone(WorkerId(worker), signal="SIGKILL"))
        story.beats(0)
        if worker == 1:
            assert reason() == (
                f"{trains}; 1 worker will start within 5 s, because a worker ended before it was ready"
            )
        if worker < 4:
            story.waits(2.5)
    four = "4 workers in a row ended before they were ready"
    assert reason() == f"{trains}; 1 worker will start within 5 s, because {four}"
    story.tell(ev.Live(1, 1, False, 1))
    assert "will start" not in reason(), "none is missing"
    story.tell(ev.Live(4, 1, False, 1))
    assert f"; 3 workers will start within 5 s, because {four}" in reason()
    story.tell(ev.StopAsked("enough"))
    assert "will start" not in reason()


def test_one_that_leaves_stays_while_the_ring_would_be_too_small_without_it() -> None:
    story = Story(workers=2, least=2, joinDelaySeconds=0).running()
    assert not of(story.tell(ev.Leaving(WorkerId(1), "SIGTERM")), ef.Leave), "2 are needed"
    only(story.ready(2), ef.Leave)
    effects = story.out(0, 1)
    assert only(effects, ef.Form).members == (0, 2)
    assert only(effects, ef.Stop).worker == 1


def test_one_polite_leave_and_one_frozen_peer_lose_nothing() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.beats(0, 1)
    story.tell(ev.Leaving(WorkerId(0), "SIGTERM"))
    effects = story.out(0, step=8)
    assert not of(effects, ef.Stop), "worker 1 has not said that it is out and well"
    for _ in range(8):
        story.beats(0, after=0.4)
    assert story.noticed(Reason.WorkerLost)
    assert story.job.ring.members == (0,), "it trains on until a different worker has the state"
    assert story.job.train.done == 8
    assert story.job.restarts == 0


def test_a_newcomer_that_is_told_to_go_while_it_starts_is_let_go_at_once() -> None:
    story = Story(workers=2, joinDelaySeconds=0).running(0)
    story.tell(ev.Hello(WorkerId(1)))
    effects = story.tell(ev.Leaving(WorkerId(1), "SIGTERM"))
    assert only(effects, ef.Stop).worker == 1
    assert only(effects, ef.Create).worker == 2


def test_one_that_was_told_to_end_is_not_charged_for_how_its_work_broke_off() -> None:
    story = Story(workers=2, joinDelaySeconds=0).running(0)
    story.tell(ev.Hello(WorkerId(1)))
    story.tell(ev.Scale(1))
    story.tell(ev.Failed(WorkerId(1), "RingBroken: told to stop"), ev.Gone(WorkerId(1), code=1))
    assert story.job.failures.charged == []


@pytest.mark.parametrize(
    "end",
    [
        ev.Failed(WorkerId(0), "the model's code has called sys.exit(0)"),
        ev.Failed(WorkerId(0), "ValueError: while it ends", mistake=True),
        ev.Failed(WorkerId(0), "a failure that is fatal otherwise", fatal=True),
        ev.Gone(WorkerId(0), code=0),
        ev.Gone(WorkerId(0), code=3),
        ev.Gone(WorkerId(0), signal="SIGSEGV"),
        ev.Gone(WorkerId(0), signal="SIGALRM"),
    ],
    ids=lambda end: f"{type(end).__name__} {getattr(end, 'why', '') or end.signal or end.code}",
)
def test_no_end_after_a_request_to_leave_is_charged_however_often(end: ev.Failed | ev.Gone) -> None:
    """A preempted worker's code may call sys.exit, raise or crash; the fourth time does not fail the job."""
    story = Story(workers=2, joinDelaySeconds=0, maxFailures=3).running()
    for leaver in range(5):
        story.tell(ev.Leaving(WorkerId(leaver), "SIGTERM"))
        story.tell(replace(end, worker=WorkerId(leaver)), ev.Gone(WorkerId(leaver), code=1))
        story.out(leaver + 1, step=leaver + 2, broken="reset")
        story.ready(leaver + 2)
        story.up(leaver + 2)
    assert story.job.failures.charged == [] and story.job.failures.count == 0
    assert not story.job.ending


def test_one_that_does_not_end_when_told_to_is_ended_by_force() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5, gracePeriodSeconds=5).running()
    story.tell(ev.Scale(1))
    assert only(story.out(0, 1), ef.Stop).worker == 1
    for _ in range(12):
        story.beats(0, 1, after=0.2)
    assert not of(story.waits(0.1), ef.Delete)
    story.beats(0)
    assert only(story.waits(0.2), ef.Delete) == ef.Delete(WorkerId(1), 0.0)
    assert story.job.failures.charged == []


def test_scaled_down_and_up_again_at_once_nobody_comes_back_from_leaving() -> None:
    story = Story(workers=3, joinDelaySeconds=0).running(0, 1, 2)
    story.tell(ev.Scale(2))
    leaving = {w.id for w in story.job.pool if w.state == "draining"}
    effects = story.tell(ev.Scale(3))
    assert only(effects, ef.Create).worker == 3
    assert {w.id for w in story.job.pool if w.state == "draining"} == leaving


def test_a_crash_is_charged_though_its_peers_said_first_that_the_ring_broke() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    story.out(0, step=2, broken="connection reset")
    story.tell(ev.Closed(WorkerId(1), "its stream ended"), ev.Gone(WorkerId(1), signal="SIGSEGV"))
    assert [f.why for f in story.job.failures.charged] == ["worker 1 crashed (SIGSEGV)"]


def test_a_crash_in_the_next_ring_is_charged() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    story.kill(0)
    story.out(1, 2, step=2, broken="reset")
    story.up(2)
    story.tell(ev.Gone(WorkerId(1), signal="SIGSEGV"))
    assert len(story.job.failures.charged) == 1


def test_code_that_crashes_whenever_it_trains_fails_the_job() -> None:
    story = Story(workers=2, joinDelaySeconds=0, maxFailures=2).running(0, 1)
    for _ in range(20):
        if story.job.ending is None:
            newest = max(w.id for w in story.job.pool)
            story.tell(ev.Gone(newest, signal="SIGSEGV"))
            for w in [w.id for w in story.job.pool if w.in_ring]:
                story.out(w, step=2, broken="reset")
            story.waits(1)
            story.ready(*(w.id for w in story.job.pool if w.state == "pending"))
            story.out(*story.job.ring.members, step=2)
    assert story.job.ending is not None
    assert story.job.ending[0] == "Failed"
    assert len(story.job.failures.charged) == 3


def test_a_failure_is_charged_once_though_it_is_heard_of_three_times() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Failed(WorkerId(1), "ValueError: no", "Traceback"))
    story.tell(ev.Closed(WorkerId(1), "its stream ended"), ev.Gone(WorkerId(1), code=1))
    assert [f.why for f in story.job.failures.charged] == ["ValueError: no"]


def test_a_thousand_early_deaths_are_no_number_too_large() -> None:
    story = Story(workers=1)
    for _ in range(1100):
        story.waits(30)
        for w in list(story.job.pool):
            story.tell(ev.Gone(w.id, free=True, why="preempted"))
    assert of(story.waits(30), ef.Create)
    assert story.job.failures.charged == []


def test_after_a_stall_of_its_own_the_master_reads_first_what_it_was_told_meanwhile() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5).running()
    story.beats(0, 1, 2)
    assert not of(story.tell(ev.Tick(), after=5), ef.Fence), "the timer is seen before the messages"
    story.beats(0, 1)
    story.waits(1)
    away = [w.id for w in story.job.pool if w.place == AWAY]
    assert away == [2], "there was nothing from worker 2 to be read"


def test_when_all_are_silent_the_master_gives_them_up_a_moment_later() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.beats(0, 1)
    assert {e.worker for e in of(story.waits(3.8), ef.Fence)} == {0, 1}


def test_the_next_deadline_is_the_first_time_at_which_time_alone_matters() -> None:
    story = Story(workers=1, joinDelaySeconds=0.5, startupTimeoutSeconds=60, heartbeatTimeoutSeconds=3)
    assert story.job.next_deadline() is None, "capacity may take for ever"
    story.tell(ev.Seen(WorkerId(0), "pid"))
    started = story.now
    assert story.job.next_deadline() == started + 60
    story.tell(ev.Hello(WorkerId(0)))
    assert story.job.next_deadline() == started + 60, "saying hello is not being ready"
    story.ready(0)
    assert story.job.next_deadline() is None, "its silence is noticed where it is heard"
    assert story.telemetry.next_deadline() == story.now + 3
    story.tell(ev.Scale(2))
    story.ready(1)
    assert story.job.next_deadline() == story.now + 0.5, "when the ring makes room for the newcomer"


def test_the_ordinary_end_of_a_stream_is_not_a_stale_message() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Gone(WorkerId(1), signal="SIGKILL"), ev.Closed(WorkerId(1), "its stream ended"))
    assert story.job.stale == 0


def test_fewer_and_more_workers_by_live_values() -> None:
    story = Story(workers=2).running()
    story.tell(ev.Live(3, 1, False, 1))
    assert story.job.pool.next_id == 3
    assert story.noticed(Reason.Scaled) == ["workers 2 -> 3"]
    story.tell(ev.Live(3, 3, False, 1))
    story.kill(0)
    story.out(1, broken="reset")
    assert story.job.phase == "Waiting", "fewer than minWorkers are left"


# --- what fails in the backend


def test_workers_that_cannot_be_started_end_the_job_with_the_reason() -> None:
    story = Story(workers=1, maxFailures=2)
    for worker in range(3):
        assert story.job.phase == "Starting"
        story.tell(ev.Gone(WorkerId(worker), why="its process cannot be started: FileNotFoundError: trainer"))
        story.waits(30)
    assert story.job.phase == "Failed"
    assert story.job.reason == "worker 2 failed: its process cannot be started: FileNotFoundError: trainer"


def test_a_part_of_the_backend_that_does_not_work_is_in_the_status_until_it_does() -> None:
    story = Story(workers=1)
    why = "edl-status cannot be written: Kubernetes does not allow it"
    assert only(story.tell(ev.Degraded("status", why)), ef.Notice) == ef.Notice(
        Reason.Degraded, f"status: {why}"
    )
    assert story.tell(ev.Degraded("status", why)) == [], "once"
    assert view.status(story.job, story.now)["degraded"] == {"status": why}
    assert only(story.tell(ev.Degraded("status", "")), ef.Notice).reason == Reason.Recovered
    assert view.status(story.job, story.now)["degraded"] == {}
    assert story.tell(ev.Degraded("labels", "")) == [], "it never did not"


def test_a_job_whose_workers_are_killed_again_and_again_backs_off_and_fails() -> None:
    story = Story(workers=1)
    times = 0
    while story.job.ending is None:
        worker = max(w.id for w in story.job.pool)
        story.ready(worker)  # and it forms a ring, in which no step is made
        effects = story.tell(ev.Gone(worker, signal="SIGKILL"))
        times += 1
        assert times <= MAX_IN_VAIN
        if story.job.ending is None:
            only(effects + story.waits(60), ef.Create)
    assert times == MAX_IN_VAIN
    assert story.job.failures.charged == [], "a kill from outside is not charged"
    assert "10 times in a row before the ring made a step; the last: worker 9, SIGKILL" in story.job.reason
    told = story.noticed(Reason.RestartBackOff)
    assert len(told) == MAX_IN_VAIN - 2
    assert "the next ones start in 1.0 s; the job fails when it happens 10 times" in told[0]


def test_kills_with_steps_in_between_go_on_for_ever() -> None:
    story = Story(workers=2, joinDelaySeconds=0).running()
    for _ in range(3 * MAX_IN_VAIN):
        ring = story.job.ring
        story.tell(ev.Stepped(ring.members[0], ring.generation, 1, 0.1, 0, 0.0))
        victim = ring.members[-1]
        story.tell(ev.Gone(victim, signal="SIGKILL"), after=60)
        story.out(*ring.members)
        story.ready(max(w.id for w in story.job.pool))
        story.up()
    assert story.job.ending is None
    assert story.noticed(Reason.RestartBackOff) == []


def test_a_worker_that_connects_after_it_was_told_to_end_is_told_again() -> None:
    story = Story(workers=1)
    story.tell(ev.Seen(WorkerId(0), "a pod"), ev.StopAsked("enough"))
    assert only(story.tell(ev.Hello(WorkerId(0))), ef.Stop).worker == 0
    assert not of(story.tell(ev.Hello(WorkerId(1))), ef.Stop), "it is no worker of this job"
    assert only(story.tell(ev.Closed(WorkerId(0), "its stream ended")), ef.End).phase == "Stopped"


def test_a_worker_whose_process_is_not_observed_is_shown_with_the_id_that_it_reports() -> None:
    story = Story(workers=2)
    story.tell(ev.Seen(WorkerId(1), "edl-worker-1"))
    story.tell(ev.Hello(WorkerId(0), pid=4711), ev.Hello(WorkerId(1), pid=7))
    status = view.status(story.job, story.now)
    assert [w["handle"] for w in status["workers"]] == ["4711", "edl-worker-1"]
    assert output.job(status, "digits", ended=False)["workers"][0]["pid"] == 4711
