# SPDX-License-Identifier: Apache-2.0
"""What a ring cannot train as Keras would is refused, in words, before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import ops

from edl import config
from edl.config import values
from edl.errors import ModelError
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.start import build_learner
from tests.process.keras.models import dense, plain
from tests.process.keras.own_models import vae
from tests.process.keras.rings import Case, Meeting, learner_of

K = keras.layers


class OwnFit(keras.Model):
    def fit(self, *_: Any, **__: Any) -> Any:
        return super().fit()


def of_class(kind: Any, **compiled: Any) -> keras.Model:
    inputs = keras.Input((4,))
    model = kind(inputs, K.Dense(2)(inputs))
    model.compile("sgd", **({"loss": "mse"} | compiled))
    return model


def with_set(**attributes: Any) -> keras.Model:
    model = dense()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def half() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), K.Dense(2, dtype="float16")])
    model.compile("sgd", "mse")
    return model


def double() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), K.Dense(2, dtype="float64")])
    model.compile("sgd", "mse")
    return model


def nothing_to_train() -> keras.Model:
    model = dense()
    model.trainable = False
    return model


def fixed() -> keras.Model:
    model = keras.Sequential([keras.Input(batch_shape=(5, 4)), K.Dense(2)])
    model.compile("sgd", "mse")
    return model


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(5, 4))
    carrying = K.LSTM(2, stateful=True, name="carrying")(K.Reshape((2, 2))(inputs))
    model = keras.Model(inputs, carrying)
    model.compile("sgd", "mse")
    return model


MSE = keras.losses.MeanSquaredError
REFUSED = {
    "no model": (lambda: 7, "must return a compiled keras.Model, not int"),
    "not compiled": (lambda: keras.Sequential([K.Dense(1)]), "call model.compile"),
    "float16 variables": (half, "is float16; only float32"),
    "float64 variables": (double, "is float64; only float32"),
    'reduction="none"': (lambda: dense(loss=MSE(reduction="none")), "has reduction 'none'"),
    "nothing to train": (nothing_to_train, "nothing would be trained"),
    "fit() of its own": (lambda: of_class(OwnFit), r"OwnFit overrides fit\(\)"),
    "train_step set on the model": (lambda: with_set(train_step=lambda data: {}), "train_step is set"),
    "compute_loss set on the model": (lambda: with_set(compute_loss=lambda *a: 0.0), "compute_loss is set"),
    "make_train_function set on the model": (
        lambda: with_set(make_train_function=lambda force=False: None),
        "make_train_function is set",
    ),
    "fixed batches": (fixed, "fixed batch of 5"),
    "stateful layers": (stateful, "layer 'carrying' is stateful"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_words(name: str) -> None:
    build, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        learner_of(Case(build, plain), Meeting())


def dice(y: Any, p: Any) -> Any:
    y, p = ops.sigmoid(y), ops.sigmoid(p)
    return 1 - 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p))


def product(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p)) * ops.mean(ops.square(p))


def in_batch_negatives(y: Any, p: Any) -> Any:
    return ops.mean(ops.logsumexp(ops.matmul(p, ops.transpose(y)), axis=-1))


class Centering(keras.layers.Layer):
    """Normalizes by the records of the batch."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


INEXACT: dict[str, Callable[[], keras.Model]] = {
    "Dice": lambda: dense(loss=dice),
    "keras.losses.Dice": lambda: dense(loss=keras.losses.Dice()),
    "a product": lambda: dense(loss=product),
    "in-batch negatives": lambda: dense(loss=in_batch_negatives),
    "a layer that mixes records": lambda: dense(layers=[Centering()]),
}


@pytest.mark.parametrize("name", INEXACT)
def test_what_mixes_the_records_of_a_batch_is_found(name: str) -> None:
    case, told = Case(INEXACT[name], plain), list[str]()
    learner_of(case, Meeting(), inexact="warn", warn=told.append)
    assert len(told) == 1 and "mixes the records of a batch: the gradient of 5 records differs by" in told[0]
    with pytest.raises(ModelError, match=r"depends on the number of workers"):
        learner_of(case, Meeting(), inexact="refuse")


EXACT: dict[str, Callable[[], keras.Model]] = {
    "dropout": lambda: dense(loss=lambda y, p: ops.mean(ops.abs(y - p), axis=-1), layers=[K.Dropout(0.5)]),
    "noise": lambda: dense(loss=lambda y, p: ops.mean(ops.abs(y - p)), layers=[K.GaussianNoise(1.0)]),
    "BatchNormalization": lambda: dense(
        loss=lambda y, p: ops.mean(ops.abs(y - p)), layers=[K.BatchNormalization()]
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_does_not_is_not_accused(name: str) -> None:
    learner_of(Case(EXACT[name], plain), Meeting(), inexact="refuse")


@pytest.mark.parametrize(
    ("build", "compression", "words"),
    [
        (
            dense,
            "bfloat16",
            "compression must be none or float16: the ring's engine, Gloo, cannot sum bfloat16",
        ),
        (lambda: vae(0.0), "float16", r"compression must be none for a model with its own train_step\(\)"),
    ],
)
def test_a_compression_that_cannot_be_honoured_is_refused(
    build: Callable[[], keras.Model], compression: str, words: str
) -> None:
    training = config.parse(values.load([], [f"training.compression={compression}"])).training
    with pytest.raises(ModelError, match=words):
        build_learner.learner_of(build(), [], HorovodRing(1, "lo", "no-job"), training, print)
