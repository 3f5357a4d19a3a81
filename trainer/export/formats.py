# SPDX-License-Identifier: Apache-2.0
"""The formats beside Keras' own that a model can be written in: SavedModel and ONNX.

Promise: what is written is whole or is not there, a directory as well as a file. It holds the forward pass
only, and needs neither the model's code nor edl to be loaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from edl.contract.artifacts import FORMATS
from edl.errors import ConfigError
from edl.trainer.export import saved_file
from edl.trainer.model import arrays

KERAS_NAMES = {"savedmodel": "tf_saved_model", "onnx": "onnx"}
# What Keras and we import for a format, beside TensorFlow.
PACKAGES = {"savedmodel": (), "onnx": ("onnx", "onnxruntime", "tf2onnx")}


def refuse_missing(formats: Sequence[str]) -> None:
    """Refuse formats whose packages are not installed.

    Raises:
        ConfigError: a format needs packages that are not installed.
    """
    for name in formats:
        missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"export.formats: {name} needs packages that are not installed here: {', '.join(missing)} "
                f"(pip install {' '.join(PACKAGES[name])}; docs/export.md)"
            )


def write(model: keras.Model, name: str, path: Path, sample: Any) -> None:
    """Write the model to `path`.

    Args:
        name: the name of the format.
        path: where nothing lies.
        sample: features of a few records; of what type each input is, where the model does not say.

    Raises:
        what Keras raises: the model cannot be written so.
    """
    if name == "keras":
        saved_file.save(model, path)
        return
    if not model.built:  # its own train_step() calls what it is made of, and never it
        model(keras.tree.map_structure(lambda array: arrays.tensor(arrays.standard(array)), sample))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages about each other's ages
        model.export(
            str(path), format=KERAS_NAMES[name], verbose=False, input_signature=signature(model, sample)
        )


def signature(model: keras.Model, sample: Any) -> list[Any]:
    """The types of the model's inputs, as its exported function takes them; each has a name."""
    if isinstance(model, keras.Sequential):
        return [_spec(tensor) for tensor in model.inputs]
    if isinstance(model, keras.models.Model) and hasattr(model, "_inputs_struct"):
        return [keras.tree.map_structure(_spec, model._inputs_struct)]
    # A model of its own class declares no inputs, so the specs are those of these records.
    names = iter(range(len(keras.tree.flatten(sample))))
    return [keras.tree.map_structure(lambda array: _named(arrays.spec(array), next(names)), sample)]


def input_names(model: keras.Model, sample: Any) -> list[str]:
    """The names of the inputs, in the order in which Keras flattens them; empty where one has none."""
    return [str(getattr(spec, "name", "") or "") for spec in keras.tree.flatten(signature(model, sample))]


def _named(spec: tf.TypeSpec, number: int) -> tf.TypeSpec:
    return (
        tf.TensorSpec(spec.shape, spec.dtype, f"input_{number}") if isinstance(spec, tf.TensorSpec) else spec
    )


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, tensor.name)


def put(model: keras.Model, name: str, directory: Path, sample: Any, worker: int) -> Path:
    """Write a format into the output directory of a job, completely or not at all.

    Args:
        worker: the id of the writing worker.

    Raises:
        as `write`, and OSError.
    """
    path = directory / FORMATS[name]
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f".*.{path.name}"):  # of a worker that was lost while writing
        _remove(left)
    put_at(model, name, path, sample, worker)
    return path


def put_at(model: keras.Model, name: str, path: Path, sample: Any, by: int) -> None:
    """Write a format to a path, completely or not at all. An existing file or directory is replaced.

    Args:
        by: a number that is unique to the writer.
    """
    unfinished = path.with_name(f".{by}.{path.name}")
    try:
        write(model, name, unfinished, sample)
        for file in files_of(unfinished):
            _sync(file)
        _remove(path)  # of an earlier worker, which was lost after it: os.replace takes no directory's place
        os.replace(unfinished, path)
    except BaseException:
        _remove(unfinished)
        raise


def files_of(path: Path) -> list[Path]:
    """The files that a format consists of, in order."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
