# SPDX-License-Identifier: Apache-2.0
"""Checkpoints from the workers' side: real loops over a local ring, a real directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.checkpoints import CheckpointError, Store
from edl.config import lineage
from edl.contract.evaluation import EvaluationPlan
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.errors import ConfigError, DataError, ModelError
from edl.trainer.agreement.metric_values import Value
from edl.trainer.checkpoint.checkpointing import Checkpointing, deal
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.records.batches import Batches
from edl.trainer.ring.base import RingSlot
from tests.support.jobs.checkpoint_writers import LAYOUT, Writer, configured, part_of, saves, write
from tests.support.jobs.workers import BATCH, POSITIONS, SIZE, come_to_sum, ring_of
from tests.support.models.counting import AtOnce, CountingLearner, CountingMetrics, Positions


def test_nothing_is_written_before_it_is_due_and_then_all_begin_after_the_same_step(
    pair: list[Writer], tmp_path: Path
) -> None:
    assert come_to_sum(1, *pair).writers == 1, "rank 1 can, and rank 0 knows of none that is due"
    pair[0].hears(1, checkpoint=pb.Checkpoint())
    assert come_to_sum(2, *pair).writers == 2
    come_to_sum(3, *pair)
    for w in pair:
        w.beside.does()
    one, other = map(part_of, pair)
    assert (one.step, one.index, one.of, one.attempt) == (2, 0, 2, "run-1-g1-w0")
    assert (other.step, other.index, other.of, other.attempt) == (2, 1, 2, "run-1-g1-w0")
    assert Store.open(str(tmp_path)).checkpoints() == [], "it is not completed"


def test_who_still_writes_takes_part_in_no_other_one(pair: list[Writer]) -> None:
    come_to_sum(1, *pair)
    pair[0].hears(1, checkpoint=pb.Checkpoint())
    assert come_to_sum(2, *pair).writers == 2
    assert come_to_sum(3, *pair).writers == 0
    pair[0].hears(1, checkpoint=pb.Checkpoint())
    pair[0].beside.does()
    come_to_sum(4, *pair)
    assert come_to_sum(5, *pair).writers == 1, "rank 1 is not done"


def test_what_is_written_is_the_state_of_that_step_however_far_the_ring_is_by_then(
    pair: list[Writer], tmp_path: Path
) -> None:
    come_to_sum(1, *pair)
    pair[0].hears(1, checkpoint=pb.Checkpoint())
    come_to_sum(4, *pair)
    for w in pair:
        w.beside.does()
    parts = [part_of(w) for w in pair]
    pair[0].hears(
        commit_checkpoint=pb.CommitCheckpoint(step=parts[0].step, attempt=parts[0].attempt, parts=parts)
    )
    pair[0].beside.does()
    (made,) = Store.open(str(tmp_path)).checkpoints()
    (counts,) = made.read().values()
    found = np.frombuffer(counts.data, np.int16)
    assert made.step == parts[0].step == 2
    assert found.tolist() == [1] * BATCH * made.step + [0] * (POSITIONS - BATCH * made.step) + [made.step, 0]


def test_a_worker_without_a_state_begins_with_the_newest_one_and_all_others_take_it(
    pair: list[Writer], tmp_path: Path
) -> None:
    write(pair, 2)
    new = [Writer(2, tmp_path), Writer(3, tmp_path)]
    assert new[0].checkpoints.newest(LAYOUT) == (2, LAYOUT)
    ring_of(*new, generation=2, step=2)
    for w in new:
        w.ring.free()
    assert [w.says("joined_ring", 2).step for w in new] == [2, 2]
    for w in new:
        assert w.says("left_ring", 2).step == 6
        assert (w.learner.weights == 1).all(), "each position once, whichever worker has trained on it"
        w.stop()


def test_who_saves_the_model_writes_the_last_state_first(tmp_path: Path) -> None:
    w = Writer(0, tmp_path)
    saves(w)
    (made,) = Store.open(str(tmp_path)).checkpoints()
    assert made.step == w.says("checkpointed", 0).step == 6
    said = [m.WhichOneof("body") for m in w.said]
    assert said.index("checkpointed") < said.index("finished")


def test_an_epochs_end_and_so_many_steps_make_one_too(tmp_path: Path) -> None:
    for steps, at in ((2, [2, 4]), (0, [3])):
        w = Writer(0, tmp_path / str(steps), changes={"checkpoint": {"steps": steps}})
        ring_of(w)
        for number in range(1, 7):
            come_to_sum(number, w)
            while w.beside.waiting:
                w.beside.does()
        w.ring.free()
        w.says("left_ring", 1)
        w.stop()
        while w.beside.waiting:
            w.beside.does()
        parts = [m.checkpoint_part.step for m in w.said if m.WhichOneof("body") == "checkpoint_part"]
        assert parts == at, "the end of the training is written by the worker that saves the model"


class Judged(CountingLearner):
    """Its epochs are the better the earlier they are."""

    epochs = 0

    def take_metrics(self) -> dict[str, Value]:
        self.epochs += 1
        return {"accuracy": 1 / self.epochs}


def test_the_best_one_by_a_metric_is_kept_beside_the_newest(tmp_path: Path) -> None:
    best = {"best": "accuracy", "bestMode": "max", "seconds": 1000, "steps": 1, "keep": 1}
    w = Writer(0, tmp_path, learner=Judged(POSITIONS), changes={"checkpoint": best})
    ring_of(w)
    for step in (1, 3, 5):  # while one is written, none begins
        come_to_sum(step + 1, w)
        w.beside.does()
        part = [m.checkpoint_part for m in w.said if m.WhichOneof("body") == "checkpoint_part"][-1]
        w.hears(commit_checkpoint=pb.CommitCheckpoint(step=step, attempt=part.attempt, parts=[part]))
        w.beside.does()
    w.ring.free()
    w.says("left_ring", 1)
    w.hears(export=pb.Export())
    w.says("finished", 0)
    w.stop()
    kept = Store.open(str(tmp_path)).checkpoints()
    assert [(c.step, c.manifest.metrics) for c in kept] == [
        (3, {"accuracy": 1.0, "loss": 0.5}),
        (6, {"accuracy": 0.5, "loss": 0.5}),
    ]


def test_for_the_best_one_each_epochs_end_makes_a_checkpoint_and_an_unknown_metric_is_told(
    tmp_path: Path,
) -> None:
    place, steps = RingSlot(1, 0, 0, 1), Steps(SIZE, BATCH)
    w = Writer(0, tmp_path, changes={"checkpoint": {"best": "acc", "seconds": 1000}})
    plain = Writer(0, tmp_path, changes={"checkpoint": {"seconds": 1000}})
    assert w.checkpoints.ready(place, 3, steps, 2) and not plain.checkpoints.ready(place, 3, steps, 2)
    assert not w.checkpoints.ready(place, 2, steps, 2)
    for step in (3, 6):
        w.checkpoints.epoch_ended(step, {"loss": 1.0, "accuracy": 0.5})
    (told,) = [m.warned.text for m in w.said if m.WhichOneof("body") == "warned"]
    assert told.startswith("checkpoint.best is 'acc', and the metrics of an epoch are loss, accuracy")


def test_one_that_is_judged_by_held_out_records_is_written_when_these_are_evaluated(tmp_path: Path) -> None:
    w = Writer(0, tmp_path, changes={"checkpoint": {"best": "val_least", "seconds": 1000}})
    plan = EvaluationPlan(
        Steps(SIZE, BATCH), 5, 0, 1, "validation", {"validation": 10}
    )  # two rounds after three steps
    held_out = {"validation": Batches(Positions(10), 5, reading=AtOnce())}
    evaluation = RingEvaluation(plan, held_out, CountingMetrics(10), AtOnce())
    w.rebuild(checkpoints=w.checkpoints, evaluation=evaluation)
    ring_of(w)
    said = [come_to_sum(number, w).writers for number in range(1, 6)]
    assert said == [0, 0, 0, 0, 1], "not with the last step of the epoch, but with the last round"
    come_to_sum(6, w)
    w.beside.does()
    part = part_of(w)
    w.hears(commit_checkpoint=pb.CommitCheckpoint(step=3, attempt=part.attempt, parts=[part]))
    w.beside.does()
    w.ring.free()
    w.says("left_ring", 1)
    w.stop()
    (kept,) = Store.open(str(tmp_path)).checkpoints()
    assert (kept.step, kept.manifest.metrics["val_least"]) == (3, 1.0)
    assert not [m for m in w.said if m.WhichOneof("body") == "warned"]


def test_one_that_is_expected_and_not_there_ends_the_job_instead_of_its_first_step(tmp_path: Path) -> None:
    w = Writer(0, tmp_path)
    with pytest.raises(CheckpointError, match="of step 4 was written, and none is whole now"):
        w.checkpoints.restore(expected=4)
    assert w.checkpoints.restore(expected=0) is None


def test_what_differs_from_the_checkpoint_is_refused_by_name(pair: list[Writer], tmp_path: Path) -> None:
    write(pair, 2)

    def of(**named: Any) -> Checkpointing:
        resume = {"checkpoint": {"resume": True}}
        return Writer(5, tmp_path, **{"run_id": "run-2", "changes": resume} | named).checkpoints

    assert of().newest(LAYOUT) == (2, LAYOUT)
    assert of(run_id="run-1", changes={}).newest(LAYOUT)[0] == 2
    with pytest.raises(ConfigError, match=r"holds checkpoints of another run \(run-1, step 2\)"):
        of(changes={}).newest(LAYOUT)
    with pytest.raises(
        ConfigError, match=r"training\.seed is 9, and the checkpoint of step 2 .* made with 1"
    ):
        of(changes={"checkpoint": {"resume": True}, "training": {"seed": 9}}).newest(LAYOUT)
    with pytest.raises(DataError, match=r"the data have 13 records, .* was made with 12"):
        of().newest(Layout(13))
    with pytest.raises(ModelError, match="of another model"):
        of(learner=CountingLearner(POSITIONS + 1)).newest(LAYOUT)


def test_the_classes_of_the_labels_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    saves(Writer(0, tmp_path, classes=["cat", "dog"]))

    def of(classes: list[str]) -> Checkpointing:
        changes = {"checkpoint": {"resume": True}}
        return Writer(5, tmp_path, run_id="run-2", changes=changes, classes=classes).checkpoints

    assert of(["cat", "dog"]).newest(LAYOUT)[0] == 6
    with pytest.raises(
        DataError, match="was trained with the classes cat, dog, and the data now have cat, fox"
    ):
        of(["cat", "fox"]).newest(LAYOUT)


def test_by_force_the_order_may_be_another_and_it_is_told_for_ever(
    pair: list[Writer], tmp_path: Path
) -> None:
    write(pair, 2)

    def of(run_id: str = "run-2", force: bool = True, **training: Any) -> Checkpointing:
        checkpoint = {"resume": True, "force": force}
        return Writer(
            5, tmp_path, run_id=run_id, changes={"checkpoint": checkpoint, "training": training}
        ).checkpoints

    with pytest.raises(ConfigError, match="cannot change, not even by force"):
        of(batchSize=BATCH + 1).newest(LAYOUT)
    with pytest.raises(ConfigError, match="goes on all the same"):
        of(force=False, seed=9).newest(LAYOUT)
    forced = of(seed=9)
    assert forced.newest(LAYOUT)[0] == 2
    assert forced.forced == (
        "training.seed 1 -> 9 at step 2, in epoch 1, whose records may count twice or not at all",
    )
    ledger = forced.restore(expected=2)
    assert ledger is not None
    forced.save(replace(ledger, step=3), Steps(SIZE, BATCH), LAYOUT)
    later = of(run_id="run-3", force=False, seed=9)
    assert later.newest(LAYOUT)[0] == 3 and later.forced == forced.forced


def test_a_checkpoint_keeps_the_values_that_decide_which_records_are_in_a_step(tmp_path: Path) -> None:
    kept = lineage.kept(configured(tmp_path))
    assert kept["training.batchSize"] == BATCH
    assert kept.keys() == {
        "model.module",
        "model.source",
        "training.batchSize",
        "training.seed",
        "data.shuffle",
    }


def test_variables_are_dealt_by_their_bytes_alike_on_every_rank() -> None:
    assert deal([100, 1, 50, 49, 1], 2) == [0, 1, 1, 1, 0]
    assert deal([], 3) == []
    assert deal([5, 5, 5], 1) == [0, 0, 0]
