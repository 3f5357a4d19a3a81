# SPDX-License-Identifier: Apache-2.0
"""Comparison of a model with what a warm start loads into it. What does not fit is refused by name."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import keras

from edl import scratch
from edl.checkpoints import CheckpointError
from edl.checkpoints.keras_files import is_of_keras_2
from edl.errors import ModelError
from edl.trainer.embedding.interfaces import Table
from edl.trainer.embedding.saved_rows import weights_in

MAX_NAMED = 5  # variables in a message

Shape = tuple[int, ...]


def refuse_rows(place: str, table: Table, dim: int | None) -> None:
    """Refuse rows that do not fit the table.

    Args:
        dim: the dimension of the existing rows; None without rows.

    Raises:
        ModelError: they are not those of the table.
    """
    if dim != table.dim:
        there = "and missing there" if dim is None else f"and of length {dim} there"
        raise ModelError(
            f"{place} does not fit this model: the rows of {table.name!r} are of length {table.dim} here, "
            f"{there}. The names of their layers identify the tables"
        )


def kind_of(dtype: str, shape: Shape) -> str:
    """The dtype and shape of a variable, for messages."""
    return f"{dtype} {list(shape)}"


def refuse_variables(place: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Refuse variables that are missing there, or of a different kind.

    Raises:
        ModelError: what is here is not there, or is of another kind.
    """
    wrong = [
        f"{name} is {kind} here, {f'and {there[name]} there' if name in there else 'and missing there'}"
        for name, kind in here.items()
        if there.get(name) != kind
    ]
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise ModelError(f"{place} does not fit this model: {'; '.join(wrong[:MAX_NAMED])}{more}")


class StoredVariable(NamedTuple):
    """A variable in a file of Keras.

    Args:
        layer: the name of its layer, for messages only.
    """

    dtype: str
    shape: Shape
    layer: str


def stored_in(path: Path) -> dict[str, StoredVariable]:
    """The variables in a file of Keras, without the optimizer's, by their positions in the model's structure.

    A position is built of the attributes and classes of layers. Keras 2 numbered the layers with weights.

    Raises:
        CheckpointError: Keras has not saved this file, or in a different format than its name says.
    """
    try:
        with weights_in(path) as file:
            has_names = any(name.startswith("layer_names") for name in file.attrs)
            if has_names or "model_weights" in file:
                if not is_of_keras_2(path.name):
                    raise CheckpointError(
                        f"initFrom.path: {path.name} has the format of Keras 2, which Keras reads only from "
                        "a file whose name ends with .h5, but not with .weights.h5: rename it"
                    )
                return _stored_by_keras_2(file if has_names else file["model_weights"])
            if is_of_keras_2(path.name):
                raise CheckpointError(
                    f"initFrom.path: {path.name} does not have the format of Keras 2. If save_weights of "
                    "Keras 3 has written it, rename it, so that its name ends with .weights.h5"
                )
            return _stored_by_keras_3(file)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"initFrom.path: {path.name} is not a file that Keras has saved: {error}"
        ) from error


def _stored_by_keras_3(file: h5py.File) -> dict[str, StoredVariable]:
    found: dict[str, StoredVariable] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith("optimizer/"):
            dtype = str(item.attrs.get("dtype", item.dtype))  # HDF5 has no bfloat16
            found[name] = StoredVariable(dtype, item.shape, str(item.parent.attrs.get("name", "")))

    file.visititems(note)
    return found


def _stored_by_keras_2(group: h5py.Group) -> dict[str, StoredVariable]:
    layers = [(name, group[name]) for name in _strings(group, "layer_names")]
    sets = [(name, layer) for name, layer in layers if _strings(layer, "weight_names")]
    found = {
        _position(number, index): StoredVariable(str(layer[weight].dtype), layer[weight].shape, name)
        for number, (name, layer) in enumerate(sets)
        for index, weight in enumerate(_strings(layer, "weight_names"))
    }
    if "top_level_model_weights" in group:
        own = group["top_level_model_weights"]
        for index, weight in enumerate(_strings(own, "weight_names")):
            found[f"model/{index}"] = StoredVariable(str(own[weight].dtype), own[weight].shape, "")
    return found


def compare_file(place: str, path: Path, model: keras.Model) -> list[str]:
    """Refuse a file that Keras' `load_weights` could not load whole: by position and shape, never by name.

    Returns:
        The dtypes of floating variables that are converted to the model's, as Keras does.

    Raises:
        ModelError: a position is missing there, or has a different shape or kind of number.
        CheckpointError: Keras has not saved this file.
    """
    there, converted = stored_in(path), set[str]()
    here = _keras_2_structure(model) if is_of_keras_2(path.name) else _keras_3_structure(model)
    ours, theirs = dict[str, str](), dict[str, str]()
    for position, variable in here.items():
        name = f"variable {position.rpartition('/')[2]} of layer {variable.layer} ({position})"
        if not variable.layer:
            name = position
        ours[name] = kind_of(variable.dtype, variable.shape)
        if (found := there.get(position)) is None:
            continue
        theirs[name] = kind_of(found.dtype, found.shape)
        if found.dtype != variable.dtype and "float" in found.dtype and "float" in variable.dtype:
            converted.add(found.dtype)
            theirs[name] = kind_of(variable.dtype, found.shape)
        if theirs[name] != ours[name] and found.layer != variable.layer:
            theirs[name] += f" of layer {found.layer}"
    refuse_variables(place, ours, theirs)
    return sorted(converted)


def _keras_3_structure(model: keras.Model) -> dict[str, StoredVariable]:
    with scratch.directory() as directory:
        own = directory / "own.weights.h5"
        model.save_weights(own)
        return stored_in(own)


def _keras_2_structure(model: keras.Model) -> dict[str, StoredVariable]:
    """The variables of a model by their positions, as a file of Keras 2 would have them."""
    sets = [(layer, layer.trainable_weights + layer.non_trainable_weights) for layer in model.layers]
    found = {
        _position(number, index): _described(weight, layer.name)
        for number, (layer, weights) in enumerate((layer, weights) for layer, weights in sets if weights)
        for index, weight in enumerate(weights)
    }
    of_layers = {id(weight) for _, weights in sets for weight in weights}
    own = [w for w in model.trainable_weights + model.non_trainable_weights if id(w) not in of_layers]
    return found | {f"model/{index}": _described(weight, "") for index, weight in enumerate(own)}


def _described(weight: Any, layer: str) -> StoredVariable:
    return StoredVariable(keras.backend.standardize_dtype(weight.dtype), tuple(weight.shape), layer)


def _position(layer: int, weight: int) -> str:
    return f"layers with weights/{layer}/{weight}"


def _strings(group: h5py.Group, name: str) -> list[str]:
    """A list of strings among the attributes of a group; long lists are divided: NAME0, NAME1, ..."""
    names = [name] if name in group.attrs else [n for n in group.attrs if n.removeprefix(name).isdigit()]
    names.sort(key=lambda n: int(n.removeprefix(name) or 0))
    texts = [text for n in names for text in group.attrs[n]]
    return [text.decode() if isinstance(text, bytes) else str(text) for text in texts]
