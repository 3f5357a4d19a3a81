# SPDX-License-Identifier: Apache-2.0
"""What must be known to load a saved model (`edl.trainer.export.saved_file`), compared with Keras itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from edl.trainer.export import saved_file

pytestmark = pytest.mark.process


class Plain(keras.layers.Layer):
    """A layer that is not registered."""

    def call(self, x: Any) -> Any:
        return x


@keras.saving.register_keras_serializable("tests")
class Registered(Plain):
    """It can be loaded where this module has been imported."""


def twice(x: Any) -> Any:
    return x * 2


def scaled(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - p), -1)


def dense(**options: Any) -> keras.layers.Layer:
    return keras.layers.Dense(1, **options)


@pytest.mark.parametrize(
    ("layer", "loss", "names"),
    [
        (lambda: dense(activation="relu"), "mse", []),
        (lambda: dense(activation=keras.activations.relu, kernel_regularizer="l2"), keras.losses.Huber(), []),
        (lambda: dense(activation=keras.ops.tanh), keras.losses.mean_squared_error, []),
        (Plain, "mse", ["Plain"]),
        (Registered, scaled, ["scaled", "tests>Registered"]),
        (lambda: dense(activation=twice), "mse", ["twice"]),
    ],
)
def test_custom_objects_are_named(tmp_path: Path, layer: Any, loss: Any, names: list[str]) -> None:
    model = keras.Sequential([keras.Input((3,)), layer(), dense()])
    model.compile(optimizer="adam", loss=loss, metrics=["mae", keras.metrics.MeanSquaredError()])
    model.optimizer.build(model.trainable_variables)
    path = tmp_path / "model.keras"
    model.save(path)
    assert saved_file.custom_objects(saved_file.config(path)) == names
    assert all(name in saved_file.note(path) for name in names)
    missing = [name for name in names if ">" not in name]  # the others are registered in this process
    if missing:
        with pytest.raises(TypeError):
            keras.models.load_model(path)
    known = {"Plain": Plain, "twice": twice, "scaled": scaled}
    keras.models.load_model(path, custom_objects={name: known[name] for name in missing})


def test_python_code_in_a_file_is_told(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x + 1)])
    path = tmp_path / "model.keras"
    model.save(path)
    assert saved_file.note(path) == (
        "model.keras can be loaded only with safe_mode=False (it holds Python code of a Lambda layer)"
    )
    with pytest.raises(ValueError, match="safe_mode"):
        keras.models.load_model(path)
    with pytest.raises(ValueError, match="safe_mode"):
        saved_file.load(path, {}, is_own=False)
    assert saved_file.load(path, {})(np.zeros((1, 3))).numpy().tolist() == [[1.0, 1.0, 1.0]]


def lora() -> keras.Model:
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 4)])
    model.add(keras.layers.Flatten())
    model.add(dense())
    for layer in (model.layers[0], model.layers[2]):
        layer.enable_lora(2)
        for variable in layer.trainable_variables:
            variable.assign(np.random.default_rng(1).normal(size=variable.shape))
    return model


def quantized(mode: str) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), dense()])
    model.layers[0].quantize(mode)
    return model


@pytest.mark.parametrize(
    "build", [lora, lambda: quantized("int8"), lambda: quantized("float8")], ids=["LoRA", "int8", "float8"]
)
def test_weights_are_compared_as_keras_saves_them(tmp_path: Path, build: Any) -> None:
    """LoRA's factors are merged into the kernel, and new ones are drawn when the file is loaded."""
    model = build()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert saved_file.weights_digest(loaded) == saved_file.weights_digest(model)
    bias = loaded.layers[-1].bias
    bias.assign_add(np.ones(bias.shape))
    assert saved_file.weights_digest(loaded) != saved_file.weights_digest(model)


def test_a_file_that_is_none_of_keras_needs_nothing_that_is_known(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    path.write_text("not a zip")
    assert saved_file.note(path) == ""
