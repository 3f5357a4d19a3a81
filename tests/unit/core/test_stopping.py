# SPDX-License-Identifier: Apache-2.0
"""A job that is to end with its state in a checkpoint: when it ends, and when it goes on."""

from __future__ import annotations

from typing import Any

from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from edl.master.jobs import new_job
from tests.support.jobs.stories import Story, of, only
from tests.unit.core.test_job_checkpoints import a_story, whole

STOP = ev.StopAsked("stopped by edl stop", checkpoint=True, id="7a")
FORCE = ev.StopAsked("stopped by edl stop", checkpoint=True, force=True, id="7a")
FULL = "No space left on device"


def fails(story: Story, step: int, worker: int = 0, attempt: str = "alone") -> list[ef.Effect]:
    return story.tell(ev.CheckpointFailed(WorkerId(worker), step, attempt, FULL))


def answer(story: Story) -> Any:
    return view.status(story.job, story.now)["stop"]


def test_all_leave_at_a_step_boundary_one_writes_the_state_and_then_the_job_ends() -> None:
    story = a_story().running()
    assert answer(story) is None
    assert only(story.tell(STOP), ef.Leave).members == (0, 1)
    assert answer(story) == {"id": "7a", "failed": ""}
    effects = story.out(0, step=5) + story.out(1, step=5)
    assert only(effects, ef.WriteCheckpoint).worker == 0
    assert not of(effects, ef.Form) and not of(story.waits(100), ef.Stop), "however long that takes"
    effects = whole(story, 5, attempt="alone")
    assert [e.worker for e in of(effects, ef.Stop)] == [0, 1]
    assert story.job.reason == "stopped by edl stop; its state is in the checkpoint of step 5"
    for worker in range(2):
        effects = story.tell(ev.Gone(WorkerId(worker), code=0))
    assert only(effects, ef.End).phase == "Stopped"


def test_if_it_cannot_be_written_the_job_says_so_and_goes_on() -> None:
    story = a_story().running()
    story.tell(STOP)
    story.out(0, 1, step=5)
    assert only(fails(story, 5), ef.Form).members == (0, 1)
    assert answer(story)["id"] == "7a" and FULL in answer(story)["failed"]
    assert FULL in story.noticed(Reason.StopFailed)[0]
    story.up(step=5)
    assert story.job.phase == "Training"
    story.tell(STOP)  # and again, at once, though the store has failed
    assert answer(story) == {"id": "7a", "failed": ""}
    assert only(story.out(0, 1, step=6), ef.WriteCheckpoint).worker == 0
    whole(story, 6)
    assert story.job.phase == "Ending"


def test_by_force_it_ends_all_the_same_and_says_what_is_missing() -> None:
    story = a_story().running()
    story.tell(FORCE)
    story.out(0, 1, step=5)
    assert len(of(fails(story, 5), ef.Stop)) == 2
    assert story.job.reason.startswith(
        "stopped by edl stop; its state could not be written: worker 0: No space"
    )


def test_who_was_to_write_it_dies_and_another_one_does() -> None:
    story = a_story(workers=3).running()
    story.tell(STOP)
    assert only(story.out(0, 1, 2, step=5), ef.WriteCheckpoint).worker == 0
    effects = story.kill(0)
    assert only(effects, ef.WriteCheckpoint).worker == 1 and not of(effects, ef.Create)


def test_what_is_in_a_checkpoint_is_not_written_again() -> None:
    story = a_story().running()
    story.tell(STOP)
    whole(story, 5)  # one that was under way
    effects = story.out(0, 1, step=5)
    assert not of(effects, ef.WriteCheckpoint) and len(of(effects, ef.Stop)) == 2


def test_without_any_state_it_ends_at_once() -> None:
    story = a_story()
    story.ready(0)
    assert len(of(story.tell(STOP), ef.Stop) + of(story.waits(0.1), ef.Delete)) >= 1
    assert story.job.reason == "stopped by edl stop; no worker holds its state, there is no checkpoint"


def test_a_stop_without_a_checkpoint_does_not_wait_for_one() -> None:
    story = a_story().running()
    story.tell(STOP)
    assert len(of(story.tell(ev.StopAsked("now")), ef.Stop)) == 2
    assert story.job.reason == "now"


def test_where_none_are_written_it_goes_on() -> None:
    story = Story(workers=2).running()
    story.tell(STOP)
    assert story.job.phase == "Training" and "checkpoint.dir is empty" in answer(story)["failed"]


# --- the deadline of the job


def with_deadline(seconds: int, **checkpoint: Any) -> Story:
    """It has begun, and its deadline was set."""
    story = a_story(**checkpoint)
    story.tell(ev.Live(2, 2, False, 1, seconds))
    return story


def test_a_job_that_has_been_active_for_too_long_fails_with_its_state_in_a_checkpoint() -> None:
    story = with_deadline(100).running()
    assert not of(story.waits(98 - (story.now - 100)), ef.Leave)
    assert only(story.waits(3), ef.Leave).members == (0, 1)
    assert only(story.out(0, 1, step=5), ef.WriteCheckpoint).worker == 0
    assert len(of(whole(story, 5), ef.Stop)) == 2
    assert story.job.ending == (
        "Failed",
        "DeadlineExceeded: the job has been active for 100 s (activeDeadlineSeconds); its state is in the "
        "checkpoint of step 5",
    )
    assert len(story.noticed(Reason.DeadlineExceeded)) == 1


def test_it_fails_also_if_that_cannot_be_written_or_takes_too_long() -> None:
    story = with_deadline(100).running()
    story.waits(100)
    story.out(0, 1, step=5)
    assert len(of(fails(story, 5), ef.Stop)) == 2 and story.job.phase == "Ending"
    story = with_deadline(100).running()
    story.waits(100)
    story.out(0, 1, step=5)
    assert len(of(story.waits(61), ef.Stop)) == 2
    assert story.job.reason.endswith("its state could not be written in time")


def test_without_checkpoints_or_workers_it_fails_at_once() -> None:
    story = with_deadline(100, dir="").running()
    assert len(of(story.waits(100), ef.Stop)) == 2
    story = with_deadline(100)
    story.waits(100)
    assert story.job.ending is not None and story.job.ending[0] == "Failed"


def test_the_time_under_earlier_masters_counts_and_a_deadline_may_be_moved() -> None:
    job = new_job(a_story().job.config)
    job.handle(ev.Adopted((), 0, active_seconds=95), 1000.0)
    job.handle(ev.Begin(), 1000.0)
    for now, deadline, ends in (
        (1000.1, 100, False),
        (1004.9, 100, False),
        (1004.9, 200, False),
        (1050, 140, True),
    ):
        job.handle(ev.Live(2, 2, False, 1, deadline), now)
        assert (job.ending is not None) == ends, now
        if not ends:
            assert job.next_deadline() == 1000 - 95 + deadline


def test_a_job_that_is_being_stopped_at_its_deadline_is_stopped_in_time() -> None:
    story = with_deadline(100).running()
    story.tell(STOP)
    story.out(0, 1, step=5)
    story.waits(170)
    assert story.job.ending is not None and story.job.ending[0] == "Stopped"
