"""The ledger: which records make up which step. Arithmetic, the same for the master and for every worker.

All epochs lie on one line of positions: `epoch * records + place`. A step is a range of this line: the next
`batch` positions of its epoch, and the last step of an epoch what is left of it, as in Keras. Steps are
counted over the whole job, from 0. So the number of steps that are in a model says which records are, and
how often: nobody has to keep a list of them. Which record lies at a position is told by
`edl.contract.order`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edl.contract.ranges import Range


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a job.

    Args:
        records: in one epoch; 0 is allowed, and then there are no steps.
        batch: records in a step, over all ranks.
    """

    records: int
    batch: int

    @property
    def per_epoch(self) -> int:
        return -(-self.records // self.batch)

    def begins_at(self, step: int) -> int:
        """The first position of `step`, which is also the number of records that all steps before it have."""
        if not self.records:
            return 0
        epoch, within = divmod(step, self.per_epoch)
        return epoch * self.records + within * self.batch

    def positions(self, step: int) -> Range:
        return self.begins_at(step), self.begins_at(step + 1)

    def records_of(self, steps: Iterable[Range]) -> int:
        """How many records these ranges of steps have."""
        return sum(self.begins_at(stop) - self.begins_at(start) for start, stop in steps)

    def epoch(self, step: int) -> int:
        """In which epoch `step` is, from 0; so also how many epochs are whole when so many steps are done."""
        return step // self.per_epoch if self.records else 0

    def begun(self, step: int) -> int:
        """How many epochs have begun when so many steps are done."""
        return -(-step // self.per_epoch) if self.records else 0

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is whole when so many steps are done, and no other has begun."""
        return self.records > 0 and step > 0 and step % self.per_epoch == 0

    def end(self, step: int, epochs: int) -> int:
        """At which step training ends that is to have `epochs` epochs, and is at `step` when it hears of
        that: with the epoch that has begun, if these are over already."""
        return max(epochs, self.begun(step)) * self.per_epoch

    def ended(self, step: int, epochs: int) -> bool:
        """Whether nothing is left to train."""
        return step >= self.end(step, epochs)
