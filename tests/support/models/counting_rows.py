# SPDX-License-Identifier: Apache-2.0
"""The counting model with counts on parameter servers, too: each position is an id, and each step adds one to
the rows of its positions.

So the pulled rows are known in advance: the rows of a step's own positions are still zero, and those of
earlier steps are one. The dense half counts in parallel (tests/support/models/counting.py).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from edl.trainer.agreement import control
from edl.trainer.embedding.interfaces import Commit, Rows, Table
from edl.trainer.records.batches import Batch, Following, nothing_follows
from tests.support.models.counting import CountingLearner

SGD = {"class_name": "SGD", "config": {"learning_rate": 1.0}}
ZEROS = {"class_name": "Zeros", "config": {}}
TABLE = Table("positions", 1, json.dumps(ZEROS), json.dumps(SGD), own_learning_rate=True)
LOOKED_AT = 5  # rows of earlier steps that each step looks at


class CountingRows(CountingLearner):
    """The two halves of a step; `rows` must be set and supplies the rows."""

    tables = (TABLE,)
    rows: Rows

    def allreduce_step(
        self,
        batch: Batch | None,
        contribution: np.ndarray,
        step: int,
        rank: int,
        records: int,
        following: Following = nothing_follows,
    ) -> control.StepResult:
        if batch is not None:
            own = np.asarray(batch.x, np.int64)
            done = np.flatnonzero(self.weights)  # positions that are in this state
            others = done[:: max(len(done) // LOOKED_AT, 1)]
            (rows,) = self.rows.pull(step, [np.concatenate([own, others])])
            counts = rows[:, 0].tolist()
            assert counts == [0.0] * len(own) + [1.0] * len(others), (
                f"rank {rank}, step {step}: the rows of {own} count {counts[: len(own)]}, "
                f"those of {others} {counts[len(own) :]}"
            )
            self.rows.stage(step, rank, [(own, -np.ones((len(own), 1), np.float32))])
        return super().allreduce_step(batch, contribution, step, rank, records)

    def commit(self, step: int, sums: control.StepResult) -> Commit:
        skipped = sums.agreed.nonfinite or not sums.agreed.records
        return Commit(step, skipped, 1.0, 0.0, self.updates)


def counts(servers: Any, positions: int) -> np.ndarray:
    """The counts in the rows of these servers, float32 [positions]."""
    found = np.zeros(positions, np.float32)
    for server in servers:
        for (_, id_), row in server.rows.items():
            assert not found[id_], f"the row of {id_} is on two servers"
            found[id_] = row[0]
    return found
