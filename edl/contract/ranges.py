# SPDX-License-Identifier: Apache-2.0
"""Sets of positions, kept as sorted half-open ranges that neither touch nor overlap.

The applied steps of a ring, the rest of a lease and the missing records of an epoch are all values of this
one type. Values never change; each operation returns a new one.

Promise: `add` refuses a position that is already in the set. That refusal is the assertion behind exactly
once: a range whose gradients are in the model can never enter it again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from edl.errors import EdlError

Range = tuple[int, int]
"""A half-open range of positions: (start, stop), start < stop."""


class Overlap(EdlError):
    """A range was added to a set that already holds a part of it."""


@dataclass(frozen=True, slots=True)
class RangeSet:
    """An immutable set of positions. Equal sets are equal values."""

    ranges: tuple[Range, ...] = ()

    @staticmethod
    def of(ranges: Iterable[Range]) -> RangeSet:
        """The union of `ranges`, given in any order, overlapping or not; empty ones are dropped."""
        merged: list[Range] = []
        for start, stop in sorted((a, b) for a, b in ranges if a < b):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return RangeSet(tuple(merged))

    def add(self, start: int, stop: int) -> RangeSet:
        """This set with [start, stop).

        Raises:
            Overlap: a part of it is already in the set.
        """
        if start >= stop:
            return self
        ranges = self.ranges
        # The neighbours: the last range that starts before `start`, and the first that starts at or after it.
        after = bisect_left(ranges, (start, start))
        before = after - 1
        if before >= 0 and ranges[before][1] > start:
            raise Overlap(f"[{start}, {stop}) overlaps {ranges[before]}, which is already in the set")
        if after < len(ranges) and ranges[after][0] < stop:
            raise Overlap(f"[{start}, {stop}) overlaps {ranges[after]}, which is already in the set")
        first, last = after, after
        if before >= 0 and ranges[before][1] == start:
            first, start = before, ranges[before][0]
        if after < len(ranges) and ranges[after][0] == stop:
            last, stop = after + 1, ranges[after][1]
        return RangeSet((*ranges[:first], (start, stop), *ranges[last:]))

    def union(self, other: RangeSet) -> RangeSet:
        """Return the set of the integers that are in either set."""
        return RangeSet.of((*self.ranges, *other.ranges))

    def minus(self, other: RangeSet) -> RangeSet:
        """The positions of this set that are not in `other`."""
        left: list[Range] = []
        taken = other.ranges
        for start, stop in self.ranges:
            i = max(bisect_right(taken, (start, start)) - 1, 0)
            while i < len(taken) and taken[i][0] < stop:
                a, b = taken[i]
                if start < a:
                    left.append((start, a))
                start = max(start, b)
                i += 1
            if start < stop:
                left.append((start, stop))
        return RangeSet(tuple(left))

    def within(self, start: int, stop: int) -> RangeSet:
        """The positions of this set in [start, stop)."""
        if start >= stop:
            return RangeSet()
        return RangeSet(
            tuple((max(a, start), min(b, stop)) for a, b in self.ranges if a < stop and b > start)
        )

    def covers(self, start: int, stop: int) -> bool:
        """Whether every position of [start, stop) is in this set."""
        if start >= stop:
            return True
        i = bisect_right(self.ranges, (start, float("inf"))) - 1
        return i >= 0 and self.ranges[i][1] >= stop

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[Range]:
        return iter(self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"[{a}, {b})" for a, b in self.ranges) or "nothing"
