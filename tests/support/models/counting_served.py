# SPDX-License-Identifier: Apache-2.0
"""The counting model with all weights on parameter servers (mode=ps).

Each position is one weight of a dense variable, and an id of a table. Each step adds one to both, for each of
its positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edl.errors import ModelError
from edl.trainer.embedding.interfaces import Rows, Table
from edl.trainer.ps_client.interfaces import StepGradients
from edl.trainer.records.batches import Batch
from tests.support.models.counting import CountingLearner
from tests.support.models.counting_rows import SGD, TABLE, ZEROS

DIM = 8  # of a dense row
DENSE = Table("edl/dense", DIM, json.dumps(ZEROS), json.dumps(SGD))
NO_IDS = np.zeros(0, np.int64)


class CountingServed(CountingLearner):
    """The learner that trainer/parts/async_loop.py expects; `rows` must be set.

    Args:
        exact: a step adds exactly one; otherwise a fraction, as when several steps are applied together.
        others: see CountingLearner.
    """

    tables = (TABLE,)
    server_tables = (TABLE, DENSE)
    rows: Rows

    def __init__(self, positions: int, works: Callable[[], None] = lambda: None, exact: bool = True):
        super().__init__(positions, works)
        self._exact = exact
        self._ids = np.arange(-(-positions // DIM), dtype=np.int64)
        self._ids.setflags(write=False)

    def dense_values(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(NO_IDS, np.zeros((0, 1), np.float32)), (self._ids, self._packed(self.weights))]

    def _packed(self, values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(self._ids), DIM), np.float32)
        packed.reshape(-1)[: len(self.weights)] = values
        return packed

    def dense_ids(self, whole: bool) -> list[np.ndarray]:
        return [self._ids]

    def put(self, whole: bool, rows: Sequence[np.ndarray]) -> None:
        (dense,) = rows
        counts = dense.reshape(-1)[: len(self.weights)]
        if self._exact:
            wrong = np.flatnonzero((counts != 0) & (counts != 1))
            assert not len(wrong), f"steps count {counts[wrong]} times at {wrong}"
        self._variables[:-2] = np.ceil(counts)

    def gradients(  # type: ignore[override]  # a learner whose weights are on servers makes steps of its own
        self, step: int, batch: Batch, of_rows: Callable[[], Sequence[tuple[np.ndarray, np.ndarray]]]
    ) -> StepGradients:
        self._works()
        own = np.asarray(batch.x, np.int64)
        (rows,) = self.rows.pull(step, [own])
        if self._exact:  # the step may be repeated, for one of the servers
            assert set(rows[:, 0].tolist()) <= {0.0, 1.0}, f"step {step}: the rows of {own} count {rows}"
        self.rows.stage(step, 0, [(own, -np.ones((len(own), 1), np.float32))])
        change = np.zeros(len(self.weights), np.float32)
        change[own] = -1
        given = [*of_rows(), (self._ids, self._packed(change))]
        return StepGradients(step, given, 0.5, len(batch), 1.0)

    def at(self, step: int) -> None:
        self._variables[-2] = step

    def beside(self) -> bytes:
        return b""

    def take_beside(self, data: bytes) -> None:
        pass

    def refuse_changed(self, changed: Mapping[int, np.ndarray]) -> None:
        if changed:
            raise ModelError("a callback has changed what servers have")
