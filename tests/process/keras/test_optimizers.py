"""Keras' optimizers and their options over a ring against Keras."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from keras import optimizers as o

from tests.process.keras.models import dense, plain, tagged, tagger
from tests.process.keras.rings import Case, assert_same

# An optimizer that divides by the size of a gradient makes much of its last digits.
DIVIDES = 1e-5
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
    "a schedule": {"learning_rate": o.schedules.ExponentialDecay(0.1, 2, 0.5)},
}


CASES = {
    **{name: Case(lambda make=make: dense(make()), plain, tolerance=DIVIDES) for name, make in PLAIN.items()},
    **{
        name: Case(
            lambda options=options: dense(o.Adam(**{"learning_rate": 0.01} | options)),
            plain,
            tolerance=DIVIDES,
        )
        for name, options in OPTIONS.items()
    },
    "rows of an embedding, Adam": Case(
        lambda: tagger(optimizer=o.Adam(0.01)), tagged, tolerance=DIVIDES, dense=True
    ),
    "rows of an embedding, Adagrad, clipped": Case(
        lambda: tagger(optimizer=o.Adagrad(0.1, global_clipnorm=0.1)), tagged, tolerance=DIVIDES, dense=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_ring_makes_the_steps_that_keras_makes(name: str) -> None:
    assert_same(CASES[name])


def test_no_optimizer_of_keras_is_missing() -> None:
    classes = {c for _, c in inspect.getmembers(o, inspect.isclass) if issubclass(c, o.Optimizer)}
    tried = {type(make()) for make in PLAIN.values()}
    # LossScaleOptimizer: test_precision.py
    assert classes - tried == {o.Optimizer, o.LossScaleOptimizer}
