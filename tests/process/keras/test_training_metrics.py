# SPDX-License-Identifier: Apache-2.0
"""The compiled metrics of the training, and the losses of its outputs, over rings of any size: Keras' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.utils.python_utils import pythonify_logs

from tests.process.keras.models import WEIGHTS, X, Y, classes, dense, sgd, tagged, tagger, weighted
from tests.process.keras.rings import RINGS, STEPS, Case, Meeting, batch, learner_of, parts_of, ring_step


def classifier(**compiled: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return dense(loss=loss, outputs=3, **compiled)


def two_outputs(**of_layers: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(2, name=name, **of_layers)(x) for name in ("one", "other")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"one": "mse", "other": "mae"}, metrics={"one": ["mae"], "other": ["mse", "mape"]})
    return model


def both(loss: Any, loss_weights: Any = None, mask: bool = False) -> keras.Model:
    """Two outputs in a list, which have names because they are layers of a functional model."""
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((6,), dtype="int32") if mask else keras.Input((4,))
    if mask:
        x = keras.layers.Embedding(9, 4, mask_zero=True)(x)
    outputs = [keras.layers.Dense(3 if mask else 2, name=name)(x) for name in ("a", "b")]
    model = keras.Model(inputs, outputs)
    model.compile(sgd(), loss, loss_weights=loss_weights)
    return model


class Unnamed(keras.Model):
    """Two outputs that are called as their losses are."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = keras.layers.Dense(2), keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.one(x), self.other(x)


def unnamed() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = Unnamed()
    model.compile(sgd(), ["mse", "mae"])
    return model


def named() -> tuple[Any, Any, Any]:
    x, y, w = weighted()
    return x, {"one": y, "other": -y}, w


def twice(data: Callable[[], tuple[Any, Any, Any]], weights: bool = True) -> Callable[[], Any]:
    """The labels for both outputs, which are not weighted alike."""

    def given() -> tuple[Any, Any, Any]:
        x, y, w = data()
        return x, (y, y[::-1].copy()), (w, w[::-1].copy()) if weights and w is not None else None

    return given


class Largest(keras.metrics.Metric):
    """No sum: the largest prediction that there was."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


class Counts(keras.metrics.Metric):
    """Its result is its variables, as in Keras' guide: one of them, or a dict of both."""

    def __init__(self, name: str, both: bool):
        super().__init__(name=name)
        self.both = both
        self.right, self.all = (self.add_variable((), "zeros", name=n) for n in ("right", "all"))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.right.assign_add(keras.ops.sum(keras.ops.cast(y_true * y_pred > 0, "float32")))
        self.all.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return {"right": self.right, "share": {"of": self.right / self.all}} if self.both else self.right


def counts() -> keras.Model:
    each = keras.metrics.F1Score(average=None, threshold=0.1, name="f1")
    return dense(loss="mse", metrics=[each, Counts("variable", False), Counts("both", True), "mae"])


def same_values(found: Any, keras_has: Any, absolute: float = 1e-6) -> bool:
    """Return whether each value, of any shape, is the one that Keras shows."""
    expected = pythonify_logs(keras_has)
    return found.keys() == expected.keys() and all(
        np.shape(found[k]) == np.shape(v) and np.allclose(found[k], v, rtol=1e-5, atol=absolute)
        for k, v in expected.items()
    )


def own(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


CASES: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "accuracy": (lambda: classifier(metrics=["accuracy"]), classes),
    "a function and a loss": (
        lambda: dense(metrics=[own, keras.losses.Huber()], weighted_metrics=["mae"]),
        weighted,
    ),
    "curves and vectors": (
        lambda: dense(
            loss="mse",
            metrics=[
                keras.metrics.AUC(num_thresholds=20, name="auc"),
                keras.metrics.R2Score(),
                "cosine_similarity",
            ],
        ),
        lambda: (X, (Y > 0).astype("f4"), WEIGHTS),
    ),
    "a value for each class, a variable and a dict": (
        counts,
        lambda: (X, (Y > 0).astype("f4"), None),
    ),
    "two outputs": (two_outputs, named),
    "outputs in a list": (lambda: both(["mse", "mae"], [0.3, 2.0]), twice(weighted)),
    "one loss for two outputs": (lambda: both("mse"), twice(weighted, weights=False)),
    "outputs without names": (unnamed, twice(weighted)),
    "a regularizer beside two outputs": (lambda: two_outputs(kernel_regularizer="l2"), named),
    "masked": (lambda: tagger(metrics=["accuracy"]), tagged),
    "run_eagerly": (lambda: classifier(metrics=["accuracy"], run_eagerly=True), classes),
}
# The loss of a batch differs from the mean of its parts' losses.
MIXED: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "two masked outputs": (
        lambda: both(
            [keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in range(2)],
            [1.0, 0.5],
            mask=True,
        ),
        twice(tagged),
    ),
    "a sum beside a mean": (
        lambda: both([keras.losses.MeanSquaredError(reduction="sum"), "mae"], [0.1, 1.0]),
        twice(weighted),
    ),
    "a weighted mean beside a loss of one's own": (
        lambda: both([keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"), own]),
        twice(weighted),
    ),
}


@pytest.mark.parametrize("name", [*CASES, *MIXED])
def test_they_are_those_that_keras_has_after_the_same_steps(name: str) -> None:
    case, meeting = Case(*{**CASES, **MIXED}[name]), Meeting()
    learner, reference = learner_of(case, meeting), case.build()
    reference(batch(case, 0, 5).x)
    reference.set_weights(learner.model.get_weights()[: len(reference.get_weights())])
    reference.optimizer.build(reference.trainable_variables)
    for ends in STEPS:
        whole = batch(case, *ends)
        reference.train_step((whole.x, whole.y, whole.weights))
    not_told = ("loss", "huber_loss")  # by the learner; and a mean over batches, not over records
    told = reference.get_metrics_result().items()
    expected = {k: v for k, v in told if k not in not_told}
    before = learner.state()
    for size in RINGS:
        learner.load(before)
        for nth, ends in enumerate(STEPS):
            ring_step(learner, meeting, parts_of(case, size, *ends, nth), nth)
        held = learner.state()
        assert same_values(learner.take_metrics(), expected), f"ring of {size}"
        assert not same_values(learner.take_metrics(), expected)  # begun anew
        learner.load(held)  # as another worker would
        assert same_values(learner.take_metrics(), expected)


def test_the_losses_of_sums_are_told_for_each_record_as_their_sum_is() -> None:
    losses = [keras.losses.MeanSquaredError(reduction="sum") for _ in range(2)]
    case, meeting = Case(lambda: both(losses, [2.0, 0.5]), twice(weighted)), Meeting()
    learner = learner_of(case, meeting)
    agreed = ring_step(learner, meeting, parts_of(case, 3, 0, 30, 0))
    told: dict[str, Any] = dict(learner.take_metrics())
    assert agreed.loss == pytest.approx(2.0 * told["a_loss"] + 0.5 * told["b_loss"], rel=1e-5)


def test_a_model_with_one_output_sums_nothing_more() -> None:
    learner = learner_of(Case(lambda: dense(loss="mse"), weighted), Meeting())
    assert learner._step.layout.changing == []
    assert learner.take_metrics() == {}


def test_one_that_is_no_sum_is_left_out_and_told() -> None:
    told: list[str] = []
    case, meeting = Case(lambda: dense(metrics=["mae", Largest()]), weighted), Meeting()
    learner = learner_of(case, meeting, warn=told.append)
    ring_step(learner, meeting, [batch(case, 0, 12)])
    assert list(learner.take_metrics()) == ["mae"]
    assert [line.partition(" is not told")[0] for line in told] == ["metric 'largest'"]


def test_a_metric_that_is_no_number_does_not_stop_the_training() -> None:
    def none(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sum(y_pred, axis=-1) * np.nan

    case, meeting = Case(lambda: dense(metrics=[none]), weighted), Meeting()
    learner = learner_of(case, meeting)
    assert not ring_step(learner, meeting, [batch(case, 0, 12)]).nonfinite
    assert np.isnan(learner.take_metrics()["none"])
