# SPDX-License-Identifier: Apache-2.0
"""The loss and the compiled metrics over held-out records that are divided over the ranks.

Keras' `evaluate` runs `model.test_step`, which updates metrics, and asks those for their results. Nearly all
of them count: what two batches add to a metric's variables is what both of them add together. So each rank
tells what its records add, the ring sums that, and the sums in the metrics' variables give the results. A
mean that is given one number for a batch, as that of the losses, counts the batch's records. One that does
not count is found at the start, with a few real records, and named; it is left to the worker that evaluates
the trained model alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from edl.trainer.agreement.exact_sums import BLOCKS, WORDS, words
from edl.trainer.agreement.metric_values import Value, values_of
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.evaluation.reading_step import ReadingStep
from edl.trainer.model.batch_types import divided, in_blocks, tensor_tree
from edl.trainer.model.model_support import flat_logs, moving, output_losses
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.step.training_metrics import counted_metrics, shown_names

TOLERANCE = 1e-4


class EvaluationMetrics:
    """The loss and the compiled metrics of a model over held-out records.

    Args:
        model: compiled and built.
        sample: real records, to trace and to try the metrics with.
        warn: takes a warning about the metrics that are left out.
        lookups: the lookups of the model's rows on servers; None if no rows are on servers.
        others: variables that the model does not list, and that its loss or a metric may assign.

    Raises:
        anything: any error of the user's test_step, loss or metrics.
    """

    def __init__(
        self,
        model: keras.Model,
        sample: Batch,
        warn: Callable[[str], None] = print,
        lookups: Lookups | None = None,
        others: Sequence[Any] = (),
    ):
        self._model = model
        self._run = ReadingStep(model, "test_step", sample, tensor_tree, lookups)
        known = {id(v): v.numpy() for v in model.metrics_variables}
        others = [*moving(model), *others]
        before = _values(others)
        returned = self._run(sample)  # which makes variables
        # What it changes beside the metrics is put back each time; as a rule that is nothing.
        self._others = [v for v, value in zip(others, before, strict=True) if not _same(v.numpy(), value)]
        _assign(others, before)
        self._variables: list[Any] = list(model.metrics_variables)
        for metric in model.metrics:
            metric.reset_state()
        self._initial = _values(self._variables)
        self._edges = np.cumsum([0, *(value.size for value in self._initial)]).tolist()
        _assign(
            self._variables,
            [known.get(id(v), i) for v, i in zip(self._variables, self._initial, strict=True)],
        )
        self._by_batch = [self._place(metric) for metric in output_losses(model)]
        self._shown = set(flat_logs(model.get_metrics_result()))
        self._left_out = self._not_metrics(returned, warn)
        if len(sample) > 1:
            self._left_out |= self._uncounted(sample, warn)

    @property
    def all_count(self) -> bool:
        """Whether `results` has all that Keras' `evaluate` would give."""
        return not self._left_out and not getattr(self._model.optimizer, "use_ema", False)

    @property
    def size(self) -> int:
        """The number of values in the metrics' variables."""
        return int(self._edges[-1])

    def added(self, batch: Batch, following: Following = nothing_follows) -> np.ndarray:
        """The contribution of a batch's records, float32 [size]. Changes nothing.

        Args:
            following: the batch that will be added next, if it is there already.
        """
        found = self._grown(batch, following=following)
        return self._by_records(found, len(batch)).astype(np.float32)

    def results(self, totals: np.ndarray) -> dict[str, Value]:
        """The results, from sums float64 [size], by the names that Keras' `evaluate` uses."""
        before = _values(self._variables)
        sums = [totals[start:stop] for start, stop in zip(self._edges, self._edges[1:], strict=False)]
        _assign(
            self._variables,
            [
                (initial + new.reshape(initial.shape)).astype(initial.dtype)
                for initial, new in zip(self._initial, sums, strict=True)
            ],
        )
        try:
            found = values_of(self._model.get_metrics_result())
            told = self._shown - self._left_out
            return {name: value for name, value in found.items() if name in told}
        finally:
            _assign(self._variables, before)

    def loss(self, batch: Batch) -> float:
        """The mean loss of a batch's records; nan if `test_step` returns none. Changes nothing."""
        loss = self.results(self.added(batch).astype(np.float64)).get("loss", math.nan)
        return loss if isinstance(loss, float) else math.nan

    def _grown(self, *batches: Batch, following: Following = nothing_follows) -> np.ndarray:
        """Return the growth of the metrics' variables over these batches, float64 [size].

        All variables have their former values afterwards.
        """
        before, others = _values(self._variables), _values(self._others)
        _assign(self._variables, self._initial)
        try:
            for batch in batches:
                self._run(batch, following)
            after = _values(self._variables)
        finally:
            _assign(self._variables, before)
            _assign(self._others, others)
        grown = [
            (new.astype(np.float64) - old).reshape(-1) for new, old in zip(after, self._initial, strict=True)
        ]
        return np.concatenate(grown) if grown else np.zeros(0)

    def _by_records(self, grown: np.ndarray, records: int) -> np.ndarray:
        """Rescale the metrics that count batches, so that they count records."""
        found = grown.copy()
        for here in self._by_batch:
            if found[here[-1]]:
                found[here] *= records / found[here[-1]]
        return found

    def _place(self, metric: keras.metrics.Metric) -> np.ndarray:
        """The indexes of the metric's variables among the values, int64 [n]."""
        numbers = {id(v): n for n, v in enumerate(self._variables)}
        edges = [self._edges[n : n + 2] for n in (numbers[id(v)] for v in metric.variables)]
        return np.concatenate([np.arange(*ends) for ends in edges] or [np.zeros(0, np.int64)])

    def _not_metrics(self, returned: Any, warn: Callable[[str], None]) -> set[str]:
        """Return the entries of `test_step`'s result that are no metrics of the model.

        The ring leaves them out, with a warning.
        """
        named = set(flat_logs(returned)) if isinstance(returned, dict) else self._shown
        if unknown := sorted(named - self._shown):
            warn(
                f"test_step() returns {', '.join(map(repr, unknown))}, which is no metric of the model: the "
                "ring does not evaluate it. One worker does when the model is trained"
            )
            self._shown &= named
            return set(unknown)
        self._shown = named
        return set()

    def _uncounted(self, sample: Batch, warn: Callable[[str], None]) -> set[str]:
        """The names of results that cannot be combined from the parts of a batch."""
        halves = divided(sample, 2)
        first, second = map(self._grown, halves)
        both, whole = self._grown(*halves), self._grown(sample)
        for metric in self._model.metrics:  # a Mean is given one number for a batch by many a test_step
            if type(metric) is keras.metrics.Mean:
                here = self._place(metric)
                if first[here[-1]] == second[here[-1]] == whole[here[-1]]:
                    self._by_batch.append(here)
        added_up = first + second
        sizes = [len(half) for half in halves]
        parts = self._by_records(first, sizes[0]) + self._by_records(second, sizes[1])
        whole = self._by_records(whole, len(sample))
        names, found = shown_names(self._model), set()
        for metric in counted_metrics(self._model):
            here = self._place(metric)
            if not (_close(parts[here], whole[here]) and _close(added_up[here], both[here])):
                found |= set(flat_logs({names[id(metric)]: metric.result()}))
                warn(
                    f"metric {metric.name!r} cannot be put together from the parts of a batch: the ring does "
                    "not evaluate it. One worker does when the model is trained"
                )
        return found


class BlockMetrics(EvaluationMetrics):
    """Metrics with exact sums of whole blocks, which do not depend on the ring (training.deterministic)."""

    @property
    def size(self) -> int:
        return WORDS * super().size

    def added(self, batch: Batch, following: Following = nothing_follows) -> np.ndarray:
        added = [super(BlockMetrics, self).added(block) for block in in_blocks(batch, BLOCKS)[1]]
        return np.asarray(np.sum([np.concatenate(words(values)) for values in added], axis=0))

    def results(self, totals: np.ndarray) -> dict[str, Value]:
        return super().results(totals.reshape(WORDS, -1).sum(axis=0))


def _values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [v.numpy() for v in variables]


def _assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for v, value in zip(variables, values, strict=True):
        v.assign(value)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
