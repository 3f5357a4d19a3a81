# SPDX-License-Identifier: Apache-2.0
"""The rows of one table on one server: read rows, apply a step, undo the last step, copy all.

Promise: two servers that received the same updates of an id have the same row of it, bit for bit. Updates
of other ids have no influence on it.

This module does not handle steps in flight, logs and calls. It is not thread-safe, except that several
threads may read and copy rows while nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.ps.errors import Invalid
from edl.ps.table import initializers, kernels, optimizers
from edl.ps.table.row_store import META, NEVER, RowStore
from edl.ps.table.seen_ids import SeenIds, SeenUndo

SWEEPS = 8  # how often in `ttl_steps` forgotten rows are removed
_NO_UNDO = kernels.Undo(np.empty(0, np.float32), np.empty(0, np.int64))


def _scratch(count: int) -> np.ndarray:
    """A temporary index of `count` ids, for the duration of a call."""
    return np.full(1 << max(4, (2 * count).bit_length()), -1, np.int32)


@dataclass(frozen=True)
class Copy:
    """A snapshot of a table: rows that are learned, and how often other ids were seen."""

    ids: np.ndarray  # int64 [n]
    steps: np.ndarray  # int64 [n]: the last one that had it
    counts: np.ndarray  # int64 [n]: of steps that had it
    rows: np.ndarray  # float32 [n, dim]
    slots: np.ndarray  # float32 [n, slots of the optimizer * dim]
    seen: np.ndarray  # int64 [m, 3]: ids that are not learned yet, last steps, counts

    def only(self, mine: Callable[[np.ndarray], np.ndarray]) -> Copy:
        """The same copy, with only the ids for which `mine` is true."""
        some, seen = mine(self.ids), mine(np.ascontiguousarray(self.seen[:, 0]))
        of_rows = (self.ids, self.steps, self.counts, self.rows, self.slots)
        ids, steps, counts, rows, slots = (array[some] for array in of_rows)
        return Copy(ids, steps, counts, rows, slots, self.seen[seen])


class Table:
    """The rows of one table on one server.

    Args:
        declared: the table as the workers declare it.
        seed: the seed of the job.

    Raises:
        Invalid: a server cannot keep this table.
    """

    def __init__(self, declared: pb.Table, seed: int):
        name = declared.name
        if not name or not 1 <= declared.dim <= 1 << 16:
            raise Invalid(f"table {name!r}: dim {declared.dim}: expected a name, and 1 to 65536 values a row")
        self.name, self.dim = name, declared.dim
        self._ttl, self._least = max(0, declared.ttl_steps), max(1, declared.min_count)
        initial = initializers.parse(declared.initializer, name, self.dim)
        self._optimizer = optimizers.parse(declared.optimizer, name)
        self._own_rate: float | None = None
        if declared.own_learning_rate:
            if self._optimizer.learning_rate is None:
                raise Invalid(
                    f"table {name!r}: the learning rate of its optimizer is a schedule: expected a number, "
                    "or leave the table's optimizer out, so that the rows learn at the rate of the model's"
                )
            self._own_rate = self._optimizer.learning_rate
        self._new_row = kernels.NewRow(
            kernels.table_key(seed, name, initial.seed),
            initial.kind,
            float(initial.a),
            float(initial.b),
            float(self._optimizer.first),
            float(self._optimizer.second),
        )
        self.stride = self.dim * (1 + self._optimizer.slots)
        self.clear()

    def clear(self) -> None:
        self._store, self._seen = RowStore(self.stride), SeenIds(self._least)
        self._undo: _Undo | None = None
        self._room = _Room()
        self._live = np.empty(0, bool), np.empty(0, bool)  # of `known`

    def __len__(self) -> int:
        return self._store.n

    def nbytes(self, more: int = 0) -> int:
        """The memory that the table takes, in bytes; at most, with rows of `more` further ids."""
        return self._store.nbytes(more) + self._seen.nbytes() + self._room.nbytes

    def new_rows(self, ids: np.ndarray) -> int:
        """The number of these ids that would get a row in the next step."""
        new = ids[self._store.find(ids, NEVER) < 0]
        if self._least > 1:
            at = self._seen.find(new, NEVER)
            return int((self._seen.numbers()[at[at >= 0], 2] >= self._least - 1).sum())
        return len(new)

    def pull(self, step: int, ids: np.ndarray, out: np.ndarray) -> None:
        """Read rows of the state at `step`, which must be the current state.

        Args:
            ids: int64 [n].
            out: float32 [n * dim], filled.
        """
        kernels.pull(self._arrays(), ids, self._oldest(step), self._new_row, out)

    def apply(
        self,
        step: int,
        parts: Sequence[tuple[np.ndarray, np.ndarray]],
        scale: float,
        learning_rate: float,
        iteration: int,
        for_good: bool = False,
    ) -> None:
        """Apply the step at `step`. `take_back` can undo it until the next step.

        Args:
            parts: each rank's ids and gradients, in the order of the ranks.
            for_good: record nothing for `take_back`.
        """
        self.forget_undo()
        oldest = self._oldest(step)
        if self._ttl and step % max(1, self._ttl // SWEEPS) == 0:
            self._store.drop_older(oldest)
            self._seen.drop_older(oldest)
        ids, sums = self._add_up(parts)
        seen: SeenUndo | None = None
        if self._least > 1 and len(ids):
            learned = self._store.find(ids, oldest) >= 0
            ids, sums, seen = self._seen.admit(step, oldest, ids, sums, learned)
        s, o = self._store, self._optimizer
        n = s.n
        s.reserve(len(ids))
        slots, undo = np.empty(len(ids), np.int64), _NO_UNDO
        if not for_good:
            self._room.reserve(len(ids), s.stride)
            undo = kernels.Undo(self._room.undo, self._room.undo_meta)
        rate = np.float32(learning_rate if self._own_rate is None else self._own_rate)
        update = kernels.Update(o.kind, np.float32(scale), np.array(o.rates(rate, iteration), np.float32))
        s.n = kernels.take_step(
            self._arrays(), n, ids, step, oldest, self._new_row, slots, undo, sums, update
        )
        if seen is not None and len(seen.counts):
            numbers = s.numbers()
            numbers[slots[seen.at], 2] = seen.counts
        self._undo = None if for_good else _Undo(n, slots, undo, seen)

    def put(self, step: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Set rows to these values from the step at `step` on, as if they were their initial values.

        Args:
            ids: int64 [n], without duplicates.
            values: float32 [n * dim].
        """
        s = self._store
        s.reserve(len(ids))
        slots = np.empty(len(ids), np.int64)
        s.n = kernels.place(
            self._arrays(), s.n, ids, step, self._oldest(step), self._new_row, slots, _NO_UNDO
        )
        s.rows[: s.stride * s.n].reshape(-1, s.stride)[slots, : self.dim] = values.reshape(-1, self.dim)

    def take_back(self) -> None:
        """Undo the last `apply`."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        s = self._store
        kernels.take_back(self._arrays(), undo.slots, undo.before)
        s.n = undo.n
        if undo.seen is not None:
            self._seen.take_back(undo.seen)

    def forget_undo(self) -> None:
        """Make the last step permanent."""
        self._undo = None

    def copy(self, step: int) -> Copy:
        """Copy the whole state at `step`, which must be the current state. The copy never changes later."""
        s, oldest = self._store, self._oldest(step)
        rows = s.rows[: s.stride * s.n].reshape(-1, s.stride)
        numbers, seen = s.numbers(), self._seen.numbers()
        if self._ttl:
            live = numbers[:, 1] >= oldest
            rows, numbers, seen = rows[live], numbers[live], seen[seen[:, 1] >= oldest]
        return self._copied(numbers, rows, seen)

    def _copied(self, numbers: np.ndarray, rows: np.ndarray, seen: np.ndarray) -> Copy:
        """Copy these columns of ids and steps, rows with their optimizer's slots, and seen ids."""
        return Copy(
            numbers[:, 0].copy(),
            numbers[:, 1].copy(),
            numbers[:, 2].copy(),
            rows[:, : self.dim].copy(),
            rows[:, self.dim :].copy(),
            seen.copy(),
        )

    def page(
        self,
        step: int,
        after: int | None,
        most: int,
        since: int = 0,
        mine: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """List a page of the rows that exist at `step`, by ascending id.

        Returns ids int64 [n], rows float32 [n, dim], and whether further rows follow.

        Args:
            after: ids up to this one have been listed; None to start with the first id.
            most: the largest number of rows in a page.
            since: list only rows that the step taken at `since`, or a later step, has had.
            mine: returns a mask of the ids that may be listed; None for all.
        """
        s, numbers = self._store, self._store.numbers()
        there = np.ones(s.n, bool) if after is None else numbers[:, 0] > after
        if (oldest := max(self._oldest(step), since)) > 0:
            there &= numbers[:, 1] >= oldest
        if mine is not None:
            there[there] = mine(np.ascontiguousarray(numbers[there, 0]))
        slots = np.flatnonzero(there)
        more = len(slots) > most
        if more:
            slots = slots[np.argpartition(numbers[slots, 0], most)[:most]]
        slots = slots[np.argsort(numbers[slots, 0])]
        rows = s.rows[: s.stride * s.n].reshape(-1, s.stride)[slots, : self.dim]
        return numbers[slots, 0].copy(), rows, more

    def known(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids that have rows at `step`, and those that are only counted: int64 [n], [m]."""
        numbers, seen, oldest = self._store.numbers(), self._seen.numbers(), self._oldest(step)
        self._live = numbers[:, 1] >= oldest, seen[:, 1] >= oldest
        return numbers[self._live[0], 0], seen[self._live[1], 0]

    def some(self, learned: np.ndarray, seen: np.ndarray) -> Copy:
        """Copy the entries at these positions of the last result of `known`."""
        slots = np.flatnonzero(self._live[0])[learned] if self._ttl else learned
        counted = np.flatnonzero(self._live[1])[seen] if self._ttl else seen
        numbers = self._store.numbers()[slots]
        rows = self._store.rows[: self.stride * self._store.n].reshape(-1, self.stride)[slots]
        return self._copied(numbers, rows, self._seen.numbers()[counted])

    def reserve(self, more: int) -> None:
        """Make room for `more` rows that will be loaded."""
        self._store.reserve(more)

    def keep(self, has: Callable[[np.ndarray], np.ndarray]) -> None:
        """Remove the ids that do not belong to this server any more, and the undo record of the last step.

        Args:
            has: returns a mask of the ids that belong to this server.
        """
        self.forget_undo()
        for store in (self._store, self._seen):
            numbers = store.numbers()
            gone = ~has(np.ascontiguousarray(numbers[:, 0]))
            if gone.any():
                store.remove(gone)

    def load(self, part: Copy) -> None:
        """Add rows and counts of a copy; its rows must not be in the table yet."""
        s, count = self._store, len(part.ids)
        if count:
            s.reserve(count)
            numbers = s.meta[META * s.n : META * (s.n + count)].reshape(-1, META)
            numbers[:, 0], numbers[:, 1], numbers[:, 2] = part.ids, part.steps, part.counts
            rows = s.rows[s.stride * s.n : s.stride * (s.n + count)].reshape(-1, s.stride)
            rows[:, : self.dim], rows[:, self.dim :] = part.rows, part.slots
            kernels.index_more(s.index, s.meta, s.n, s.n + count)
            s.n += count
        if len(part.seen):
            self._seen.put(part.seen)

    def begin_with(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        counts: np.ndarray | None = None,
        slots: np.ndarray | None = None,
    ) -> None:
        """Add rows of a different job at step 0, for ids without a row. Their time to live starts afresh.

        Args:
            ids: int64 [n], without duplicates.
            rows: float32 [n, dim].
            counts: the number of steps that had each id; None for the least number that gets a row.
            slots: float32 [n, slots of the optimizer * dim]; None for the slots of new rows.
        """
        there = self._store.find(ids, NEVER) >= 0
        new = ~there if there.any() else slice(None)  # where all are new, nothing is copied
        n = len(ids) - int(there.sum())
        if slots is None:
            slots = np.full((n, self.stride - self.dim), self._optimizer.second, np.float32)
            slots[:, : self.dim] = self._optimizer.first
        else:
            slots = slots[new]
        counts = np.full(n, self._least, np.int64) if counts is None else counts[new]
        nothing = np.zeros((0, META), np.int64)
        self.load(Copy(ids[new], np.zeros(n, np.int64), counts, rows[new], slots, nothing))

    def _arrays(self) -> kernels.Arrays:
        """The table's memory, for one call: memory that is referred to cannot grow."""
        s = self._store
        return kernels.Arrays(s.index, s.meta, s.rows, s.stride, self.dim)

    def _oldest(self, step: int) -> int:
        """The oldest step that still counts at `step`: rows that no step since then has had are forgotten."""
        return step - self._ttl if self._ttl else NEVER

    def _add_up(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        total = sum(len(ids) for ids, _ in parts)
        if len(parts) == 1 and kernels.distinct(parts[0][0], _scratch(total)):
            return parts[0]
        union = np.empty(total, np.int64)
        if total * self.dim > len(self._room.sums):
            self._room.sums = np.empty(total * self.dim, np.float32)
        sums = self._room.sums
        scratch, n = _scratch(total), 0
        for ids, values in parts:
            n = kernels.add_up(union, n, sums, ids, values, self.dim, scratch)
        return union[:n], sums[: n * self.dim]


class _Room:
    """Memory that all steps reuse: allocating new memory costs as much as writing to it."""

    def __init__(self) -> None:
        self.sums, self.undo = np.empty(0, np.float32), np.empty(0, np.float32)
        self.undo_meta = np.empty(0, np.int64)

    def reserve(self, ids: int, stride: int) -> None:
        if ids * stride > len(self.undo):
            self.undo = np.empty(ids * stride, np.float32)
        if ids * META > len(self.undo_meta):
            self.undo_meta = np.empty(ids * META, np.int64)

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + self.undo.nbytes + self.undo_meta.nbytes


@dataclass(frozen=True)
class _Undo:
    """The record that `take_back` needs to undo a step."""

    n: int
    slots: np.ndarray
    before: kernels.Undo
    seen: SeenUndo | None
