# SPDX-License-Identifier: Apache-2.0
"""Layout of a job's records, and each rank's part of a step: values that masters and workers exchange.

`edl.contract.order` interprets these values. Only workers need it, and it needs NumPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_SHARDS = 64
WHOLE = 8  # shards per rank from which on each shard is read by one rank only


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a job's records, the same for all of its workers.

    Args:
        records: number of records in one epoch.
        block: number of consecutive records that are read together; 1: any record can be read by itself.
        shards: number of blocks whose records a step mixes.
    """

    records: int
    block: int = 1
    shards: int = 1

    @staticmethod
    def fitting(
        records: int, record_bytes: float, buffer_bytes: float, ranks: int, together: int = 1
    ) -> Layout:
        """Compute the layout for a reader that reads consecutive records.

        Args:
            record_bytes: size of one record in memory.
            buffer_bytes: total size of the open blocks of all shards; a rank holds those of its shards.
            ranks: expected size of the ring.
            together: number of consecutive records that the reader reads at once anyway. A block is a
                multiple of it, so that no record is read twice.
        """
        shards = max(MIN_SHARDS, WHOLE * ranks)
        # Choose a number of blocks that fills (nearly) all shards to the end, so that the last steps, too,
        # mix the records of many blocks.
        rows = max(math.ceil(records * record_bytes / buffer_bytes), 1)
        block = max(math.ceil(records / (shards * rows)), 1)
        if together > 1:
            block = math.ceil(block / together) * together
            shards = max(min(shards, int(buffer_bytes / max(block * record_bytes, 1))), 1)
        return Layout(records, block, shards)


@dataclass(frozen=True, slots=True)
class StepSlice:
    """A rank's part of each step.

    Args:
        rank: number of the rank, from 0.
        shares: shares of all ranks, in proportion to each other; all at least 0, not all 0.
    """

    rank: int
    shares: tuple[int, ...]

    @staticmethod
    def even(rank: int, size: int) -> StepSlice:
        """Return the part of a rank if all ranks have equal shares."""
        return StepSlice(rank, (1,) * size)

    @property
    def stretch(self) -> tuple[float, float]:
        """The rank's interval of [0, 1)."""
        total = sum(self.shares)
        return sum(self.shares[: self.rank]) / total, sum(self.shares[: self.rank + 1]) / total

    def in_blocks(self, blocks: int) -> StepSlice:
        """Return the part with each share rounded to a number of blocks; `blocks` is their sum."""
        parts = (StepSlice(rank, self.shares).of(blocks) for rank in range(len(self.shares)))
        return StepSlice(self.rank, tuple(stop - start for start, stop in parts))

    def of(self, count: int) -> tuple[int, int]:
        """The rank's interval of range(count)."""
        total = sum(self.shares)
        before, after = sum(self.shares[: self.rank]), sum(self.shares[: self.rank + 1])
        return count * before // total, count * after // total
