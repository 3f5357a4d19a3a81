"""The order of an epoch: every record once, the same for everybody, nothing stored."""

import collections
import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.contract.shuffle import Order, permute

sizes = st.integers(1, 700)


@given(sizes, st.integers(0, 2**40))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@given(sizes, st.integers(0, 2**31), st.integers(1, 80), st.integers(0, 5), st.booleans())
def test_each_epoch_visits_each_record_once(
    size: int, seed: int, block: int, epoch: int, shuffle: bool
) -> None:
    order = Order(size, seed, block, shuffle)
    assert sorted(order.records(epoch * size, (epoch + 1) * size)) == list(range(size))


@settings(max_examples=40)
@given(sizes, st.integers(1, 80), st.data())
def test_the_order_does_not_depend_on_how_it_is_cut(size: int, block: int, data: st.DataObject) -> None:
    order = Order(size, 7, block)
    whole = order.records(size, 2 * size)
    cuts = sorted({size, 2 * size, *data.draw(st.lists(st.integers(size, 2 * size), max_size=6))})
    parts = [order.records(a, b) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_differ() -> None:
    first, second = (Order(1000, 1, 100).records(e * 1000, (e + 1) * 1000) for e in (0, 1))
    other = Order(1000, 2, 100).records(0, 1000)
    assert (first != second).mean() > 0.9
    assert (first != other).mean() > 0.9


def test_a_batch_comes_from_one_block_or_two() -> None:
    records = Order(100_000, 3, 1024).records(5000, 5032)
    assert len(set(records // 1024)) <= 2


def test_a_thousand_million_records_take_no_memory_and_no_time() -> None:
    order = Order(10**9, 1, 1024)
    tracemalloc.start()
    began = time.perf_counter()
    assert len(order.records(10**9 + 123_456_789, 10**9 + 123_456_789 + 64)) == 64
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert seconds < 1


@settings(max_examples=40)
@given(st.integers(10**9, 10**9 + 300), st.integers(1, 300), st.integers(0, 10**9 - 300), st.integers(0, 99))
def test_a_part_of_a_huge_epoch_has_no_record_twice(size: int, block: int, place: int, epoch: int) -> None:
    start = epoch * size + place
    records = Order(size, 3, block).records(start, start + 300)
    assert len(np.unique(records)) == 300
    assert 0 <= records.min() <= records.max() < size
    assert len(np.unique(records // block)) <= 300 // block + 3, (
        "a reader would touch more blocks than it must"
    )


def test_small_numbers_of_blocks_come_in_every_order_equally_often() -> None:
    seen = collections.Counter(tuple(permute(i, 4, seed) for i in range(4)) for seed in range(24 * 200))
    assert len(seen) == 24
    assert 120 < min(seen.values()) <= max(seen.values()) < 280


def test_the_order_is_the_same_in_every_version() -> None:
    """Workers of a job may not differ in this, and a checkpoint may be older than the code."""
    assert Order(10, 1, 4).records(0, 10).tolist() == [9, 8, 6, 7, 4, 5, 2, 1, 3, 0]
    assert Order(10, 1, 4).records(10, 20).tolist() == [4, 6, 5, 7, 2, 1, 3, 0, 9, 8]


def test_unshuffled_records_come_as_they_lie() -> None:
    assert Order(10, 1, 4, shuffle=False).records(12, 17).tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("size", "start", "stop"), [(10, 8, 12), (10, 5, 5), (10, 6, 5), (10, -1, 3), (0, 0, 1)]
)
def test_what_is_no_range_inside_one_epoch_is_refused(size: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"inside one epoch of {size} records"):
        Order(size, 1, 4).records(start, stop)


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="not in range"):
        permute(index, 5, 1)
