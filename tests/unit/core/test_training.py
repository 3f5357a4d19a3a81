# SPDX-License-Identifier: Apache-2.0
"""The task of a job: how far it is, and how people change it while it runs. `edl.master.core.training`."""

from __future__ import annotations

from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, view
from tests.support.jobs.invariants import replayed
from tests.support.jobs.stories import Story, finish, of, only

FIRST, SECOND = WorkerId(0), WorkerId(1)


def live(story: Story, epochs: int) -> list[ef.Effect]:
    """A change of `training.epochs`, and of nothing else."""
    job = story.job
    return story.tell(ev.Live(job.target, job.min_size, job.suspended, epochs))


def task(story: Story) -> dict[str, object]:
    return view.status(story.job, story.now)["task"]


def ended(story: Story) -> str:
    """How the job ends once its model is saved and all workers are gone; and it does so when replayed."""
    story.tell(ev.Finished(story.exporter, {}, "model.keras"))
    story.tell(*(ev.Gone(w.id, code=0) for w in list(story.job.pool)))
    assert view.summary(replayed(story.watchdog)) == view.summary(story.job)
    return story.job.reason


# --- progress


def test_a_member_that_has_made_a_step_proves_the_one_before_it() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    assert task(story) == {"kind": "train", "mode": "train", "epoch": 1, "epochs": 1, "step": 0, "steps": 10}
    story.tell(ev.Progress(Generation(1), 5))
    assert task(story)["step"] == 4
    story.tell(ev.Progress(Generation(1), 3))
    assert task(story)["step"] == 4, "a late member takes nothing back"
    story.tell(ev.Progress(Generation(0), 9))
    assert task(story)["step"] == 4, "it is not of this ring"


def test_the_root_has_the_last_word_on_how_far_it_is() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(Generation(1), 5))
    story.kill(0)
    story.out(1, step=4, broken="reset")
    assert task(story)["step"] == 4


def test_each_epoch_is_told_once_and_with_its_loss() -> None:
    story = Story(workers=1, joinDelaySeconds=0)
    live(story, 2)
    story.running()
    story.tell(ev.Progress(Generation(1), 10, loss=0.5, epoch_loss=facts.EpochLoss(0, 90, 0.7)))
    assert story.noticed(Reason.EpochApplied) == [], "not every member may have step 10"
    loss = facts.EpochLoss(0, 100, 0.75)
    story.tell(ev.EpochEnded(FIRST, Generation(1), 1, loss, {"accuracy": 0.5, "auc": None}))
    for step in (11, 12):
        story.tell(ev.Progress(Generation(1), step, loss=0.5, epoch_loss=facts.EpochLoss(1, 10, 0.6)))
    words = "epoch 1 of 2 is applied: loss 0.7500, accuracy 0.5000, auc not finite"
    assert story.noticed(Reason.EpochApplied) == [words]
    assert (task(story)["epoch"], task(story)["step"]) == (2, 11)


def test_an_epoch_that_no_step_follows_is_told_too() -> None:
    story = Story(workers=1, joinDelaySeconds=0).running()
    story.tell(ev.EpochEnded(FIRST, Generation(1), 1, None))
    assert story.noticed(Reason.EpochApplied) == ["epoch 1 of 1 is applied"]
    assert task(story)["step"] == 10
    only(story.out(0, step=10, digest="d"), ef.Export)
    assert len(story.noticed(Reason.EpochApplied)) == 1


def test_the_end_of_an_epoch_in_an_older_ring_is_no_news() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.EpochEnded(FIRST, Generation(0), 1, None))
    assert task(story)["step"] == 0
    assert story.job.stale == 1


# --- other epochs


def test_more_epochs_before_the_ring_are_in_the_order_to_form_it() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    assert not of(live(story, 3), ef.Train), "no worker is there to be notified"
    assert only(story.ready(0, 1), ef.Form).epochs == 3
    assert task(story)["steps"] == 30
    assert story.noticed(Reason.EpochsChanged) == ["training.epochs 1 -> 3"]


def test_before_anybody_has_counted_the_records_the_status_has_the_epochs_alone() -> None:
    story = Story(workers=1)
    live(story, 3)
    assert task(story) == {
        "kind": "train",
        "mode": "train",
        "epoch": 0,
        "epochs": 3,
        "step": 0,
        "steps": None,
    }


def test_the_members_of_a_running_ring_are_told_and_the_ring_stays() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    effects = live(story, 2)
    assert only(effects, ef.Train) == ef.Train(Generation(1), (WorkerId(0), WorkerId(1)), 2)
    assert not of(effects, ef.Leave) + of(effects, ef.Cut)
    assert task(story)["steps"] == 20
    assert not of(live(story, 2), ef.Train), "it is no change"
    assert len(story.noticed(Reason.EpochsChanged)) == 1
    story.tell(ev.Progress(Generation(1), 20))
    only(story.out(0, 1, step=20, digest="d"), ef.Export)
    assert ended(story) == "every record of 2 epochs is applied exactly once"


def test_fewer_epochs_end_with_the_epoch_that_has_begun() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    live(story, 5)
    story.tell(ev.Progress(Generation(1), 14))
    assert only(live(story, 1), ef.Train).epochs == 1
    assert task(story) == {"kind": "train", "mode": "train", "epoch": 2, "epochs": 2, "step": 13, "steps": 20}
    only(story.out(0, 1, step=20, digest="d"), ef.Export)
    assert ended(story) == "every record of 2 epochs is applied exactly once"


def test_fewer_epochs_at_the_very_end_of_one_end_the_training() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    live(story, 3)
    story.ready(0, 1)
    story.up()
    story.tell(ev.Live(2, 1, True, 3))  # suspended
    story.out(0, 1, step=10)
    assert only(live(story, 1), ef.Export).worker == 0
    assert ended(story) == "every record of 1 epoch is applied exactly once"


def test_while_the_model_is_being_saved_other_epochs_are_refused_in_words() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    finish(story)
    effects = live(story, 4)
    assert not of(effects, ef.Form) + of(effects, ef.Train)
    words = "training.epochs 1 -> 4: training has ended, and the model is being saved"
    assert only(effects, ef.Notice) == ef.Notice(Reason.SpecRefused, words)
    assert ended(story) == "every record of 1 epoch is applied exactly once"


def test_once_the_model_is_saved_they_are_refused_though_its_exporter_is_lost() -> None:
    story = Story(workers=2, least=2, joinDelaySeconds=0.5).running()
    finish(story)
    story.tell(ev.Saved(FIRST, "model.keras"))
    story.kill(0)
    assert not of(live(story, 4), ef.Form)
    assert len(story.noticed(Reason.SpecRefused)) == 1


def test_more_epochs_when_only_some_are_out_at_the_old_end_are_the_next_rings() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(Generation(1), 10))
    story.out(0, step=10, digest="d")
    assert not of(live(story, 2), ef.Train), "the ring is being left"
    form = only(story.out(1, step=10, digest="d"), ef.Form)
    assert (form.members, form.epochs, form.sync) == ((0, 1), 2, False)
    story.up(10)
    only(story.out(0, 1, step=20, digest="e"), ef.Export)
    assert story.job.result.digests == {0: "e", 1: "e"}
    assert ended(story) == "every record of 2 epochs is applied exactly once"


def test_more_epochs_when_all_that_was_trained_is_lost_before_it_was_saved_are_the_next_rings() -> None:
    story = Story(workers=1, joinDelaySeconds=0).running()
    finish(story, ("d",))
    story.kill(0)
    assert story.job.exporter is None
    live(story, 2)
    story.waits(1)
    assert only(story.ready(1), ef.Form).epochs == 2
    story.up()
    only(story.out(1, step=20, digest="d"), ef.Export)
    assert ended(story) == "every record of 2 epochs is applied exactly once"


def test_a_suspended_job_takes_other_epochs_into_its_next_ring() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Live(2, 1, True, 1))
    story.out(0, 1, step=3)
    assert not of(live(story, 2), ef.Train)
    assert only(story.tell(ev.Live(2, 1, False, 2)), ef.Form).epochs == 2


def test_epochs_and_workers_may_change_in_one_go() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    effects = story.tell(ev.Live(1, 1, False, 2))
    assert only(effects, ef.Leave).members == (0, 1)
    form = only(story.out(0, 1, step=4), ef.Form)
    assert (form.members, form.epochs) == ((0,), 2)


def test_no_records_are_no_steps_however_many_epochs() -> None:
    story = Story(workers=1, records=0)
    live(story, 7)
    only(story.ready(0), ef.Export)
    assert task(story) == {"kind": "train", "mode": "train", "epoch": 7, "epochs": 7, "step": 0, "steps": 0}
    assert ended(story) == "every record of 7 epochs is applied exactly once"


# --- how the records lie


def test_the_layout_of_the_first_worker_that_is_ready_is_the_jobs() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    first = Layout(100, block=7, shards=64)
    story.tell(ev.Hello(FIRST), ev.Ready(FIRST, first))
    effects = story.tell(ev.Hello(SECOND), ev.Ready(SECOND, Layout(100, block=9, shards=80)))
    form = only(effects, ef.Form)
    assert (form.members, form.layout) == ((0, 1), first)
    assert story.job.failures.charged == []


def test_another_number_of_records_is_refused_whatever_the_blocks() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.tell(ev.Hello(FIRST), ev.Ready(FIRST, Layout(100, block=7, shards=64)))
    story.tell(ev.Hello(SECOND), ev.Ready(SECOND, Layout(101, block=7, shards=64)))
    assert [f.why for f in story.job.failures.charged] == [
        "worker 1 found 101 records in the data; the job has 100"
    ]
