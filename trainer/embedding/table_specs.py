# SPDX-License-Identifier: Apache-2.0
"""Table specifications that servers receive for a model's layers: initial rows, and their optimizer.

An optimizer whose updates need more than a row and its gradient is refused before anything is trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from edl.errors import ModelError
from edl.layers.embedding import Embedding
from edl.trainer.embedding.interfaces import Table

OPTIMIZERS = ("SGD", "Adagrad", "Adam", "Ftrl")  # that servers have
ZEROS = json.dumps({"class_name": "Zeros", "config": {}})
# It keeps the least beside a row.
_NO_OPTIMIZER = json.dumps({"class_name": "SGD", "config": {"learning_rate": 0.0, "momentum": 0.0}})
_TRUNCATED_STDDEV = 0.87962566103423978  # of a normal distribution that is cut at 2, as Keras has it
# What an optimizer may have that takes more than a row and its gradient.
_WHOLE = (
    "clipnorm",
    "global_clipnorm",
    "weight_decay",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)


def trained(layer: Embedding, model: keras.Model) -> Table:
    """Rows that are trained with the model, or with the layer's own optimizer.

    Raises:
        ModelError: servers cannot do what that optimizer does.
    """
    initializer = json.dumps(keras.initializers.serialize(_with_its_scale(layer)), sort_keys=True)
    own = True
    if not layer.trainable:  # they stay as they begin: Ftrl would change them, also without a gradient
        optimizer = _NO_OPTIMIZER
    elif layer.optimizer is not None:
        optimizer = layer.optimizer
        _refuse_own_optimizer(layer)
    else:
        own, optimizer = False, _of_model(layer, getattr(model, "optimizer", None))
    return Table(layer.name, layer.dim, initializer, optimizer, own, layer.min_count, layer.ttl_steps)


def kept(layer: Embedding) -> Table:
    """A table whose rows are constant; ids without a row have zeros, as in a saved model."""
    return Table(layer.name, layer.dim, ZEROS, _NO_OPTIMIZER, True)


def refuse_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that cannot train beside rows on servers.

    Args:
        optimizer: the optimizer of a model with such layers; None if it has none.

    Raises:
        ModelError: rows on servers cannot be trained beside it.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelError(
            "the model's optimizer scales the loss (mixed_float16), which servers do not know of; use "
            "mixed_bfloat16 or float32 with edl.layers.Embedding"
        )
    if optimizer is not None and getattr(optimizer, "gradient_accumulation_steps", None):
        raise ModelError(
            "the model's optimizer has gradient_accumulation_steps, but rows on servers are trained in each "
            "step; use training.accumulateSteps"
        )


def _with_its_scale(layer: Embedding) -> keras.initializers.Initializer:
    """The layer's initializer; where it scales with the number of ids, and that is known, what it is then."""
    initializer = layer.initializer
    if layer.input_dim is None or not isinstance(initializer, keras.initializers.VarianceScaling):
        return initializer
    config = initializer.get_config()
    if config.get("input_axes") is not None or config.get("output_axes") is not None:
        return initializer
    fans = {"fan_in": layer.input_dim, "fan_out": layer.dim, "fan_avg": (layer.input_dim + layer.dim) / 2}
    variance, seed = initializer.scale / max(1.0, fans[initializer.mode]), config["seed"]
    if initializer.distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return keras.initializers.RandomUniform(-limit, limit, seed)
    if initializer.distribution == "untruncated_normal":
        return keras.initializers.RandomNormal(0.0, math.sqrt(variance), seed)
    # Cut at two standard deviations, which leaves less of one.
    return keras.initializers.TruncatedNormal(0.0, math.sqrt(variance) / _TRUNCATED_STDDEV, seed)


def _of_model(layer: Embedding, optimizer: Any) -> str:
    """Return the model's optimizer as JSON; plain SGD for a model that is not trained.

    Raises:
        ModelError: servers do not have the model's optimizer.
    """
    if optimizer is None:
        optimizer = keras.optimizers.SGD()
    name = type(optimizer).__name__
    if name not in OPTIMIZERS:
        raise ModelError(
            f"layer {layer.name!r} has rows on servers, which train them with {', '.join(OPTIMIZERS)}, and "
            f"not with the model's {name}. Give the layer its own: Embedding(..., optimizer=...)"
        )
    made = keras.optimizers.serialize(optimizer)
    # Which rate a step has, the step says; a schedule of the user's own is no JSON.
    made["config"]["learning_rate"] = float(np.asarray(optimizer.learning_rate))
    _refuse_whole(made, f"the model's optimizer, which also trains the rows of layer {layer.name!r},")
    return json.dumps(made, sort_keys=True)


def _refuse_own_optimizer(layer: Embedding) -> None:
    assert layer.optimizer is not None
    made = json.loads(layer.optimizer)
    name = made.get("class_name")
    if name not in OPTIMIZERS:
        raise ModelError(
            f"layer {layer.name!r} is to be trained with {name}; servers have {', '.join(OPTIMIZERS)}"
        )
    if not isinstance(made["config"].get("learning_rate"), int | float):
        raise ModelError(
            f"the optimizer of layer {layer.name!r} has a schedule as its learning rate; expected a number. "
            "The model's optimizer may have one"
        )
    _refuse_whole(made, f"the optimizer of layer {layer.name!r}")


def _refuse_whole(optimizer: Mapping[str, Any], whose: str) -> None:
    config = optimizer["config"]
    for name in _WHOLE:
        if config.get(name) not in (None, False):
            raise ModelError(
                f"{whose} has {name}={config[name]!r}, which takes more than a row and its gradient: servers "
                "cannot do it. Leave it out, or give the layer an optimizer without it: Embedding(..., "
                "optimizer=...)"
            )
