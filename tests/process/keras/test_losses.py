# SPDX-License-Identifier: Apache-2.0
"""Losses over a ring against Keras: masks, weights, sums, what layers add, what a user computes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from tests.process.keras.models import TAGS, TOKENS, X, Y, classes, dense, plain, tagged, tagger, weighted
from tests.process.keras.rings import Case, assert_same

CE = keras.losses.SparseCategoricalCrossentropy


class Added(keras.layers.Layer):
    """Adds a loss of what goes through it."""

    def __init__(self, loss: Any):
        super().__init__()
        self._made = loss

    def call(self, x: Any) -> Any:
        self.add_loss(self._made(x))
        return x


class OwnLoss(keras.losses.Loss):
    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(ops.square(y - p), axis=-1)


class Reducing(keras.losses.Loss):
    """Makes a number of another loss's values, as keras.io's named entity recognition does."""

    def call(self, y: Any, p: Any) -> Any:
        return ops.mean(CE(from_logits=True, reduction="none")(y, p))


class Selecting(keras.losses.Loss):
    """A mean over those values of a batch that are positive."""

    def call(self, y: Any, p: Any) -> Any:
        import tensorflow as tf

        return tf.boolean_mask(ops.square(y - p), y > 0)


class WarmUp(keras.losses.Loss):
    """Counts its calls in a variable of its own, which it first reads in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = keras.Variable(1.0, trainable=False, name="calls")

    def call(self, y: Any, p: Any) -> Any:
        calls = ops.fori_loop(0, 2, lambda _, total: total + self.calls / 2.0, 0.0)
        self.calls.assign_add(1.0)
        return ops.mean(ops.square(y - p), axis=-1) * ops.minimum(1.0, calls / 4.0)


class OldComputeLoss(keras.Model):
    """Keras before 3.3: no `training`."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return ops.mean(ops.square(y - y_pred)) + 0.01 * ops.mean(ops.abs(x))


class SumAndMean(keras.Model):
    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight, training) * 2.0 + ops.mean(ops.abs(y_pred))


def subclassed(kind: Any, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    model = kind(inputs, keras.layers.Dense(2)(inputs))
    model.compile(keras.optimizers.SGD(0.1), **compiled)
    return model


def two_ends(first: Any = "mse", second: Any = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    a, b = keras.Input((4,), name="a"), keras.Input((6,), dtype="int32", name="b")
    words = keras.layers.Embedding(9, 5, mask_zero=True)(b)
    tags = keras.layers.Dense(3, name="q")(keras.layers.LSTM(4, return_sequences=True)(words))
    p = keras.layers.Dense(2, name="p", kernel_regularizer="l2")(a)
    model = keras.Model([a, b], [p, tags])
    model.compile("sgd", loss=[first, second or CE(from_logits=True)], loss_weights=[1.0, 0.3])
    return model


def two_ends_data() -> Any:
    return [X, TOKENS], [Y, TAGS], None


def regularized(loss: Any) -> keras.Model:
    return dense(loss=loss, layers=[keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.05))])


def ignoring() -> Any:
    return TOKENS, np.where(TOKENS > 0, TAGS, -1), None


def nothing_left() -> Any:
    """In the second step, and in a part of the others, everything is ignored."""
    tags = np.where((np.arange(30) % 12 < 4)[:, None], -1, TAGS)
    tags[12:23] = -1
    return TOKENS, tags, None


def token_weights() -> Any:
    return TOKENS, TAGS, np.where(TOKENS > 3, 2.0, 0.5).astype("f4")


MEAN_WITH = "mean_with_sample_weight"
CASES = {
    "mse": Case(dense, plain),
    "regularized": Case(lambda: regularized("mse"), plain),
    "sample weights": Case(dense, weighted),
    "mean_with_sample_weight": Case(lambda: regularized(keras.losses.MeanSquaredError(MEAN_WITH)), weighted),
    "class weights": Case(
        lambda: dense(loss=CE(from_logits=True), outputs=3), classes, class_weight={0: 1.0, 1: 3.0, 2: 0.2}
    ),
    "mask_zero": Case(tagger, tagged),
    "mask_zero, weights of tokens": Case(tagger, token_weights),
    "mask_zero, regularized": Case(
        lambda: tagger(optimizer=keras.optimizers.SGD(0.1, weight_decay=0.01)), tagged
    ),
    "ignore_class": Case(lambda: tagger(CE(from_logits=True, ignore_class=-1), mask=False), ignoring),
    "ignore_class that leaves nothing": Case(
        lambda: tagger(CE(from_logits=True, ignore_class=-1), mask=False), nothing_left
    ),
    "two losses, one masked, regularized": Case(two_ends, two_ends_data),
    "two losses, a sum and a masked mean": Case(
        lambda: two_ends(keras.losses.MeanSquaredError(reduction="sum")), two_ends_data
    ),
    "sum": Case(
        lambda: dense(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum")),
        plain,
        told=False,
    ),
    "sum, regularized": Case(lambda: regularized(keras.losses.MeanSquaredError(reduction="sum")), plain),
    "function, mean by record": Case(
        lambda: dense(loss=lambda y, p: ops.mean(ops.abs(y - p), axis=-1)), plain
    ),
    "function, mean": Case(lambda: dense(loss=lambda y, p: ops.mean(ops.square(y - p))), plain),
    "function, sum": Case(
        lambda: dense(loss=lambda y, p: 0.1 * ops.sum(ops.square(y - p))), plain, told=False
    ),
    "class of its own": Case(lambda: dense(loss=OwnLoss()), weighted),
    "class around reduction none": Case(lambda: dense(loss=Reducing(), outputs=3), classes),
    "class that selects values": Case(lambda: dense(loss=Selecting()), plain),
    "class that counts its calls": Case(lambda: dense(loss=WarmUp()), plain),
    "add_loss, mean": Case(lambda: dense(layers=[Added(lambda x: 0.1 * ops.mean(ops.square(x)))]), plain),
    "add_loss, sum": Case(lambda: dense(layers=[Added(lambda x: 0.01 * ops.sum(ops.square(x)))]), plain),
    "add_loss, one for each record": Case(
        lambda: dense(layers=[Added(lambda x: 0.01 * ops.sum(ops.square(x), axis=-1))]), plain
    ),
    "add_loss, beside a masked loss": Case(lambda: masked_and_added(), tagged),
    "activity_regularizer": Case(
        lambda: dense(layers=[keras.layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.1))]),
        weighted,
    ),
    "compute_loss without training": Case(lambda: subclassed(OldComputeLoss), plain),
    "compute_loss around a compiled loss": Case(lambda: subclassed(SumAndMean, loss="mse"), weighted),
    "compute_loss around a sum": Case(
        lambda: subclassed(SumAndMean, loss=keras.losses.MeanSquaredError(reduction="sum")),
        plain,
        tolerance=1e-5,  # gradients of a sum, and their rounding, are larger than a mean's
    ),
}


def masked_and_added() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(9, 5, mask_zero=True)(inputs)
    x = keras.layers.LSTM(4, return_sequences=True)(x)
    x = keras.layers.ActivityRegularization(l2=0.1)(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    model.compile("sgd", CE(from_logits=True))
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_ring_makes_the_steps_that_keras_makes(name: str) -> None:
    assert_same(CASES[name])
