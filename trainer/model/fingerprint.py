# SPDX-License-Identifier: Apache-2.0
"""Whether two workers have made the same model: a hash of how it is made, not of its weights.

A ring sums vectors by position. Two different models with the same number of weights would train on,
wrongly and without an error.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import keras


def fingerprint(model: keras.Model) -> str:
    """A hash of the model's variables, layers, loss and optimizer.

    Only numbers, texts and lists of these in a configuration count: a function's code holds the path of its
    file, and an object's name its address, which differ from worker to worker. Seeds may differ.
    """
    layers = [(type(layer).__name__, _plain(layer)) for layer in model._flatten_layers(include_self=False)]
    variables = [(v.path, list(v.shape), v.dtype, v.trainable) for v in model.variables]
    losses = [_name(loss) for loss in keras.tree.flatten(getattr(model, "loss", None))]
    optimizer = getattr(model, "optimizer", None)
    made = [layers, variables, losses, _name(optimizer), _plain(optimizer)]
    return hashlib.sha256(json.dumps(made, default=_name).encode()).hexdigest()


def _plain(thing: Any) -> dict[str, Any]:
    try:
        config = thing.get_config()
    except Exception:  # the user's own, or none at all: then its variables have to do
        return {}
    return {key: value for key, value in sorted(config.items()) if key != "seed" and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return thing
    return str(getattr(thing, "__name__", type(thing).__name__))
