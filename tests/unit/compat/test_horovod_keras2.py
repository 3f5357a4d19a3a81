# SPDX-License-Identifier: Apache-2.0
"""Errors of scripts for Horovod that are written for Keras 2."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import keras
import pytest

from edl.compat.horovod.keras3 import keras2_advice


def model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    "call",
    [
        lambda: keras.optimizers.SGD(lr=0.1),
        lambda: keras.layers.Dense(1, input_dims=3),
        lambda: keras.layers.BatchNormalization(fused=False),
        lambda: model().fit_generator([]),
        lambda: model().fit([[1.0, 2.0]], [1.0], workers=4),
        lambda: model().save("folder"),
        lambda: keras.backend.set_session(None),
        lambda: import_module("keras.utils.np_utils"),
    ],
)
def test_a_name_of_keras_2_leads_to_its_flag(call: Callable[[], object]) -> None:
    assert "--legacy-keras" in keras2_advice(error := raised(call)), error


@pytest.mark.parametrize(
    "call",
    [
        lambda: keras.layers.Dense(-1),
        lambda: model()(keras.ops.ones([1, 3])),
        lambda: Path("absent").read_text(),
        lambda: import_module("absent"),
        lambda: "text".absent,  # type: ignore[attr-defined]
        lambda: int(text="1"),  # type: ignore[call-overload]
    ],
)
def test_other_errors_do_not(call: Callable[[], object]) -> None:
    assert keras2_advice(raised(call)) == ""


def raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error was raised")
