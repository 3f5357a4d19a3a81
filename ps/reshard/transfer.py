# SPDX-License-Identifier: Apache-2.0
"""Rows in transfer to another shard assignment (edl/contract/rows/placement.py).

The source sends them page by page. The target keeps them beside its tables until all servers can switch. A
page is a range of buckets, so a repeated request gets the same page, even from a restarted source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.buckets import BUCKETS, bucket_of
from edl.contract.rows.placement import ShardAssignment, moves
from edl.ps.errors import Invalid
from edl.ps.table.table import Copy, Table

INT64, FLOAT32 = np.dtype("<i8"), np.dtype("<f4")


class ReshardSource:
    """The rows that a server sends to others, as of one step; valid until the next step.

    Args:
        index: of the sending server.
    """

    def __init__(self, index: int, tables: Sequence[Table], step: int):
        self._index, self._tables, self._step = index, tables, step
        self._sorted: dict[int, tuple[_ByBucket, _ByBucket]] = {}

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        if not 0 <= request.table < len(self._tables) or not 0 <= request.bucket < BUCKETS:
            raise Invalid(f"unknown table {request.table} or bucket {request.bucket}")
        table = self._tables[request.table]
        if request.table not in self._sorted:
            ids, seen = table.known(self._step)
            self._sorted[request.table] = _ByBucket(ids), _ByBucket(seen)
        learned, seen_ = self._sorted[request.table]
        wanted = moves(
            ShardAssignment.from_proto(request.of),
            ShardAssignment.from_proto(request.to),
            self._index,
            request.index,
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
            table=request.table,
            ids=copy.ids.tobytes(),
            steps=copy.steps.tobytes(),
            counts=copy.counts.tobytes(),
            rows=copy.rows.tobytes(),
            slots=copy.slots.tobytes(),
            seen=copy.seen.tobytes(),
            next=end if more else 0,
        )


class _ByBucket:
    """Ids sorted by their buckets."""

    def __init__(self, ids: np.ndarray):
        buckets = bucket_of(ids)
        self._order = np.argsort(buckets, kind="stable")
        self.counts = np.bincount(buckets, minlength=BUCKETS)

    def of(self, wanted: np.ndarray) -> np.ndarray:
        """Positions of the ids of these buckets, int64 [n]."""
        found: np.ndarray = self._order[np.repeat(wanted, self.counts)]
        return found


@dataclass
class ReshardTarget:
    """The rows that a server gains in another assignment.

    Args:
        request: the request that started the fetch.
    """

    request: pb.FetchRequest
    pages: list[tuple[int, Copy]] = field(default_factory=list)

    @property
    def to(self) -> ShardAssignment:
        return ShardAssignment.from_proto(self.request.to)

    def gives(self, index: int, to: ShardAssignment, step: int) -> bool:
        """Whether these are all rows that the server gains in assignment `to`, as of that step."""
        ready = self.to
        # Further servers may be out meanwhile.
        same = (ready.servers, ready.replicas) == (
            to.servers,
            to.replicas,
        )
        held = bool((ready.held(index) >= to.held(index)).all())
        return same and held and self.request.step == step

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
        """Keep a page of rows of `table`.

        Raises:
            Invalid: the page does not fit the table.
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
        """Move all pages into the tables."""
        for number, table in enumerate(tables):
            table.reserve(self.rows(number))
        while self.pages:
            number, copy = self.pages.pop()
            tables[number].load(copy)
