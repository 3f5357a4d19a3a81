# SPDX-License-Identifier: Apache-2.0
"""The loss by which workers are compared: equal for one model and the same records, different for others."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import edl.layers
from edl.layers.row_location import rows_elsewhere
from edl.trainer.agreement import control
from edl.trainer.evaluation.inference import InferenceLearner, Predictor
from edl.trainer.evaluation.metrics import EvaluationMetrics
from edl.trainer.records.batches import Batch
from edl.trainer.step.interfaces import SampleLoss
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from edl.trainer.step.ps_learner import PsLearner
from edl.trainer.step.sample_loss import output_norm, sample_loss, with_fixed_weights
from tests.process.keras.own_models import VAE

K = keras.layers
DATA = np.random.default_rng(1)
X, Y = DATA.normal(size=(5, 6)).astype(np.float32), DATA.normal(size=(5, 1)).astype(np.float32)
IDS = np.arange(20).reshape(5, 4)
SCALE = "EDL_TEST_SCALE"
Learner = KerasLearner | OwnStepLearner


class Scaled(keras.layers.Layer):
    """Multiplies by a constant that the configuration does not show."""

    def __init__(self, scale: Any, **options: Any):
        super().__init__(**options)
        self.scale = scale

    def call(self, x: Any) -> Any:
        return x * self.scale() if callable(self.scale) else x * self.scale


def built(scale: Any = 1.0, **compiled: Any) -> keras.Model:
    """A model with everything that has a state: weights, moving averages, a seed and slots."""
    keras.utils.clear_session()  # names are counted anew, as in another process
    inputs = keras.Input((6,))
    x = K.BatchNormalization()(K.Dense(16, "relu")(Scaled(scale)(inputs)))
    model = keras.Model(inputs, K.Dense(1)(K.Dropout(0.5)(x)))
    model.compile(**({"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | compiled))
    return model


def ring_of_one(vector: Any) -> Any:
    return vector


def batch(count: int, x: np.ndarray = X) -> Batch:
    return Batch(np.arange(count), x[:count], Y[:count], None)


def learner_of(model: keras.Model, x: np.ndarray = X) -> KerasLearner:
    return KerasLearner(model, batch(5, x), [], ring_of_one, "allow")


def loss_of(learner: Learner, x: np.ndarray = X) -> SampleLoss | None:
    return sample_loss(learner, lambda: batch(2, x))


def is_same(one: SampleLoss | None, other: SampleLoss | None) -> bool:
    assert one is not None and other is not None
    return bool(np.isfinite(one.loss)) and abs(one.loss - other.loss) <= 1e-5 * abs(one.loss)


def differ(one: SampleLoss | None, other: SampleLoss | None) -> bool:
    """Whether the master refuses a worker with one of these where the other is that of the job."""
    assert one is not None and other is not None
    tolerance = max(one.tolerance, other.tolerance)
    return abs(one.loss - other.loss) > tolerance * max(abs(one.loss), abs(other.loss))


def trained(learner: Learner) -> Learner:
    for step in range(2):
        learner.apply(learner.allreduce_step(batch(2), control.write(step), step, 0, 2))
    return learner


@pytest.fixture(scope="module")
def found() -> SampleLoss | None:
    """The sample loss of the plain model."""
    keras.utils.set_random_seed(1)
    return loss_of(learner_of(built()))


def test_one_model_has_one_loss_whatever_its_weights_seeds_and_slots_which_stay_as_they_are(
    found: SampleLoss | None,
) -> None:
    keras.utils.set_random_seed(2)
    learner = trained(learner_of(built(metrics=["mae"])))
    before, digest = learner.parts(), learner.digest()
    assert is_same(loss_of(learner), found)
    assert learner.digest() == digest
    assert all(np.array_equal(a, b) for a, b in zip(before, learner.parts(), strict=True))

    def read() -> Batch:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        sample_loss(learner, read)
    assert learner.digest() == digest


def drawn() -> keras.Model:
    """Each process has another constant."""
    return built(np.random.default_rng(7).normal(size=6).astype(np.float32))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: built(float(os.environ[SCALE])), X),
        (drawn, X),
        (lambda: built(loss=lambda y, p: keras.ops.mean(keras.ops.abs(y - p), -1)), X),
        (lambda: built(loss=keras.losses.Huber(0.1)), X),
        (built, X[::-1].copy()),
    ],
    ids=["environment variable", "unseeded constant", "code of the loss", "parameter of the loss", "data"],
)
def test_models_and_data_that_differ_have_different_losses(
    found: SampleLoss | None, model: Callable[[], keras.Model], x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCALE, "1.2")
    assert differ(found, loss_of(learner_of(model(), x), x))


def test_a_model_with_its_own_step_is_compared_too() -> None:
    sample = Batch(np.arange(5), X, None, None)

    def made(noise: float) -> OwnStepLearner:
        keras.utils.clear_session()
        model = VAE(noise)
        model.compile(optimizer=keras.optimizers.Adam(0.01))
        return OwnStepLearner(model, sample, ring_of_one, "allow")

    def found(learner: OwnStepLearner) -> SampleLoss | None:
        digest = learner.digest()
        loss = sample_loss(learner, lambda: Batch(np.arange(2), X[:2], None, None))
        assert learner.digest() == digest
        return loss

    learner = made(1.0)
    one = found(learner)
    for step in range(2):
        learner.apply(learner.allreduce_step(sample, control.write(step), step, 0, 5))
    assert is_same(one, found(learner))
    assert differ(one, found(made(2.0)))


@pytest.mark.parametrize("learner", [KerasLearner, PsLearner], ids=["hybrid", "ps"])
def test_a_model_with_rows_on_servers_is_compared_too(learner: Any) -> None:
    def found(scale: float) -> SampleLoss | None:
        keras.utils.clear_session()
        with rows_elsewhere():
            inputs = keras.Input((4,), dtype="int64")
            x = K.Flatten()(Scaled(scale)(edl.layers.Embedding(3, name="rows")(inputs)))
            model = keras.Model(inputs, K.Dense(1)(K.Dense(8, "relu")(x)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        given = (ring_of_one,) if learner is KerasLearner else ()
        made = learner(model, batch(5, IDS), [], *given, "allow")
        digest = made.digest()
        loss = sample_loss(made, lambda: batch(2, IDS))
        assert made.digest() == digest
        return loss

    one, again, other = found(1.0), found(1.0), found(1000.0)
    assert is_same(one, again)
    assert differ(one, other)


def test_a_loss_that_is_drawn_at_random_is_none() -> None:
    assert loss_of(learner_of(built(lambda: tf.random.uniform([6])))) is None


def test_a_loss_of_records_that_feed_changes_at_random_is_none() -> None:
    drawn = np.random.default_rng(3)
    noisy = lambda: batch(2, X + drawn.normal(size=X.shape).astype(np.float32))  # noqa: E731
    assert sample_loss(learner_of(built()), noisy) is None


def test_a_loss_that_cannot_be_computed_with_any_weights_is_none() -> None:
    class Checked(keras.layers.Dense):
        def call(self, x: Any) -> Any:
            tf.debugging.assert_less(tf.abs(tf.convert_to_tensor(self.kernel)), 0.01)
            return super().call(x)

    model = keras.Sequential([keras.Input((6,)), Checked(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse")
    learner = learner_of(model)
    digest = learner.digest()
    assert loss_of(learner) is None
    assert learner.digest() == digest


def test_a_loss_that_is_not_finite_is_none() -> None:
    assert loss_of(learner_of(built(float("inf")))) is None


def found_by(learner: InferenceLearner, compute: Any, x: np.ndarray = X) -> SampleLoss | None:
    """The sample loss of a worker that does not train, whose state must stay as it was."""
    digest = learner.digest()
    found = with_fixed_weights(learner, lambda: batch(5, x), compute)
    assert learner.digest() == digest
    return found


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
def test_workers_that_evaluate_or_predict_are_compared_too(mode: str) -> None:
    def found(scale: Any = 1.0, x: np.ndarray = X, seed: int = 1, **compiled: Any) -> SampleLoss | None:
        keras.utils.set_random_seed(seed)
        model = built(scale, **compiled)
        learner, sample = InferenceLearner(model, ring_of_one), batch(5, x)
        if mode == "evaluate":
            return found_by(learner, EvaluationMetrics(model, sample).loss, x)
        predict = Predictor(model, sample)
        return found_by(learner, lambda some: output_norm(predict(some)), x)

    plain = found()
    assert is_same(found(seed=2, metrics=["mae"]), plain)
    assert differ(plain, found(scale=1.2))
    assert differ(plain, found(scale=-1.0))
    assert differ(plain, found(x=X * 2))
    assert found(scale=lambda: tf.random.uniform([6])) is None, "it is drawn at random"
    if mode == "evaluate":
        assert differ(plain, found(loss=keras.losses.Huber(0.1)))


def test_outputs_of_any_magnitude_and_sign_count_in_their_norm_and_integers_do_not() -> None:
    large, small = np.full((5, 3), 1e6, np.float32), DATA.normal(size=(5, 1)).astype(np.float32)
    norm = output_norm({"a": large, "b": small})
    assert abs(output_norm({"b": small.copy(), "a": large.copy()}) - norm) <= 1e-9 * norm
    assert abs(output_norm({"a": large, "b": small * 1.1}) - norm) > 0.01 * norm
    assert abs(output_norm({"a": -large, "b": small}) - norm) > 0.01 * norm
    assert output_norm({"a": large, "b": small, "class": np.arange(5)}) == norm
    assert output_norm({"a": np.zeros((5, 1), np.float32)}) == 1.0
    assert np.isnan(output_norm({"class": np.arange(5)}))
