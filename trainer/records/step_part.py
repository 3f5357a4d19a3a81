# SPDX-License-Identifier: Apache-2.0
"""What a worker and its reader processes say about a batch besides its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edl.contract.layout import Layout, StepSlice


@dataclass(frozen=True, slots=True)
class StepPart:
    """A rank's part of the records of a step.

    Args:
        layout: of the job's records.
        start: the position of the step's first record.
        part: the rank's part.
    """

    layout: Layout
    start: int
    part: StepSlice

    @property
    def epoch(self) -> int:
        """The epoch of the step."""
        return self.start // max(self.layout.records, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the numbers: dataclasses with slots are pickled by slow Python code."""
        layout, part = self.layout, self.part
        numbers = layout.records, layout.block, layout.shards, self.start, part.rank, part.shares
        return _unpickled, numbers


def _unpickled(
    records: int, block: int, shards: int, start: int, rank: int, shares: tuple[int, ...]
) -> StepPart:
    return StepPart(Layout(records, block, shards), start, StepSlice(rank, shares))
