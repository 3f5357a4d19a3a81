# SPDX-License-Identifier: Apache-2.0
"""Rows of tables in this process: how they begin, and which steps they learn from."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.embedding.local_rows import LocalRows, born

IDS = np.array([3, -7, 1 << 62, 0])


def table(initializer: str = "zeros", **options: Any) -> Table:
    made, sgd = keras.initializers.get(initializer), keras.optimizers.SGD(1.0)
    return Table(
        "t",
        4,
        json.dumps(keras.initializers.serialize(made)),
        json.dumps(keras.optimizers.serialize(sgd)),
        **options,
    )


@pytest.mark.parametrize(
    ("initializer", "least", "most"),
    [
        ("uniform", -0.05, 0.05),
        ("random_normal", -0.5, 0.5),
        ("truncated_normal", -0.1, 0.1),
        ("ones", 1, 1),
        ("he_uniform", -2.5, 2.5),
    ],
)
def test_a_row_begins_the_same_whatever_is_asked_for_with_it(
    initializer: str, least: float, most: float
) -> None:
    whole = born(table(initializer), IDS, seed=1)
    np.testing.assert_array_equal(born(table(initializer), IDS[2:], seed=1), whole[2:])
    assert whole.dtype == np.float32 and whole.shape == (4, 4)
    assert whole.min() >= least and whole.max() <= most
    if least < most:
        assert len(np.unique(whole)) == whole.size
        assert not np.array_equal(born(table(initializer), IDS, seed=2), whole)


def step(rows: LocalRows, nth: int, ids: np.ndarray, skipped: bool = False) -> None:
    """One of two ranks, each with a gradient of one."""
    for rank in range(2):
        rows.stage(nth, rank, [(ids, np.ones((len(ids), 4), np.float32))])
    rows.took(Commit(nth, skipped, scale=0.5, learning_rate=2.0, iteration=nth))


def test_a_step_is_the_sum_of_all_ranks_and_one_that_is_skipped_changes_nothing() -> None:
    rows = LocalRows([table()])
    step(rows, 0, IDS[:2])
    step(rows, 1, IDS[:2], skipped=True)
    (found,) = rows.pull(2, [IDS])
    np.testing.assert_array_equal(found[:, 0], [-2, -2, 0, 0])
    known, values = rows.all_rows(0)
    assert sorted(known.tolist()) == [-7, 3] and (values == -2).all()


def test_a_row_is_learned_from_the_so_many_th_step_on_that_has_its_id() -> None:
    rows = LocalRows([table(min_count=2)])
    for nth in range(3):
        step(rows, nth, IDS[:1])
        np.testing.assert_array_equal(rows.pull(nth + 1, [IDS[:1]])[0][0], -2.0 * nth)
