# SPDX-License-Identifier: Apache-2.0
"""The end of a job: `edl.master.core.completion`. What is trained is saved, and never trained again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edl.contract.ids import WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, view
from tests.support.jobs.invariants import replayed
from tests.support.jobs.stories import Story, finish, of, only

FIRST, SECOND = WorkerId(0), WorkerId(1)
BROKEN = facts.PartFailed("evaluation", "ValueError: no such column", "Traceback: mine.py")
FULL = facts.PartFailed("saving", "[Errno 28] No space left on device")


def finishing(workers: int = 2, **elastic: Any) -> Story:
    """A job whose worker 0 has been asked to save the model."""
    story = Story(workers=workers, joinDelaySeconds=0.5, **elastic).running()
    finish(story, ("d",) * workers)
    assert story.job.exporter == FIRST
    return story


def ended(story: Story) -> dict[str, Any]:
    """The summary, once all workers are gone."""
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    assert story.job.ended
    assert view.summary(replayed(story.watchdog)) == view.summary(story.job)
    return view.summary(story.job)


def test_that_the_model_is_saved_is_told_before_it_is_evaluated() -> None:
    story = finishing()
    (notice,) = of(story.tell(ev.Saved(FIRST, "model.keras")), ef.Notice)
    assert notice == ef.Notice(
        Reason.Evaluating,
        "the model is saved: model.keras; worker 0 evaluates it and loads it again in a new process",
    )
    assert story.job.phase == "Finishing"


@pytest.mark.parametrize(
    ("end", "model", "parts", "reason"),
    [
        (
            ev.Finished(FIRST, {}, "model.keras", failed=(BROKEN,)),
            "model.keras",
            ["evaluation"],
            "but evaluation failed: ValueError: no such column; the trained model is kept: model.keras",
        ),
        (
            ev.Finished(FIRST, {"loss": 0.1}, "/tmp/x/model.keras", failed=(FULL,)),
            "/tmp/x/model.keras",
            ["saving"],
            "but saving failed: [Errno 28] No space left on device; the trained model is kept: "
            "/tmp/x/model.keras (written by worker 0)",
        ),
        (
            ev.Finished(FIRST, {}, "", failed=(FULL, BROKEN)),
            "",
            ["saving", "evaluation"],
            "evaluation failed: ValueError: no such column; the trained model could not be kept",
        ),
    ],
)
def test_what_fails_at_the_end_fails_the_job_and_is_named(
    end: ev.Finished, model: str, parts: list[str], reason: str
) -> None:
    story = finishing()
    effects = story.tell(end)
    assert not of(effects, ef.Form), "it is not trained again"
    summary = ended(story)
    assert summary["phase"] == "Failed"
    assert reason in summary["reason"]
    assert summary["model"] == model
    assert [f["part"] for f in summary["failed_parts"]] == parts
    assert summary["traceback"] == ("Traceback: mine.py" if BROKEN in end.failed else "")


def test_workers_that_have_reported_their_last_word_may_exit_slowly_so_that_their_logs_are_kept() -> None:
    story = finishing()
    story.tell(ev.Finished(FIRST, {}, "model.keras"))
    grace = story.job.config.elastic.grace_period_seconds
    delete = only(story.tell(ev.Closed(FIRST, "its stream ended")), ef.Delete)
    assert delete == ef.Delete(FIRST, grace, patience_seconds=grace)


def test_a_model_that_is_not_where_it_ought_to_be_is_shown_until_it_is() -> None:
    story = finishing()
    story.tell(ev.Saved(FIRST, "/tmp/x/model.keras", failed=(FULL,)))
    assert view.status(story.job, story.now)["degraded"] == {"saving": FULL.why}
    story.tell(ev.Finished(FIRST, {}, "model.keras"))
    assert view.status(story.job, story.now)["degraded"] == {}
    assert ended(story)["phase"] == "Succeeded"


def test_who_dies_of_evaluating_is_followed_by_another_holder_and_the_last_leaves_the_model() -> None:
    story = finishing()
    story.tell(ev.Saved(FIRST, "model.keras"))
    assert only(story.kill(0), ef.Export).worker == 1
    story.tell(ev.Saved(SECOND, "model.keras"))
    effects = story.kill(1)
    assert not of(effects, ef.Form)
    summary = ended(story)
    assert (summary["phase"], summary["model"]) == ("Failed", "model.keras")
    assert [f["part"] for f in summary["failed_parts"]] == ["evaluation"]
    assert summary["state_losses"] == 0


@pytest.mark.parametrize("lost", [1, 3])
def test_the_evaluation_is_repeated_from_a_checkpoint_of_the_last_step_if_all_holders_are_lost(
    lost: int,
) -> None:
    story = Story(workers=1, joinDelaySeconds=0, checkpoint={"dir": "d"})  # maxFailures is 2
    for worker in range(lost):
        story.ready(worker) if worker == 0 else story.tell(
            ev.Hello(WorkerId(worker)), ev.Ready(WorkerId(worker), Layout(100), checkpoint=10)
        )
        story.up(step=10 if worker else 0)
        finish(story, ("d",), first=worker)
        assert story.job.exporter == worker
        # A worker writes a checkpoint before it saves the model.
        story.tell(ev.Checkpointed(WorkerId(worker), 10, "whole", 100))
        story.tell(ev.Saved(WorkerId(worker), "model.keras"))
        story.kill(worker)
        story.waits(1)
    effects = story.tell(ev.Hello(WorkerId(lost)), ev.Ready(WorkerId(lost), Layout(100), checkpoint=10))
    if lost > 2:
        assert not of(effects, ef.Form)
        summary = ended(story)
        assert [f["part"] for f in summary["failed_parts"]] == ["evaluation"]
        assert summary["reason"].endswith("the trained model is kept: model.keras")
        return
    assert only(effects, ef.Form).step == 10
    story.up(step=10)
    story.out(lost, step=10, digest="d")
    story.tell(ev.Saved(WorkerId(lost), "model.keras"))
    story.tell(ev.Finished(WorkerId(lost), {"accuracy": 0.9}, "model.keras"))
    summary = ended(story)
    assert (summary["phase"], summary["model"]) == ("Succeeded", "model.keras")
    assert summary["state_losses"] == 0
    assert summary["metrics"] == {"accuracy": 0.9}


def test_a_model_that_is_not_saved_is_trained_again_when_all_its_holders_were_killed_from_outside() -> None:
    story = finishing(workers=1)
    story.kill(0)
    story.waits(1)
    assert of(story.ready(1), ef.Form)
    assert view.summary(story.job)["state_losses"] == 1


def test_a_crash_while_the_only_holder_saves_is_not_repeated_by_training_again() -> None:
    story = finishing(workers=1)
    story.tell(ev.Closed(FIRST, "its stream ended"))
    story.tell(ev.Gone(FIRST, signal="SIGSEGV"))
    summary = ended(story)
    assert summary["phase"] == "Failed"
    assert summary["reason"].startswith("saving failed: worker 0 crashed (SIGSEGV)")


@pytest.mark.parametrize(("mode", "losses"), [("train", 2), ("ps", 0)])
def test_workers_that_are_killed_each_time_they_save_do_not_train_for_ever(mode: str, losses: int) -> None:
    story = Story(workers=1, mode=mode, joinDelaySeconds=0)
    for worker in range(3):  # maxFailures is 2
        story.ready(worker)
        story.up()
        finish(story, ("d",), first=worker)
        assert story.job.exporter == worker
        story.kill(worker)
        story.waits(1)
    summary = ended(story)
    assert (summary["phase"], summary["state_losses"]) == ("Failed", losses)
    assert summary["reason"].startswith("saving failed: 3 workers were lost while they saved the model")


LOST = "parameter server 0 has come back with nothing: it has lost its log"


def test_who_finds_rows_lost_when_it_saves_goes_back_with_all_others_in_a_ring_and_saves_later() -> None:
    story = finishing()
    effects = story.tell(ev.RowsLost(FIRST, LOST))
    form = only(effects, ef.Form)
    assert set(form.members) == {FIRST, SECOND} and form.step == 10
    assert story.noticed(Reason.SaveFailed) == [
        f"the model cannot be saved: {LOST}; a ring is formed, and trains what is missing"
    ]
    assert not of(story.tell(ev.RowsLost(FIRST, LOST)), ef.Form), "it has said so twice"
    why = "parameter server 0 has lost its log and rows"
    story.tell(*(ev.JoinedRing(w, form.generation, 4, rolled_back=why) for w in form.members))
    assert story.noticed(Reason.RolledBack)[0].endswith(
        "60 records are trained again, from the checkpoint of step 4"
    )
    (export,) = of(finish(story, ("e", "e")), ef.Export)
    story.tell(ev.Finished(export.worker, {}, "model.keras"))
    summary = ended(story)
    assert (summary["phase"], summary["model"]) == ("Succeeded", "model.keras")


def test_rows_that_were_not_lost_after_all_need_no_more_than_a_ring() -> None:
    story = finishing()
    form = only(story.tell(ev.RowsLost(FIRST, LOST)), ef.Form)
    story.tell(*(ev.JoinedRing(w, form.generation, 10) for w in form.members))
    assert len(of(finish(story, ("d", "d")), ef.Export)) == 1
    assert view.summary(story.job)["state_losses"] == 0


def test_a_new_master_hears_from_who_saves_that_rows_are_lost() -> None:
    story = finishing()
    story.job.exporter = story.watchdog.exporter = None  # as far as that one knows
    story.tell(ev.RowsLost(FIRST, LOST))
    assert story.job.exporter is None and story.job.ring.members


def test_rows_that_are_lost_each_time_the_model_is_saved_end_the_job() -> None:
    story = finishing(workers=1)
    for _ in range(2):  # which is maxFailures
        form = only(story.tell(ev.RowsLost(FIRST, LOST)), ef.Form)
        story.tell(ev.JoinedRing(FIRST, form.generation, 0, rolled_back=LOST))
        assert of(finish(story, ("d",)), ef.Export)
    story.tell(ev.RowsLost(FIRST, LOST))
    summary = ended(story)
    assert summary["phase"] == "Failed"
    assert "lost rows while it was saved 3 times (elastic.maxFailures is 2)" in summary["reason"]
    assert summary["failed_parts"] == [{"part": "saving", "why": LOST}]


@pytest.mark.parametrize("hangs", [True, False])
def test_where_the_variables_are_is_told_when_the_model_cannot_be_saved(hangs: bool) -> None:
    """The user's code hangs, which the worker reports, or ends the process while the model is saved."""
    story = finishing(workers=1, maxFailures=0)
    story.tell(ev.Saved(FIRST, "", variables="model.weights.npz"))
    assert story.job.exporter == FIRST and story.job.result.model == ""
    if hangs:
        why = "saving failed: it has not returned for 600 s"
        story.tell(ev.Failed(FIRST, why, "Traceback", fatal=True))
    else:
        why = "worker 0 exited unexpectedly with exit code 0"
        story.tell(ev.Gone(FIRST, code=0))
    summary = ended(story)
    assert summary["reason"] == f"{why}; the trained weights are kept: model.weights.npz"
    assert (summary["model"], summary["phase"]) == ("model.weights.npz", "Failed")


def test_once_the_model_is_saved_its_variables_are_not_named() -> None:
    story = finishing(workers=1, maxFailures=0)
    story.tell(ev.Saved(FIRST, "", variables="model.weights.npz"), ev.Saved(FIRST, "model.keras"))
    story.tell(ev.Gone(FIRST, code=7))
    summary = ended(story)
    assert summary["model"] == "model.keras"
    assert "npz" not in str(summary["reason"])


def test_a_warning_is_told_once_and_kept() -> None:
    story = Story(workers=2)
    effects = story.tell(
        ev.Hello(FIRST), ev.Warned(FIRST, "no get_config"), ev.Warned(FIRST, "no get_config")
    )
    assert [n.text for n in of(effects, ef.Notice) if n.reason is Reason.ModelWarning] == ["no get_config"]
    assert view.summary(story.job)["warnings"] == ["no get_config"]


def test_a_metric_that_is_not_finite_is_null() -> None:
    story = finishing()
    story.tell(ev.Saved(FIRST, "model.keras"))
    effects = story.tell(ev.Finished(FIRST, {"loss": None, "accuracy": 0.5}, "model.keras"))
    assert "loss not finite, accuracy 0.5000" in of(effects, ef.Notice)[0].text
    assert json.dumps(ended(story)["metrics"], allow_nan=False) == '{"loss": null, "accuracy": 0.5}'


def test_a_model_that_is_not_the_last_one_is_no_loss() -> None:
    """With mode=ps an epoch may have begun that is not wanted any more: it is trained to its end."""
    story = finishing(workers=1, maxFailures=0)
    begun = ev.RowsLost(FIRST, "steps of epoch 2 are in the weights already", trained_on=True)
    form = only(story.tell(begun), ef.Form)
    story.tell(ev.JoinedRing(FIRST, form.generation, 10))
    assert of(finish(story, ("d",)), ef.Export)
    assert not of(story.tell(ev.RowsLost(FIRST, LOST)), ef.Form)
    assert "while it was saved 1 time (elastic.maxFailures is 0)" in str(ended(story)["reason"])
