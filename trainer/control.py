"""The control vector: what every rank tells every other in each step.

It rides at the end of the one vector that a step sums over the ring. So all ranks read the
same values at the same step, and that is all the agreement the protocol needs.

    [ records, loss sum, leave, non-finite, idle | start, start, count of rank 0 | ... ]

A rank writes its own slot and leaves the others zero: the sum is exact. float32 holds whole
numbers up to 2^24, so a position is two numbers below that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edl.contract.ranges import Range

RECORDS, LOSS, LEAVE, NONFINITE, IDLE = range(5)
HEADER = 5
SLOT = 3
LIMB = 1 << 24
LARGEST_BATCH = LIMB - 1


def length(size: int) -> int:
    """Floats in the control vector of a ring of `size`."""
    return HEADER + SLOT * size


def write(rank: int, size: int, batch: Range | None, leave: bool) -> np.ndarray:
    """This rank's contribution, float32 [length(size)]. `batch` is what it trains on in this step.

    The records, loss and non-finite fields of a rank with a batch are written by the model's
    graph, which knows them.
    """
    vector = np.zeros(length(size), np.float32)
    vector[LEAVE] = leave
    if batch is None:
        vector[IDLE] = 1
    else:
        start, stop = batch
        at = HEADER + SLOT * rank
        vector[at : at + SLOT] = (start // LIMB, start % LIMB, stop - start)
    return vector


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a step's summed control vector says, the same on every rank."""

    records: int
    loss: float  # mean over the step's records; nan when there were none
    leave: bool
    nonfinite: bool
    idle: bool  # no rank had a batch
    batches: tuple[Range, ...]  # of all ranks


def read(vector: np.ndarray) -> Agreed:
    """The meaning of a summed control vector, float32 [length(size)]."""
    slots = vector[HEADER:].reshape(-1, SLOT).astype(np.int64)
    starts = slots[:, 0] * LIMB + slots[:, 1]
    records = int(vector[RECORDS])
    return Agreed(
        records=records,
        loss=float(vector[LOSS]) / records if records else float("nan"),
        leave=vector[LEAVE] > 0,
        nonfinite=vector[NONFINITE] > 0,
        idle=int(vector[IDLE]) == len(slots),
        batches=tuple(
            (start, start + count)
            for start, count in zip(starts.tolist(), slots[:, 2].tolist(), strict=True)
            if count
        ),
    )
