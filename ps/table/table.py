"""The rows of one table on one server: read rows, apply a step, undo the last step, copy all.

Promise: two servers that received the same updates of an id have the same row of it, bit for bit, whatever
other updates they received. Memory grows with the contents, and growing copies nothing large.

This module does not handle steps in flight, logs and calls. It is not thread-safe, except that several
threads may read and copy rows while nothing is changed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.ps.errors import Invalid
from edl.ps.table import initializers, kernels, optimizers

META = kernels.META
LEAST_INDEX = 1 << 10  # pairs
FULL = 0.6  # of an index; beyond that it is doubled
GROWTH = 1 << 22  # bytes, at the least, by which an array grows
SWEEPS = 8  # how often in `ttl_steps` forgotten rows are removed
_NEVER = -(1 << 62)  # older than every step
_NO_ROWS, _NO_META = np.empty(0, np.float32), np.empty(0, np.int64)


class _Array:
    """A flat array that grows in place: the kernel moves its pages, and allocates only pages in use."""

    def __init__(self, dtype: str):
        self._dtype = np.dtype(dtype)
        self._map = mmap.mmap(-1, GROWTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.values = self._view()

    def _view(self) -> np.ndarray:
        if hasattr(self._map, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(self._map, self._dtype)

    def reserve(self, count: int) -> None:
        """Make room for `count` values."""
        needed = count * self._dtype.itemsize
        if needed <= len(self._map):
            return
        size = max(needed, len(self._map) + max(GROWTH, len(self._map) // 4))
        size += -size % GROWTH
        self.values = np.empty(0, self._dtype)  # no view may refer to memory that is resized
        try:
            self._map.resize(size)
        except (SystemError, ValueError):  # a system without mremap
            larger = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            larger[: len(self._map)] = self._map[:]
            self._map = larger
        self.values = self._view()


class _Store:
    """Ids with their slots, numbers (last step, count) and rows.

    Args:
        stride: the number of values of each row; 0 for ids without rows.
    """

    def __init__(self, stride: int):
        self.stride, self.n = stride, 0
        self.index = _index(LEAST_INDEX)
        self._meta, self._rows = _Array("int64"), _Array("float32")

    @property
    def meta(self) -> np.ndarray:
        return self._meta.values

    @property
    def rows(self) -> np.ndarray:
        return self._rows.values

    def reserve(self, more: int) -> None:
        """Make room for `more` further ids."""
        count = self.n + more
        if count > FULL * (self.index.size // 2):
            self.index = _index(_index_size(count))
            kernels.index_more(self.index, self.meta, 0, self.n)
        self._meta.reserve(META * count)
        self._rows.reserve(max(1, self.stride * count))

    def find(self, ids: np.ndarray, oldest: int) -> np.ndarray:
        slots = np.empty(len(ids), np.int64)
        kernels.find(self.index, self.meta, ids, oldest, slots)
        return slots

    def drop_older(self, oldest: int) -> None:
        self.n = kernels.drop_older(self.index, self.meta, self.rows, self.n, self.stride, oldest)

    def nbytes(self, more: int = 0) -> int:
        """The memory that the store takes, in bytes, with `more` further ids."""
        count = self.n + more
        pairs = self.index.size // 2
        if count > FULL * pairs:
            pairs += _index_size(count)  # the old and the new index, while the new one is filled
        return count * (4 * self.stride + 8 * META) + 16 * pairs

    def numbers(self) -> np.ndarray:
        """[n, META]: ids, last steps, counts."""
        return self.meta[: META * self.n].reshape(-1, META)


def _index_size(count: int) -> int:
    return 1 << max(LEAST_INDEX.bit_length() - 1, int(count / FULL).bit_length())


def _scratch(count: int) -> np.ndarray:
    """A temporary index of `count` ids, for the duration of a call."""
    return np.full(1 << max(4, (2 * count).bit_length()), -1, np.int32)


def _index(pairs: int) -> np.ndarray:
    return np.full(2 * pairs, -1, np.int64)


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
        described: the table as the workers declare it.
        seed: the seed of the job.

    Raises:
        Invalid: a server cannot keep this table.
    """

    def __init__(self, described: pb.Table, seed: int):
        name = described.name
        if not name or not 1 <= described.dim <= 1 << 16:
            raise Invalid(
                f"table {name!r}: dim {described.dim}: expected a name, and 1 to 65536 values a row"
            )
        self.name, self.dim = name, described.dim
        self._ttl, self._least = max(0, described.ttl_steps), max(1, described.min_count)
        self._initial = initializers.parse(described.initializer, name, self.dim)
        self._optimizer = optimizers.parse(described.optimizer, name)
        self._own_rate: float | None = None
        if described.own_learning_rate:
            if self._optimizer.learning_rate is None:
                raise Invalid(
                    f"table {name!r}: the learning rate of its optimizer is a schedule: expected a number, "
                    "or leave the table's optimizer out, so that the rows learn at the rate of the model's"
                )
            self._own_rate = self._optimizer.learning_rate
        self._key = kernels.table_key(seed, name, self._initial.seed)
        self.stride = self.dim * (1 + self._optimizer.slots)
        self.clear()

    def clear(self) -> None:
        self._store, self._seen = _Store(self.stride), _Store(0)
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
        new = ids[self._store.find(ids, _NEVER) < 0]
        if self._least > 1:
            at = self._seen.find(new, _NEVER)
            return int((self._seen.numbers()[at[at >= 0], 2] >= self._least - 1).sum())
        return len(new)

    def pull(self, step: int, ids: np.ndarray, out: np.ndarray) -> None:
        """Read rows of the state at `step`, which must be the current state.

        Args:
            ids: int64 [n].
            out: float32 [n * dim], filled.
        """
        s, i = self._store, self._initial
        kernels.pull(
            s.index,
            s.meta,
            s.rows,
            s.stride,
            self.dim,
            ids,
            self._oldest(step),
            self._key,
            i.kind,
            i.a,
            i.b,
            out,
        )

    def apply(
        self, step: int, parts: Sequence[tuple[np.ndarray, np.ndarray]],
        scale: float, learning_rate: float, iteration: int, for_good: bool = False,
    ) -> None:  # fmt: skip
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
        seen: _SeenUndo | None = None
        if self._least > 1 and len(ids):
            ids, sums, seen = self._admit(step, oldest, ids, sums)
        s, i, o = self._store, self._initial, self._optimizer
        n = s.n
        s.reserve(len(ids))
        slots = np.empty(len(ids), np.int64)
        if for_good:
            undo, undo_meta = _NO_ROWS, _NO_META
        else:
            self._room.reserve(len(ids), s.stride)
            undo, undo_meta = self._room.undo, self._room.undo_meta
        rate = np.float32(learning_rate if self._own_rate is None else self._own_rate)
        s.n = kernels.take_step(
            s.index, s.meta, s.rows, n, s.stride, self.dim, ids, step, oldest, self._key,
            i.kind, i.a, i.b, o.first, o.second, slots, undo, undo_meta,
            sums, np.float32(scale), o.kind, np.array(o.rates(rate, iteration), np.float32),
        )  # fmt: skip
        if seen is not None and len(seen.counts):
            numbers = s.numbers()
            numbers[slots[seen.at], 2] = seen.counts
        self._undo = None if for_good else _Undo(n, slots, undo, undo_meta, seen)

    def put(self, step: int, ids: np.ndarray, values: np.ndarray) -> None:
        """Set rows to these values from the step at `step` on, as if they were their initial values.

        Args:
            ids: int64 [n], without duplicates.
            values: float32 [n * dim].
        """
        s, i, o = self._store, self._initial, self._optimizer
        s.reserve(len(ids))
        slots = np.empty(len(ids), np.int64)
        s.n = kernels.place(
            s.index, s.meta, s.rows, s.n, s.stride, self.dim, ids, step, self._oldest(step), self._key,
            i.kind, i.a, i.b, o.first, o.second, slots, _NO_ROWS, _NO_META,
        )  # fmt: skip
        s.rows[: s.stride * s.n].reshape(-1, s.stride)[slots, : self.dim] = values.reshape(-1, self.dim)

    def take_back(self) -> None:
        """Undo the last `apply`."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        s = self._store
        kernels.take_back(s.index, s.meta, s.rows, s.stride, undo.slots, undo.rows, undo.meta)
        s.n = undo.n
        if undo.seen is not None:
            self._take_back_seen(undo.seen)

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
        return Copy(
            numbers[:, 0].copy(), numbers[:, 1].copy(), numbers[:, 2].copy(),
            rows[:, : self.dim].copy(), rows[:, self.dim :].copy(), seen.copy(),
        )  # fmt: skip

    def page(
        self, step: int, after: int | None, most: int, since: int = 0,
        mine: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, bool]:  # fmt: skip
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
        return Copy(
            numbers[:, 0].copy(), numbers[:, 1].copy(), numbers[:, 2].copy(),
            rows[:, : self.dim].copy(), rows[:, self.dim :].copy(), self._seen.numbers()[counted].copy(),
        )  # fmt: skip

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
                self._drop(store, gone)

    def _drop(self, store: _Store, gone: np.ndarray) -> None:
        """Remove the rows of the mask `gone`: make them too old for every step, and drop old rows."""
        numbers = store.numbers()
        numbers[gone, 1] = _NEVER - 1
        store.drop_older(_NEVER)

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
            self._put_seen(part.seen)

    def begin_with(
        self, ids: np.ndarray, rows: np.ndarray, counts: np.ndarray | None = None,
        slots: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Add rows of a different job at step 0, for ids without a row. Their time to live starts afresh.

        Args:
            ids: int64 [n], without duplicates.
            rows: float32 [n, dim].
            counts: the number of steps that had each id; None for the least number that gets a row.
            slots: float32 [n, slots of the optimizer * dim]; None for the slots of new rows.
        """
        there = self._store.find(ids, _NEVER) >= 0
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

    # --- sums, admission

    def _oldest(self, step: int) -> int:
        """The oldest step that still counts at `step`: rows that no step since then has had are forgotten."""
        return step - self._ttl if self._ttl else _NEVER

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

    def _admit(
        self, step: int, oldest: int, ids: np.ndarray, sums: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, _SeenUndo]:
        """Return the ids that are learned, with their summed gradients; count the other ids."""
        learned = self._store.find(ids, oldest) >= 0
        waiting = np.flatnonzero(~learned)
        others = ids[waiting]
        at = self._seen.find(others, _NEVER)
        before = np.zeros((len(others), META), np.int64)
        before[:, 0] = others
        known = at >= 0
        before[known] = self._seen.numbers()[at[known]]
        live = known & (before[:, 1] >= oldest)
        after = before.copy()
        after[:, 1] = step
        after[:, 2] = np.where(live, before[:, 2], 0) + 1
        admitted = after[:, 2] >= self._least
        self._put_seen(after[~admitted])
        self._drop_seen(others[admitted & known])
        learned[waiting[admitted]] = True
        # The positions of newly admitted ids among the remaining ids.
        place = np.cumsum(learned) - 1
        undo = _SeenUndo(before, known, admitted, place[waiting[admitted]], after[admitted, 2])
        sums = np.ascontiguousarray(sums.reshape(-1, self.dim)[learned]).reshape(-1)
        return ids[learned], sums, undo

    def _take_back_seen(self, undo: _SeenUndo) -> None:
        self._drop_seen(undo.before[~undo.known & ~undo.admitted, 0])
        self._put_seen(undo.before[undo.known])

    def _put_seen(self, numbers: np.ndarray) -> None:
        """Set the numbers of these ids, which may be present or not."""
        s = self._seen
        at = s.find(np.ascontiguousarray(numbers[:, 0]), _NEVER)
        new = at < 0
        s.numbers()[at[~new]] = numbers[~new]
        count = int(new.sum())
        if count:
            s.reserve(count)
            s.meta[META * s.n : META * (s.n + count)] = numbers[new].reshape(-1)
            kernels.index_more(s.index, s.meta, s.n, s.n + count)
            s.n += count

    def _drop_seen(self, ids: np.ndarray) -> None:
        if len(ids):
            s = self._seen
            kernels.drop(s.index, s.meta, s.n, ids)
            s.n -= len(ids)


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
class _SeenUndo:
    """The counts, before a step, of ids that were not learned yet.

    Args:
        before: their numbers, [m, META].
        known: whether each was counted before.
        admitted: whether each is learned from this step on.
        at: the positions of the admitted ids among the step's ids.
        counts: how often each admitted id was seen.
    """

    before: np.ndarray
    known: np.ndarray
    admitted: np.ndarray
    at: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class _Undo:
    """The record that `take_back` needs to undo a step."""

    n: int
    slots: np.ndarray
    rows: np.ndarray
    meta: np.ndarray
    seen: _SeenUndo | None
