# SPDX-License-Identifier: Apache-2.0
"""Ids that a table has seen too seldom to learn them (`min_count`): they are counted, and have no rows.

A step counts an id once. The step that completes the count admits the id: it gets a row, and leaves this
store. `take_back` undoes the counts of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edl.ps.table import kernels
from edl.ps.table.row_store import META, NEVER, RowStore


@dataclass(frozen=True)
class SeenUndo:
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


class SeenIds(RowStore):
    """The ids that are counted.

    Args:
        least: the number of steps that must have an id before it gets a row.
    """

    def __init__(self, least: int):
        super().__init__(0)
        self.least = least

    def admit(
        self, step: int, oldest: int, ids: np.ndarray, sums: np.ndarray, learned: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, SeenUndo]:
        """Count the ids of a step that are not learned yet, and admit those that were seen often enough.

        Args:
            oldest: the oldest step whose counts still hold.
            ids: int64 [n], without duplicates.
            sums: their summed gradients, float32 [n * dim].
            learned: which ids have rows, bool [n]. The admitted ones are set.

        Returns:
            the ids that are learned in this step, with their sums, and the record to undo the counts.
        """
        waiting = np.flatnonzero(~learned)
        others = ids[waiting]
        at = self.find(others, NEVER)
        before = np.zeros((len(others), META), np.int64)
        before[:, 0] = others
        known = at >= 0
        before[known] = self.numbers()[at[known]]
        live = known & (before[:, 1] >= oldest)
        after = before.copy()
        after[:, 1] = step
        after[:, 2] = np.where(live, before[:, 2], 0) + 1
        admitted = after[:, 2] >= self.least
        self.put(after[~admitted])
        self._drop(others[admitted & known])
        learned[waiting[admitted]] = True
        # The positions of newly admitted ids among the remaining ids.
        place = np.cumsum(learned) - 1
        undo = SeenUndo(before, known, admitted, place[waiting[admitted]], after[admitted, 2])
        dim = len(sums) // max(len(ids), 1)
        sums = np.ascontiguousarray(sums.reshape(-1, dim)[learned]).reshape(-1)
        return ids[learned], sums, undo

    def take_back(self, undo: SeenUndo) -> None:
        """Undo the counts of the last step."""
        self._drop(undo.before[~undo.known & ~undo.admitted, 0])
        self.put(undo.before[undo.known])

    def put(self, numbers: np.ndarray) -> None:
        """Set the numbers of these ids, which may be present or not."""
        at = self.find(np.ascontiguousarray(numbers[:, 0]), NEVER)
        new = at < 0
        self.numbers()[at[~new]] = numbers[~new]
        count = int(new.sum())
        if count:
            self.reserve(count)
            self.meta[META * self.n : META * (self.n + count)] = numbers[new].reshape(-1)
            kernels.index_more(self.index, self.meta, self.n, self.n + count)
            self.n += count

    def _drop(self, ids: np.ndarray) -> None:
        if len(ids):
            kernels.drop(self.index, self.meta, self.n, ids)
            self.n -= len(ids)
