# SPDX-License-Identifier: Apache-2.0
"""The evaluation of a model by a ring: which part of the held-out data is this worker's, and what it adds.

When, and in which batches, is arithmetic (edl/contract/evaluation.py); how a model is evaluated on a batch is
not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np

from edl.contract.evaluation import EvaluationPlan, Pass
from edl.contract.layout import StepSlice
from edl.trainer.agreement.metric_values import Value
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.runtime.watchdog import Computing, uncounted


class Metrics(Protocol):
    """The loss and the compiled metrics, as sums over records."""

    @property
    def size(self) -> int:
        """The number of values."""
        ...

    def added(self, batch: Batch, following: Callable[[], Batch | None]) -> np.ndarray:
        """The contribution of a batch's records, float32 [size]. Changes nothing.

        Args:
            following: the batch that will be added next, if it is there already.
        """
        ...

    @property
    def all_count(self) -> bool:
        """Whether `results` has all that there is to know of a trained model."""
        ...

    def results(self, totals: np.ndarray) -> dict[str, Value]:
        """The results, from the sums over all records, float64 [size]."""
        ...


class RingEvaluation:
    """The held-out data of a worker, and its model's metrics.

    While the all-reduce of one batch runs, the next batch of its pass is computed: nothing changes weights
    between them. So ranks do not wait for the slowest rank of each batch, only for that of the pass.

    Args:
        batches: by split; each of them has the evaluation batches of a pass as its steps.
        computing: computes one evaluation batch at a time; None to use a separate thread.
        watched: limits the time that this worker computes in an evaluation batch.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        batches: Mapping[str, Batches],
        metrics: Metrics,
        computing: Executor | None = None,
        watched: Computing = uncounted,
    ):
        self._plan, self._batches, self._metrics, self._watched = plan, batches, metrics, watched
        self._computing = computing or ThreadPoolExecutor(1, thread_name_prefix="evaluate")
        self._ahead: tuple[Pass, int, Future[tuple[np.ndarray, int]]] | None = None  # pass, batch, result

    @property
    def sizes(self) -> Mapping[str, int]:
        """The records of each split that there is."""
        return self._plan.sizes

    def after(self, step: int, epochs: int) -> tuple[Pass, ...]:
        """The passes due after `step` steps, in a job that trains `epochs`."""
        return self._plan.after(step, epochs)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to find out about a trained model."""
        return self._metrics.all_count

    def take(self, part: StepSlice) -> None:
        """Set the part of each evaluation batch that this worker evaluates.

        Results computed in advance are dropped, because they may be of a different state.
        """
        self._forget()
        for batches in self._batches.values():
            batches.take(batches.layout, part)

    def idle(self) -> list[Future[None]]:
        """Return futures that are done when all reads that have begun until now have returned."""
        self._forget()
        return [batches.idle() for batches in self._batches.values()]

    def nothing(self, split: str) -> np.ndarray:
        """The contribution of no records, float32 [values]."""
        return np.zeros(self._metrics.size, np.float32)

    def part(self, now: Pass, round: int) -> tuple[np.ndarray, int]:
        """This rank's contribution to a batch, float32 [values], and its number of records.

        Raises:
            anything: any error of the user's code, or of the data.
        """
        computed: Future[tuple[np.ndarray, int]] | None = None
        if self._ahead is not None and self._ahead[:2] == (now, round):
            computed, self._ahead = self._ahead[2], None
        self._forget()
        found = (computed or self._compute(now, round)).result()
        if round + 1 < now.end:
            self._ahead = now, round + 1, self._compute(now, round + 1)
        return found

    def results(self, split: str, totals: np.ndarray) -> dict[str, Value]:
        """The loss and the metrics that these sums over all evaluation batches mean, float64 [values]."""
        with self._watched("results", lambda: f"the results of the metrics over data({split!r})", 0):
            return self._metrics.results(totals)

    def _compute(self, now: Pass, round: int) -> Future[tuple[np.ndarray, int]]:
        return self._computing.submit(self._part, now, round)

    def _part(self, now: Pass, round: int) -> tuple[np.ndarray, int]:
        batches, at = self._batches[now.split], round - now.first
        batch = batches.of(at, now.rounds)
        if batch is None:
            return self.nothing(now.split), 0
        what = lambda: f"the evaluation of the {batch} of data({now.split!r})"  # noqa: E731
        with self._watched("evaluation", what, len(batch)):
            return self._metrics.added(batch, lambda: batches.following(at)), len(batch)

    def _forget(self) -> None:
        if self._ahead is not None:
            wait([self._ahead[2]])  # it uses the model
            self._ahead = None
