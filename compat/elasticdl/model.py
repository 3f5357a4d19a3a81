# SPDX-License-Identifier: Apache-2.0
"""The user's Keras model, with the loss and the metrics of the user's module.

The loss is overridden, not compiled: Keras 3 expands labels [batch] to [batch, 1] before it calls a compiled
function, and a loss that expands them itself would then train on nonsense. The model keeps its own class
under the same name, so it is saved as if nothing had been overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError

Loss = Callable[[Any, Any], Any]


class Overrides:
    """What a model of ElasticDL's contract overrides of keras.Model."""

    elasticdl_loss: Loss
    elasticdl_metrics: Mapping[str, tuple[str, keras.metrics.Metric]]  # name: output ("": all), metric

    def __call__(self, x: Any, *args: Any, **named: Any) -> Any:
        # Keras 2 accepted a dict of one feature, with any name, for a model with one input.
        inputs = getattr(self, "inputs", None)
        if isinstance(x, dict) and len(x) == 1 and isinstance(inputs, list) and len(inputs) == 1:
            x = next(iter(x.values()))
        return super().__call__(x, *args, **named)  # type: ignore[misc]

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        loss = tf.reduce_mean(self.elasticdl_loss(y, y_pred))
        added = [tf.cast(value, loss.dtype) for value in self.losses]  # type: ignore[attr-defined]
        return tf.add_n([loss, *added])

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        for output, metric in self.elasticdl_metrics.values():
            metric.update_state(y, y_pred[output] if output else y_pred)
        return self.get_metrics_result()  # type: ignore[attr-defined]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [*super().metrics, *(metric for _, metric in self.elasticdl_metrics.values())]  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration; without the arguments that Keras cannot save, such as feature columns.

        The saved model is then loaded by the user's code, which is how edl verifies it.
        """
        try:
            return super().get_config()  # type: ignore[misc]
        except NotImplementedError:
            return {"name": self.name}  # type: ignore[attr-defined]

    @property
    def _default_save_signature(self) -> None:
        """None: for a model of its own class or a Sequential of dicts, Keras takes all inputs for floats.

        The signature of a SavedModel is that of edl (trainer/export/formats.py).
        """

    def get_compile_config(self) -> None:
        """Return None: a saved model is for inference, as ElasticDL's SavedModel is."""


def overridden(model: Any, loss: Loss, metrics: Mapping[str, Any], name: str) -> Any:
    """Give a model its loss and metrics.

    Args:
        model: the model of custom_model(); it is changed.
        metrics: the result of eval_metrics_fn(): a metric or a function for each name, or a dict of these
            for each output.
        name: the user's module, for messages.

    Raises:
        ModelError: it is not a Keras model, or a metric is neither a function nor a metric of Keras 3.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"{name}: the model is a {type(model).__name__} (expected a keras.Model)")
    kind = type(model)
    made = type(kind.__name__, (Overrides, kind), {"__module__": kind.__module__})
    object.__setattr__(model, "__class__", made)
    # Not as attributes that Keras tracks: a built model takes no more of these.
    object.__setattr__(model, "elasticdl_loss", loss)
    object.__setattr__(model, "elasticdl_metrics", dict(_metrics(metrics, name)))
    return model


def _metrics(metrics: Any, name: str) -> Any:
    if not isinstance(metrics, Mapping):
        raise ModelError(f"{name}: eval_metrics_fn() returned {type(metrics).__name__} (expected a dict)")
    for key, value in metrics.items():
        for inner, metric in value.items() if isinstance(value, Mapping) else [("", value)]:
            shown = f"{key}_{inner}" if inner else str(key)
            yield shown, (str(key) if inner else "", _metric(metric, shown, name))


def _metric(metric: Any, shown: str, name: str) -> keras.metrics.Metric:
    if isinstance(metric, keras.metrics.Metric):
        metric.name = shown
        return metric
    if not callable(metric) or hasattr(metric, "update_state"):
        raise ModelError(
            f"{name}: metric {shown!r} of eval_metrics_fn() is a {type(metric).__module__}."
            f"{type(metric).__name__} (expected a function of labels and predictions, or a "
            f"tf.keras.metrics.Metric)"
        )

    def values(labels: Any, predictions: Any) -> Any:
        return tf.reshape(tf.cast(metric(labels, predictions), tf.float32), [-1])

    return keras.metrics.MeanMetricWrapper(values, name=shown)


@keras.saving.register_keras_serializable(package="edl.elasticdl")
class ByVersion(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of ElasticDL's LearningRateScheduler: a Python function of the model version.

    The version is the number of updates that the optimizer has made. `None` is the schedule of a loaded
    configuration; it cannot be called.
    """

    def __init__(self, schedule: Callable[[int], float] | None = None):
        self._schedule = schedule

    def __call__(self, step: Any) -> Any:
        def rate(version: Any) -> Any:
            assert self._schedule is not None
            return np.float32(self._schedule(int(version)))

        found = tf.numpy_function(rate, [tf.cast(step, tf.int64)], tf.float32, stateful=False)
        found.set_shape([])
        return found

    def get_config(self) -> dict[str, Any]:
        return {}
