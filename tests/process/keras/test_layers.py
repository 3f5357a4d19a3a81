# SPDX-License-Identifier: Apache-2.0
"""Layers that change something in the forward pass, over a ring against Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from edl.errors import ModelError
from edl.trainer.agreement import control
from tests.process.keras.models import X, Y, dense, plain, sgd, tagged
from tests.process.keras.rings import Case, Meeting, assert_same, batch, learner_of, parts_of, ring_step

K = keras.layers


class Counting(keras.layers.Layer):
    """Counts, each in a type of its own: calls, records, and whether there was one."""

    def build(self, _: Any) -> None:
        self.calls = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False, name="calls"
        )
        self.seen = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen"
        )
        self.any = self.add_weight(shape=(), dtype="bool", initializer="zeros", trainable=False, name="any")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1)
        self.seen.assign_add(ops.shape(x)[0])
        self.any.assign(True)
        return x


class Largest(keras.layers.Layer):
    """How many records the largest batch had: neither a sum nor the same for each part."""

    def build(self, _: Any) -> None:
        self.most = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="most"
        )

    def call(self, x: Any) -> Any:
        self.most.assign(ops.maximum(self.most, ops.shape(x)[0]))
        return x


class MovingMean(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x


class Halving(keras.layers.Layer):
    """Assigns a weight that is trained."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        self.scale.assign(0.5 * self.scale)
        return x * self.scale


CASES = {
    "SpectralNormalization": Case(lambda: dense(layers=[K.SpectralNormalization(K.Dense(5))]), plain),
    "SpectralNormalization, a convolution": Case(
        lambda: dense(layers=[K.Reshape((4, 2)), K.SpectralNormalization(K.Conv1D(3, 2)), K.Flatten()]), plain
    ),
    "a layer that assigns a trained weight": Case(lambda: dense(layers=[Halving()]), plain),
    "a layer with a moving mean": Case(lambda: dense(layers=[MovingMean()]), plain),
    "counters": Case(lambda: dense(layers=[Counting()]), plain),
    "frozen layers": Case(lambda: dense(layers=[K.Dense(5, trainable=False)]), plain),
    "UnitNormalization, LayerNormalization, GroupNormalization": Case(
        lambda: dense(layers=[K.UnitNormalization(), K.LayerNormalization(), K.GroupNormalization(2)]), plain
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_makes_the_steps_that_keras_makes(name: str) -> None:
    assert_same(CASES[name])


def test_a_counter_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="'largest/most' of type int32"):
        learner_of(Case(lambda: dense(layers=[Largest(name="largest")]), plain), Meeting())


def moving_parts() -> keras.Model:
    return dense(layers=[K.BatchNormalization(), K.Dropout(0.5)])


def test_moving_averages_are_averaged_by_records() -> None:
    case, meeting = Case(lambda: dense(layers=[K.Identity()]), plain), Meeting()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), K.BatchNormalization(), K.Dense(2)])
    model.compile(sgd(), "mse")
    case, meeting = Case(lambda: model, plain), Meeting()
    ring_step(learner_of(case, meeting), meeting, parts_of(case, 3, 0, 12))
    moving_mean = model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(moving_mean, 0.01 * X[:12].mean(axis=0), rtol=1e-4, atol=1e-6)


def test_gradients_have_no_side_effect() -> None:
    case = Case(moving_parts, plain)
    learner = learner_of(case, Meeting())
    before, state = learner.digest(), learner.state()
    told = control.write(0)
    first, again, other = (
        learner.allreduce_step(batch(case, 0, 12), told, 5, rank, 12) for rank in (0, 0, 1)
    )
    assert learner.digest() == before
    after = []
    for sums in (first, again, other):
        learner.apply(sums)
        after.append(learner.digest())
        learner.load(state)
    assert after[0] == after[1], "a step that is done again draws the same masks"
    assert after[0] != after[2], "another rank draws other masks"


def test_the_state_travels_whole() -> None:
    case, meeting = Case(moving_parts, plain), Meeting()
    one, other = (learner_of(case, meeting) for _ in range(2))
    for step in range(3):
        ring_step(one, meeting, [batch(case, 0, 12)], step)
    assert one.digest() != other.digest()
    other.load(one.state())
    assert one.digest() == other.digest()
    for learner in (one, other):
        ring_step(learner, meeting, [batch(case, 0, 12)], 3)
    assert one.digest() == other.digest()
    with pytest.raises(ModelError, match="the ring's state has 3 bytes"):
        other.load(np.zeros(3, np.uint8))


def test_what_is_not_finite_is_flagged() -> None:
    x = X.copy()
    x[7, 1] = np.nan
    case, meeting = Case(dense, lambda: (x, Y, None)), Meeting()
    learner = learner_of(case, meeting)
    before = learner.digest()
    sums = learner.allreduce_step(batch(case, 0, 12), control.write(0), 0, 0, 12)
    assert (sums.agreed.nonfinite, sums.at_fault) == (True, True)
    assert learner.digest() == before


def normalized(layers: int = 2, optimizer: Any = None) -> keras.Model:
    """Normalized over the whole batch, with records of very unlike size."""
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((4,))
    for _ in range(layers):
        x = K.Dense(5, activation="tanh")(K.BatchNormalization(synchronized=True, momentum=0.5)(x))
    model = keras.Model(inputs, K.Dense(2)(x))
    model.compile(optimizer or sgd(), "mse")
    return model


def convolved() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4, 3, 2))
    x = K.Conv2D(3, 2)(inputs)
    x = K.BatchNormalization(axis=1, synchronized=True)(x)
    model = keras.Model(inputs, K.Dense(2)(K.Flatten()(x)))
    model.compile(sgd(), "mse")
    return model


def masked_norm() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((None,), dtype="int32")
    x = K.BatchNormalization(synchronized=True)(K.Embedding(9, 5, mask_zero=True)(inputs))
    model = keras.Model(inputs, K.Dense(3)(x))
    model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


IMAGES = np.random.default_rng(1).normal(size=(30, 4, 3, 2)).astype("f4")
SYNCHRONIZED = {
    "two layers": Case(normalized, plain),
    "far from zero": Case(lambda: normalized(1), lambda: (X * 0.1 + 3, Y, None), tolerance=1e-5),
    "channels first": Case(convolved, lambda: (IMAGES, Y, None)),
    "masked": Case(masked_norm, tagged),
}


@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_synchronized_batch_normalization_normalizes_by_the_whole_batch(name: str) -> None:
    assert_same(SYNCHRONIZED[name])
