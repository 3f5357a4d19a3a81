# SPDX-License-Identifier: Apache-2.0
"""What is not finite and records that are bad: skipped and counted, or the end of the job, at all workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl import config
from edl.contract.proto import edl_pb2 as pb
from edl.errors import DataError
from edl.trainer.agreement import control
from edl.trainer.agreement.checks import NonFinite
from edl.trainer.records.batches import Batch
from tests.support.jobs.workers import CONFIG, POSITIONS, SIZE, STEPS, A, Held, R, come_to_sum, ring_of
from tests.support.models.counting import CountingLearner


class Infinite(CountingLearner):
    def gradients(self, *arguments: Any) -> np.ndarray:
        vector = super().gradients(*arguments)
        vector[POSITIONS + control.NONFINITE] = 1
        return vector


def by_policy(policy: str) -> config.Config:
    training = CONFIG.training.model_copy(update={"on_non_finite": policy})
    return CONFIG.model_copy(update={"training": training})


def test_what_is_not_finite_changes_nothing_and_ends_the_worker() -> None:
    w = A(0, Infinite(POSITIONS), by_policy("stop"))
    ring_of(w)
    assert isinstance(w.joined(), NonFinite)
    assert str(w.ended).endswith("at step 1, on worker 0, in the records 0, 1, 2, 3")
    assert w.worker.state.step == 0
    assert not w.learner.weights.any()


def test_a_value_that_is_not_finite_is_named_with_record_and_column() -> None:
    x = np.zeros((3, 2), np.float32)
    x[1, 1] = np.nan
    batch = Batch(np.array([4, 9, 2]), {"age": np.zeros(3), "size": x}, np.zeros(3), None)
    assert str(NonFinite(batch, 0, 1)) == (
        "the loss or a gradient is not finite at step 1, on worker 1, in the records 4, 9, 2: "
        "features['size'] is nan in record 9, column 1, so the loss is not finite: fill missing values, or "
        "leave these records out"
    )


def test_what_is_not_finite_at_another_worker_breaks_the_ring() -> None:
    well, ill = A(0, config=by_policy("stop")), A(1, Infinite(POSITIONS), by_policy("stop"))
    ring_of(well, ill)
    assert well.says("left_ring", 1).broken == "the loss or a gradient of another worker is not finite"
    assert isinstance(ill.joined(), NonFinite)
    assert str(ill.ended).endswith("on worker 1, in the records 2, 3")
    assert not well.learner.weights.any()
    well.stop()


def test_what_is_not_finite_is_skipped_and_the_steps_are_named() -> None:
    w = A(0, Infinite(POSITIONS), by_policy("skip"))
    ring_of(w)
    out = w.says("left_ring", 1)
    assert out.step == STEPS
    assert [(r.start, r.stop) for r in out.skipped] == [(0, STEPS)]
    assert not w.learner.weights.any()
    w.stop()


def allowing(bad: int) -> config.Config:
    return CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update={"max_bad_records": bad})})


def with_bad(number: int, bad: tuple[int, ...], allowed: int, ring: R | None = None) -> A[R]:
    w = A(number, config=allowing(allowed), ring=ring)
    w.source.bad = bad
    return w


def test_bad_records_are_left_out_of_their_steps_and_all_know_how_many() -> None:
    bad = (1, 8, 9, 10, 11)  # the last four are all of a step
    pair = [with_bad(i, bad, allowed=5) for i in range(2)]
    ring_of(*pair)
    for w in pair:
        out = w.says("left_ring", 1)
        assert (out.step, dict(out.bad)) == (STEPS, {0: 5, 1: 5})
        assert np.flatnonzero(w.learner.weights == 0).tolist() == [*bad, *(SIZE + b for b in bad)]
        assert w.learner.updates == STEPS - 2, "a step without records changes nothing"
    said = [
        (m.bad_records.epoch, index)
        for w in pair
        for m in w.said
        if m.HasField("bad_records")
        for index in m.bad_records.records
    ]
    assert sorted(said) == [(epoch, b) for epoch in range(2) for b in bad]
    for w in pair:
        w.stop()


def test_one_bad_record_too_many_ends_the_job_and_changes_nothing() -> None:
    finder, other = with_bad(0, (4, 8), allowed=1), with_bad(1, (4, 8), allowed=1)
    ring_of(finder, other)
    assert other.says("left_ring", 1).broken == (
        "another worker has found more bad records than data.maxBadRecords allows"
    )
    assert isinstance(finder.joined(), DataError)
    assert str(finder.ended) == (
        "record 8 is bad: it is bad. With it, 2 records of epoch 1 are; data.maxBadRecords is 1"
    )
    assert (other.worker.state.ledger.step, other.worker.state.ledger.bad) == (2, {0: 1})
    other.stop()


def test_a_newcomer_takes_over_how_many_records_were_left_out() -> None:
    old, new = with_bad(0, (1,), allowed=1, ring=Held()), with_bad(1, (1,), allowed=1)
    ring_of(old)
    come_to_sum(2, old)
    old.hears(1, leave=pb.Leave())
    old.ring.free()
    assert old.says("left_ring", 1).step == 3
    ring_of(old, new, generation=2)
    for w in (old, new):
        out = w.says("left_ring", 2)
        assert (out.step, dict(out.bad)) == (STEPS, {0: 1, 1: 1})
        w.stop()
