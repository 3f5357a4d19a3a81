# SPDX-License-Identifier: Apache-2.0
"""Rows of a table, in a vector that is summed: each rank's at a place of its own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.ring.local import LocalRing
from edl.trainer.step import sparse_gradients
from tests.process.keras.ranks import on_ranks

MANY = 1 << 35  # rows of a table
TABLE = tf.TensorSpec([MANY, 3])


def of_rank(rank: int) -> tf.IndexedSlices:
    """So many as its rank, with indices that float32 does not hold."""
    values = np.arange(rank * 3, dtype="f4").reshape(rank, 3) + 10 * rank
    indices = MANY - 1 - np.arange(rank) - 10 * rank
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices, tf.int64), [MANY, 3])


def test_all_ranks_read_the_rows_of_all_in_the_order_of_the_ranks() -> None:
    rings = [LocalRing() for _ in range(3)]

    def work(rank: int) -> tf.IndexedSlices:
        ours = of_rank(rank)
        before, total = sparse_gradients.counted(rings[rank].reduce, rank, [len(ours.indices)])
        return sparse_gradients.read(
            rings[rank].reduce(sparse_gradients.written(ours, before[0], total[0])), TABLE
        )

    found = on_ranks(rings, work)
    expected = [of_rank(rank) for rank in range(3)]
    for slices in found:
        np.testing.assert_array_equal(slices.indices, np.concatenate([e.indices for e in expected]))
        np.testing.assert_array_equal(slices.values, np.concatenate([e.values for e in expected]))


def test_a_rank_without_a_place_among_the_counts_is_refused() -> None:
    with pytest.raises(ModelError, match="more than 1024 workers"):
        sparse_gradients.refuse_rank(1024)
