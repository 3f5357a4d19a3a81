# SPDX-License-Identifier: Apache-2.0
"""RangeSet against Python's own sets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl.contract.ranges import Overlap, RangeSet

ranges = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1]))
range_sets = st.lists(ranges, max_size=8).map(RangeSet.of)


def positions(s: RangeSet | list[tuple[int, int]]) -> set[int]:
    return {p for a, b in s for p in range(a, b)}


def is_canonical(s: RangeSet) -> bool:
    return all(a < b for a, b in s) and all(x[1] < y[0] for x, y in itertools.pairwise(s.ranges))


@given(st.lists(ranges, max_size=8))
def test_ranges_in_any_order_overlapping_or_not_make_one_set(some: list[tuple[int, int]]) -> None:
    s = RangeSet.of(some)
    assert positions(s) == positions(some)
    assert is_canonical(s)
    assert bool(s) == (len(s) > 0)


@given(st.lists(ranges, max_size=4), st.lists(ranges, max_size=4))
def test_equal_sets_are_equal_values(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert (RangeSet.of(one) == RangeSet.of(other)) == (positions(one) == positions(other))


@given(range_sets, st.data())
def test_a_set_grown_piece_by_piece_is_the_same_set(s: RangeSet, data: st.DataObject) -> None:
    pieces = [(p, p + 1) for p in positions(s)]
    grown = RangeSet()
    for piece in data.draw(st.permutations(pieces)):
        grown = grown.add(*piece)
    assert grown == s


@given(range_sets, range_sets)
def test_union_and_difference_are_those_of_sets(one: RangeSet, other: RangeSet) -> None:
    assert positions(one.union(other)) == positions(one) | positions(other)
    assert positions(one.minus(other)) == positions(one) - positions(other)
    assert is_canonical(one.union(other))
    assert is_canonical(one.minus(other))
    assert len(one) == len(positions(one))


@given(range_sets, ranges)
def test_adding_takes_exactly_what_is_not_there(s: RangeSet, r: tuple[int, int]) -> None:
    new = set(range(*r))
    if new & positions(s):
        with pytest.raises(Overlap):
            s.add(*r)
    else:
        added = s.add(*r)
        assert positions(added) == positions(s) | new
        assert is_canonical(added)


@given(range_sets, ranges)
def test_within_and_covers(s: RangeSet, r: tuple[int, int]) -> None:
    assert positions(s.within(*r)) == positions(s) & set(range(*r))
    assert is_canonical(s.within(*r))
    assert s.covers(*r) == (set(range(*r)) <= positions(s))


def test_a_set_says_what_is_in_it() -> None:
    assert str(RangeSet.of([(5, 7), (0, 2)])) == "[0, 2), [5, 7)"
    assert str(RangeSet()) == "nothing"


def test_what_is_refused_names_both_ranges() -> None:
    with pytest.raises(Overlap, match=r"\[3, 6\) overlaps \(5, 9\), which is already in the set"):
        RangeSet(((5, 9),)).add(3, 6)
