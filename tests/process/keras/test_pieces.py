# SPDX-License-Identifier: Apache-2.0
"""A part of a step that is computed in pieces (training.accumulateSteps): the same sums, with less memory."""

from __future__ import annotations

import numpy as np
import pytest
from keras import optimizers as o

from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.ring.local import LocalRing
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.overlapped import turns
from tests.process.keras.models import by_weights, dense, plain, tagged, tagger, weighted
from tests.process.keras.ranks import on_ranks
from tests.process.keras.rings import Case, batch

PIECES = 4
ENDS = (0, 7, 7, 8, 12)  # where the ranks' parts end: one has no record, and one has fewer than pieces


CASES = {
    "Adam": Case(lambda: dense(o.Adam(0.01), metrics=["mae"]), plain),
    "weights": Case(dense, weighted),
    "a table, SGD": Case(lambda: tagger(mask=False), tagged),
    "a masked mean": Case(lambda: tagger(metrics=["accuracy"]), tagged),
    "a mean by weights": Case(lambda: dense(loss=by_weights(), metrics=["mae"]), weighted),
    "run eagerly": Case(lambda: dense(run_eagerly=True, metrics=["mae"]), plain),
}


def learner_of(case: Case, ring: LocalRing, pieces: int) -> KerasLearner:
    return KerasLearner(case.build(), batch(case, 0, 5), (), ring.reduce, pieces=pieces)


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_pieces_is_the_same_step(name: str) -> None:
    case = CASES[name]
    rings = [LocalRing() for _ in ENDS[1:]]
    learners = [learner_of(case, ring, PIECES) for ring in rings]
    alone = LocalRing()
    whole = learner_of(case, alone, 1)
    for learner in learners:
        learner.load(whole.state())

    def sums(learner: KerasLearner, step: int, rank: int, start: int, stop: int) -> control.StepResult:
        part = batch(case, start, stop) if start < stop else None
        return learner.allreduce_step(part, control.write(step), step, rank, ENDS[-1])

    for step in range(3):
        found = on_ranks(rings, lambda r, step=step: sums(learners[r], step, r, *ENDS[r : r + 2]))
        [expected] = on_ranks([alone], lambda r, step=step: sums(whole, step, r, 0, ENDS[-1]))
        for agreed in (s.agreed for s in found):
            assert (agreed.records, agreed.nonfinite) == (ENDS[-1], False)
            assert agreed.all_at(step, 0, len(rings))
            assert agreed.loss == pytest.approx(expected.agreed.loss, rel=1e-5)
        for learner, s in zip([*learners, whole], [*found, expected], strict=True):
            learner.apply(s)
    assert len({learner.digest() for learner in learners}) == 1
    for mine, theirs in zip(learners[0].model.variables, whole.model.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6, err_msg=mine.path)
    assert learners[0].take_metrics() == pytest.approx(whole.take_metrics(), rel=1e-5)


def test_what_is_not_finite_in_a_piece_that_is_not_the_last_is_told() -> None:
    x = np.array(plain()[0])
    x[1, 1] = np.nan
    ring = LocalRing()
    case = Case(dense, lambda: (x, *plain()[1:]))
    learner = learner_of(Case(dense, plain), ring, PIECES)
    [sums] = on_ranks(
        [ring], lambda _: learner.allreduce_step(batch(case, 0, 12), control.write(0), 0, 0, 12)
    )
    assert (sums.agreed.nonfinite, sums.at_fault) == (True, True)


def test_each_piece_draws_something_else_and_one_speaks() -> None:
    told, draw = control.write(3, leave=True), np.array([(1 << 31) - 1, 17, 2])
    found = list(turns([["a"], ["b"], ["c"]], told, draw))
    assert [tensors for tensors, _, _ in found] == [["a"], ["b"], ["c"]]
    np.testing.assert_array_equal(sum(said for _, said, _ in found), told)
    np.testing.assert_array_equal(found[0][2], draw)
    seeds = [tuple(drawn[:2].tolist()) for _, _, drawn in found]
    assert len(set(seeds)) == 3
    assert all(0 <= word < 1 << 31 for words in seeds for word in words)
    assert [int(drawn[2]) for _, _, drawn in found] == [2] * 3


REFUSED = {
    "a masked mean, eagerly": (Case(lambda: tagger(run_eagerly=True), tagged), "totals of the whole step"),
    "a table, by rows": (
        Case(lambda: tagger(mask=False, optimizer=o.Adam()), tagged),
        "rows of an Embedding",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_is_no_sum_over_pieces_is_refused(name: str) -> None:
    case, why = REFUSED[name]
    with pytest.raises(ModelError, match=f"accumulateSteps must be 1 .*{why}"):
        learner_of(case, LocalRing(), PIECES)
    learner_of(case, LocalRing(), 1)
