# SPDX-License-Identifier: Apache-2.0
"""One server's part in resharding: the rows that it fetches, and the rows that it sends to other servers.

Both update modes use it. They decide which calls count and when the server switches to the new assignment.

Promise: fetched rows are logged before they are kept in memory, and enter no table before the switch.
"""

from __future__ import annotations

from enum import StrEnum

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.state_tables import Table
from edl.ps.errors import Misplaced, OutOfMemory, Stale
from edl.ps.reshard.transfer import ReshardSource, ReshardTarget
from edl.ps.storage.records import FETCHED, PAGE
from edl.ps.storage.storage import Storage


class FetchState(StrEnum):
    """The state of a server's fetch of rows for another shard assignment."""

    NONE = "none"
    FETCHING = "fetching"
    COMPLETE = "complete"  # the server can switch to the other assignment


NONE, FETCHING, COMPLETE = FetchState

FETCHES = Table(
    "a fetch of rows",
    NONE,
    {
        (NONE, "fetch"): FETCHING,
        (FETCHING, "fetch"): FETCHING,
        (COMPLETE, "fetch"): FETCHING,
        (FETCHING, "complete"): COMPLETE,
        (NONE, "drop"): NONE,
        (FETCHING, "drop"): NONE,
        (COMPLETE, "drop"): NONE,
    },
)


class Resharding:
    """The rows that this server fetches for a new shard assignment, and the copies that it sends."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._state = FETCHES.first
        self._target: ReshardTarget | None = None  # None: the state is NONE
        self._source: ReshardSource | None = None

    @property
    def is_active(self) -> bool:
        """True from `begin` until the server switches to an assignment, or drops the rows."""
        return self._state is not NONE

    @property
    def ready(self) -> ReshardTarget | None:
        """The fetched rows; None until all of them are here."""
        return self._target if self._state is COMPLETE else None

    def ready_for(self, to: ShardAssignment, step: int) -> ReshardTarget | None:
        """The fetched rows, if they are all that this server gains in assignment `to`, as of that step."""
        ready = self.ready
        return ready if ready is not None and ready.gives(self._storage.index, to, step) else None

    @property
    def nbytes(self) -> int:
        """Bytes of the fetched rows."""
        return self._target.nbytes if self._target is not None else 0

    def drop(self) -> None:
        """Drop the fetched rows and the copies for other servers: they are outdated, or in the tables."""
        self._state = FETCHES.after(self._state, "drop")
        self._target = self._source = None

    # --- rows that this server fetches

    def begin(self, request: pb.FetchRequest) -> None:
        self._state = FETCHES.after(self._state, "fetch")
        self._target, self._source = ReshardTarget(request), None

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        """Log and keep a page that another server has sent for this request.

        Raises:
            OutOfMemory: the rows would exceed the memory limit; the fetch is dropped.
        """
        page: pb.PageOfRows = pb.PageOfRows.FromString(raw)
        target, table = self._comes(request), self._storage.table(page.table)
        try:
            self._storage.check_room(table, target.rows(page.table) + len(page.ids) // 8)
        except OutOfMemory:
            self.drop()
            raise
        self._storage.append(PAGE, raw)
        target.add(page, table)
        return page

    def complete(self, request: pb.FetchRequest) -> None:
        """Record that all rows of this request are here."""
        self._comes(request)
        self._storage.append(FETCHED)
        self._state = FETCHES.after(self._state, "complete")

    def replay(self, kind: bytes, text: bytes) -> None:
        """Apply a PAGE or FETCHED record again."""
        if self._target is None:
            return
        if kind == PAGE:
            page = pb.PageOfRows.FromString(text)
            self._target.add(page, self._storage.table(page.table))
        else:
            self._state = FETCHES.after(self._state, "complete")

    def switch(self, to: ShardAssignment, target: ReshardTarget | None, stays: bool) -> bool:
        """Switch to an assignment: load the fetched rows, and drop the rows of other servers.

        Args:
            target: the fetched rows; None: the tables have all rows.
            stays: keep those rows of the tables that the new assignment leaves on this server.

        Returns:
            whether the server has fewer buckets than before.
        """
        storage = self._storage
        storage.finish_copy()
        self.drop()
        before, storage.assignment = storage.assignment, to
        fewer = bool((before.held(storage.index) & ~to.held(storage.index)).any())
        here = storage.index in to.members
        for table in storage.tables:
            if not here or (target is not None and not stays):
                table.clear()
            elif stays and (target is not None or fewer):
                table.keep(storage.has)
        if here and target is not None:
            target.load(storage.tables)
        return fewer

    def _comes(self, request: pb.FetchRequest) -> ReshardTarget:
        if self._target is None or self._target.request is not request:
            raise Stale(f"generation {request.generation}: its fetch was replaced or dropped")
        return self._target

    # --- rows that this server sends

    def page(self, request: pb.PageRequest, clock: int) -> pb.PageOfRows:
        """One page of rows for another server, as of this clock; valid until the rows change.

        Raises:
            Misplaced: the caller expects a different assignment.
        """
        there = self._storage.assignment
        if ShardAssignment.from_proto(request.of) != there:
            raise Misplaced(
                f"the rows are on {there}; expected by the caller: {ShardAssignment.from_proto(request.of)}"
            )
        if self._source is None:
            self._storage.finish_copy()
            self._source = ReshardSource(self._storage.index, self._storage.tables, clock)
        return self._source.page(request)
