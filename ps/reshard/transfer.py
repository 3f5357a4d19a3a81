"""Rows on their way to another arrangement of the servers (contract/rows/placement.py): what one gives, page
by page, and what another keeps beside its tables until all have what they are to have.

A page is of some buckets: so it is the same, whoever asks again, and whatever process the server is by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import BUCKETS, bucket_of
from edl.contract.rows.placement import Arrangement, moves
from edl.ps.errors import Invalid
from edl.ps.table.table import Copy, Table

INT64, FLOAT32 = np.dtype("<i8"), np.dtype("<f4")


class Outgoing:
    """What a server gives away of its tables as they are at one step; made once, good until the next step.

    Args:
        index: of the server.
    """

    def __init__(self, index: int, tables: Sequence[Table], step: int):
        self._index, self._tables, self._step = index, tables, step
        self._sorted: dict[int, tuple[_ByBucket, _ByBucket]] = {}

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        if not 0 <= request.table < len(self._tables) or not 0 <= request.bucket < BUCKETS:
            raise Invalid(f"table {request.table}, bucket {request.bucket}: there is no such one")
        table = self._tables[request.table]
        if request.table not in self._sorted:
            ids, seen = table.known(self._step)
            self._sorted[request.table] = _ByBucket(ids), _ByBucket(seen)
        learned, seen_ = self._sorted[request.table]
        wanted = moves(
            Arrangement.of(request.of), Arrangement.of(request.to), self._index, request.index
        ).copy()
        wanted[: request.bucket] = False
        row = 4 * table.stride + 24
        nbytes = np.cumsum(np.where(wanted, learned.counts * row + seen_.counts * 24, 0))
        end = min(int(np.searchsorted(nbytes, request.most, side="right")), BUCKETS)
        if not wanted[:end].any() and wanted.any():  # one bucket is larger than a page
            end = int(np.flatnonzero(wanted)[0]) + 1
        more = wanted[end:].any()
        wanted[end:] = False
        copy = table.some(learned.of(wanted), seen_.of(wanted))
        return pb.PageOfRows(
            table=request.table, ids=copy.ids.tobytes(), steps=copy.steps.tobytes(),
            counts=copy.counts.tobytes(), rows=copy.rows.tobytes(), slots=copy.slots.tobytes(),
            seen=copy.seen.tobytes(), next=end if more else 0,
        )  # fmt: skip


class _ByBucket:
    """Ids sorted by their buckets."""

    def __init__(self, ids: np.ndarray):
        buckets = bucket_of(ids)
        self._order = np.argsort(buckets, kind="stable")
        self.counts = np.bincount(buckets, minlength=BUCKETS)

    def of(self, wanted: np.ndarray) -> np.ndarray:
        """Where the ids of these buckets are among those that were given."""
        found: np.ndarray = self._order[np.repeat(wanted, self.counts)]
        return found


@dataclass
class Incoming:
    """What a server is to have in another arrangement, and has not now.

    Args:
        request: that began it.
        whole: all of it is here.
    """

    request: pb.FetchRequest
    pages: list[tuple[int, Copy]] = field(default_factory=list)
    whole: bool = False

    @property
    def to(self) -> Arrangement:
        return Arrangement.of(self.request.to)

    def gives(self, index: int, to: Arrangement, step: int) -> bool:
        """Whether all is here that a server needs for that arrangement, at that step."""
        ready = self.to
        same = (ready.servers, ready.replicas) == (to.servers, to.replicas)  # more may be out by now
        held = bool((ready.held(index) >= to.held(index)).all())
        return self.whole and same and held and self.request.step == step

    def rows(self, table: int) -> int:
        return sum(len(copy.ids) for number, copy in self.pages if number == table)

    @property
    def nbytes(self) -> int:
        return sum(
            array.nbytes
            for _, copy in self.pages
            for array in (copy.ids, copy.steps, copy.counts, copy.rows, copy.slots, copy.seen)
        )

    def add(self, page: pb.PageOfRows, table: Table) -> None:
        """
        Raises:
            Invalid: it is not one of this table.
        """
        try:
            ids = np.frombuffer(page.ids, INT64)
            n = len(ids)
            copy = Copy(
                ids,
                np.frombuffer(page.steps, INT64).reshape(n),
                np.frombuffer(page.counts, INT64).reshape(n),
                np.frombuffer(page.rows, FLOAT32).reshape(n, table.dim),
                np.frombuffer(page.slots, FLOAT32).reshape(n, table.stride - table.dim),
                np.frombuffer(page.seen, INT64).reshape(-1, 3),
            )
        except ValueError as error:
            raise Invalid(f"a page of table {table.name!r} does not fit: {error}") from error
        self.pages.append((page.table, copy))

    def load(self, tables: Sequence[Table]) -> None:
        """Into the tables; nothing is here any more then."""
        for number, table in enumerate(tables):
            table.reserve(self.rows(number))
        while self.pages:
            number, copy = self.pages.pop()
            tables[number].load(copy)
