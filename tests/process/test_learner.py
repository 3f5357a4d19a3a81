"""The two halves of a step against Keras itself, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from edl.errors import ModelError
from trainer import control
from trainer.data import Batch
from trainer.learner import KerasLearner

RECORDS = 12


def a_batch(start: int, stop: int, x: Any, y: Any, weights: Any = None) -> Batch:
    def cut(tree: Any) -> Any:
        return keras.tree.map_structure(lambda a: a[start:stop], tree)

    return Batch((start, stop), cut(x), cut(y), None if weights is None else cut(weights))


def ring_step(learner: KerasLearner, batches: list[Batch | None], step: int = 0) -> control.Agreed:
    """One step as a ring of len(batches) would do it, in this process."""
    size = len(batches)
    vectors = []
    for rank, batch in enumerate(batches):
        told = control.write(rank, size, batch.positions if batch else None, leave=False)
        vectors.append(learner.gradients(batch, told, step, rank) if batch else learner.nothing(told))
    total = sum(vectors[1:], vectors[0])
    agreed = learner.agreed(total)
    learner.update(total)
    return agreed


def dense(optimizer: Any = None, **compile_options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile(optimizer or keras.optimizers.Adam(0.01), **({"loss": "mse"} | compile_options))
    return model


def two_ends() -> keras.Model:
    keras.utils.set_random_seed(3)
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    both = keras.layers.Concatenate()([keras.layers.Dense(5, trainable=False)(a), b])
    model = keras.Model(
        [a, b], [keras.layers.Dense(1, name="p")(both), keras.layers.Dense(3, name="q")(both)]
    )
    model.compile(
        keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9, clipnorm=1.0
        ),
        loss=["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)],
        loss_weights=[1.0, 0.3],
        metrics=[["mae"], ["accuracy"]],
    )
    return model


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="relu")
        self.last = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))


def subclassed() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = Subclassed()
    model.compile(
        keras.optimizers.RMSprop(0.01), loss=lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1)
    )
    model(np.zeros((1, 4), "f4"))
    return model


def simple_data(seed: int = 0) -> tuple[Any, Any, Any]:
    chance = np.random.default_rng(seed)
    return chance.normal(size=(RECORDS, 4)).astype("f4"), chance.normal(size=(RECORDS, 2)).astype("f4"), None


def weighted_data() -> tuple[Any, Any, Any]:
    x, y, _ = simple_data()
    return x, y, np.linspace(0.1, 2, RECORDS).astype("f4")


def two_ends_data() -> tuple[Any, Any, Any]:
    chance = np.random.default_rng(0)
    x = [chance.normal(size=(RECORDS, 4)).astype("f4"), chance.normal(size=(RECORDS, 3)).astype("f4")]
    y = [chance.normal(size=(RECORDS, 1)).astype("f4"), chance.integers(0, 3, RECORDS)]
    return x, y, None


@pytest.mark.parametrize(
    ("build", "data"),
    [
        (dense, simple_data),
        (dense, weighted_data),
        (lambda: dense(keras.optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.5)), simple_data),
        (two_ends, two_ends_data),
        (subclassed, simple_data),
    ],
    ids=[
        "regularized",
        "sample weights",
        "AdamW, clipping",
        "two inputs, outputs and losses; frozen; schedule",
        "subclassed",
    ],
)
@pytest.mark.parametrize("cuts", [[0, 12], [0, 5, 12], [0, 1, 9, 12]], ids=["one", "two", "three"])
def test_a_ring_makes_the_step_that_keras_makes(
    build: Callable[[], keras.Model], data: Callable[[], Any], cuts: list[int]
) -> None:
    x, y, weights = data()
    reference, model = build(), build()
    learner = KerasLearner(model, a_batch(0, 2, x, y, weights))
    for step in range(3):
        reference.train_on_batch(x, y, sample_weight=weights)
        batches: list[Any] = [a_batch(a, b, x, y, weights) for a, b in itertools.pairwise(cuts)]
        agreed = ring_step(learner, [*batches, None], step)  # and one rank without data
        assert agreed.records == RECORDS
        assert agreed.batches == tuple(itertools.pairwise(cuts))
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)
    assert int(model.optimizer.iterations) == 3


def test_a_sum_is_summed() -> None:
    x, y, _ = simple_data()

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
        return model

    reference, model = build(), build()
    learner = KerasLearner(model, a_batch(0, 2, x, y))
    reference.train_on_batch(x, y)
    ring_step(learner, [a_batch(0, 5, x, y), a_batch(5, 12, x, y)])
    np.testing.assert_allclose(model.get_weights()[0], reference.get_weights()[0], rtol=1e-5)


def with_moving_parts() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )
    model.compile("adam", "mse")
    return model


def test_gradients_have_no_side_effect() -> None:
    x, y, _ = simple_data()
    learner = KerasLearner(with_moving_parts(), a_batch(0, 2, x, y))
    before = learner.digest()
    told = control.write(0, 1, (0, 12), leave=False)
    first, again = (np.asarray(learner.gradients(a_batch(0, 12, x, y), told, 5, 0)) for _ in range(2))
    assert learner.digest() == before
    np.testing.assert_array_equal(first, again)  # a step that is done again draws the same masks
    other = np.asarray(learner.gradients(a_batch(0, 12, x, y), told, 5, 1))
    assert (first != other).any(), "another rank should draw other masks"


def test_moving_averages_are_averaged_by_records() -> None:
    x, y, _ = simple_data()
    model = with_moving_parts()
    learner = KerasLearner(model, a_batch(0, 2, x, y))
    ring_step(learner, [a_batch(0, 3, x, y), a_batch(3, 12, x, y)])
    moving_mean = model.layers[0].moving_mean.numpy()
    np.testing.assert_allclose(moving_mean, 0.01 * x.mean(axis=0), rtol=1e-4, atol=1e-6)


def test_the_state_travels_whole() -> None:
    x, y, _ = simple_data()
    one, other = (KerasLearner(with_moving_parts(), a_batch(0, 2, x, y)) for _ in range(2))
    for step in range(3):
        ring_step(one, [a_batch(0, 12, x, y)], step)
    assert one.digest() != other.digest()
    other.load(one.state())
    assert one.digest() == other.digest()
    for learner in (one, other):
        ring_step(learner, [a_batch(0, 12, x, y)], 3)
    assert one.digest() == other.digest()
    with pytest.raises(ModelError, match="the ring's state has 3 bytes"):
        other.load(np.zeros(3, np.uint8))


def test_what_is_not_finite_is_flagged() -> None:
    x, y, _ = simple_data()
    learner = KerasLearner(dense(), a_batch(0, 2, x, y))
    x[7, 1] = np.nan
    told = control.write(0, 1, (0, 12), leave=False)
    assert learner.agreed(learner.gradients(a_batch(0, 12, x, y), told, 0, 0)).nonfinite


def half() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="float16")])
    model.compile("sgd", "mse")
    return model


def scaled() -> keras.Model:
    return dense(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))


def nothing_to_train() -> keras.Model:
    model = dense()
    model.trainable = False
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: 7, "must return a compiled keras.Model, not int"),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), "call model.compile"),
        (half, "is float16; only float32"),
        (scaled, "loss scaling"),
        (lambda: dense(loss=keras.losses.MeanSquaredError(reduction="none")), "has reduction 'none'"),
        (
            lambda: dense(loss=keras.losses.MeanSquaredError(reduction="sum")),
            "cannot be combined with regularizers",
        ),
        (nothing_to_train, "nothing would be trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_words(build: Callable[[], Any], words: str) -> None:
    x, y, _ = simple_data()
    with pytest.raises(ModelError, match=words):
        KerasLearner(build(), a_batch(0, 2, x, y))
