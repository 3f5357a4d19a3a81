# SPDX-License-Identifier: Apache-2.0
"""Members whose states differ: which are removed, when all roll back, and what is never completed."""

from __future__ import annotations

from typing import Any

import pytest

from edl.contract.ids import WorkerId
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import view
from edl.master.core.consistency import Difference, difference
from edl.master.core.snapshot import dump, load
from tests.support.jobs.stories import Story, finish, of, only


def a_story(workers: int = 3, **named: Any) -> Story:
    """A job of workers that are in one ring and never silent."""
    named = {"checkpoint": {"dir": "d", "seconds": 10}, **named}
    story = Story(workers=workers, heartbeatTimeoutSeconds=10**6, joinDelaySeconds=1, **named)
    story.ready(*range(workers))
    story.waits(1.1)
    story.up()
    assert len(story.job.ring.members) == workers
    return story


def compared(story: Story, *states: str, step: int = 5, attempt: str = "", **named: Any) -> list[ef.Effect]:
    """All members have written their parts, and say of their state what its letter stands for."""
    ring = story.job.ring
    generation = named.pop("generation", ring.generation)
    writers = named.pop("writers", ring.members)
    told = tuple((state, 1) for state in states)
    attempt = attempt or f"g{generation}"
    return story.tell(ev.PartsWritten(writers[-1], step, attempt, writers, generation, told))


def whole(story: Story, step: int) -> None:
    story.tell(ev.Checkpointed(story.job.ring.members[0], step, "whole", 1 << 20))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("aaa", None),
        ("a-a", None),
        ("---", None),
        ("aba", Difference((WorkerId(1),), 2, 3)),
        ("ab", Difference((), 1, 2)),
        ("aabb", Difference((), 2, 4)),
        ("aab-", Difference((), 2, 4)),
        ("aaab-", Difference((WorkerId(3),), 3, 5)),
        ("abcaa", Difference((WorkerId(1), WorkerId(2)), 3, 5)),
    ],
)
def test_more_than_half_of_all_decide_and_who_has_told_nothing_does_not_agree(
    told: str, expected: Difference | None
) -> None:
    said = {WorkerId(w): "" if letter == "-" else letter for w, letter in enumerate(told)}
    assert difference(said) == expected


def test_a_checkpoint_of_equal_states_is_completed() -> None:
    story = a_story()
    assert only(compared(story, "a", "a", "a"), ef.Commit).step == 5
    assert not story.noticed(Reason.ReplicaDivergence)


def test_a_member_that_differs_from_most_is_dropped_and_replaced_and_the_checkpoint_is_ordered_again() -> (
    None
):
    story = a_story()
    effects = compared(story, "a", "b", "a")
    assert not of(effects, ef.Commit), "its parts are of different states"
    fence = only(effects, ef.Fence)
    assert (fence.worker, fence.reason) == (1, ef.FenceReason.StateDiffers)
    assert only(effects, ef.Cut).members == (0, 2)
    assert only(effects, ef.Create).worker == 3
    why = "worker 1 holds another state than 2 of 3 members at step 5: an operation whose result depends on "
    assert [f.why for f in story.job.failures.charged] == [why + "the machine, or bad memory"]
    assert story.noticed(Reason.ReplicaDivergence) == [
        "at step 5, 1 of 3 members held another state; worker 1 is dropped, the others go on"
    ]
    story.tell(ev.Gone(WorkerId(1), code=3))
    assert len(story.job.failures.charged) == 1, "charged once"
    form = only(story.out(0, 2, step=6, broken="cut"), ef.Form)
    assert (form.members, form.step, form.untrusted_up_to) == ((0, 2), 6, 0), "nothing is redone"
    assert of(story.up(step=6), ef.Checkpoint), "at once"
    assert view.summary(story.job)["failures"][0]["worker"] == 1
    assert only(compared(story, "a", "a", step=8), ef.Commit).step == 8


def test_what_is_heard_of_such_a_checkpoint_again_changes_nothing() -> None:
    story = a_story(workers=2)
    whole(story, 3)
    writers, generation = story.job.ring.members, story.job.ring.generation
    compared(story, "a", "b")
    again = compared(story, "a", "b", writers=writers, generation=generation)
    assert again == [] and story.job.restarts == 1
    story.out(0, 1, step=6, broken="cut")
    again = compared(story, "a", "b", writers=writers, generation=generation)
    late = compared(story, "a", "b", writers=writers, generation=generation, attempt="another")
    assert not [e for e in (*again, *late) if isinstance(e, ef.Commit | ef.Cut | ef.Fence)], (
        "of states that no member holds any more"
    )
    assert story.job.restarts == 1


def test_of_a_loop_the_first_cause_is_an_incomplete_state() -> None:
    story = a_story(workers=2, model={"script": "/train.py"})
    whole(story, 3)
    compared(story, "a", "b")
    causes = "something that the loop changes is missing from the `state` of edl.join(), an operation whose"
    assert f"agree ({causes}" in story.noticed(Reason.ReplicaDivergence)[0]


def test_without_a_majority_all_go_back_to_the_newest_checkpoint_whatever_they_hold() -> None:
    story = a_story(workers=2)
    whole(story, 3)
    generation = story.job.ring.generation
    assert only(compared(story, "a", "b"), ef.Cut).members == (0, 1)
    assert "all go back to the newest checkpoint of step 3" in story.noticed(Reason.ReplicaDivergence)[0]
    story.tell(ev.Progress(generation, 9), ev.JoinedRing(WorkerId(0), generation, 0))
    form = only(story.out(0, 1, step=9, broken="cut"), ef.Form)
    assert (form.step, form.sync, form.untrusted_up_to) == (3, True, generation)
    assert form.untrusted_reason.startswith("at step 5 the members held different states")
    assert not any(w.has_state for w in story.job.pool), "until they have read it"
    again = load(dump(story.job), story.job.config)
    assert again.divergence == story.job.divergence
    story.up(step=3)
    assert story.noticed(Reason.Restored) == ["the state of step 3 is restored from d"]
    assert story.noticed(Reason.StateLost) == [], "no worker was lost"
    assert story.job.failures.charged == [] and story.job.restarts == 1


def test_a_job_whose_states_differ_after_each_time_that_it_has_gone_back_fails() -> None:
    story = a_story(workers=2)
    whole(story, 3)
    for times in range(1, 4):
        compared(story, "a", "b", step=4)
        if times < 3:
            story.out(0, 1, step=4, broken="cut")
            story.up(step=3)
    assert story.job.ending is not None and story.job.ending[0] is Phase.Failed
    assert "3 times in a row all would go back to the same checkpoint" in story.job.reason


def test_a_state_that_may_have_been_handed_on_before_it_was_known_to_differ_is_nobodys() -> None:
    story = a_story()
    whole(story, 3)
    writers, generation = story.job.ring.members, story.job.ring.generation
    story.ready(3)
    story.tell(ev.Scale(4))
    story.ready(3)
    form = only(story.out(0, 1, 2, step=6), ef.Form)
    assert form.joining == (3,)
    effects = compared(story, "a", "b", "a", writers=writers, generation=generation)
    assert not of(effects, ef.Fence) and only(effects, ef.Cut).members == (0, 1, 2, 3)
    assert story.job.failures.charged == [] and story.job.restarts == 1


@pytest.mark.parametrize("odd", [0, 2])
def test_at_the_end_a_worker_that_differs_is_dropped_and_one_of_the_others_saves_the_model(odd: int) -> None:
    story, others = a_story(), {0, 1, 2} - {odd}
    effects = finish(story, tuple("odd" if w == odd else "same" for w in range(3)))
    assert only(effects, ef.Fence).worker == odd
    assert only(effects, ef.Export).worker in others
    assert set(story.job.result.digests) == others


def test_at_the_end_without_a_majority_all_go_back_and_without_checkpoints_the_job_fails() -> None:
    story = a_story(workers=2)
    whole(story, 3)
    effects = finish(story, ("one", "other"))
    effects += story.waits(1.0)
    form = only(effects, ef.Form)
    assert not of(effects, ef.Export) and (form.step, form.untrusted_up_to) == (3, 1)

    without = a_story(workers=2, checkpoint={})
    assert not of(finish(without, ("one", "other")), ef.Export)
    assert without.job.reason.startswith("at step 10 the members held different states")
    assert without.job.reason.endswith("There is no checkpoint that they could go back to")
