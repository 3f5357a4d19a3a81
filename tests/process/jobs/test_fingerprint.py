# SPDX-License-Identifier: Apache-2.0
"""Which models have one fingerprint, and which have not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

from edl.trainer.model.fingerprint import fingerprint

pytestmark = pytest.mark.waits


def built(
    units: int = 3, rate: float = 0.5, seed: int | None = None, rescale: float = 2.0, **compiled: Any
) -> keras.Model:
    keras.utils.clear_session()  # names are counted anew, as in another process
    inputs = keras.Input((4,))
    x = keras.layers.Lambda(lambda x: x * rescale)(inputs)
    x = keras.layers.Dropout(rate, seed=seed)(keras.layers.Dense(units)(x))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile(**({"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"} | compiled))
    return model


def test_a_model_that_is_made_twice_has_one_fingerprint_whatever_its_weights_and_seeds() -> None:
    assert fingerprint(built(seed=1)) == fingerprint(built(seed=2))


@pytest.mark.parametrize(
    "other",
    [
        lambda: built(units=4),
        lambda: built(rate=0.4),
        lambda: built(optimizer=keras.optimizers.Adam(0.02)),
        lambda: built(optimizer=keras.optimizers.SGD(0.01)),
        lambda: built(loss="mae"),
    ],
    ids=["units", "rate", "learning rate", "optimizer", "loss"],
)
def test_models_that_differ_have_different_ones(other: Callable[[], keras.Model]) -> None:
    assert fingerprint(other()) != fingerprint(built())


def test_a_configuration_that_cannot_be_told_is_no_error() -> None:
    class Odd(keras.layers.Layer):
        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError

    model = keras.Sequential([keras.Input((2,)), Odd(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert len(fingerprint(model)) == 64
