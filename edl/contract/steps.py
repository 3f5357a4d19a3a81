# SPDX-License-Identifier: Apache-2.0
"""The ledger: which records make up which step. Master and workers compute this alike.

All epochs lie on one line of positions: `epoch * records + place`. A step is a range of positions: the next
`batch` positions of its epoch. The last step of an epoch has the remaining records, as in Keras. Steps are
counted over the whole job, from 0. So the number of steps in a model determines which records are in it, and
how often; no list of records has to be kept. `edl.contract.order` maps positions to records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edl.contract.ranges import Range


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a job.

    Args:
        records: number of records in one epoch; 0 is allowed, and then there are no steps.
        batch: records in a step, over all ranks.
    """

    records: int
    batch: int

    @property
    def per_epoch(self) -> int:
        """The number of steps of an epoch; the last one may have fewer records."""
        return -(-self.records // self.batch)

    def begins_at(self, step: int) -> int:
        """The first position of `step`, which is also the total number of records of all steps before it."""
        if not self.records:
            return 0
        epoch, within = divmod(step, self.per_epoch)
        return epoch * self.records + within * self.batch

    def positions(self, step: int) -> Range:
        """Return the positions of a step's records, counted over all epochs, as [start, stop)."""
        return self.begins_at(step), self.begins_at(step + 1)

    def records_of(self, steps: Iterable[Range]) -> int:
        """The number of records in these ranges of steps."""
        return sum(self.begins_at(stop) - self.begins_at(start) for start, stop in steps)

    def epoch(self, step: int) -> int:
        """The epoch of `step`, from 0; also the number of complete epochs after `step` steps."""
        return step // self.per_epoch if self.records else 0

    def begun(self, step: int) -> int:
        """The number of epochs that have begun after `step` steps."""
        return -(-step // self.per_epoch) if self.records else 0

    def ends_epoch(self, step: int) -> bool:
        """Whether `step` steps end an epoch: the epoch is complete, and the next one has not begun."""
        return self.records > 0 and step > 0 and step % self.per_epoch == 0

    def end(self, step: int, epochs: int) -> int:
        """The step at which training ends if the number of epochs is set to `epochs` at `step`.

        If these epochs are over already, training ends with the epoch that has begun.
        """
        return max(epochs, self.begun(step)) * self.per_epoch

    def ended(self, step: int, epochs: int) -> bool:
        """Whether training is complete after `step` steps."""
        return step >= self.end(step, epochs)
