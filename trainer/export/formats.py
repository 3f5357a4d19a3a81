# SPDX-License-Identifier: Apache-2.0
"""The formats that a model can be written in: Keras' own, SavedModel and ONNX.

Promise: what is written is whole or is not there, a directory as well as a file. SavedModel and ONNX hold the
forward pass only, and need neither the model's code nor edl to be loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.contract import artifacts
from edl.contract.exports import Export, File, dumps
from edl.errors import ConfigError
from edl.trainer.export import saved_file
from edl.trainer.records import arrays

KERAS_NAMES = {"savedmodel": "tf_saved_model", "onnx": "onnx"}
# What Keras and we import for a format, beside TensorFlow.
PACKAGES = {"onnx": ("onnx", "onnxruntime", "tf2onnx")}


def refuse_missing(formats: Sequence[str]) -> None:
    """Refuse formats whose packages are not installed.

    Raises:
        ConfigError: a format needs packages that are not installed.
    """
    for name in formats:
        needed = PACKAGES.get(name, ())
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"export.formats: {name} needs packages that are not installed here: {', '.join(missing)} "
                f"(pip install {' '.join(needed)}; docs/export.md)"
            )


def write(model: keras.Model, name: str, path: Path, sample: Any, classes: Sequence[str] = ()) -> None:
    """Write the model to `path`.

    Args:
        name: the name of the format.
        path: where nothing lies.
        sample: features of a few records; of what type each input is, where the model does not say.
        classes: the names of the labels' classes by number, for Keras' own format.

    Raises:
        what Keras raises: the model cannot be written so.
    """
    if name == "keras":
        saved_file.save(model, path, classes)
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
    # One that was built by a dict of features declares no inputs.
    if isinstance(model, keras.Sequential) and getattr(model, "_functional", None) is not None:
        return [_declared(tensor) for tensor in model.inputs]
    if (inputs := getattr(model, "_inputs_struct", None)) is not None:
        return [keras.tree.map_structure(_declared, inputs)]
    # A model of its own class declares no inputs, so the types are those of these records.
    names = itertools.count()

    def found(array: Any) -> tf.TypeSpec:
        spec, name = arrays.spec(array), f"input_{next(names)}"
        return tf.TensorSpec(spec.shape, spec.dtype, name) if isinstance(spec, tf.TensorSpec) else spec

    return [keras.tree.map_structure(found, sample)]


def _declared(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype, tensor.name)


def inputs(model: keras.Model, features: Any) -> dict[str, np.ndarray]:
    """Arrays of features by the names and types that the model's exported function declares.

    Args:
        features: dense arrays, as the model is called with them.
    """
    specs = keras.tree.flatten(signature(model, features))
    if isinstance(features, dict) and all(spec.name in features for spec in specs):
        leaves = [features[spec.name] for spec in specs]
    else:
        leaves = keras.tree.flatten(features)
    # Keras ignores superfluous features. A missing one is reported by the export when it is run.
    pairs = zip(specs, leaves, strict=False)
    return {spec.name: _as_declared(array, spec) for spec, array in pairs if array is not None}


def _as_declared(array: np.ndarray, spec: tf.TensorSpec) -> np.ndarray:
    """Convert a feature as Keras does for the model: to the declared type, and [batch] to [batch, 1]."""
    if spec.dtype != tf.string:
        array = array.astype(spec.dtype.as_numpy_dtype)
    return array[..., np.newaxis] if spec.shape.rank == array.ndim + 1 else array


def put(path: Path, write: Callable[[Path], object], writer: int) -> Path:
    """Write a file or directory whole or not at all: a reader sees the old one, none, or the new one.

    Args:
        write: writes to the path that it is given.
        writer: a number that is unique to the writer.

    Raises:
        what `write` raises, and OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for names in (f".[0-9]*.{path.name}", f"{saved_file.PLAIN}.[0-9]*.{path.name}"):
        for left in path.parent.glob(names):  # a writer that was lost has left it
            _remove(left)
    unfinished = path.with_name(f".{writer}.{path.name}")
    try:
        write(unfinished)
        for file in files_of(unfinished):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        if path.is_dir():  # os.replace takes no directory's place
            _remove(path)
        os.replace(unfinished, path)
    except BaseException:
        _remove(unfinished)
        raise
    return path


def files_of(path: Path) -> list[Path]:
    """The files that a format consists of, in order."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def write_list(output: Path, exports: Mapping[str, Path], verified: Collection[str]) -> bytes:
    """Write the list of exported files beside them, and return its SHA-256.

    Args:
        exports: by the names of their formats.
        verified: which of them were loaded again, and are as the model was.

    Raises:
        OSError: there is no room for it.
    """
    text = dumps(
        Export(
            name,
            path.name if path.parent == output else str(path),
            name in verified,
            {str(file.relative_to(path.parent)): _described(file) for file in files_of(path)},
        )
        for name, path in exports.items()
    )
    artifacts.write_whole(output / artifacts.EXPORTS, text)
    return hashlib.sha256(text.encode()).digest()


def _described(file: Path) -> File:
    with open(file, "rb") as opened:
        return File(file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
