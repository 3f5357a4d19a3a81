# SPDX-License-Identifier: Apache-2.0
"""Sums that are the same bits in any order, and rings of any shares with the same blocks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edl.contract.layout import StepSlice
from edl.trainer.agreement.exact_sums import BLOCKS, words

NUMBERS = st.lists(
    st.floats(-(2.0**80), 2.0**80, width=32, allow_subnormal=False), min_size=BLOCKS, max_size=BLOCKS
)


@given(NUMBERS, st.permutations(range(BLOCKS)), st.integers(1, BLOCKS - 1))
def test_words_are_summed_without_rounding_in_any_order(
    numbers: list[float], order: list[int], ranks: int
) -> None:
    each = np.array([words(np.float32(number)) for number in numbers])
    total = each[0]
    for other in each[1:]:
        total = total + other
    first = np.sum(each[order[:ranks]], axis=0, dtype=np.float32)
    second = np.sum(each[order[ranks:]], axis=0, dtype=np.float32)
    np.testing.assert_array_equal(total, second + first)
    exact = sum(int(number * 2.0**60) for number in numbers)
    assert abs(sum(int(float(word) * 2.0**60) for word in total) - exact) <= BLOCKS


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any), st.integers(0, 100))
def test_ranks_have_whole_blocks_whatever_their_shares(shares: list[int], records: int) -> None:
    edges = {records * nth // BLOCKS for nth in range(BLOCKS + 1)}
    at = 0
    for rank in range(len(shares)):
        start, stop = StepSlice(rank, tuple(shares)).in_blocks(BLOCKS).of(records)
        assert (start, start in edges, stop in edges) == (at, True, True)
        assert start == stop or shares[rank], "a member without the state has no records"
        at = stop
    assert at == records
