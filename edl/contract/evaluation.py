# SPDX-License-Identifier: Apache-2.0
"""The schedule of evaluations and their records. Master and workers compute it alike.

An evaluation is one pass over a split of the held-out data, or several, between two training steps. A pass
consists of evaluation batches: each takes the next `batch` records of the split, divided over the ring like a
step, and changes no weights. So a state is at (step, round): the number of steps that are in the model, and
the number of evaluation batches since the last of these steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.contract.ranges import Range
from edl.contract.steps import Steps

VALIDATION = (
    "validation"  # the split on which a model is evaluated while it is trained, unless a value says otherwise
)
FINAL = "test"  # the split that only the trained model is evaluated on, if it has records
PREDICTED = "predict"  # the split of a job that predicts
ROUND_PARTS = 16  # files of predictions per evaluation batch


def final_split(split: str, sizes: Mapping[str, int]) -> str:
    """Return the split whose results are those of the trained model.

    Args:
        split: the split on which the model is evaluated during training.
        sizes: number of records of each existing split.
    """
    return FINAL if sizes.get(FINAL) else split


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over all records of a split.

    Args:
        records: number of records in the split.
        batch: records in an evaluation batch, over all ranks.
        first: number of its first evaluation batch, counted over all of them after the same step.
    """

    split: str
    records: int
    batch: int
    first: int = 0

    @property
    def rounds(self) -> int:
        """The number of evaluation batches."""
        return -(-self.records // self.batch)

    @property
    def end(self) -> int:
        """The number of the evaluation batch after the last one of this pass."""
        return self.first + self.rounds

    def positions(self, round: int) -> Range:
        """The records of an evaluation batch, as a range of indices in the split."""
        start = (round - self.first) * self.batch
        return start, min(start + self.batch, self.records)


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The evaluations of a job.

    Args:
        batch: records in an evaluation batch, over all ranks.
        every_steps: number of steps between evaluations; 0: do not evaluate by steps.
        every_epochs: likewise for epochs.
        split: the split on which the model is evaluated during training.
        sizes: number of records of each existing split.
        alone: the job does not train: its only task is one pass over each split.
    """

    steps: Steps
    batch: int
    every_steps: int
    every_epochs: int
    split: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    alone: bool = False

    def after(self, step: int, epochs: int) -> tuple[Pass, ...]:
        """The passes that are due after `step` steps, in a job that trains `epochs` epochs."""
        if self.alone:
            return tuple(Pass(split, records, self.batch) for split, records in self.sizes.items() if records)
        ends_epoch = self.steps.ends_epoch(step)
        if not ends_epoch and not (self.every_steps and step and step % self.every_steps == 0):
            return ()
        ended = ends_epoch and self.steps.ended(step, epochs)
        due = ended or not ends_epoch or self._epoch_is_due(step)
        splits = [self.split] * due + [FINAL] * (ended and self.split != FINAL)
        passes: list[Pass] = []
        for split in splits:
            if records := self.sizes.get(split, 0):
                passes.append(Pass(split, records, self.batch, passes[-1].end if passes else 0))
        return tuple(passes)

    def _epoch_is_due(self, step: int) -> bool:
        steps, epochs = self.every_steps, self.every_epochs
        return bool((epochs and self.steps.epoch(step) % epochs == 0) or (steps and step % steps == 0))

    def rounds(self, step: int, epochs: int) -> int:
        """The number of evaluation batches of all passes that are due after `step` steps."""
        passes = self.after(step, epochs)
        return passes[-1].end if passes else 0
