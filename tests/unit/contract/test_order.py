# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch and its division: every record once, the same for everybody, nothing stored."""

import collections
import itertools
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edl.contract.layout import Layout, StepSlice
from edl.contract.order import Order, permute, unpermute
from edl.contract.steps import Steps

sizes = st.integers(1, 700)
layouts = st.builds(Layout, sizes, st.integers(1, 80), st.integers(1, 40))
parts = st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any)


@given(sizes, st.integers(0, 2**40))
def test_permute_is_a_bijection_and_unpermute_its_inverse(size: int, key: int) -> None:
    index = np.arange(size)
    there = permute(index, size, key)
    assert sorted(there) == list(range(size))
    assert (unpermute(there, size, key) == index).all()


def test_what_is_not_in_the_range_is_refused() -> None:
    for index in (-1, 5):
        with pytest.raises(ValueError, match=r"not all of \[.*\] are in range\(5\)"):
            permute(np.array([0, index]), 5, 1)


def test_permutations_of_many_sizes_and_keys_at_once_are_those_of_each() -> None:
    some = np.random.default_rng(0)
    size, key = some.integers(1, 10**9, 200), some.integers(0, 2**63, 200)
    index = some.integers(0, size)
    together = permute(index, size, key)
    alone = [int(permute(index[i : i + 1], int(size[i]), int(key[i]))[0]) for i in range(200)]
    assert alone == together.tolist()


@given(layouts, st.integers(0, 2**31), st.integers(0, 5), st.booleans())
def test_each_epoch_visits_each_record_once(layout: Layout, seed: int, epoch: int, shuffle: bool) -> None:
    order, size = Order(layout, seed, shuffle), layout.records
    assert sorted(order.records(epoch * size, (epoch + 1) * size)) == list(range(size))


@settings(max_examples=40)
@given(layouts, st.data())
def test_the_order_does_not_depend_on_how_it_is_cut(layout: Layout, data: st.DataObject) -> None:
    order, size = Order(layout, 7), layout.records
    whole = order.records(size, 2 * size)
    cuts = sorted({size, 2 * size, *data.draw(st.lists(st.integers(size, 2 * size), max_size=6))})
    pieces = [order.records(a, b) for a, b in itertools.pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("layout", [Layout(5000), Layout(5000, 7, 64)])
def test_how_many_places_are_looked_up_together_makes_no_difference(layout: Layout) -> None:
    few, many = Order(layout, 3, window=100), Order(layout, 3, window=1 << 15)
    for start, stop in [(0, 5000), (5000, 5099), (9873, 10_000), (7_001, 8_200)]:
        assert few.records(start, stop).tolist() == many.records(start, stop).tolist()
    assert Order(layout, 3).records(0, 5000).tolist() == many.records(0, 5000).tolist()


@settings(max_examples=25)
@given(layouts, parts, st.integers(1, 100), st.booleans(), st.integers(0, 2))
def test_the_parts_of_all_ranks_are_the_step_whatever_the_ring(
    layout: Layout, shares: list[int], batch: int, shuffle: bool, epoch: int
) -> None:
    order, steps = Order(layout, 3, shuffle), Steps(layout.records, batch)
    for step in range(epoch * steps.per_epoch, (epoch + 1) * steps.per_epoch):
        start, stop = steps.positions(step)
        found = [order.part(start, stop, StepSlice(rank, tuple(shares)))[0] for rank in range(len(shares))]
        assert sorted(np.concatenate(found)) == sorted(order.records(start, stop))


@given(sizes, st.integers(1, 90), st.integers(1, 6))
def test_the_steps_of_an_epoch_are_its_records_in_batches(records: int, batch: int, epochs: int) -> None:
    steps = Steps(records, batch)
    assert steps.per_epoch == -(-records // batch)
    ranges = [steps.positions(step) for step in range(epochs * steps.per_epoch)]
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges)][:-1]
    assert ranges[-1][1] == records * epochs
    for step, (start, stop) in enumerate(ranges):
        assert start // records == (stop - 1) // records == steps.epoch(step)
        assert stop - start == batch or stop % records == 0
    assert steps.records_of([(0, len(ranges))]) == records * epochs


@pytest.mark.parametrize(
    ("step", "epochs", "end"),
    [
        (0, 3, 30),
        (7, 3, 30),
        (30, 3, 30),
        (12, 1, 20),
        (20, 1, 20),
        (21, 1, 30),
        (0, 0, 0),
    ],
)
def test_an_epoch_that_has_begun_is_trained_to_its_end(step: int, epochs: int, end: int) -> None:
    assert Steps(100, 10).end(step, epochs) == end


def test_without_records_there_are_no_steps() -> None:
    steps = Steps(0, 10)
    assert (steps.per_epoch, steps.begins_at(0), steps.end(0, 5), steps.ended(0, 5)) == (0, 0, 0, True)


# --- read once, and evenly


def reads(layout: Layout, batch: int, ring: int) -> tuple[float, float]:
    """-> how often a block is read in an epoch, on average; the largest part of a whole step, of an even
    one."""
    order, steps = Order(layout, 1), Steps(layout.records, batch)
    opened: list[set[int]] = [set() for _ in range(ring)]
    largest = 0.0
    for step in range(steps.per_epoch):
        start, stop = steps.positions(step)
        for rank in range(ring):
            records, _ = order.part(start, stop, StepSlice.even(rank, ring))
            opened[rank] |= set((records // layout.block).tolist())
            if stop - start == batch:
                largest = max(largest, len(records) * ring / batch)
    return sum(map(len, opened)) / -(-layout.records // layout.block), largest


@pytest.mark.parametrize("records", [1797, 30_011])
@pytest.mark.parametrize("ring", [1, 3, 6])
def test_every_block_is_read_once_and_the_parts_are_even(records: int, ring: int) -> None:
    layout = Layout.fitting(records, record_bytes=4000, buffer_bytes=32 << 20, ranks=ring)
    factor, largest = reads(layout, 192, ring)
    assert factor <= 1.1
    assert largest <= 1.2


def test_a_ring_larger_than_expected_divides_shards_and_stays_even() -> None:
    factor, largest = reads(Layout.fitting(20_000, 4000, 32 << 20, ranks=1), 512, 24)
    assert 1 < factor <= 1 + 24 / 64
    assert largest <= 1.25


@given(st.integers(1, 10**9), st.floats(1, 1e7), st.floats(1e5, 1e10), st.integers(1, 500))
def test_the_open_blocks_fit_into_the_buffer(
    records: int, record_bytes: float, buffer: float, ranks: int
) -> None:
    layout = Layout.fitting(records, record_bytes, buffer, ranks)
    open_bytes = layout.block * layout.shards * record_bytes
    assert open_bytes <= max(buffer, layout.shards * record_bytes) + layout.shards * record_bytes
    assert layout.shards >= 8 * ranks


def test_a_rank_knows_which_shards_it_reads() -> None:
    order = Order(Layout(5000, 10, 64), 1)
    for rank in range(3):
        part = StepSlice(rank, (1, 2, 4))
        _, shards = order.part(0, 5000, part)
        assert set(shards) == set(np.flatnonzero(order.shards(part)))


def test_random_access_has_even_parts() -> None:
    order = Order(Layout(1000), 1)
    assert [len(order.part(0, 100, StepSlice.even(r, 3))[0]) for r in range(3)] == [33, 33, 34]
    assert [len(order.part(0, 2, StepSlice.even(r, 3))[0]) for r in range(3)] == [0, 1, 1]
    assert [len(order.part(0, 60, StepSlice(r, (1, 2, 3)))[0]) for r in range(3)] == [10, 20, 30]


# --- mixing


def test_a_file_sorted_by_class_is_mixed_nearly_as_well_as_by_a_whole_permutation() -> None:
    """The spread of a class over batches: of independent draws it is that of the hypergeometric
    distribution."""
    size, batch = 40_000, 96
    label = np.arange(size) * 10 // size

    def spread(order: Order) -> float:
        starts = range(0, size - batch, batch)
        counts = [np.bincount(label[order.records(s, s + batch)], minlength=10) for s in starts]
        return float(np.std(counts))

    whole = spread(Order(Layout(size), 1))
    assert 2.7 < whole < 3.2
    assert spread(Order(Layout.fitting(size, 4000, 32 << 20, 1), 1)) < 1.5 * whole
    assert spread(Order(Layout(size), 1, shuffle=False)) > 20


def test_epochs_and_seeds_differ() -> None:
    for layout in (Layout(1000), Layout(1000, 10, 16)):
        first, second = (Order(layout, 1).records(e * 1000, (e + 1) * 1000) for e in (0, 1))
        other = Order(layout, 2).records(0, 1000)
        assert (first != second).mean() > 0.9
        assert (first != other).mean() > 0.9


@pytest.mark.parametrize("layout", [Layout(10**9), Layout(10**9, 1024, 64)])
def test_a_thousand_million_records_take_no_memory_and_no_time(layout: Layout) -> None:
    order = Order(layout, 1)
    tracemalloc.start()
    began = time.perf_counter()
    assert len(order.records(10**9 + 123_456_789, 10**9 + 123_456_789 + 64)) == 64
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000  # the order itself would be 8,000,000,000
    assert seconds < 1


@settings(max_examples=40)
@given(st.integers(10**9, 10**9 + 300), st.integers(1, 300), st.integers(0, 10**9 - 300), st.integers(0, 99))
def test_a_part_of_a_huge_epoch_has_no_record_twice(size: int, block: int, place: int, epoch: int) -> None:
    start = epoch * size + place
    records = Order(Layout(size, block, 64), 3).records(start, start + 300)
    assert len(np.unique(records)) == 300
    assert 0 <= records.min() <= records.max() < size


def test_small_numbers_of_blocks_come_in_every_order_equally_often() -> None:
    four = np.arange(4)
    seen = collections.Counter(tuple(permute(four, 4, seed).tolist()) for seed in range(24 * 200))
    assert len(seen) == 24
    assert 120 < min(seen.values()) <= max(seen.values()) < 280
