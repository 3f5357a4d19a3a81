# SPDX-License-Identifier: Apache-2.0
"""The control vector: what every rank reports to all others in each step.

It travels with the gradients in the all-reduce. So all ranks read the same values at the same step; the
protocol needs no other agreement.

    [ records, leave, step, round, epochs, bad records, in sync, checkpoint, loss sum, non-finite ]

Its length does not depend on the ring's size. float32 represents whole numbers exactly only up to 2^24, so
the step is sent modulo 4096.

An evaluation batch (edl/contract/evaluation.py) carries a control vector, too. Its non-finite field
reports that a rank could not evaluate its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

RECORDS, LEAVE, STEP, ROUND, EPOCHS, BAD, IN_SYNC, CHECKPOINT, LOSS, NONFINITE = range(10)
LENGTH = 10
STEPS = 4096  # sent modulo this: the sum is exact for up to 4096 ranks


def write(
    step: int,
    leave: bool = False,
    epochs: int = 0,
    bad: int = 0,
    in_sync: bool = True,
    checkpoint: bool = False,
    round: int = 0,
) -> np.ndarray:
    """This rank's contribution, float32 [LENGTH].

    If the rank has a batch, the model's graph fills in the records, loss and non-finite fields.

    Args:
        step: the step that the rank makes, counted over the job.
        leave: whether the rank is to leave the ring after it.
        epochs: the changed number of epochs to train, from rank 0 alone; 0: it has not changed.
        bad: the number of bad records in the rank's part; they are left out.
        in_sync: whether the rank has the state of this step.
        checkpoint: whether the rank can write its part of a checkpoint after this step; for rank 0: and one
            is due.
        round: the number of the evaluation batch after that step, if the rank makes one.
    """
    vector = np.zeros(LENGTH, np.float32)
    vector[LEAVE:LOSS] = leave, step % STEPS, round % STEPS, epochs, bad, in_sync, checkpoint
    return vector


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a step's summed control vector says, the same on every rank."""

    records: int
    loss: float  # mean over the step's records; nan when there were none
    leave: bool
    nonfinite: bool
    steps: int  # the sum of all ranks' values
    epochs: int  # the changed number of epochs to train; 0: it has not changed
    bad: int  # records that are left out of the step
    synced_ranks: int  # number of ranks that have the state
    writers: int = 0  # number of ranks that can write their part of a checkpoint; all ranks: one is due
    rounds: int = 0  # the sum of all ranks' values

    def all_at(self, step: int, round: int, ranks: int) -> bool:
        """Whether all ranks made this step, or this evaluation batch after it."""
        return self.steps == step % STEPS * ranks and self.rounds == round % STEPS * ranks


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of one step's all-reduce on one rank."""

    agreed: Agreed
    at_fault: bool  # whether this rank's own contribution is not finite
    waited: float  # seconds for the other ranks, after this rank's contribution was ready
    nbytes: int  # memory that it takes while it is pending
    given: Any  # the summed gradients, in the form of the learner that made them


def read(vector: np.ndarray) -> Agreed:
    """The meaning of a summed control vector, float32 [LENGTH]."""
    records = int(vector[RECORDS])
    return Agreed(
        records=records,
        loss=float(vector[LOSS]) / records if records else float("nan"),
        leave=vector[LEAVE] > 0,
        nonfinite=vector[NONFINITE] > 0,
        steps=int(vector[STEP]),
        epochs=int(vector[EPOCHS]),
        bad=int(vector[BAD]),
        synced_ranks=int(vector[IN_SYNC]),
        writers=int(vector[CHECKPOINT]),
        rounds=int(vector[ROUND]),
    )
