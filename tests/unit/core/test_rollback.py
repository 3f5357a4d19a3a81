# SPDX-License-Identifier: Apache-2.0
"""Ring and parameter servers go back together: what the master makes of it, and what its journal shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.contract.ids import WorkerId
from edl.contract.reasons import Reason
from edl.journal import audit
from edl.journal.audit import AuditFailed
from edl.master.core import events as ev
from edl.master.core import view
from tests.support.jobs.journals import keep
from tests.support.jobs.stories import Story
from tests.unit.journal.test_audit import verdict

WHY = "parameter server 1 has lost its log and rows"


def a_story_that_goes_back(step: int) -> Story:
    """A ring at step 6 is formed anew, and begins at an earlier one."""
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(story.job.ring.generation, 7))
    story.out(0, 1, step=6, broken="a parameter server has come back with nothing")
    g, members = story.job.ring.generation, story.job.ring.members
    assert g == 2 and len(members) == 2
    story.tell(*(ev.JoinedRing(w, g, step, rolled_back=WHY) for w in members))
    return story


def test_the_master_goes_on_from_the_earlier_step_and_says_why() -> None:
    story = a_story_that_goes_back(2)
    assert story.noticed(Reason.RolledBack) == [
        f"rolled back to step 2: {WHY}; 40 records are trained again, from the checkpoint of step 2"
    ]
    assert (story.job.train.done, story.job.train.safe, story.job.latest.step) == (2, 2, 2)
    assert story.job.restarts == 1
    assert not story.noticed(Reason.StateLost), "no worker is gone"


def test_where_nothing_was_trained_since_that_is_said() -> None:
    (told,) = a_story_that_goes_back(6).noticed(Reason.RolledBack)
    assert told == f"rolled back to step 6: {WHY}; no record is trained again"


def test_without_a_checkpoint_it_is_the_beginning() -> None:
    story = a_story_that_goes_back(0)
    assert story.noticed(Reason.RolledBack)[0].endswith("60 records are trained again, from the first record")


def test_an_evaluation_that_is_made_again_after_its_state_was_lost_is_logged_once() -> None:
    story = Story(workers=1).running()

    def evaluate(step: int, loss: float) -> None:
        generation = story.job.ring.generation
        story.tell(ev.Evaluated(WorkerId(0), generation, step, "test", 50, {"loss": loss}))

    evaluate(4, 0.5)
    evaluate(6, 0.4)
    story.out(0, step=6, broken="a parameter server has come back with nothing")
    story.tell(ev.JoinedRing(WorkerId(0), story.job.ring.generation, 2, rolled_back=WHY))
    evaluate(4, 0.5)
    evaluate(6, 0.4)
    evaluate(8, 0.3)
    assert story.noticed(Reason.Evaluated) == [
        f"Evaluation at step {step} on 50 records of data('test'): loss {loss:.4f}"
        for step, loss in ((4, 0.5), (6, 0.4), (8, 0.3))
    ]
    assert view.status(story.job, story.now)["evaluations"]["test"]["step"] == 8


def test_the_journal_proves_the_job_all_the_same(tmp_path: Path) -> None:
    story = a_story_that_goes_back(2)
    said = verdict(story, tmp_path)
    assert said.startswith("exactly once: 100 records x 1 epoch in 10 steps, 2 rings")
    assert "the newest state was lost once and training went on from what was left" in said


def test_members_that_go_back_to_different_steps_are_found_in_the_journal(tmp_path: Path) -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.out(0, 1, step=6, broken="a parameter server has come back with nothing")
    g, (first, second) = story.job.ring.generation, story.job.ring.members
    story.tell(ev.JoinedRing(first, g, 2, rolled_back=WHY), ev.JoinedRing(second, g, 3, rolled_back=WHY))
    story.tell(ev.Progress(g, 10))
    for w in (first, second):
        story.tell(ev.LeftRing(w, g, 10, True, digest="d"))
    story.tell(ev.Finished(story.exporter, {}, ""), *(ev.Gone(w.id, code=0) for w in story.job.pool))
    keep(story, tmp_path)
    with pytest.raises(AuditFailed, match="rolled back to step 3, its ring is at 2"):
        audit.audit(tmp_path)
