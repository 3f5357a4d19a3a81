# SPDX-License-Identifier: Apache-2.0
"""Models with their own training step whose records depend on each other are found at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.records.batches import Batch
from edl.trainer.step.own_step import OwnStepLearner
from tests.process.keras import own_models as zoo

X, Z = zoo.features(5), zoo.points(5)
BY_RECORD: dict[str, tuple[Callable[[], keras.Model], Any, Any]] = {
    "VAE that draws": (lambda: zoo.vae(noise=1.0), X, None),
    "DCGAN that draws": (lambda: zoo.gan(draws=True), X, Z),
    "WGAN-GP": (lambda: zoo.gan(draws=False, kind=zoo.WGAN), X, Z),
    "distillation": (zoo.distiller, X, zoo.labels(5, 3)),
}


class Squared(zoo.VAE):
    """Its loss is the square of a mean."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            z_mean, z_log_var, _ = self.encoder(data)
            loss = tf.square(tf.reduce_mean(tf.square(data - self.decoder(z_mean + z_log_var))))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))  # noqa: B905
        return {"loss": loss}


class Summed(zoo.VAE):
    """Its loss is one for each record, as that of Keras' siamese network: a tape adds them up."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            z_mean, z_log_var, _ = self.encoder(data)
            loss = tf.reduce_sum(tf.square(data - self.decoder(z_mean + z_log_var)), axis=1)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))  # noqa: B905
        return {"loss": tf.reduce_mean(loss)}


class Drawn(zoo.VAE):
    """Draws random numbers without a seed."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data + tf.random.normal(tf.shape(data)))


class Unlike(zoo.VAE):
    """Its step takes graphs only."""

    def train_step(self, data: Any) -> Any:
        if tf.executing_eagerly():
            raise RuntimeError("not eagerly, please")
        return super().train_step(data)


def tried(model: keras.Model, x: Any, y: Any = None, inexact: str = "warn") -> list[str]:
    """The warnings about the learner, which is unchanged afterwards."""
    told: list[str] = []
    learner = OwnStepLearner(model, Batch(np.arange(5), x, y, None), lambda v: v, inexact, told.append)
    state = learner.state()
    assert np.isfinite(state.view("f4")[: state.size // 8]).all()
    learner.load(state)
    return told


def compiled(model: keras.Model) -> keras.Model:
    model.compile(keras.optimizers.Adam(0.01))
    return model


@pytest.mark.parametrize("name", BY_RECORD)
def test_a_step_that_takes_each_record_by_itself_passes(name: str) -> None:
    build, x, y = BY_RECORD[name]
    assert tried(build(), x, y) == []


def test_a_contrastive_loss_is_told_with_the_optimizer_that_it_is_for() -> None:
    [told] = tried(zoo.contrastive(), X, zoo.labels(5, 2))
    assert "a ring does not train this model as Keras alone would" in told
    assert "the gradients for optimizer 'adam" in told
    assert "records assign differs" in told  # of the averaged encoder, and its spread


def test_a_loss_that_is_no_mean_is_told_or_refused_or_allowed() -> None:
    x = X * np.array([[0.1], [0.5], [1], [2], [3]], np.float32)
    [told] = tried(compiled(Squared(0.0)), x)
    assert "from 5 records differ by" in told
    with pytest.raises(ModelError, match="of 2 and 3 of them put together"):
        tried(compiled(Squared(0.0)), x, inexact="refuse")
    assert tried(compiled(Squared(0.0)), x, inexact="allow") == []


def test_losses_that_a_tape_adds_up_are_told_as_that() -> None:
    [told] = tried(compiled(Summed(0.0)), X)
    assert "are those of the sum of 5 losses, one for each record" in told
    assert "keras.ops.mean(loss)" in told
    assert "mixes" not in told
    with pytest.raises(ModelError, match="adds the records of a batch up"):
        tried(compiled(Summed(0.0)), X, inexact="refuse")


def test_of_a_step_that_draws_what_nobody_controls_nothing_is_told() -> None:
    assert tried(compiled(Drawn(0.0)), X) == []


def test_a_step_that_cannot_be_tried_is_told_and_trained() -> None:
    [told] = tried(compiled(Unlike(0.0)), X)
    assert (
        "could not be tried out: Unlike.train_step() run eagerly, on 5 records, raised RuntimeError" in told
    )
