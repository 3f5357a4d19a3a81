"""The control vector: what every rank tells every other in each step.

It is a part of what a step sums over the ring. So all ranks read the same values at the same step, and that
is all the agreement the protocol needs.

    [ records, leave, step, round, change, bad records, holders, checkpoint, loss sum, non-finite ]

Its length does not depend on the ring. float32 holds whole numbers up to 2^24, so the number of the step is
told by its last digits.

A round of an evaluation (edl/contract/evaluation.py) is summed with one, too. Non-finite says then that a
rank could not evaluate its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

RECORDS, LEAVE, STEP, ROUND, CHANGE, BAD, HOLDS, CHECKPOINT, LOSS, NONFINITE = range(10)
LENGTH = 10
STEPS = 4096  # told modulo this: the sum is exact for as many ranks


def write(
    step: int,
    leave: bool = False,
    change: bool = False,
    bad: int = 0,
    holds: bool = True,
    checkpoint: bool = False,
    round: int = 0,
) -> np.ndarray:
    """This rank's contribution, float32 [LENGTH].

    The records, loss and non-finite fields of a rank with a batch are written by the model's
    graph, which knows them.

    Args:
        step: that the rank takes, counted over the job.
        leave: whether the rank is to leave the ring after it.
        change: whether the rank has been told of a change of the task that the ring has not made yet.
        bad: how many records are missing in the rank's part, because they are bad.
        holds: whether the rank has the state of this step.
        checkpoint: whether the rank can write its part of one after this step; of rank 0: and one is due.
        round: which round after that step it takes, if it takes one.
    """
    vector = np.zeros(LENGTH, np.float32)
    vector[LEAVE:LOSS] = leave, step % STEPS, round % STEPS, change, bad, holds, checkpoint
    return vector


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a step's summed control vector says, the same on every rank."""

    records: int
    loss: float  # mean over the step's records; nan when there were none
    leave: bool
    nonfinite: bool
    steps: int  # the sum of what the ranks said
    changes: int  # how many ranks know of the next change
    bad: int  # records that are left out of the step
    holders: int  # how many ranks have the state
    writers: int = 0  # how many ranks can write their part of a checkpoint; of all: one is due
    rounds: int = 0  # the sum of what the ranks said

    def all_at(self, step: int, round: int, ranks: int) -> bool:
        """Whether all ranks took this step, or this round after it."""
        return self.steps == step % STEPS * ranks and self.rounds == round % STEPS * ranks


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What the sums of one step have given a rank, all of which have come back."""

    agreed: Agreed
    at_fault: bool  # whether this rank's own part is not finite
    waited: float  # seconds, for the other ranks: from the moment at which its part was ready
    nbytes: int  # that it takes to keep them
    given: Any  # what is to be applied to the model, as the learner that made the sums has it
    round: int = 0  # of a round of an evaluation: which one is next


def read(vector: np.ndarray) -> Agreed:
    """The meaning of a summed control vector, float32 [LENGTH]."""
    records = int(vector[RECORDS])
    return Agreed(
        records=records,
        loss=float(vector[LOSS]) / records if records else float("nan"),
        leave=vector[LEAVE] > 0,
        nonfinite=vector[NONFINITE] > 0,
        steps=int(vector[STEP]),
        changes=int(vector[CHANGE]),
        bad=int(vector[BAD]),
        holders=int(vector[HOLDS]),
        writers=int(vector[CHECKPOINT]),
        rounds=int(vector[ROUND]),
    )
