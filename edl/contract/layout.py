"""How the records of a job lie, and which part of each step a rank has: values that masters and workers
exchange.

What they mean is told by `edl.contract.order`, which only workers need (and NumPy with it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_SHARDS = 64
WHOLE = 8  # shards for each rank, so that each of them is read by one rank


@dataclass(frozen=True, slots=True)
class Layout:
    """How the records of a job lie: the same for all of its workers.

    Args:
        records: in one epoch.
        block: consecutive records that are read together; 1: any record can be read by itself.
        shards: of how many blocks a step mixes records.
    """

    records: int
    block: int = 1
    shards: int = 1

    @staticmethod
    def fitting(
        records: int, record_bytes: float, buffer_bytes: float, ranks: int, together: int = 1
    ) -> Layout:
        """The layout for a reader that reads consecutive records.

        Args:
            record_bytes: of one record in memory. buffer_bytes: what the open blocks of all shards may take
            together; a rank has those of its shards. ranks: of the ring that is expected. together: how many
            consecutive records are read at once anyway; a block is a multiple of it, so that none is read
            twice.
        """
        shards = max(LEAST_SHARDS, WHOLE * ranks)
        # As many blocks as fill all shards to the end, or nearly: no few are left over for the last steps.
        rows = max(math.ceil(records * record_bytes / buffer_bytes), 1)
        block = max(math.ceil(records / (shards * rows)), 1)
        if together > 1:
            block = math.ceil(block / together) * together
            shards = max(min(shards, int(buffer_bytes / max(block * record_bytes, 1))), 1)
        return Layout(records, block, shards)


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of each step a rank has.

    Args:
        rank: from 0.
        shares: of all ranks, in proportion to each other; all at least 0, not all 0.
    """

    rank: int
    shares: tuple[int, ...]

    @staticmethod
    def even(rank: int, size: int) -> Part:
        return Part(rank, (1,) * size)

    @property
    def stretch(self) -> tuple[float, float]:
        """The rank's stretch of [0, 1)."""
        total = sum(self.shares)
        return sum(self.shares[: self.rank]) / total, sum(self.shares[: self.rank + 1]) / total

    def of(self, count: int) -> tuple[int, int]:
        """The rank's stretch of range(count)."""
        total = sum(self.shares)
        before, after = sum(self.shares[: self.rank]), sum(self.shares[: self.rank + 1])
        return count * before // total, count * after // total
