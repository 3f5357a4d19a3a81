"""The rows that a server fetches for another arrangement, and those that it gives away for one: for both ways
of taking steps. Which calls count, and when it goes over, is the way's.

Promise: what was fetched is in the log before it is here, and in no table before the server goes over.
"""

from __future__ import annotations

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import Arrangement
from edl.ps.errors import Misplaced, OutOfMemory, Stale
from edl.ps.reshard.transfer import Incoming, Outgoing
from edl.ps.storage.storage import Storage

FETCH, PAGE, FETCHED = b"f", b"p", b"w"  # what a record is, by its first byte: no way has these letters


class Rearranging:
    def __init__(self, storage: Storage):
        self._storage = storage
        self.incoming: Incoming | None = None
        self._outgoing: Outgoing | None = None

    @property
    def nbytes(self) -> int:
        """Of what was fetched."""
        return self.incoming.nbytes if self.incoming is not None else 0

    def drop(self) -> None:
        """Nothing of it is of the present state any more."""
        self.incoming = self._outgoing = None

    # --- what it is to have

    def log_fetch(self, request: pb.FetchRequest) -> None:
        self._storage.finish_copy()
        self._storage.log.append(FETCH, request.SerializeToString())

    def begin(self, request: pb.FetchRequest) -> None:
        self.incoming, self._outgoing = Incoming(request), None

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        """A page of what was begun with this request, as another server has given it."""
        page: pb.PageOfRows = pb.PageOfRows.FromString(raw)
        incoming, table = self._comes(request), self._storage.table(page.table)
        try:
            self._storage.check_room(table, incoming.rows(page.table) + len(page.ids) // 8)
        except OutOfMemory:
            self.incoming = None
            raise
        self._storage.log.append(PAGE, raw)
        incoming.add(page, table)
        return page

    def fetched(self, request: pb.FetchRequest) -> None:
        incoming = self._comes(request)
        self._storage.log.append(FETCHED)
        incoming.whole = True

    def replay(self, kind: bytes, text: bytes) -> None:
        """Of a PAGE or FETCHED."""
        if self.incoming is None:
            return
        if kind == PAGE:
            page = pb.PageOfRows.FromString(text)
            self.incoming.add(page, self._storage.table(page.table))
        else:
            self.incoming.whole = True

    def take_in(self, incoming: Incoming, stays: bool) -> None:
        """Go over: to what was fetched, and, of a server that had rows before, what stays its own."""
        for table in self._storage.tables:
            if stays:
                table.keep(self._storage.has)
            else:
                table.clear()
        incoming.load(self._storage.tables)

    def _comes(self, request: pb.FetchRequest) -> Incoming:
        if self.incoming is None or self.incoming.request is not request:
            raise Stale(f"generation {request.generation}: what was fetched for it is not wanted any more")
        return self.incoming

    # --- what it gives

    def page(self, request: pb.PageRequest, clock: int) -> pb.PageOfRows:
        """Some of the rows that another server is to have, as they are at this clock: until they change."""
        there = self._storage.arrangement
        if Arrangement.of(request.of) != there:
            raise Misplaced(f"rows of {request.of} are asked for, and the server is one of {there}")
        if self._outgoing is None:
            self._storage.finish_copy()
            self._outgoing = Outgoing(self._storage.index, self._storage.tables, clock)
        return self._outgoing.page(request)
