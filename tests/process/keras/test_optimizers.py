# SPDX-License-Identifier: Apache-2.0
"""Keras' optimizers and their options over a ring against Keras."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers as o

from edl.trainer.model.graphs import concrete
from edl.trainer.step import sparse_gradients
from edl.trainer.step.fused_updates import fused
from tests.process.keras.models import TOKENS, Y, dense, plain, tagged, tagger
from tests.process.keras.rings import Case, assert_same

COLUMNS = {"user": 1, "item": 3, "other": 2}
PLAIN = {
    "SGD": lambda: o.SGD(0.1),
    "SGD, Nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: o.RMSprop(0.01, momentum=0.5, centered=True),
    "Adam": lambda: o.Adam(0.01),
    "Adam, amsgrad": lambda: o.Adam(0.01, amsgrad=True),
    "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1),
    "Adadelta": lambda: o.Adadelta(1.0),
    "Adagrad": lambda: o.Adagrad(0.1),
    "Adamax": lambda: o.Adamax(0.01),
    "Adafactor": lambda: o.Adafactor(0.01),
    "Nadam": lambda: o.Nadam(0.01),
    "Ftrl": lambda: o.Ftrl(0.1),
    "Lion": lambda: o.Lion(0.001),
    "Lamb": lambda: o.Lamb(0.01),
    "Muon": lambda: o.Muon(0.01),
    "ScheduleFreeAdamW": lambda: o.ScheduleFreeAdamW(0.01),
    "MultiOptimizer": lambda: o.MultiOptimizer(o.OptimizerMap(o.SGD(0.1), {"bias": o.Adam(0.01)})),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipvalue": {"clipvalue": 0.05},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5},
    "use_ema, overwriting": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "loss_scale_factor": {"loss_scale_factor": 128.0},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "gradient_accumulation_steps, use_ema": {"gradient_accumulation_steps": 2, "use_ema": True},
    "a schedule": {"learning_rate": o.schedules.ExponentialDecay(0.02, 2, 0.5)},
}


def looked_up() -> tuple[Any, Any, Any]:
    return {"user": TOKENS[:, :1], "item": TOKENS[:, 1:4], "other": TOKENS[:, 4:]}, Y, None


def two_tables() -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = {name: keras.Input((n,), dtype="int32", name=name) for name, n in COLUMNS.items()}
    users, items = keras.layers.Embedding(9, 4), keras.layers.Embedding(9, 4)
    x = [users(inputs["user"]), items(inputs["item"]), items(inputs["other"])]
    x = keras.layers.Concatenate()([keras.layers.GlobalAveragePooling1D()(part) for part in x])
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile(o.Adam(0.01), loss="mse")
    return model


class Places(keras.layers.Layer):
    """Adds something to each place of a text: its rows are looked up once in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(6, 5)

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(x + self.table(keras.ops.arange(keras.ops.shape(x)[1])))


class Different(keras.layers.Layer):
    """Looks up each of the different ids of a batch once, as feature columns do.

    The ids of the records that edl tries first ([3, 5, 0, 0, 1]) are such that those of two parts add up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(9, 5)

    def call(self, x: Any) -> Any:
        ids, places = tf.unique(x[:, 4])
        return tf.gather(self.table(ids), places)


def of_different() -> keras.Model:
    keras.utils.set_random_seed(3)
    k = keras.layers
    model = keras.Sequential([keras.Input((6,), dtype="int32"), Different(), k.RepeatVector(6), k.Dense(3)])
    model.compile(o.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def of_tokens(
    optimizer: Any, synchronized: bool = False, places: bool = False, words: int = 9, **compiled: Any
) -> keras.Model:
    """Rows are looked up several times in a record, and in the records of several ranks."""
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(words, 5)(x)
    if places:
        x = Places()(x)
    if synchronized:
        x = keras.layers.BatchNormalization(synchronized=True)(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **compiled)
    return model


ROWS: dict[str, Callable[[], keras.Model]] = {
    **{name: lambda make=PLAIN[name]: of_tokens(make()) for name in ("SGD", "Adam", "Adagrad")},  # type: ignore[misc]
    "momentum": lambda: of_tokens(o.SGD(0.1, momentum=0.9)),
    "clipnorm": lambda: of_tokens(o.SGD(1.0, clipnorm=0.001)),
    "global_clipnorm": lambda: of_tokens(o.SGD(1.0, global_clipnorm=0.001)),
    "gradient_accumulation_steps": lambda: of_tokens(o.Adam(0.01, gradient_accumulation_steps=2)),
    "loss scaling": lambda: of_tokens(o.LossScaleOptimizer(o.Adam(0.01))),
    "MultiOptimizer": lambda: of_tokens(o.MultiOptimizer(o.OptimizerMap(o.Adam(0.01), {"bias": o.SGD(0.1)}))),
    "once in each batch": lambda: of_tokens(o.Adagrad(0.1), places=True),
    "different ids once in each batch": of_different,
    "once in each batch, run_eagerly": lambda: of_tokens(o.Adagrad(0.1), places=True, run_eagerly=True),
    "large, SGD": lambda: of_tokens(o.SGD(0.1), words=sparse_gradients.LARGE // 16),
    "masked": lambda: tagger(optimizer=o.Adam(0.01)),
    "run_eagerly": lambda: of_tokens(o.Adagrad(0.1), run_eagerly=True),
    "jit_compile": lambda: of_tokens(o.Adagrad(0.1), jit_compile=True),
    "synchronized BatchNormalization": lambda: of_tokens(o.Adagrad(0.1), synchronized=True),
}


def made_with(optimizer: Callable[..., Any], **options: Any) -> keras.Model:
    return dense(optimizer(**options))


CASES = {
    **{name: Case(partial(made_with, make), plain) for name, make in PLAIN.items()},
    **{
        name: Case(partial(made_with, o.Adam, **{"learning_rate": 0.01} | options), plain)
        for name, options in OPTIONS.items()
    },
    **{f"rows of an Embedding, {name}": Case(build, tagged) for name, build in ROWS.items()},
    "rows of two tables, one used twice": Case(two_tables, looked_up),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_makes_the_steps_that_keras_makes(name: str) -> None:
    assert_same(CASES[name])


def test_no_optimizer_of_keras_is_missing() -> None:
    classes = {c for _, c in inspect.getmembers(o, inspect.isclass) if issubclass(c, o.Optimizer)}
    tried = {type(make()) for make in PLAIN.values()}
    # LossScaleOptimizer: test_precision.py
    assert classes - tried == {o.Optimizer, o.LossScaleOptimizer}


FUSED = {
    "SGD": lambda: o.SGD(0.1),
    "SGD, Nesterov": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: o.Adam(0.01),
    "Adam, other betas": lambda: o.Adam(0.01, beta_1=0.99, beta_2=0.98, epsilon=1e-4),
    "AdamW": lambda: o.AdamW(0.01, weight_decay=0.1),
}


def _updated(make: Callable[[], o.Optimizer], mode: str) -> np.ndarray:
    """A variable and its slots after 200 updates of one optimizer."""
    variable, optimizer, chance = keras.Variable(np.ones(500, "f4")), make(), np.random.default_rng(0)
    optimizer.build([variable])

    def update(gradient: tf.Tensor) -> None:
        optimizer.apply_gradients([(gradient, variable)])

    call: Callable[[tf.Tensor], None] = update
    if mode != "eager":
        with fused(optimizer) if mode == "ours" else contextlib.nullcontext():
            call = concrete(update, tf.TensorSpec([500], tf.float32), jit=mode == "xla")
    spread = np.geomspace(1e-5, 10, 500)
    for _ in range(200):
        call(tf.constant(chance.normal(size=500) * spread + 0.3 * variable.numpy(), tf.float32))
    slots = [v.numpy() for v in optimizer.variables if v.shape == (500,)]
    scale = [np.max(np.abs(a)) for a in [variable.numpy(), *slots]]
    return np.concatenate([np.float64(a) / s for a, s in zip([variable.numpy(), *slots], scale, strict=True)])


@pytest.mark.parametrize("name", FUSED)
def test_an_update_differs_from_kerass_no_more_than_its_modes_do(name: str) -> None:
    graph, eager, xla, ours = (_updated(FUSED[name], mode) for mode in ("graph", "eager", "xla", "ours"))
    spread = max(np.max(np.abs(graph - eager)), np.max(np.abs(graph - xla)))
    assert np.max(np.abs(ours - graph)) <= max(2 * spread, 2e-7)
