# SPDX-License-Identifier: Apache-2.0
"""Replacement of a model's large `keras.layers.Embedding` by `edl.layers.Embedding` (ps.replaceEmbeddings).

Layers are replaced when the user's `model()` creates them. So functional, sequential and subclassed models
and nested layers behave alike, and a table that is too large for a variable never becomes one.

Promise: a replaced layer has the same outputs and learns the same for the same rows, under the same name. A
layer that cannot is rejected by name, or stays a Keras layer with a message to the user.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from edl.errors import ModelError
from edl.layers.embedding import Embedding
from edl.layers.row_location import is_loaded_by_keras

# What the rows of servers cannot have.
REFUSED = ("embeddings_regularizer", "embeddings_constraint", "lora_rank", "quantization_config")


@contextmanager
def replaced(least: int) -> Iterator[list[str]]:
    """Inside this context, an Embedding of `least` or more values (input_dim x output_dim) is one of edl's.

    Args:
        least: 0: none is replaced.

    Yields:
        what was made of each that is as large, in words: filled inside.

    Raises:
        ModelError: (inside) one of them cannot be replaced.
    """
    told: list[str] = []
    if not least:
        yield told
        return
    plain = keras.layers.Embedding
    before, own = plain.__new__, plain.__dict__.get("__new__")

    def make(cls: Any, *args: Any, **named: Any) -> Any:
        found = _arguments(cls, args, named) if cls is plain else {}
        size = found.get("input_dim", 0) * found.get("output_dim", 0)
        if not found or size < least:
            return before(cls, *args, **named)
        name = f" {found['name']!r}" if found.get("name") else ""
        what = f"keras.layers.Embedding({found['input_dim']}, {found['output_dim']}){name}"
        if why := _stays(found):
            told.append(f"{what} stays a variable: {why}")
            return before(cls, *args, **named)
        if refused := [name for name in REFUSED if found.get(name) is not None]:
            raise ModelError(
                f"{what}: ps.replaceEmbeddings is {least}, so its rows would be on parameter servers, which "
                f"do not know {refused[0]}. Leave that out, or set ps.replaceEmbeddings above {size}"
            )
        ours = _ours(found)
        what = f"layer {ours.name!r}, keras.layers.Embedding({ours.input_dim}, {ours.dim}),"
        told.append(f"{what} is replaced by edl.layers.Embedding (ps.replaceEmbeddings is {least})")
        return ours

    plain.__new__ = staticmethod(make)
    try:
        yield told
    finally:
        if own is None:
            del plain.__new__
        else:
            plain.__new__ = own


def _arguments(cls: Any, args: Any, named: Any) -> dict[str, Any]:
    """Return the layer's arguments by name, with its defaults.

    The dict is empty if Keras does not accept the arguments, and will raise.
    """
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **named)
    except TypeError:
        return {}
    bound.apply_defaults()
    found = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    for name in ("input_dim", "output_dim"):
        size = found[name]
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size <= 0:
            return {}
        found[name] = int(size)  # which NumPy may have counted
    return found


def _stays(found: dict[str, Any]) -> str:
    """Why the layer is not replaced; empty if it is."""
    if found.get("weights") is not None:
        return "it is given its weights"
    if not found.get("trainable", True):
        return "it is not trained"
    if is_loaded_by_keras():
        return "it is loaded with its weights"
    return ""


def _ours(found: dict[str, Any]) -> Embedding:
    others = {key: found[key] for key in ("name", "dtype") if found.get(key) is not None}
    return Embedding(
        found["output_dim"],
        initializer=found["embeddings_initializer"],
        input_dim=found["input_dim"],
        mask_zero=found["mask_zero"],
        float_ids=True,
        **others,
    )
