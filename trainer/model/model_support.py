# SPDX-License-Identifier: Apache-2.0
"""Properties of models that the trainer needs, and the refusal of unsupported models, with a remedy."""

from __future__ import annotations

from typing import Any

import keras

from edl.errors import ModelError
from edl.layers import Embedding

# Operations of keras.ops that a functional model may have and that take each value by itself.
BY_VALUE = frozenset({"Add", "Multiply", "NotEqual", "Subtract"})
# The methods of fit(); a model that overrides one is trained by it and not by the ring.
LOOP = ("fit", "train_on_batch", "make_train_function", "_make_function")


def refuse_unless_compiled(model: Any) -> None:
    """Refuse a model that is not compiled, or whose step cannot be divided.

    Raises:
        ModelError: it is no compiled Keras model whose step can be taken apart.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"model() must return a compiled keras.Model, not {type(model).__name__}")
    if not getattr(model, "compiled", False):
        raise ModelError("model() must return a compiled model: call model.compile(optimizer, loss) in it")
    if model.optimizer is None and not has_own_step(model):
        raise ModelError("model() must compile its model with an optimizer: it has none")
    name = type(model).__name__
    for method in LOOP:
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ModelError(
                f"{name} overrides {method}(), which is not called: the ring runs the training. What it does "
                "belongs into train_step(), compute_loss(), data() or feed()"
            )
    for method in (*LOOP, "train_step", "compute_loss"):
        if vars(model).get(method) is not None:
            raise ModelError(
                f"{method} is set on the model itself, which is not called when it is trained over a ring. "
                f"Override {method}() in a class of your own"
                if method in ("train_step", "compute_loss")
                else f"{method} is set on the model itself, which is not called: the ring runs the training"
            )


def has_own_step(model: keras.Model) -> bool:
    """True if the model's class overrides `train_step`."""
    return type(model).train_step is not keras.Model.train_step


def refuse_unless_float32(model: keras.Model) -> None:
    """Refuse trained variables of other types than float32.

    Raises:
        ModelError: a variable that is to be trained has another type.
    """
    for v in model.trainable_variables:
        if v.dtype != "float32":
            raise ModelError(
                f"variable {v.path!r} is {v.dtype}; only float32 variables can be trained "
                "(one step sums one float32 vector over the ring). mixed_float16 and mixed_bfloat16 have "
                "float32 variables"
            )
        if getattr(v, "overwrite_with_gradient", False):
            raise ModelError(f"variable {v.path!r} is not trained but overwritten (float8): not supported")


def refuse_fixed_batches(model: keras.Model) -> None:
    """Refuse a model of a fixed batch size, or with state from batch to batch.

    Raises:
        ModelError: the model takes batches of one size only, or carries something from batch to batch.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"layer {layer.name!r} is stateful: it carries its state from one batch to the next, but the "
                "records of a step are divided over the workers, and shuffled. Use stateful=False"
            )
    for tensor in keras.tree.flatten(getattr(model, "inputs", None) or []):
        if tensor.shape and tensor.shape[0] is not None:
            raise ModelError(
                f"input {tensor.name!r} has a fixed batch of {tensor.shape[0]}; the ring divides each "
                "batch over "
                "its workers, so any number of records must fit: use Input(shape) without batch_size"
            )


def output(model: keras.Model, x: Any, training: bool) -> Any:
    """The model's predictions, called as Keras' `train_step` does."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def flat_logs(returned: Any) -> Any:
    """A step's result as `fit` shows it: a dict of compiled metrics inside it is flattened."""
    if not isinstance(returned, dict):
        return returned
    found: dict[str, Any] = {}
    for name, value in returned.items():
        found.update(flat_logs(value) if isinstance(value, dict) else {name: value})
    return found


def moving(model: keras.Model) -> list[keras.Variable]:
    """The variables that are neither trained nor a metric's: moving averages, counters, seeds."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in model.non_trainable_variables if id(v) not in metrics]


def output_losses(model: keras.Model) -> list[Any]:
    """Return Keras' means of the loss of each output, in the order of their computation.

    The list is empty for a model with one output, whose loss is the whole loss.
    """
    return list(getattr(model._compile_loss, "metrics", ()))


def of_keras(thing: Any) -> bool:
    """Whether it is Keras' own: a function, or an instance of one of its classes."""
    module = thing.__module__ if callable(thing) and hasattr(thing, "__name__") else type(thing).__module__
    return bool(module and module.split(".")[0] == "keras")


def computes_its_own_loss(model: keras.Model) -> bool:
    """True if the model's class overrides compute_loss(): compiled losses then need not be in its loss."""
    return type(model).compute_loss is not keras.Model.compute_loss


def is_plain(model: keras.Model) -> bool:
    """True if the model consists of Keras' and edl's layers, and its loss of compiled losses of Keras.

    None of these mixes the records of a batch, except for BatchNormalization.
    """
    layers = list(model._flatten_layers())
    operations = [op for layer in layers for op in getattr(layer, "operations", ())]
    losses = [entry.loss for entry in getattr(model._compile_loss, "_flat_losses", None) or ()]
    return (
        not computes_its_own_loss(model)
        and all(of_keras(loss) for loss in losses)
        and not any(isinstance(layer, keras.layers.Lambda) for layer in layers)
        and all(of_keras(layer) or type(layer) is Embedding for layer in layers)
        and all(isinstance(op, keras.layers.Layer) or type(op).__name__ in BY_VALUE for op in operations)
    )


def is_scaled(model: keras.Model) -> bool:
    """Whether the optimizer scales the loss and looks for what is not finite (mixed_float16)."""
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def is_half(model: keras.Model) -> bool:
    """Whether a layer computes in 16 bits."""
    return any(layer.compute_dtype in ("float16", "bfloat16") for layer in model._flatten_layers())
