# SPDX-License-Identifier: Apache-2.0
"""When and in which rounds a job evaluates its model, and what the ring makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edl.contract.evaluation import EvaluationPlan, Pass
from edl.contract.ids import Generation, WorkerId
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import snapshot, view
from edl.trainer.agreement.ledger import Evaluated, Ledger
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.parts.evaluation import EvaluationBatches
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.local import InProcessGroup
from tests.support.jobs.stories import Story, of, only
from tests.support.jobs.workers import A, Held, R, come_to_sum, ring_of
from tests.support.models.counting import AtOnce, CountingMetrics, Positions

FIRST, SECOND = WorkerId(0), WorkerId(1)
STEPS = Steps(records=12, batch=4)  # three in an epoch


def plan(**changed: Any) -> EvaluationPlan:
    said: dict[str, Any] = {
        "batch": 4,
        "every_steps": 0,
        "every_epochs": 1,
        "split": "test",
        "sizes": {"test": 10},
    }
    return EvaluationPlan(STEPS, **(said | changed))


# --- when


def steps_of(of: EvaluationPlan, epochs: int = 2) -> list[int]:
    return [step for step in range(epochs * 3 + 1) if of.after(step, epochs)]


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({}, [3, 6]),
        ({"every_epochs": 2}, [6]),
        ({"every_epochs": 0}, [6]),
        ({"every_epochs": 0, "every_steps": 2}, [2, 4, 6]),
        ({"every_steps": 2}, [2, 3, 4, 6]),
        ({"sizes": {}}, []),
    ],
)
def test_evaluations_are_due_at_steps_at_the_ends_of_epochs_and_at_the_end(
    changed: dict[str, Any], steps: list[int]
) -> None:
    assert steps_of(plan(**changed)) == steps


def test_a_pass_visits_every_record_once_in_rounds() -> None:
    (now,) = plan().after(3, 2)
    assert now == Pass("test", 10, 4) and now.end == 3
    assert [now.positions(round) for round in range(3)] == [(0, 4), (4, 8), (8, 10)]


def test_at_the_end_the_validation_records_come_before_the_test_records() -> None:
    of = plan(split="validation", sizes={"test": 10, "validation": 5})
    assert [(p.split, p.first, p.end) for p in of.after(3, 2)] == [("validation", 0, 2)]
    assert [(p.split, p.first, p.end) for p in of.after(6, 2)] == [("validation", 0, 2), ("test", 2, 5)]
    assert of.after(6, 2)[1].positions(4) == (8, 10)
    assert (of.rounds(3, 2), of.rounds(6, 2), of.rounds(5, 2)) == (2, 5, 0)


def test_a_state_in_an_evaluation_travels_whole() -> None:
    one = Ledger(3).after_round(1, np.array([1, 2.5], np.float32)).after_round(2, np.array([0.25, 0]))
    assert np.frombuffer(one.totals).tolist() == [1.25, 2.5]
    other = Ledger(3, evaluated={"test": Evaluated(3, 10, {"loss": 0.5})}, round=1, totals=one.totals)
    for ledger in (one, other, Ledger()):
        assert Ledger.unpack(ledger.pack()) == ledger


# --- the loop


def evaluating(
    number: int, metrics: CountingMetrics | None = None, ring: R | None = None, **arguments: Any
) -> A[R]:
    """A worker that evaluates ten records after each epoch of three steps, four in a round."""
    w = A(number, ring=ring, **arguments)
    held_out = {"test": Batches(Positions(10), 4, reading=AtOnce())}
    counted = metrics or CountingMetrics(10)
    w.rebuild(evaluation=RingEvaluation(plan(), held_out, counted, AtOnce()))
    return w


def rounds(w: A) -> EvaluationBatches:
    """Return the part of the worker that evaluates."""
    return next(part for part in w.worker.parts if isinstance(part, EvaluationBatches))


def told(w: A) -> list[tuple[int, int, dict[str, float]]]:
    found = [m.evaluated for m in w.said if m.WhichOneof("body") == "evaluated"]
    return [(e.step, e.records, dict(e.metrics)) for e in found]


ONCE = {"least": 1.0, "most": 1.0}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_ring_evaluates_every_record_once_at_the_end_of_each_epoch(size: int) -> None:
    workers = [evaluating(number) for number in range(size)]
    ring_of(*workers)
    outs = [w.says("left_ring", 1) for w in workers]
    assert {(o.step, o.round, o.broken) for o in outs} == {(6, 3, "")}
    assert told(workers[0]) == [(3, 10, ONCE), (6, 10, ONCE)]
    assert not any(told(w) for w in workers[1:]), "rank 0 tells it"
    for w in workers:
        assert (w.learner.weights == 1).all()
        w.stop()


def test_who_leaves_in_the_middle_of_an_evaluation_takes_it_along_and_it_goes_on_in_the_next_ring() -> None:
    pair = [evaluating(number, ring=Held()) for number in (0, 1)]
    ring_of(*pair)
    come_to_sum(5, *pair)  # three steps, two rounds
    for w in pair:
        w.hears(1, leave=pb.Leave())
        w.ring.free()
    assert [(w.says("left_ring", 1).step, w.says("left_ring", 1).round) for w in pair] == [(3, 3)] * 2
    assert told(pair[0]) == [(3, 10, ONCE)]
    group = InProcessGroup(1)
    pair[1].form(group, 2, [1], 1, sync=False, step=3)
    assert (pair[1].says("left_ring", 2).step, told(pair[1])) == (6, [(3, 10, ONCE), (6, 10, ONCE)])
    for w in pair:
        w.stop()


class Fails(CountingMetrics):
    """Cannot evaluate the record 6."""

    def added(self, batch: Batch, following: Callable[[], Batch | None] = lambda: None) -> np.ndarray:
        if 6 in batch.x:
            raise ValueError("no such word")
        return super().added(batch, following)


def test_an_evaluation_that_fails_on_one_rank_ends_on_all_and_the_training_goes_on() -> None:
    pair = [evaluating(0), evaluating(1, Fails(10))]
    ring_of(*pair)
    assert [w.says("left_ring", 1).step for w in pair] == [6, 6]
    assert told(pair[0]) == [(3, 10, {}), (6, 10, {})]
    text = pair[1].says("warned", 0).text
    assert text == "the model could not be evaluated on data('test'): ValueError: no such word"
    assert all(rounds(w).final_metrics(w.worker.state.ledger) is None for w in pair)
    for w in pair:
        assert (w.learner.weights == 1).all()
        w.stop()


def test_a_newcomer_without_the_state_takes_part_with_nothing_and_then_has_it_all() -> None:
    old, new = evaluating(0, ring=Held()), evaluating(1)
    ring_of(old)
    come_to_sum(4, old)  # three steps and a round
    old.hears(1, leave=pb.Leave())
    old.ring.free()
    out = old.says("left_ring", 1)
    assert (out.step, out.round) == (3, 2)
    group = InProcessGroup(2)
    for w in (new, old):
        w.form(group, 2, [0, 1], sync=False, step=3, joining=[1], round=2)
    outs = [w.says("left_ring", 2) for w in (old, new)]
    assert {(o.step, o.round, o.digest) for o in outs} == {(6, 3, outs[0].digest)}
    assert told(old) == [(3, 10, ONCE), (6, 10, ONCE)]
    assert old.worker.state.ledger == new.worker.state.ledger
    assert rounds(new).final_metrics(w.worker.state.ledger) == ONCE
    for w in (old, new):
        w.stop()


def test_the_next_ring_tells_what_the_last_one_has_found() -> None:
    """Its rank 0 may have died before it could."""
    w = evaluating(7)
    ring_of(w)
    w.says("left_ring", 1)
    w.said.clear()
    w.form(InProcessGroup(1), 2, [7], 7, sync=False, step=6, round=3)
    w.says("left_ring", 2)
    assert told(w) == [(6, 10, ONCE)]
    w.stop()


# --- the master

HELD_OUT = {"test": 5000}  # records: five rounds


def evaluating_story(**elastic: Any) -> Story:
    """Two workers in a ring; ten steps make up their one epoch."""
    story = Story(2, **elastic)
    for w in (FIRST, SECOND):
        story.tell(ev.Hello(w), ev.Ready(w, Layout(100), held_out=HELD_OUT))
    story.up()
    return story


def left(story: Story, worker: WorkerId, step: int, round: int, digest: str = "") -> list[ef.Effect]:
    ring = story.job.ring.generation
    return story.tell(ev.LeftRing(worker, ring, step, True, broken="reset", digest=digest, round=round))


def test_the_model_is_saved_when_it_is_evaluated_and_not_before() -> None:
    story = evaluating_story(joinDelaySeconds=9)
    story.tell(ev.EpochEnded(FIRST, Generation(1), 1, None))
    story.kill(0)
    form = only(left(story, SECOND, 10, 3, "d"), ef.Form)
    assert (form.members, form.step, form.round) == ((1,), 10, 3), (
        "two rounds are left, and one can make them"
    )
    story.tell(ev.JoinedRing(SECOND, Generation(2), 10, 3))
    assert only(left(story, SECOND, 10, 5, "d"), ef.Export).worker == 1


def kept(story: Story, step: int) -> None:
    story.tell(ev.Saved(FIRST, "model.keras", step=step))


def test_a_model_that_is_kept_before_its_evaluation_is_never_trained_again() -> None:
    story = evaluating_story(joinDelaySeconds=0)
    story.tell(ev.EpochEnded(FIRST, Generation(1), 1, None))
    kept(story, 10)
    assert story.noticed(Reason.Evaluating) == ["the model is saved: model.keras; the ring evaluates it"]
    story.kill(0)
    story.kill(1)
    assert story.job.ending is not None
    phase, reason = story.job.ending
    assert phase == "Failed" and reason.endswith("the trained model is kept: model.keras")


def test_a_copy_of_an_earlier_end_does_not_end_a_job_that_was_given_more_epochs() -> None:
    story = evaluating_story(joinDelaySeconds=0)
    kept(story, 10)
    story.tell(ev.Live(2, 1, False, 3))
    story.kill(0)
    story.kill(1)
    assert story.job.ending is None and story.job.epochs == 3


def test_who_has_one_round_more_gives_the_state() -> None:
    story = evaluating_story(joinDelaySeconds=9)
    third = WorkerId(2)
    story.job.target = 3
    story.tell(ev.Tick())
    story.tell(ev.Hello(third), ev.Ready(third, Layout(100), held_out=HELD_OUT))
    story.kill(0)
    form = only(left(story, SECOND, 10, 4), ef.Form)
    assert (form.members, form.root, form.joining, form.round) == ((1, 2), 1, (2,), 4)
    story.up(10)
    assert not of(left(story, third, 10, 4), ef.Form)
    export = only(left(story, SECOND, 10, 5), ef.Export)
    assert export.worker == 1, "worker 2 lacks the last round"


def test_a_model_is_saved_without_an_evaluation_if_rings_break_again_and_again() -> None:
    story = evaluating_story(least=2, maxFailures=1)
    story.tell(ev.EpochEnded(FIRST, Generation(1), 1, None))
    for rank in (0, 1):
        left(story, story.job.ring.members[rank], 10, 0, "d")
    effects = []
    for _ in range(2):
        assert story.job.ring.running, "to evaluate"
        for worker in (FIRST, SECOND):
            effects = left(story, worker, 10, 0, "d")
        while not (story.job.ring.running or of(effects, ef.Export)):
            story.beats(FIRST, SECOND)
            effects = story.waits(0.5)
    assert only(effects, ef.Export).worker in (FIRST, SECOND)
    (told,) = story.noticed(Reason.Degraded)
    assert told.startswith("the ring does not evaluate the trained model: 2 rings in a row broke")


def test_people_are_told_of_an_evaluation_once_and_the_status_has_the_last_one() -> None:
    story = evaluating_story()
    found = ev.Evaluated(FIRST, Generation(1), 5, "test", 5000, {"loss": 0.25, "auc": None})
    story.tell(found, found)
    text = "Evaluation at step 5 on 5,000 records of data('test'): loss 0.2500, auc not finite"
    assert story.noticed(Reason.Evaluated) == [text]
    assert view.status(story.job, 0.0)["evaluations"] == {
        "test": {"step": 5, "records": 5000, "metrics": {"loss": 0.25, "auc": None}}
    }
    again = snapshot.load(snapshot.dump(story.job), story.job.config)
    assert (again.latest.evaluations, again.train) == (story.job.latest.evaluations, story.job.train)


def test_a_worker_that_has_other_held_out_data_is_refused() -> None:
    story = Story(2)
    story.tell(ev.Hello(FIRST), ev.Ready(FIRST, Layout(100), held_out=HELD_OUT))
    story.tell(ev.Hello(SECOND), ev.Ready(SECOND, Layout(100), held_out={"test": 7}))
    why = "worker 1 found 7 records of 'test' in the held-out data; the job has 5000 records of 'test'"
    assert story.job.failures.charged[0].why == why


def test_a_trained_model_that_cannot_be_evaluated_is_saved_all_the_same() -> None:
    story = evaluating_story(maxFailures=0, joinDelaySeconds=9)
    story.tell(ev.EpochEnded(FIRST, Generation(1), 1, None))
    story.tell(ev.Closed(FIRST, "its stream ended"), ev.Gone(FIRST, signal="SIGSEGV"))
    effects = left(story, SECOND, 10, 3, "d")
    assert only(effects, ef.Export).worker == 1
    assert story.job.ending is None
    assert "does not evaluate the trained model" in story.noticed(Reason.Degraded)[0]
