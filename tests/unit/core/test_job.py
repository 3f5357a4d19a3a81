# SPDX-License-Identifier: Apache-2.0
"""Stories of a job from its begin to its end: what it does, what it says, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest

from edl import config
from edl.config import values
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, snapshot, view
from edl.master.core.job import OF_A_WORKER, OF_THE_JOB, OF_THE_RING, Job
from edl.master.core.state import InvalidState
from edl.master.core.workers import OUT
from tests.support.jobs.invariants import replayed
from tests.support.jobs.stories import Story, finish, of, only


def test_a_job_asks_for_its_workers_and_forms_a_ring_of_those_that_are_ready() -> None:
    story = Story(workers=3)
    assert story.job.pool.next_id == 3
    form = only(story.ready(0, 1, 2), ef.Form)
    assert form.members == (0,), "with no time to wait for others the first begins alone"
    assert story.job.phase == "Training"


def test_those_who_are_late_for_the_start_get_a_moment() -> None:
    story = Story(workers=3, joinDelaySeconds=0.5)
    assert not of(story.ready(0, 1), ef.Form)
    assert only(story.ready(2), ef.Form).members == (0, 1, 2)
    waiting = Story(workers=3, joinDelaySeconds=0.5)
    waiting.ready(0, 1)
    assert only(waiting.tell(ev.Tick(), after=0.6), ef.Form).members == (0, 1)


def test_below_the_least_size_the_job_waits_and_keeps_its_state() -> None:
    story = Story(workers=2, least=2, joinDelaySeconds=0.5)
    story.running()
    story.kill(1)
    assert not of(story.out(0, step=4, broken="reset"), ef.Form)
    waits = "1 worker is ready, and training needs at least 2 (minWorkers)"
    assert (story.job.phase, story.job.reason) == ("Waiting", f"{waits}: 1 is pending")
    story.tell(ev.Hello(WorkerId(2)))
    assert story.job.reason == f"{waits}: 1 is starting"
    form = only(story.ready(2), ef.Form)
    assert (form.members, form.root) == ((0, 2), 0)
    assert story.job.train.done == 4


def test_a_job_succeeds_when_every_record_is_applied_and_the_model_is_saved() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    assert only(finish(story), ef.Export).worker == 0
    assert story.job.phase == "Finishing"
    effects = story.tell(ev.Finished(WorkerId(0), {"accuracy": 0.9}, "model.keras"))
    assert {e.worker for e in of(effects, ef.Stop)} == {0, 1}
    effects = story.tell(ev.Gone(WorkerId(0), code=0), ev.Gone(WorkerId(1), code=0))
    assert only(effects, ef.End).phase == "Succeeded"
    summary = view.summary(story.job)
    assert summary["records"] == {"size": 100, "applied": 100, "skipped": 0, "bad": 0}
    assert (summary["task"]["steps_done"], summary["task"]["steps"], summary["task"]["epochs_done"]) == (
        10,
        10,
        1,
    )
    assert summary["metrics"] == {"accuracy": 0.9}


def test_another_holder_exports_when_the_first_dies_at_it() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    finish(story)
    assert only(story.kill(0), ef.Export).worker == 1


def test_different_weights_fail_the_job() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    assert not of(finish(story, ("one", "other")), ef.Export)
    assert story.job.ending is not None
    assert story.job.ending[0] == "Failed"
    assert "held different states" in story.job.ending[1]


def test_a_worker_that_counts_other_records_is_refused() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.ready(0)
    story.tell(ev.Hello(WorkerId(1)), ev.Ready(WorkerId(1), Layout(99)))
    assert [f.why for f in story.job.failures.charged] == [
        "worker 1 found 99 records in the data; the job has 100"
    ]


def test_a_worker_that_made_another_model_is_refused() -> None:
    story = Story(workers=2)
    story.tell(ev.Hello(WorkerId(0)), ev.Ready(WorkerId(0), Layout(100), "a"))
    effects = story.tell(ev.Hello(WorkerId(1)), ev.Ready(WorkerId(1), Layout(100), "b"))
    assert not of(effects, ef.Form)
    (failure,) = story.job.failures.charged
    assert "worker 1 made another model than the workers before it" in failure.why
    story.tell(ev.Tick(), after=1)
    story.tell(ev.Hello(WorkerId(2)), ev.Ready(WorkerId(2), Layout(100), "a"))
    assert {w.id for w in story.job.pool if w.is_ready} == {0, 2}


def ready(story: Story, worker: int, loss: float | None, tolerance: float = 0.01) -> list[ef.Effect]:
    w, found = WorkerId(worker), None if loss is None else facts.SampleLoss(loss, tolerance)
    return story.tell(ev.Hello(w), ev.Ready(w, Layout(100), "a", sample_loss=found))


def test_a_worker_whose_model_computes_a_different_loss_is_refused_and_both_values_are_reported() -> None:
    story = Story(workers=4, joinDelaySeconds=30)
    ready(story, 0, 0.5)
    ready(story, 1, 0.5049)
    ready(story, 2, 0.506)
    (failure,) = story.job.failures.charged
    assert failure.why.startswith(
        "worker 2 computes a loss of 0.506 for the first records with fixed weights, workers 0 and 1 compute "
        "0.5: their models or data differ. Compare the versions of libraries"
    )
    assert [f.text for f in story.notices if f.reason is Reason.WorkerFailed] == [
        f"{failure.why} (failure 1; elastic.maxFailures is 2)"
    ]
    ready(story, 3, None)
    assert {w.id for w in story.job.pool if w.is_ready} == {0, 1, 3}, "rounding and no loss are no difference"


def test_a_job_whose_first_worker_is_the_odd_one_ends_and_says_which_workers_computed_what() -> None:
    story = Story(workers=2)
    ready(story, 0, 0.5)
    for worker in 1, 2, 3:
        assert story.job.ending is None
        story.tell(ev.Tick(), after=60)
        ready(story, worker, 0.7)
    assert [f.worker for f in story.job.failures.charged] == [1, 2, 3]
    assert story.job.ending is not None
    phase, why = story.job.ending
    assert phase == "Failed"
    assert why.startswith(
        "worker 3 computes a loss of 0.7 for the first records with fixed weights, worker 0 computes 0.5: "
    )


def test_the_larger_tolerance_of_two_workers_counts() -> None:
    story = Story(workers=3, joinDelaySeconds=30)
    ready(story, 0, 0.5, 0.001)
    ready(story, 1, 0.52, 0.05)
    ready(story, 2, 0.501, 0.001)
    assert [f.worker for f in story.job.failures.charged] == [2], "0.5 is the job's, with its tolerance"
    coarse = Story(workers=2, joinDelaySeconds=30)
    ready(coarse, 0, 0.5, 0.05)
    ready(coarse, 1, 0.52, 0.001)
    assert not coarse.job.failures.charged


def test_losses_are_compared_also_when_the_workers_that_reported_them_are_gone() -> None:
    story = Story(workers=1)
    ready(story, 0, -2.0)
    story.kill(0)
    story.tell(ev.Tick(), after=60)
    ready(story, 1, 2.0)
    (failure,) = story.job.failures.charged
    assert "worker 1 computes a loss of 2 " in failure.why
    assert "the workers before it computed -2: " in failure.why


def test_a_core_that_is_read_from_the_journal_compares_with_the_same_loss() -> None:
    story = Story(workers=2, joinDelaySeconds=30)
    ready(story, 0, 0.5)
    kept = json.loads(json.dumps(snapshot.dump(story.job)))
    again = snapshot.load(kept, story.job.config)
    assert again.reference.sample_loss == facts.SampleLoss(0.5, 0.01)
    for event in (
        ev.Hello(WorkerId(1)),
        ev.Ready(WorkerId(1), Layout(100), "a", sample_loss=facts.SampleLoss(7, 0)),
    ):
        again.handle(event, story.now + 1)
    assert "worker 1 computes a loss of 7 " in again.failures.charged[0].why
    assert "worker 0 computes 0.5: " in again.failures.charged[0].why


def test_a_refusal_names_at_most_eight_of_the_workers_that_agree() -> None:
    story = Story(workers=12, joinDelaySeconds=30)
    for worker in range(11):
        ready(story, worker, 1.0)
    ready(story, 11, 3.0)
    (failure,) = story.job.failures.charged
    assert "workers 0, 1, 2, 3, 4, 5, 6, 7 and 3 more compute 1: " in failure.why


@pytest.mark.parametrize(
    ("mode", "words"),
    [("evaluate", "computes a loss of 0.6 "), ("predict", "computes an output norm of 0.6 ")],
)
def test_workers_that_evaluate_or_predict_are_compared_as_those_that_train(mode: str, words: str) -> None:
    story = Story(workers=3, mode=mode, joinDelaySeconds=30)
    for worker, value in enumerate((0.5, 0.6, 0.5001)):
        loss = facts.SampleLoss(value, 0.001)
        ready = ev.Ready(WorkerId(worker), Layout(0), held_out={"test": 40}, sample_loss=loss)
        story.tell(ev.Hello(WorkerId(worker)), ready)
    (failure,) = story.job.failures.charged
    assert f"worker 1 {words}for the first records with fixed weights, worker 0 computes 0.5" in failure.why
    assert {w.id for w in story.job.pool if w.is_ready} == {0, 2}


def test_a_worker_that_holds_other_records_is_refused_and_a_new_master_remembers_them() -> None:
    story = Story(workers=4, joinDelaySeconds=30)
    for worker, digests in enumerate(({}, {"train": "a"}, {"train": "a", "test": "b"})):
        story.tell(ev.Hello(WorkerId(worker)), ev.Ready(WorkerId(worker), Layout(100), digests=digests))
    assert not story.job.failures.charged
    kept = json.loads(json.dumps(snapshot.dump(story.job)))
    again = snapshot.load(kept, story.job.config)
    other = WorkerId(3)
    for event in (ev.Hello(other), ev.Ready(other, Layout(100), digests={"train": "a", "test": "c"})):
        again.handle(event, story.now + 1)
    (failure,) = again.failures.charged
    assert failure.why.startswith(
        "worker 3 holds other records of 'test' than the workers before it, or the same in another order: "
        "the pipeline that edl.from_tf reads"
    )


def test_goodput_accounts_for_every_second() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    story.beats(0, 1, after=1.0)
    story.kill(1)
    story.out(0, step=4, broken="reset")
    story.up(4)
    seconds = story.job.goodput.at(story.now)
    assert story.job.lifetime.began_at is not None
    assert sum(seconds.values()) == pytest.approx(story.now - story.job.lifetime.began_at)
    assert seconds["useful"] > 1.8
    assert seconds["re-forming"] >= 0.2, "as its member measured it, from step to step"


def test_a_ring_that_waits_for_a_server_is_not_useful_meanwhile() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    generation, before = story.job.ring.generation, story.job.goodput.at(story.now)
    for _ in range(5):
        story.beats(0, 1, after=1.0)
    story.tell(ev.Stalled(generation, "waiting for servers", 1.5))
    for _ in range(4):
        story.beats(0, 1, after=1.0)
    story.tell(ev.StallEnded(generation))
    after = story.job.goodput.at(story.now)
    assert after["useful"] - before["useful"] == pytest.approx(10.0 - 1.5, abs=0.2)
    assert after["waiting for servers"] == pytest.approx(8.0 + 1.5, abs=0.2)
    found = view.summary(story.job)["longest_wait"]
    assert found["kind"] == "waiting for servers" and found["seconds"] == pytest.approx(9.5, abs=0.2)
    story.tell(ev.Stalled(generation, "waiting for servers", 1.0))
    story.kill(1)
    assert story.job.goodput.kind == "re-forming", "what its cause is from here on"


def test_the_history_replays_to_the_same_decisions_and_the_same_end() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5)
    story.running()
    story.kill(1)
    story.out(0, step=4, broken="reset")
    story.waits(2)
    assert view.summary(replayed(story.watchdog)) == view.summary(story.job)


def test_asked_to_stop_the_job_lets_all_go_and_says_why() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    effects = story.tell(ev.StopAsked("Ctrl-C"))
    assert {e.worker for e in of(effects, ef.Stop)} == {0, 1}
    effects = story.tell(ev.Gone(WorkerId(0), code=0), ev.Gone(WorkerId(1), code=0))
    assert only(effects, ef.End) == ef.End("Stopped", "Ctrl-C")
    assert story.job.failures.charged == []


def test_an_empty_dataset_is_done_as_soon_as_somebody_can_save_the_model() -> None:
    story = Story(workers=2, records=0, joinDelaySeconds=0.5)
    effects = story.ready(0, 1)
    assert not of(effects, ef.Form)
    assert only(effects, ef.Export).worker == 0
    story.tell(ev.Finished(WorkerId(0), {}, "model.keras"))
    story.tell(ev.Gone(WorkerId(0), code=0), ev.Gone(WorkerId(1), code=0))
    assert story.job.phase == "Succeeded"
    assert view.summary(story.job)["records"] == {"size": 0, "applied": 0, "skipped": 0, "bad": 0}


def test_one_holder_is_enough_to_save_the_model_whatever_the_least_size() -> None:
    story = Story(workers=2, least=2, joinDelaySeconds=0.5).running()
    story.tell(ev.Progress(story.job.ring.generation, 10))
    story.out(0, step=10, digest="d")
    assert only(story.kill(1), ef.Export).worker == 0


def test_when_the_exporter_alone_had_the_last_step_the_ring_trains_that_step_again() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.tell(ev.LeftRing(WorkerId(0), Generation(1), 10, True, broken="reset", digest="d"))
    assert only(story.out(1, step=9, broken="reset"), ef.Export).worker == 0
    form = only(story.kill(0), ef.Form)
    assert (form.members, form.root) == ((1,), 1)
    assert story.job.train.done == 9
    assert story.job.phase == "Training"


def test_finished_from_one_that_was_not_asked_is_no_end() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    finish(story)
    story.tell(ev.Finished(WorkerId(1), {}, "other.keras"))
    assert story.job.ending is None
    assert story.job.stale == 1


def test_evaluating_is_the_time_of_finishing_and_every_second_is_of_one_kind() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    finish(story)
    before = story.job.goodput.at(story.now)
    for _ in range(10):
        story.beats(0, 1, after=1.0)
    after = story.job.goodput.at(story.now)
    assert after["finishing"] - before["finishing"] == pytest.approx(20)
    assert story.job.lifetime.began_at is not None
    assert sum(after.values()) == pytest.approx(story.now - story.job.lifetime.began_at)


def test_an_epoch_that_ends_as_the_ring_breaks_is_told_too() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    story.kill(1)
    story.out(0, step=10, broken="reset")
    assert story.noticed(Reason.EpochApplied) == ["epoch 1 of 1 is applied"]


def test_a_pause_keeps_the_state_and_a_resume_goes_on_from_it() -> None:
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    assert only(story.tell(ev.Live(2, 1, True, 1)), ef.Leave).members == (0, 1)
    assert not of(story.out(0, 1, step=3), ef.Form)
    assert story.job.phase == "Suspended"
    story.beats(0, 1, after=2)
    effects = story.kill(1) + story.tell(ev.Tick(), after=0.1)
    assert not of(effects, ef.Create) + of(effects, ef.Form), "a suspended worker needs no replacement"
    story.beats(0, after=1)
    effects = story.tell(ev.Live(2, 1, False, 1))
    form = only(effects, ef.Form)
    assert (form.members, form.root) == ((0,), 0)
    assert only(effects, ef.Create).worker == 2
    story.up(step=3)
    assert story.noticed(Reason.RingFormed)[-1] == "ring 0 -> 1 (resumed)"
    assert len(story.noticed(Reason.Suspended)) == 2, "when it was requested, and when it was so"
    assert len(story.noticed(Reason.Resumed)) == 1
    assert story.job.goodput.at(story.now)["suspended"] > 2


def test_a_job_that_is_paused_from_the_start_asks_for_nobody() -> None:
    job = Job(config.parse(values.merge(values.defaults(), {"suspend": True})))
    assert not of(job.handle(ev.Begin(), 1.0), ef.Create)
    assert len(of(job.handle(ev.Live(4, 1, False, 20), 2.0), ef.Create)) == 4


def test_all_that_is_trained_is_exported_though_paused() -> None:
    story = Story(workers=1).running()
    story.tell(ev.Live(1, 1, True, 1))
    assert only(story.out(0, step=10, digest="d"), ef.Export).worker == 0


def test_why_a_worker_does_not_run_is_told_once_and_shown() -> None:
    story = Story(workers=3)
    why = "0/2 nodes are available: 2 Insufficient cpu"
    for w in (0, 1, 2, 1):
        story.tell(ev.Delayed(WorkerId(w), why))
    assert story.noticed(Reason.WorkerPending) == [f"worker 0 is pending: {why}"]
    shown = [w["delay"] for w in view.status(story.job, story.now)["workers"]]
    assert shown == [why] * 3
    story.tell(ev.Seen(WorkerId(1), "pod-1"), ev.Delayed(WorkerId(2), ""))
    assert [w["delay"] for w in view.status(story.job, story.now)["workers"]] == [why, "", ""]


def test_each_event_has_one_handler_which_takes_it() -> None:
    messages = {*get_args(ev.WorkerMessage)}, {*get_args(ev.RingMessage)}
    assert ({*OF_A_WORKER}, {*OF_THE_RING}) == messages
    assert {*OF_THE_JOB} == {*get_args(ev.Event)} - messages[0] - messages[1]
    for event, handler in (*OF_THE_JOB.items(), *OF_A_WORKER.items(), *OF_THE_RING.items()):
        taken = get_type_hints(handler).get("event", event)  # a lambda takes any
        assert event in (taken, *get_args(taken)), f"{event.__name__}: {handler.__name__}"


def test_a_state_that_contradicts_itself_decides_nothing() -> None:
    def after(damage: Callable[[Job], object]) -> str:
        story = Story(workers=2, joinDelaySeconds=0.5).running()
        damage(story.job)
        with pytest.raises(InvalidState) as caught:
            story.job.validate()
        return str(caught.value).removeprefix("the state of the job contradicts itself: ")

    def forget_the_members(job: Job) -> None:
        job.ring.members = ()

    def move_out(job: Job) -> None:
        job.pool.change(job.pool[WorkerId(1)], place=OUT)

    def save_now(job: Job) -> None:
        job.exporter = WorkerId(0)

    def end_now(job: Job) -> None:
        job.ended = True

    assert after(forget_the_members) == "a ring that is running has 0 members"
    assert after(move_out) == "1 of 2 members are in a ring that is running"
    assert after(save_now) == "worker 0 saves the model, but is gone, or 2 workers are in a ring"
    assert after(end_now) == "the job has ended, with 2 workers and the end None"
    story = Story(workers=2, joinDelaySeconds=0.5).running()
    end_now(story.job)
    with pytest.raises(InvalidState):
        story.job.handle(ev.Tick(), story.now)
