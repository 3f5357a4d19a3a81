"""The loss and the compiled metrics over held-out records, whoever evaluates which of them.

Keras' `evaluate` runs `model.test_step`, which updates metrics, and asks those for their results. Nearly all
of them count: what two batches add to a metric's variables is what both of them add together. So each rank
tells what its records add, the ring sums that, and the sums in the metrics' variables give the results. One
that does not count is found at the start, with a few real records, and named; it is left to the worker that
evaluates the trained model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.batch_types import divided, tensor_tree
from trainer.data import Batch
from trainer.model_support import moving
from trainer.training_metrics import counted_metrics, shown_names

TOLERANCE = 1e-4


class EvaluationMetrics:
    """
    Args:
        model: compiled and built.
        sample: real records, to trace and to try the metrics with.
        warn: is told of those that are left out.

    Raises:
        anything: of the user's test_step, loss or metrics.
    """

    def __init__(self, model: keras.Model, sample: Batch, warn: Callable[[str], None] = print):
        self._model = model
        self._run = (
            model.test_step
            if model.run_eagerly
            else tf.function(model.test_step, autograph=False, reduce_retracing=True)
        )
        metrics, others = _values(model.metrics_variables), moving(model)
        before = _values(others)
        self._run(tensor_tree(sample))  # which makes variables
        # What it changes beside the metrics is put back each time; as a rule that is nothing.
        self._others = [v for v, value in zip(others, before, strict=True) if not _same(v.numpy(), value)]
        _assign(others, before)
        self._variables: list[Any] = list(model.metrics_variables)
        known = dict(zip(map(id, self._variables), metrics, strict=False))
        for metric in model.metrics:
            metric.reset_state()
        self._initial = _values(self._variables)
        self._edges = np.cumsum([0, *(value.size for value in self._initial)]).tolist()
        _assign(
            self._variables,
            [known.get(id(v), i) for v, i in zip(self._variables, self._initial, strict=True)],
        )
        self._left_out = self._uncounted(sample, warn) if len(sample) > 1 else set()

    @property
    def all_count(self) -> bool:
        """Whether `results` has all that Keras' `evaluate` would give."""
        return not self._left_out and not getattr(self._model.optimizer, "use_ema", False)

    @property
    def size(self) -> int:
        """How many numbers the variables of the metrics have."""
        return int(self._edges[-1])

    def added(self, batch: Batch) -> np.ndarray:
        """What the records of a batch add to these, float32 [size]. Changes nothing."""
        return self._added(batch).astype(np.float32)

    def results(self, totals: np.ndarray) -> dict[str, float]:
        """What these sums mean, float64 [size]; by the names that Keras' `evaluate` gives."""
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
            found = self._model.get_metrics_result()
            return {name: float(np.mean(v)) for name, v in found.items() if name not in self._left_out}
        finally:
            _assign(self._variables, before)

    def _added(self, *batches: Batch) -> np.ndarray:
        """float64 [size]."""
        before, others = _values(self._variables), _values(self._others)
        _assign(self._variables, self._initial)
        try:
            for batch in batches:
                self._run(tensor_tree(batch))
            after = _values(self._variables)
        finally:
            _assign(self._variables, before)
            _assign(self._others, others)
        grown = [
            (new.astype(np.float64) - old).reshape(-1) for new, old in zip(after, self._initial, strict=True)
        ]
        return np.concatenate(grown) if grown else np.zeros(0)

    def _uncounted(self, sample: Batch, warn: Callable[[str], None]) -> set[str]:
        """The names of results of which the parts of a batch do not make the whole."""
        halves = divided(sample, 2)
        first, second = map(self._added, halves)
        parts, one_by_one, whole = first + second, self._added(*halves), self._added(sample)
        place = {id(v): n for n, v in enumerate(self._variables)}
        names = shown_names(self._model)
        found = set()
        for metric in counted_metrics(self._model):
            here = np.concatenate(
                [
                    np.arange(self._edges[place[id(v)]], self._edges[place[id(v)] + 1])
                    for v in metric.variables
                ]
                or [np.zeros(0, np.int64)]
            )
            if not (_close(parts[here], whole[here]) and _close(parts[here], one_by_one[here])):
                found.add(names[id(metric)])
                warn(
                    f"metric {metric.name!r} cannot be put together from the parts of a batch: the ring does "
                    "not evaluate it. One worker does when the model is trained"
                )
        return found


def _values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [v.numpy() for v in variables]


def _assign(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    for v, value in zip(variables, values, strict=True):
        v.assign(value)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
