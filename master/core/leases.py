"""Which positions may be trained now, who holds which, and what is left.

    todo = what is open - what is applied - what the living hold

is an equation here, not a history: after every re-forming it is computed anew from the
applied set of the ring that goes on. So no lease can be lost with a worker, and none can
be handed out twice.

An epoch opens when the one before it is wholly applied. Leases shrink towards the end of
an epoch (guided self-scheduling: Polychronopoulos and Kuck, 1987), so that nobody waits
long for the last one.
"""

from __future__ import annotations

from collections.abc import Iterable

from edl.contract.ranges import Range, RangeSet


class LeaseBook:
    """The book of leases of one job: `epochs` times `size` records."""

    def __init__(self, size: int, epochs: int) -> None:
        self.size = size
        self.epochs = epochs
        self.applied = RangeSet()
        self.todo = RangeSet()
        self.rebase(RangeSet(), ())

    @property
    def done_epochs(self) -> int:
        """How many epochs are wholly applied, counted from the first."""
        if self.size == 0:
            return self.epochs
        first = next(iter(self.applied), (0, 0))
        return first[1] // self.size if first[0] == 0 else 0

    @property
    def open(self) -> Range:
        """The positions that may be trained now: all up to the end of the epoch in progress."""
        return (0, min(self.done_epochs + 1, self.epochs) * self.size)

    @property
    def complete(self) -> bool:
        """Whether every position of every epoch is applied."""
        return self.done_epochs >= self.epochs

    def rebase(self, applied: RangeSet, held: Iterable[Range]) -> None:
        """Take `applied` as the truth: a ring goes on from it, its members hold the leases `held`."""
        self.applied = applied
        self.todo = RangeSet.of([self.open]).minus(applied).minus(RangeSet.of(held))

    def progress(self, applied: RangeSet) -> bool:
        """Note what a healthy ring has applied. True: that opened the next epoch."""
        before = self.open
        self.applied = applied
        opened = (before[1], self.open[1])
        self.todo = self.todo.union(RangeSet.of([opened]))
        return opened[0] < opened[1]

    def grant(self, members: int, local_batch: int, most_batches: int) -> Range | None:
        """The next lease for one of `members` workers, or None when nothing is left to give.

        At most `most_batches` local batches, and at most half of an even share of what is left.
        """
        fair = -(-len(self.todo) // (2 * max(members, 1)))
        batches = min(max(fair // local_batch, 1), most_batches)
        lease, self.todo = self.todo.take(batches * local_batch)
        return lease
