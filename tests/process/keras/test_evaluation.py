# SPDX-License-Identifier: Apache-2.0
"""What a ring finds when it evaluates: the loss and metrics of Keras' `evaluate`, however the records are
divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import edl
from edl.trainer.evaluation.inference import Predictor
from edl.trainer.evaluation.local_evaluation import evaluate
from edl.trainer.evaluation.metrics import EvaluationMetrics
from edl.trainer.model.user_model import UserModel
from edl.trainer.runtime.watchdog import unwatched
from tests.process.keras.models import classes, dense, plain, tagged, tagger, weighted
from tests.process.keras.own_models import features, guided, points
from tests.process.keras.rings import Case, batch
from tests.process.keras.test_training_metrics import CASES, Largest, classifier, same_values

ROUNDS = ((0, 7), (7, 8), (8, 23), (23, 30))  # parts of 30 records, of unlike sizes


class OwnTest(keras.Model):
    """Says itself what an evaluation is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.layers.Dense(2)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def test_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self.size.update_state(keras.ops.norm(y_pred, axis=-1))
        return {"size": self.size.result()}


def own_test(kind: type[OwnTest] = OwnTest) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = kind()
    model.compile("sgd", "mse")
    return model


def binary() -> tuple[Any, Any, Any]:
    x, y, _ = plain()
    return x, (y[:, :1] > 0).astype("f4"), None


MORE: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "no metric": (lambda: dense(), plain),
    "regularized": (lambda: dense(layers=[keras.layers.Dense(4, kernel_regularizer="l2")]), plain),
    "a curve and F1": (
        lambda: dense(
            outputs=1,
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.AUC(from_logits=True, name="auc"), keras.metrics.F1Score(threshold=0.5)],
        ),
        binary,
    ),
    "dropout and moving averages": (
        lambda: dense(layers=[keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)], metrics=["mae"]),
        plain,
    ),
    "confusion": (
        lambda: classifier(metrics=[keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")]),
        classes,
    ),
    "test_step": (own_test, plain),
    "test_step of Keras' guide": (guided, lambda: (features(30), points(30), None)),
}


class Measured(OwnTest):
    """Its mean is given one number for each batch."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.size.update_state(keras.ops.mean(keras.ops.square(y - self(x))))
        return {"size": self.size.result()}


MORE["a mean of means"] = lambda: own_test(Measured), plain

LOSS = "a function and a loss"  # which as a metric is a number for each batch


@pytest.mark.parametrize("name", [name for name in (*CASES, *MORE) if name != LOSS])
def test_it_is_what_keras_evaluate_gives(name: str) -> None:
    case = Case(*{**CASES, **MORE}[name])
    model, told = case.build(), list[str]()
    whole = batch(case, 0, 30)
    model.evaluate(whole.x, whole.y, sample_weight=whole.weights, batch_size=30, verbose=0)
    before = [v.numpy() for v in model.variables]
    metrics = EvaluationMetrics(model, batch(case, 0, 5), told.append)
    totals = np.stack([metrics.added(batch(case, *ends)) for ends in ROUNDS]).sum(0, np.float64)
    found = metrics.results(totals)
    for v, value in zip(model.variables, before, strict=True):
        assert np.array_equal(v.numpy(), value, equal_nan=True), f"{v.path} has changed"
    expected = model.evaluate(
        whole.x, whole.y, sample_weight=whole.weights, batch_size=30, verbose=0, return_dict=True
    )
    if name == "masked":  # a mean over what a mask leaves in each batch: by batches, as in Keras
        expected["loss"] = found["loss"]
    assert same_values(found, expected)
    assert metrics.all_count and told == []


def test_the_loss_of_masked_records_is_that_of_the_same_batches() -> None:
    case = Case(lambda: tagger(metrics=["accuracy"]), tagged)
    model = case.build()
    metrics = EvaluationMetrics(model, batch(case, 0, 5))
    rounds = [metrics.added(batch(case, start, start + 6)) for start in range(0, 30, 6)]
    totals = np.stack(rounds).sum(0, np.float64)
    x, y, _ = case.data()
    expected = model.evaluate(x, y, batch_size=6, verbose=0, return_dict=True)
    assert metrics.results(totals) == pytest.approx(expected, rel=1e-6)


def test_a_loss_as_a_metric_counts_batches_and_is_named() -> None:
    told: list[str] = []
    case = Case(*CASES[LOSS])
    metrics = EvaluationMetrics(case.build(), batch(case, 0, 5), told.append)
    assert [line.partition(" cannot")[0] for line in told] == ["metric 'huber_loss'"]
    found = metrics.results(metrics.added(batch(case, 0, 30)).astype(np.float64))
    assert set(found) == {"loss", "own", "mae"}


def test_a_metric_that_cannot_be_put_together_is_named_and_the_others_are_there() -> None:
    case, told = Case(lambda: dense(metrics=["mae", Largest()]), weighted), list[str]()
    metrics = EvaluationMetrics(case.build(), batch(case, 0, 12), told.append)
    assert [line.partition(" cannot")[0] for line in told] == ["metric 'largest'"]
    assert set(metrics.results(metrics.added(batch(case, 0, 30)).astype(np.float64))) == {"loss", "mae"}
    assert not metrics.all_count, "so the worker that saves the model evaluates it whole"


class OfFeatures(OwnTest):
    """An autoencoder whose steps take features alone, as keras.io's examples write them."""

    def test_step(self, features: Any) -> Any:
        self.size.update_state(keras.ops.mean(keras.ops.square(features[:, :2] - self(features))))
        return {"size": self.size.result()}

    def predict_step(self, features: Any) -> Any:
        return {"half": self(features / 2)}


class OfItsOwn(OfFeatures):
    """Says itself which metrics it has, as Keras' siamese network, with weighted_metrics=[]."""

    @property
    def metrics(self) -> list[Any]:
        return [self.size]


def test_compiled_metrics_that_no_step_asks_are_none() -> None:
    x, _, _ = plain()
    case = Case(lambda: own_test(OfItsOwn), lambda: (x, None, None))
    model = case.build()
    model.compile(weighted_metrics=[])
    expected = model.evaluate(x, batch_size=30, verbose=0, return_dict=True)
    metrics = EvaluationMetrics(model, batch(case, 0, 5))
    found = metrics.results(metrics.added(batch(case, 0, 30)).astype(np.float64))
    assert found == pytest.approx(expected, rel=1e-6)


def test_steps_of_features_alone_are_given_these_as_by_fit() -> None:
    x, _, _ = plain()
    case = Case(lambda: own_test(OfFeatures), lambda: (x, None, None))
    model, whole = case.build(), batch(case, 0, 30)
    expected = model.evaluate(x, batch_size=30, verbose=0, return_dict=True)
    metrics = EvaluationMetrics(model, batch(case, 0, 5))
    totals = np.stack([metrics.added(batch(case, *ends)) for ends in ROUNDS]).sum(0, np.float64)
    assert metrics.results(totals) == pytest.approx(expected, rel=1e-6)
    assert metrics.all_count
    module = UserModel("own", case.build, lambda split: None, feed=lambda records: (records[0], None))
    assert evaluate(model, module, edl.arrays(x), unwatched) == pytest.approx(expected, rel=1e-6)
    assert model.evaluate(x, batch_size=30, verbose=0, return_dict=True) == pytest.approx(expected)
    outputs = Predictor(model, batch(case, 0, 5))(whole)
    np.testing.assert_allclose(outputs["half"], model.predict(x, verbose=0)["half"], rtol=1e-6)
