# SPDX-License-Identifier: Apache-2.0
"""Models whose rows are on servers learn over a ring as Keras does with an ordinary table, step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.records.batches import Batch
from tests.process.keras.embedding_models import CASES, SIZE, beside
from tests.process.keras.rings import STEPS, batch, ring_step
from tests.process.keras.rings import _given as tensor

WITH_BAD_RECORDS = ["sum", "records of unlike weight", "run_eagerly", "BatchNormalization(synchronized=True)"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITH_BAD_RECORDS])
def test_rows_on_servers_are_trained_as_an_ordinary_table(name: str) -> None:
    both = beside(CASES[name])
    for nth, (start, stop) in enumerate(STEPS):
        both.keras_step(nth)
        agreed = both.step(SIZE, nth)
        assert (agreed.records, agreed.nonfinite) == (stop - start, False)
    both.assert_equal()


# --- what a step is made of


def test_a_batch_in_pieces_learns_what_a_whole_one_does() -> None:
    both = beside(CASES["sum"], pieces=3)
    both.keras_step(0)
    both.step(2, 0)
    both.assert_equal()


class Noted:
    """Rows that note what is asked of them."""

    def __init__(self, rows: LocalRows) -> None:
        self._rows = rows
        self.told: list[tuple[str, int]] = []

    def pull(self, step: int, ids: Any) -> Any:
        self.told.append(("pull", step))
        assert all(len(np.unique(some)) == len(some) for some in ids)
        return self._rows.pull(step, ids)

    def stage(self, step: int, rank: int, gradients: Any) -> None:
        self.told.append(("stage", step))
        assert all(len(np.unique(some)) == len(some) for some, _ in gradients)
        self._rows.stage(step, rank, gradients)


def test_gradients_are_staged_before_the_sums_and_a_rank_without_records_asks_for_nothing() -> None:
    both = beside(CASES["a shared table"])
    noted = Noted(both.rows)
    both.learner.use(noted)
    reduce = both.meeting.reduce

    def told(vector: Any) -> Any:
        noted.told.append(("sum", 7))
        return reduce(vector)

    both.learner._step._ours.inner_sum._reduce = told
    ring_step(both.learner, both.meeting, [batch(both.case, 0, 12)], 7)
    assert noted.told == [("pull", 7), ("stage", 7), ("sum", 7)]
    noted.told.clear()
    sums = both.learner.allreduce_step(None, control.write(7), 7, 0, 0)
    assert noted.told == [("sum", 7)]
    assert both.learner.commit(7, sums).skipped


@pytest.mark.parametrize("name", WITH_BAD_RECORDS)
def test_rows_are_pulled_again_and_staged_once_when_bad_records_are_left_out(name: str) -> None:
    both = beside(CASES[name])
    noted = Noted(both.rows)
    both.learner.use(noted)
    for nth, (start, stop) in enumerate(STEPS):
        both.keras_step(nth)
        agreed = both.step(SIZE, nth, bad=nth)
        assert (agreed.records, agreed.nonfinite) == (stop - start, False)
        ranks = SIZE - (nth == 1)  # one of the second step has no records
        repeated = 2 if nth else 1
        expected = {("pull", nth): ranks * repeated, ("stage", nth): ranks}
        assert Counter(told for told in noted.told if told[1] == nth) == expected
    both.assert_equal()


@pytest.mark.parametrize("bad", [0, 2])
def test_a_batch_in_pieces_stages_each_piece_once_when_bad_records_are_left_out(bad: int) -> None:
    both = beside(CASES["records of unlike weight"], pieces=3)
    both.keras_step(0)
    both.step(2, 0, bad)
    both.assert_equal()


def test_a_step_that_is_not_finite_is_summed_once_though_records_are_bad() -> None:
    both = beside(CASES["sum"])
    rows = LocalRows(both.learner.tables, initial=lambda table, some: np.full((len(some), 4), np.inf, "f4"))
    noted = Noted(rows)
    both.learner.use(noted)
    parts = [batch(both.case, 0, 6), batch(both.case, 6, 11)]
    assert ring_step(both.learner, both.meeting, parts, 0, rows.took, bad=1).nonfinite
    assert Counter(noted.told) == {("pull", 0): 2, ("stage", 0): 2}
    assert len(rows.all_rows(0)[0]) == 0


class Ahead:
    """Rows that can be asked for before they are needed: of the state that they are of by then."""

    def __init__(self, rows: LocalRows):
        self._rows, self.generation = rows, 1
        self.told: list[tuple[str, int]] = []

    def pull(self, step: int, ids: Any) -> Any:
        self.told.append(("pull", step))
        return self._rows.pull(step, ids)

    def stage(self, step: int, rank: int, gradients: Any) -> None:
        raise AssertionError("it was to be begun")

    def begin_pull(self, step: int, ids: Any, last: Any = None) -> Begun:
        self.told.append(("begin pull", step))
        assert last.step == step - 1
        self._rows.took(last)  # as servers do: the rows are of the state after it
        rows = self._rows.pull(step, ids)
        return Begun(self, lambda: rows, "rows", step)

    def begin_stage(self, step: int, rank: int, gradients: Any) -> Begun:
        self.told.append(("begin stage", step))
        return Begun(self, lambda: self._rows.stage(step, rank, gradients), "staged", step)


@dataclass
class Begun:
    rows: Ahead
    made: Any
    what: str
    step: int

    def result(self) -> Any:
        self.rows.told.append((self.what, self.step))
        return self.made()

    def forget(self) -> None:
        self.rows.told.append(("forget", self.step))


def test_rows_of_the_next_step_are_asked_for_before_this_one_is_in_the_model() -> None:
    both, steps = beside(CASES["a shared table"]), [(0, 12), (12, 24), (6, 18)]
    batches = [both.learner.ready(batch(both.case, *some)) for some in steps]
    ahead = Ahead(both.rows)

    def following(step: int) -> Batch | None:
        ahead.told.append(("look for", step + 1))
        return batches[step + 1] if step < 2 else None

    both.learner.use(ahead)
    for step, some in enumerate(batches):
        if step == 2:  # another ring: what was begun in the one before is of no use
            ahead.generation = 2
        sums = both.learner.allreduce_step(some, control.write(step), step, 0, 12, partial(following, step))
        commit = both.learner.commit(step, sums)
        both.learner.begin_pull(step + 1, commit)
        both.learner.apply(sums)
        whole = batch(both.case, *steps[step])
        model = both.reference
        with tf.GradientTape() as tape:
            x, y = (keras.tree.map_structure(tensor, tree) for tree in (whole.x, whole.y))
            loss = model.compute_loss(x, y, model(x, training=True), None, training=True)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        dense = map(tf.convert_to_tensor, gradients)
        model.optimizer.apply_gradients(zip(dense, model.trainable_variables, strict=True))
    both.rows.took(commit)
    assert ahead.told == [
        ("pull", 0),
        ("begin stage", 0),
        ("look for", 1),
        ("staged", 0),
        ("begin pull", 1),
        ("look for", 2),
        ("rows", 1),
        ("begin stage", 1),
        ("look for", 2),
        ("staged", 1),
        ("begin pull", 2),
        ("forget", 2),
        ("pull", 2),
        ("begin stage", 2),
        ("look for", 3),
        ("staged", 2),
    ]
    both.assert_equal()


def test_a_row_that_is_not_finite_is_flagged_and_what_was_staged_is_dropped() -> None:
    both = beside(CASES["sum"])
    known = both.rows.all_rows(0)
    spoiled = LocalRows(
        both.learner.tables, initial=lambda table, some: np.full((len(some), 4), np.inf, "f4")
    )
    both.learner.use(spoiled)
    sums = both.learner.allreduce_step(batch(both.case, 0, 12), control.write(0), 0, 0, 12)
    assert (sums.agreed.nonfinite, sums.at_fault) == (True, True)
    commit = both.learner.commit(0, sums)
    assert commit.skipped
    spoiled.took(commit)
    assert len(spoiled.all_rows(0)[0]) == len(known[0]) == 0


def test_what_servers_are_told_of_a_step() -> None:
    both = beside(CASES["Adagrad, a learning rate that decays"])
    for step in range(2):
        sums = both.learner.allreduce_step(batch(both.case, 0, 12), control.write(step), step, 0, 12)
        commit = both.learner.commit(step, sums)
        assert (commit.step, commit.skipped, commit.iteration) == (step, False, step)
        assert commit.learning_rate == pytest.approx(0.1 * 0.5**step)
        assert commit.scale == pytest.approx(1 / 12)
        both.learner.apply(sums)
