# SPDX-License-Identifier: Apache-2.0
"""When a copy of the state, which a crashed worker has left in memory, is the job's state."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.ranges import RangeSet
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.membership import SNAPSHOT_SECONDS
from tests.support.jobs.stories import Story, finish, of, only

NEVER_SILENT: dict[str, Any] = {"heartbeatTimeoutSeconds": 10**6}


def left_to(worker: int, step: int, made_in: int) -> ev.LeftRing:
    return ev.LeftRing(
        WorkerId(worker),
        Generation(0),
        step,
        has_state=True,
        skipped=RangeSet.of([(1, 2)]),
        made_in=made_in,
    )


def greets(story: Story, *workers: int) -> list[ef.Effect]:
    """They start, with a copy."""
    return [e for w in workers for e in story.tell(ev.Hello(WorkerId(w), brings_state=True))]


def ready(
    story: Story, worker: int, step: int | None, checkpoint: int = 0, made_in: int = 1
) -> list[ef.Effect]:
    held = None if step is None else left_to(worker, step, made_in)
    return story.tell(ev.Ready(WorkerId(worker), Layout(100), checkpoint=checkpoint, held=held))


def all_crash(checkpoint: dict[str, Any] | None = None) -> Story:
    """Workers 0 and 1 have trained to step 5 or 6, and their processes are gone; 2 and 3 follow them."""
    story = Story(workers=2, checkpoint=checkpoint, inMemorySnapshot=True, **NEVER_SILENT).running(0)
    story.ready(1)
    story.out(0)
    story.up(step=1)
    story.tell(ev.Progress(story.job.ring.generation, 6))
    story.kill(0)
    story.kill(1)
    return story


def test_when_all_crash_the_job_goes_on_from_the_latest_copy_once_all_who_have_one_are_ready() -> None:
    story = all_crash()
    greets(story, 2, 3)
    assert of(ready(story, 2, 5), ef.Form) == [], "worker 3 may have the next step"
    assert "copy of the state" in story.job.reason
    form = only(ready(story, 3, 6), ef.Form)
    assert (form.root, form.step, form.joining) == (3, 6, (2,))
    assert story.job.pool[WorkerId(3)].skipped == RangeSet.of([(1, 2)])
    assert story.noticed(Reason.StateLost) == []
    assert ["step 6 was kept in memory" in text for text in story.noticed(Reason.Restored)] == [True]


def test_nobody_starts_anew_while_one_with_a_copy_is_starting_and_it_is_not_waited_for_for_ever() -> None:
    story = all_crash()
    greets(story, 3)
    story.tell(ev.Hello(WorkerId(2)))
    assert of(ready(story, 2, None), ef.Form) == []
    story.kill(3)  # and its copy is lost with it
    assert story.job.restarts == 0, "a second one may still come"
    story.waits(SNAPSHOT_SECONDS)
    assert story.job.restarts == 1 and story.job.ring.members == (2,)


def test_who_is_ready_without_a_copy_waits_a_moment_for_the_next_process_of_who_had_the_state() -> None:
    story = Story(workers=1, inMemorySnapshot=True).running()
    story.tell(ev.Scale(2))
    story.kill(0)
    assert of(story.ready(1), ef.Form) == []
    greets(story, 2)
    assert only(ready(story, 2, 6), ef.Form).step == 6
    assert story.noticed(Reason.StateLost) == []


def test_who_says_that_it_brings_a_copy_and_has_none_holds_nobody_up() -> None:
    story = all_crash()
    greets(story, 2, 3)
    ready(story, 2, None)
    assert only(ready(story, 3, None), ef.Form).step == 0
    assert len(story.noticed(Reason.StateLost)) == 1


def test_a_copy_counts_for_nothing_while_others_train_on() -> None:
    story = Story(workers=2).running()
    story.tell(ev.Progress(story.job.ring.generation, 6))
    story.kill(1)
    story.out(0, step=6, broken="worker 1 died")
    story.up(step=6)
    greets(story, 2)
    ready(story, 2, 6)  # the survivor has made more steps since
    story.out(0, step=9)
    form = story.job.ring
    assert form.members == (0, 2)
    assert story.job.train is not None and story.job.train.done == 9
    assert not story.job.pool[WorkerId(2)].has_state


def test_who_comes_late_with_the_latest_copy_is_the_next_root() -> None:
    story = all_crash()
    story.tell(ev.Hello(WorkerId(2)))
    ready(story, 2, 3)  # an old one
    story.waits(SNAPSHOT_SECONDS)  # without a report of another snapshot
    assert len(story.noticed(Reason.StateLost)) == 1
    story.up(step=3)
    story.tell(ev.Hello(WorkerId(3), brings_state=True))
    leave = only(ready(story, 3, 6), ef.Leave)
    assert leave.members == (2,)
    story.out(2, step=4)
    assert story.job.ring.members == (2, 3) and story.job.train is not None and story.job.train.done == 6


def test_a_copy_of_the_step_that_others_have_reached_again_is_not_taken_for_their_state() -> None:
    """The training has begun anew since it was left, so there are two states of that step."""
    story = all_crash()
    story.tell(ev.Hello(WorkerId(2)))
    ready(story, 2, None)
    story.waits(SNAPSHOT_SECONDS)
    story.up(step=0)
    story.tell(ev.Hello(WorkerId(3), brings_state=True))
    only(ready(story, 3, 6), ef.Leave)
    form = only(story.out(2, step=6, made_in=story.job.ring.generation), ef.Form)
    assert (form.root, form.joining, form.sync) == (2, (3,), False)


@pytest.mark.parametrize(("made_in", "joining"), [(1, ()), (2, (2,))])
def test_copies_of_one_step_are_one_state_only_if_one_ring_has_made_it(
    made_in: int, joining: tuple[int, ...]
) -> None:
    story = all_crash()
    greets(story, 2, 3)
    ready(story, 2, 6)
    form = only(ready(story, 3, 6, made_in=made_in), ef.Form)
    assert (form.root, form.joining) == (3 if joining else 2, joining)


def test_a_late_copy_is_nothing_where_parameter_servers_are_with_a_ring_that_trains() -> None:
    story = Story(workers=2, mode="hybrid", inMemorySnapshot=True, **NEVER_SILENT).running(0)
    ring = story.job.ring
    story.tell(ev.JoinedRing(WorkerId(0), ring.generation, 3, servers=1))
    story.tell(ev.Hello(WorkerId(1), brings_state=True))
    only(ready(story, 1, 6), ef.Leave)
    form = only(story.out(0, step=4), ef.Form)
    assert (form.root, form.step, form.joining) == (0, 4, (1,))


def test_a_later_checkpoint_is_preferred() -> None:
    story = all_crash(checkpoint={"dir": "d"})
    greets(story, 2)
    ready(story, 2, 4, checkpoint=5)
    form = only(story.waits(SNAPSHOT_SECONDS), ef.Form)
    assert form.step == 5 and not story.job.pool[WorkerId(2)].has_state


def test_a_job_that_was_trained_to_its_end_is_saved_from_a_copy() -> None:
    story = Story(workers=1, inMemorySnapshot=True).running()
    story.kill(0)
    greets(story, 1)
    assert only(ready(story, 1, 10), ef.Export).worker == 1


def test_when_who_was_saving_is_lost_and_no_copy_comes_the_job_ends_by_the_time_alone() -> None:
    story = Story(workers=2, inMemorySnapshot=True, **NEVER_SILENT).running()
    finish(story)
    story.tell(ev.Saved(WorkerId(0), "model.keras"))
    story.kill(1)
    story.kill(0)
    story.tell(ev.Hello(WorkerId(2)))
    assert not of(ready(story, 2, None), ef.Stop), "a copy may still come"
    effects: list[ef.Effect] = []
    while story.job.ending is None:
        due = story.job.next_deadline()
        assert due is not None and due <= (story.job.pool.snapshots.deadline or 0.0)
        effects = story.tell(ev.Tick(), after=due - story.now)
    assert [e.worker for e in of(effects, ef.Stop)] == [2], "nothing else will happen"
    assert story.job.reason.startswith("evaluation failed: every worker that held the state was lost")
