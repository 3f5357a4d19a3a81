"""The order in which an epoch visits its records: computed, never stored.

A position is a record's place on one number line over all epochs: `epoch * size + place`.
This module maps a range of positions to record indices. The mapping is a function of
(size, seed, block, epoch) alone, so it is the same for any number of workers, on any of
them, before and after any failure; and it takes O(block) memory for 10^9 records.

Blocks of `block` consecutive records are visited in a pseudo-random order, and the records
within a block in a pseudo-random order too. So a reader touches one block at a time, which
is what files like, and a dataset smaller than a block is shuffled wholly.

The order of the blocks is a Feistel network over the block numbers with cycle walking
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): a bijection by
construction, with nothing to store. Its round function is splitmix64's finaliser
(Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 6


def _mix(x: int) -> int:
    """splitmix64's finaliser: 64 bits to 64 well mixed bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Where `index` goes in the pseudo-random permutation `key` of range(size).

    Raises:
        ValueError: index is not in range(size).
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:  # cycle walking: the network permutes [0, 4^half); leave it only inside [0, size)
        left, right = index >> half, index & mask
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(key + round_)) & mask)
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True)
class Order:
    """The visiting order of a dataset of `size` records.

    Args:
        size: records in one epoch; 0 is allowed.
        seed: of the order; each epoch derives its own.
        block: records per block.
        shuffle: False gives the records as they lie.
    """

    size: int
    seed: int
    block: int
    shuffle: bool = True

    def records(self, start: int, stop: int) -> np.ndarray:
        """Record indices of the positions [start, stop), in order, shape [stop - start], int64.

        Raises:
            ValueError: the range is empty, negative, or spans two epochs.
        """
        if not (self.size and 0 <= start < stop and start // self.size == (stop - 1) // self.size):
            raise ValueError(f"[{start}, {stop}) is not a range inside one epoch of {self.size} records")
        epoch, place = divmod(start, self.size)
        end = place + stop - start
        if not self.shuffle:
            return np.arange(place, end, dtype=np.int64)
        parts = []
        while place < end:
            slot, first = self._slot(place, epoch)
            records = self._block(slot, epoch)
            parts.append(records[place - first : end - first])
            place = first + len(records)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _key(self, epoch: int) -> int:
        return _mix(_mix(self.seed & _MASK) ^ epoch)

    def _slot(self, place: int, epoch: int) -> tuple[int, int]:
        """The slot that holds `place` and the slot's first place.

        Every slot is `block` long but the one that the last, shorter block was permuted to.
        """
        blocks = -(-self.size // self.block)
        short = self.size - (blocks - 1) * self.block
        short_slot = _slot_of(blocks - 1, blocks, self._key(epoch))
        short_first = short_slot * self.block
        if place < short_first:
            return place // self.block, place // self.block * self.block
        if place < short_first + short:
            return short_slot, short_first
        later = (place - short_first - short) // self.block
        return short_slot + 1 + later, short_first + short + later * self.block

    def _block(self, slot: int, epoch: int) -> np.ndarray:
        """The records of the block in `slot`, in the order in which the epoch visits them."""
        return _shuffled_block(slot, self.size, self.block, self._key(epoch))


@lru_cache(maxsize=8)
def _slot_of(block: int, blocks: int, key: int) -> int:
    """The slot that `permute` sends to `block`: the network run backwards."""
    half = max(1, ((blocks - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    index = block
    while True:
        left, right = index >> half, index & mask
        for round_ in reversed(range(_ROUNDS)):
            left, right = right ^ (_mix(left ^ _mix(key + round_)) & mask), left
        index = (left << half) | right
        if index < blocks:
            return index


@lru_cache(maxsize=8)
def _shuffled_block(slot: int, size: int, block: int, key: int) -> np.ndarray:
    number = permute(slot, -(-size // block), key)
    first = number * block
    count = min(block, size - first)
    shuffled = first + np.random.default_rng([key, number]).permutation(count)
    shuffled.setflags(write=False)
    return shuffled.astype(np.int64, copy=False)
