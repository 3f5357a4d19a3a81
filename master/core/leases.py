"""Records that single workers take: who has which range, and what is left.

For work that needs no ring: each range is done by one worker, in any order. (Training has no leases: a ring
takes whole steps, `edl.master.core.training`.) What a lost worker held is handed out again; what was done
stays done.

    all = todo + held + done
"""

from __future__ import annotations

from edl.contract.ids import WorkerId
from edl.contract.ranges import Range, RangeSet


class LeaseBook:
    """The leases of `records` records."""

    def __init__(self, records: int) -> None:
        self.todo = RangeSet.of([(0, records)])
        self.held: dict[WorkerId, RangeSet] = {}

    @property
    def complete(self) -> bool:
        return not self.todo and not any(self.held.values())

    def grant(self, worker: WorkerId, count: int) -> Range | None:
        """The next at most `count` records, for this worker; None: nothing is left to give."""
        lease, self.todo = self.todo.take(count)
        if lease is not None:
            self.held[worker] = self.held.get(worker, RangeSet()).add(*lease)
        return lease

    def done(self, worker: WorkerId, lease: Range) -> bool:
        """The worker has done these records. False: it does not hold them (any more), so they do not
        count."""
        held = self.held.get(worker, RangeSet())
        if not held.covers(*lease):
            return False
        self.held[worker] = held.minus(RangeSet((lease,)))
        return True

    def lost(self, worker: WorkerId) -> None:
        """The worker is gone: others get what it held."""
        self.todo = self.todo.union(self.held.pop(worker, RangeSet()))
