# SPDX-License-Identifier: Apache-2.0
"""Jobs that run a script that was written for Horovod (mode=horovod): a commit is a step."""

from __future__ import annotations

from typing import Any

from edl.cli.shared import display
from edl.contract.exit_codes import WorkerExit
from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, view
from tests.support.jobs.invariants import replayed
from tests.support.jobs.stories import Story, of, only

COMMITS = 1 << 50


def script(workers: int, elastic: bool = True, **more: Any) -> Story:
    story = Story(
        workers,
        records=COMMITS,
        mode="horovod",
        model={"script": "/train.py"},
        horovod={"elastic": elastic},
        joinDelaySeconds=0.5,
        **more,
    )
    return story.running()


def ended(story: Story, *workers: int) -> list[ef.Effect]:
    return [e for w in workers for e in story.tell(ev.Finished(WorkerId(w), {}, ""))]


def test_a_job_succeeds_when_the_scripts_of_all_workers_have_ended() -> None:
    story = script(2)
    assert not of(story.tell(ev.Progress(story.job.ring.generation, 7)), ef.Export)
    assert only(ended(story, 0), ef.Stop).worker == 0
    effects = story.tell(ev.Closed(WorkerId(0), "its stream ended"), ev.Gone(WorkerId(0), code=0))
    assert not of(effects, ef.Create), "a worker whose script has ended is not replaced"
    assert not of(effects, ef.Cut), "the others may still be in the last collective"
    ended(story, 1)
    assert story.job.reason == "the script has ended on all workers"
    assert only(story.tell(ev.Gone(WorkerId(1), code=0)), ef.End).phase == "Succeeded"
    summary = view.summary(story.job)
    assert (summary["step"], summary["task"]["kind"], summary["records"]["size"]) == (7, "horovod", None)
    assert view.summary(replayed(story.watchdog)) == summary


def test_a_script_that_ended_twice_to_two_masters_ends_once() -> None:
    story = script(1)
    ended(story, 0)
    assert not of(ended(story, 0), ef.Stop)
    assert story.job.reason == "the script has ended on all workers"


def test_a_member_that_needs_the_last_ring_again_forms_it_alone() -> None:
    story = script(2, least=2)
    ended(story, 0)
    story.tell(ev.Gone(WorkerId(0), code=0))
    form = only(story.out(1, step=5, broken="reset"), ef.Form)
    assert (form.members, form.step) == ((1,), 5)
    story.up(5)
    ended(story, 1)
    assert story.job.ending and story.job.ending[0] == "Succeeded"


def test_a_worker_that_dies_after_the_end_of_the_others_fails_the_job() -> None:
    story = script(2)
    ended(story, 0)
    story.kill(1)
    assert story.job.reason == "worker 1 was lost after the script of worker 0 had ended: its stream ended"
    assert story.job.ending and story.job.ending[0] == "Failed"


def test_rank_0_holds_the_most_commits() -> None:
    story = script(3)
    story.kill(0)
    story.out(1, step=4, broken="reset")
    form = only(story.out(2, step=5, broken="reset"), ef.Form)
    assert (form.members, form.root, form.step) == ((2, 1), 2, 5)


def test_lost_commits_are_named() -> None:
    story = script(1)
    story.tell(ev.Progress(story.job.ring.generation, 9))
    story.kill(0)
    story.ready(1)
    story.up()
    assert only_text(story, Reason.StateLost) == (
        "every worker that held the state is gone: 8 commits are lost, the job starts again from the start "
        "of its script"
    )


def test_no_message_speaks_of_records() -> None:
    story = script(2)
    beats(story, 0, 1)
    status = view.status(story.job, story.now, story.telemetry.beats)
    assert display.progress_line(status) == "20 commits, 4 per second; 2 workers (generation 1)"
    assert status["records"] == {"size": None, "total": 0, "applied": 19}
    story.kill(0)
    story.out(1, step=19, broken="reset")
    story.up(19)
    beats(story, 1)
    while not story.noticed(Reason.WorkerUnreachable):
        story.waits(0.25)
    told = [e.text for _, _, effects in story.watchdog.history for e in effects if isinstance(e, ef.Notice)]
    assert "ring 2 -> 1 in 0.20 s (worker 0 is lost (SIGKILL))" in told
    assert "Removing it would lose 19 commits (20 s of training)" in told[-1]
    assert not any("record" in text for text in told)


def beats(story: Story, *workers: int) -> None:
    """Let the ring run for ten seconds, with heartbeats of these workers."""
    for _ in range(10):
        for worker in workers:
            beat = facts.Heartbeat(WorkerId(worker), story.job.ring.generation, 20, rate=4.0)
            story.tell(beat, after=1 / len(workers))


def test_a_plain_script_starts_again_at_most_as_often_as_maxfailures_says() -> None:
    story = script(1, elastic=False)  # maxFailures is 2
    for worker in range(3):
        assert story.job.ending is None
        story.kill(worker)
        story.waits(5)
        story.ready(worker + 1)
        if story.job.ring.members:
            story.tell(ev.JoinedRing(WorkerId(worker + 1), story.job.ring.generation, 0))
    assert story.job.ending and story.job.ending[0] == "Failed"
    assert "workers were lost 3 times in a row" in story.job.reason


def fails(story: Story, worker: int, why: str) -> None:
    story.tell(ev.Failed(WorkerId(worker), why, "Traceback", mistake=True), ev.Gone(WorkerId(worker), code=1))


def test_a_mistake_that_a_script_repeats_ends_the_job_and_its_peers_were_not_killed() -> None:
    story = script(2, elastic=False, least=2)
    fails(story, 0, "ValueError: no (train.py, line 7)")
    assert story.job.ending is None, "the first time, the data of this worker may be the cause"
    story.tell(ev.Gone(WorkerId(1), code=WorkerExit.PEER_BROKEN))
    story.waits(5)
    story.ready(2, 3)
    fails(story, 3, "ValueError: no (train.py, line 7)")
    assert story.job.ending == ("Failed", "ValueError: no (train.py, line 7)")
    told = [e.text for _, _, effects in story.watchdog.history for e in effects if isinstance(e, ef.Notice)]
    assert "worker 1 exited: it ended itself, because its ring broke" in told or any(
        "worker 1 is lost: it ended itself, because its ring broke" in text for text in told
    ), told
    assert not any("killed" in text for text in told)


def test_a_mistake_after_further_commits_is_another_failure() -> None:
    story = script(2)
    fails(story, 0, "ValueError: no (train.py, line 7)")
    story.out(1, step=0, broken="reset")
    story.up(0)
    story.tell(ev.Progress(story.job.ring.generation, 9))
    story.ready(2)
    fails(story, 1, "ValueError: no (train.py, line 7)")
    assert story.job.ending is None


def only_text(story: Story, reason: Reason) -> str:
    (text,) = story.noticed(reason)
    return text
