# SPDX-License-Identifier: Apache-2.0
"""The compiled metrics over the records of an epoch, and the losses of several outputs, over all ranks.

Keras' `fit` updates them in each step, with the predictions of the forward pass that it trains with. Nearly
all of them count: what two parts of a batch add to a metric's variables is what the whole of it adds. So each
rank computes what its records add, the ring sums that, and all ranks hold the same metrics. One that does not
count is found at the start, with a few real records, and left out. The losses of single outputs are made of
the same terms as the whole loss, and summed as that is (trainer/step/loss_terms.py).

The variables are a part of the training state: a worker that joins or takes over goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from edl.trainer.agreement.metric_values import Value, values_of
from edl.trainer.model import batch_types
from edl.trainer.model.batch_types import BatchTypes
from edl.trainer.model.captured import undone
from edl.trainer.model.model_support import output, output_losses
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch

TOLERANCE = 1e-4


class TrainingMetrics:
    """The compiled metrics over the records of an epoch, on all ranks.

    Args:
        model: compiled and built.
        sample: real records, to try the metrics with.
        warn: takes a warning about the metrics that are left out.
    """

    def __init__(
        self, model: keras.Model, types: BatchTypes, sample: Batch, warn: Callable[[str], None] = print
    ):
        self._model = model
        self._metrics: list[keras.metrics.Metric] = []
        self._initial: dict[int, np.ndarray] = {}
        if any(metric is not model._loss_tracker for metric in model.metrics):
            whole = batch_types.leaves(sample)
            size, half = len(sample), len(sample) // 2
            parts = [[arrays.cut(leaf, *ends) for leaf in whole] for ends in ((0, half), (half, size))]
            with undone():  # a layer may assign variables
                given = [_given(model, types, leaves) for leaves in ([whole, *parts] if half else [whole])]
            self._update(given[0])  # which makes variables
            self._metrics = counted_metrics(model)
            self.reset()
            self._initial = {id(v): v.numpy() for v in self.variables}
            if half:
                self._leave_out(given, warn)
        self._names = shown_names(model)
        for loss in output_losses(model):
            loss.reset_state()
            self._metrics.append(loss)
            self._names[id(loss)] = loss.name
            self._initial |= {id(v): v.numpy() for v in loss.variables}

    @property
    def variables(self) -> list[keras.Variable]:
        """Each is raised by the sum over the ring of what the ranks add to it."""
        return [v for metric in self._metrics for v in metric.variables]

    def initial(self, variable: keras.Variable) -> np.ndarray:
        """Return the value that a metric's variable has while there are no records."""
        return self._initial[id(variable)]

    def take(self) -> dict[str, Value]:
        """The metrics of all steps since they were taken last."""
        found: dict[str, Value] = {}
        for metric in self._metrics:  # one after the other: of two with one name Keras shows the last
            found |= values_of({self._names[id(metric)]: metric.result()})
        self.reset()
        return found

    def reset(self) -> None:
        for metric in self._metrics:
            metric.reset_state()

    def _leave_out(self, given: list[Any], warn: Callable[[str], None]) -> None:
        """Leave out metrics that cannot be combined from the parts of a batch."""
        whole, one, other = given
        first, second, both, all_ = (self._added(*given) for given in ([one], [other], [one, other], [whole]))
        counting = []
        for metric in self._metrics:
            keys = [id(v) for v in metric.variables]
            if all(_close(first[k] + second[k], all_[k]) and _close(both[k], all_[k]) for k in keys):
                counting.append(metric)
            else:
                warn(
                    f"metric {metric.name!r} is not told while the model is trained: it cannot be put "
                    "together from the parts of a batch. It is reported for the held-out records"
                )
        self._metrics = counting

    def _added(self, *parts: Any) -> dict[int, np.ndarray]:
        """The records' contribution to each variable, one after the other."""
        for part in parts:
            self._update(part)
        found = {id(v): v.numpy().astype(np.float64) - self.initial(v) for v in self.variables}
        self.reset()
        return found

    def _update(self, given: Any) -> None:
        x, y, y_pred, weights = given
        self._model.compute_metrics(x, y, y_pred, sample_weight=weights)


def counted_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that `fit` shows beside the losses and that Keras weights with batches, not records."""
    losses = [model._loss_tracker, *output_losses(model)]
    found: list[keras.metrics.Metric] = []
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)  # the compiled ones are one metric
        found += [metric] if inner is None or metric is not model._compile_metrics else inner
    return [m for m in found if not any(m is loss for loss in losses)]


def shown_names(model: keras.Model) -> dict[int, str]:
    """The names that Keras shows: with the output's name if there are several outputs; unique."""
    found = {id(m): m.name for m in counted_metrics(model)}
    compiled = model._compile_metrics
    if compiled is not None and compiled.built:  # else a test_step() of the model's own has not asked them
        shown, inner = list(compiled.result()), compiled.metrics
        if len(shown) == len(inner):  # each has one
            found |= {id(m): name for m, name in zip(inner, shown, strict=True)}
    return found


def _given(model: keras.Model, types: BatchTypes, leaves: list[Any]) -> tuple[Any, ...]:
    """The arguments of `compute_metrics` for some records."""
    x, y, weights = types.tree(leaves)
    return x, y, output(model, x, training=False), weights


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
