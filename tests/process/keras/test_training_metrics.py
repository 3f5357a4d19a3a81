"""The compiled metrics of the training, over rings of any size: Keras' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.process.keras.models import classes, dense, tagged, tagger, weighted
from tests.process.keras.rings import (
    RINGS,
    STEPS,
    Case,
    Meeting,
    batch,
    learner_of,
    parts_of,
    ring_step,
)


def classifier(**compiled: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return dense(loss=loss, outputs=3, **compiled)


def two_outputs() -> keras.Model:
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(2, name=name)(x) for name in ("one", "other")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"one": "mse", "other": "mae"}, metrics={"one": ["mae"], "other": ["mse", "mape"]})
    return model


class Largest(keras.metrics.Metric):
    """No sum: the largest prediction that there was."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.value


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
        lambda: (lambda x, y, w: (x, (y > 0).astype("f4"), w))(*weighted()),
    ),
    "two outputs": (two_outputs, lambda: (lambda x, y, w: (x, {"one": y, "other": -y}, w))(*weighted())),
    "masked": (lambda: tagger(metrics=["accuracy"]), tagged),
    "run_eagerly": (lambda: classifier(metrics=["accuracy"], run_eagerly=True), classes),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_that_keras_has_after_the_same_steps(name: str) -> None:
    case, meeting = Case(*CASES[name]), Meeting()
    learner, reference = learner_of(case, meeting), case.build()
    reference(batch(case, 0, 5).x)
    reference.set_weights(learner.model.get_weights()[: len(reference.get_weights())])
    reference.optimizer.build(reference.trainable_variables)
    for ends in STEPS:
        whole = batch(case, *ends)
        reference.train_step((whole.x, whole.y, whole.weights))
    expected = {k: float(np.mean(v)) for k, v in reference.get_metrics_result().items() if "loss" not in k}
    before = learner.state()
    for size in RINGS:
        learner.load(before)
        for nth, ends in enumerate(STEPS):
            ring_step(learner, meeting, parts_of(case, size, *ends, nth), nth)
        held = learner.state()
        assert learner.take_metrics() == pytest.approx(expected, rel=1e-5, abs=1e-6), f"ring of {size}"
        assert learner.take_metrics() != pytest.approx(expected, rel=1e-5, abs=1e-6)  # begun anew
        learner.load(held)  # as another worker would
        assert learner.take_metrics() == pytest.approx(expected, rel=1e-5, abs=1e-6)


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
