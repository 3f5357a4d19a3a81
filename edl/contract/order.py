# SPDX-License-Identifier: Apache-2.0
"""The order in which an epoch visits its records, and which rank reads each record: computed, never stored.

The mapping from places of an epoch to records is a function of (layout, seed, epoch) alone. It is the same
for any number of workers, on each of them, before and after any failure. It takes O(1) memory for 10^9
records.

**Random access.** If a reader can read any record by itself (`block` is 1), the order is a pseudo-random
permutation of all records. Each rank has one interval of each step.

**Blocks.** A file is read in blocks of `block` consecutive records, and each block is read once. The blocks
are dealt in a pseudo-random order to virtual shards, in turn. So a shard is a sequence of blocks, each of
them shuffled. The places of the epoch are taken from all shards in turn, so a step mixes records of as many
blocks as there are shards. A rank reads the shards in an interval of [0, shards) as long as its share. That
divides each step among the ranks, evenly if there are many more shards than ranks, and no two ranks read the
same block. With fewer than `WHOLE` shards per rank, an interval can end within a shard, whose records are
then divided between two ranks: the parts are even again, and both ranks read its blocks.

Shards are ordered on [0, shards) with a stride near the golden ratio, so that shards that are used one after
the other are spread all over this interval. A shard that is divided is divided in the same way. Those are
low-discrepancy sequences (Kuipers and Niederreiter, "Uniform Distribution of Sequences", 1974).

The permutations are Feistel networks with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002): bijections by construction, with nothing to store. Their round function is splitmix64's
finaliser (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from edl.contract.layout import WHOLE, Layout, StepSlice

WINDOW, MAX_WINDOWS = 16384, 4  # places that are looked up together; number of such windows in the cache
GOLDEN = (5**0.5 - 1) / 2
_ROUNDS = 6
_GOLDEN_64 = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1

Integers: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]
Found: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]


class Order:
    """The order of the epochs of a job.

    Args:
        shuffle: False keeps the order of the data set.
        window: number of places that are looked up together. More is faster if all of them are needed.
    """

    def __init__(self, layout: Layout, seed: int, shuffle: bool = True, window: int = WINDOW):
        self.layout, self.shuffle, self._width = layout, shuffle, window
        self._seed = mix(seed)
        self._blocks = -(-layout.records // layout.block)
        self._shards = max(min(layout.shards, self._blocks), 1)
        self._windows: dict[tuple[int, int], Found] = {}

    @property
    def in_blocks(self) -> bool:
        """Whether records are read block by block; else a part is one range, or any records."""
        return self.shuffle and self.layout.block > 1

    def part(self, start: int, stop: int, part: StepSlice) -> tuple[np.ndarray, np.ndarray]:
        """The rank's records of a step, in order, int64 [records]; and the shard of each, int64 [records].

        Args:
            start, stop: positions of the step.

        Raises:
            ValueError: the range is empty, negative, or spans two epochs.
        """
        if self.in_blocks:
            records, shard, point = self._at(start, stop)
            first, last = self._stretch(part)
            ours = (first <= point) & (point < last)
            return records[ours], shard[ours]
        begin, end = part.of(stop - start)
        records = self.records(start + begin, start + end) if begin < end else np.zeros(0, np.int64)
        return records, np.zeros_like(records)

    def shards(self, part: StepSlice) -> np.ndarray:
        """Whether the rank reads any records of each shard, bool [shards]."""
        first, last = self._stretch(part)
        begins = self._coordinate(np.arange(self._shards))
        return (begins + 1 > first) & (begins < last)

    def _stretch(self, part: StepSlice) -> tuple[float, float]:
        """The rank's interval of [0, shards)."""
        first, last = (edge * self._shards for edge in part.stretch)
        whole = self._shards >= WHOLE * len(part.shares)
        return (round(first), round(last)) if whole else (first, last)

    def _coordinate(self, shard: np.ndarray) -> np.ndarray:
        """The start of each shard on [0, shards). Shards with successive numbers are far apart there."""
        return shard * _stride(self._shards) % self._shards

    def records(self, start: int, stop: int) -> np.ndarray:
        """The records at the positions [start, stop), int64 [stop - start].

        Raises:
            ValueError: the range is empty, negative, or spans two epochs.
        """
        return self._at(start, stop)[0]

    def _at(self, start: int, stop: int) -> Found:
        """Look up the record of each position, its shard, and its coordinate on [0, shards).

        Raises:
            ValueError: the range is empty, or crosses the end of an epoch.
        """
        size = self.layout.records
        if not (size and 0 <= start < stop and start // size == (stop - 1) // size):
            raise ValueError(f"[{start}, {stop}) is not a range inside one epoch of {size} records")
        epoch, place = divmod(start, size)
        end, pieces = place + stop - start, []
        for number in range(place // self._width, (end - 1) // self._width + 1):
            records, shard, point = self._window(epoch, number)
            here = slice(max(place - number * self._width, 0), end - number * self._width)
            pieces.append((records[here], shard[here], point[here]))
        if len(pieces) == 1:
            return pieces[0]
        records, shard, point = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return records, shard, point

    def _window(self, epoch: int, number: int) -> Found:
        """Compute `_at` for the places of one window of an epoch. The last few windows are cached.

        NumPy takes as long for a few records as for some thousands, and a step may have only a few.
        """
        if (kept := self._windows.get((epoch, number))) is not None:
            return kept
        first = number * self._width
        places = np.arange(first, min(first + self._width, self.layout.records), dtype=np.int64)
        nothing = np.zeros_like(places)
        found: Found
        if not self.shuffle:
            found = places, nothing, nothing
        elif self.in_blocks:
            shard, index = self._turns(epoch).locate(places)
            point = self._coordinate(shard) + index * GOLDEN % 1.0
            found = self._of_blocks(epoch, shard, index), shard, point
        else:
            found = permute(places, self.layout.records, self._key(epoch)), nothing, nothing
        for array in found:
            array.setflags(write=False)  # callers get slices of it
        while len(self._windows) >= MAX_WINDOWS:
            del self._windows[next(iter(self._windows))]
        self._windows[epoch, number] = found
        return found

    def _key(self, epoch: int) -> int:
        return mix(self._seed ^ epoch)

    def _turns(self, epoch: int) -> _Turns:
        """The `_Turns` of an epoch. Shard lengths depend on the slot of the last, maybe short, block."""
        key = self._key(epoch)
        slot = int(unpermute(np.array([self._blocks - 1]), self._blocks, key)[0])
        return _turns(self.layout.records, self.layout.block, self._shards, slot)

    def _of_blocks(self, epoch: int, shard: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The records at `index` of each `shard`."""
        block, key = self.layout.block, self._key(epoch)
        turns = self._turns(epoch)
        # After the short block, a shard continues as if that block were as long as the others.
        index = index + turns.missing * ((shard == turns.short_shard) & (index >= turns.short_ends_at))
        slot: np.ndarray = index // block * self._shards + shard
        first = int(slot.min())  # the slots of a window follow one another, nearly without gaps
        blocks = permute(np.arange(first, int(slot.max()) + 1), self._blocks, key)
        length = np.minimum(block, self.layout.records - blocks * block)
        which = slot - first
        shuffled = permute(index % block, length, _mix(blocks.astype(np.uint64) ^ np.uint64(key)), which)
        records: np.ndarray = (blocks * block)[which] + shuffled
        return records


class _Turns:
    """The mapping from places of an epoch to (shard, place in the shard).

    Shards differ in length. When the shorter shards are used up, places are taken from the longer ones only:
    there are at most three such segments.
    """

    def __init__(self, records: int, block: int, shards: int, short_slot: int):
        blocks = -(-records // block)
        self.missing = blocks * block - records  # in the short block
        self.short_shard = short_slot % shards
        self.short_ends_at = (short_slot // shards + 1) * block - self.missing
        lengths = np.array([-(-(blocks - i) // shards) * block for i in range(shards)])
        lengths[self.short_shard] -= self.missing
        self._starts, self._done, self._active = [0], [0], [np.arange(shards)]
        for level in sorted(set(lengths.tolist()))[:-1]:
            active = self._active[-1]
            self._starts.append(self._starts[-1] + (level - self._done[-1]) * len(active))
            self._done.append(level)
            self._active.append(np.flatnonzero(lengths > level))

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard, and the place in the shard, of each place; both int64, shaped like `places`."""
        shard, index = np.empty_like(places), np.empty_like(places)
        segment = np.searchsorted(self._starts, places, side="right") - 1
        for s in np.unique(segment):
            here = segment == s
            within, turn = np.divmod(places[here] - self._starts[s], len(self._active[s]))
            shard[here], index[here] = self._active[s][turn], self._done[s] + within
        return shard, index


@lru_cache(maxsize=4)
def _turns(records: int, block: int, shards: int, short_slot: int) -> _Turns:
    return _Turns(records, block, shards, short_slot)


@lru_cache(maxsize=8)
def _stride(n: int) -> int:
    """The number nearest to n times the golden ratio and prime to n: its multiples cover range(n) mod n."""
    return min((s for s in range(1, n + 1) if math.gcd(s, n) == 1), key=lambda s: abs(s - n * GOLDEN))


# --- permutations


def mix(x: int) -> int:
    """Map 64 bits to 64 well mixed bits with splitmix64's finaliser."""
    return int(_mix(np.array([x & _WORD], np.uint64))[0])


def record_seeds(seed: int, epoch: int, records: Integers) -> Integers:
    """A seed for each record in an epoch, int64 [records, 2], for TensorFlow's stateless operations."""
    key = mix(mix(seed) ^ mix(epoch))
    words = np.stack([np.full(len(records), key, np.uint64), _mix(records.astype(np.uint64))], 1)
    return words.view(np.int64)


def _mix(x: Words) -> Words:
    x = x + np.uint64(_GOLDEN_64)  # wraps, as it should
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def permute(
    index: Integers, size: Integers | int, key: Integers | int, which: Integers | None = None
) -> Integers:
    """Apply the pseudo-random permutation `key` of range(size) to each of `index`.

    Args:
        index: int64 [n], each in range(size).
        size, key: a number for all indices, or [k].
        which: int64 [n], the size and key of each index; None if there is one of each, or if k is n.

    Raises:
        ValueError: an index is out of range.
    """
    return _network(index, size, key, which, forward=True)


def unpermute(index: Integers, size: Integers | int, key: Integers | int) -> Integers:
    """Apply the inverse of `permute` to each of `index`."""
    return _network(index, size, key, None, forward=False)


def _network(
    index: Integers, size: Integers | int, key: Integers | int, which: Integers | None, forward: bool
) -> Integers:
    sizes, keys = np.broadcast_arrays(np.atleast_1d(np.asarray(size, np.uint64)), np.asarray(key, np.uint64))
    # Half of the bits of size - 1, rounded up: the network permutes [0, 4^half).
    bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]
    half = np.maximum((bits + 1) // 2, 1).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    rounds = [_mix(keys + np.uint64(r)) for r in (range(_ROUNDS) if forward else reversed(range(_ROUNDS)))]
    every = len(sizes) == 1  # all indices have the same size and key
    of = which if which is not None else np.arange(0 if every else len(index))
    value = index.astype(np.uint64)
    if (index < 0).any() or (value >= (sizes if every else sizes[of])).any():
        raise ValueError(f"not all of {index} are in range({size})")
    width = 1 << int(half.max(initial=1))
    tabled = len(sizes) * width <= len(index)  # a round has fewer arguments than there are indices
    if tabled:
        halves = np.arange(width, dtype=np.uint64)
        rounds = [(_mix(halves ^ k[:, None]) & mask[:, None]).ravel() for k in rounds]
    outside, last = np.arange(len(index)), value  # cycle walking: leave the network only inside [0, size)
    while len(outside):
        h, m, limit = (half, mask, sizes) if every else (half[of], mask[of], sizes[of])
        left, right = last >> h, last & m
        row = 0 if every else of * width
        for keys_or_table in rounds:
            kept = right if forward else left
            if tabled:
                mixed = keys_or_table[kept.view(np.int64) + row]
            else:
                mixed = _mix(kept ^ (keys_or_table if every else keys_or_table[of])) & m
            left, right = (right, left ^ mixed) if forward else (right ^ mixed, left)
        last = (left << h) | right
        value[outside] = last
        again = last >= limit
        outside, last, of = outside[again], last[again], of if every else of[again]
    return value.astype(np.int64)
