# SPDX-License-Identifier: Apache-2.0
"""Leases of ranges of records, for work that needs no ring.

Each range is processed by one worker, in any order. (Training has no leases: a ring takes whole steps, see
`edl.master.core.training`.) The leases of a lost worker are granted again; completed ranges stay completed.

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
        """Whether every step is applied: none is left to lease, and no lease is open."""
        return not self.todo and not any(self.held.values())

    def grant(self, worker: WorkerId, count: int) -> Range | None:
        """Grant the next range of at most `count` records to this worker; None if nothing is left."""
        lease, self.todo = self.todo.take(count)
        if lease is not None:
            self.held[worker] = self.held.get(worker, RangeSet()).add(*lease)
        return lease

    def done(self, worker: WorkerId, lease: Range) -> bool:
        """Record that the worker has processed these records. False if it does not hold their lease."""
        held = self.held.get(worker, RangeSet())
        if not held.covers(*lease):
            return False
        self.held[worker] = held.minus(RangeSet((lease,)))
        return True

    def lost(self, worker: WorkerId) -> None:
        """Return the leases of a lost worker to `todo`."""
        self.todo = self.todo.union(self.held.pop(worker, RangeSet()))
