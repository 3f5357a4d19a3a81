"""Which models can be trained over a ring. The others are refused, with what to do instead."""

from __future__ import annotations

from typing import Any

import keras

from edl.errors import ModelError

MEANS = frozenset({"sum_over_batch_size", "mean"})


def refuse_unless_compiled(model: Any) -> None:
    """
    Raises:
        ModelError: it is no compiled Keras model whose step can be taken apart.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"model() must return a compiled keras.Model, not {type(model).__name__}")
    if not getattr(model, "compiled", False):
        raise ModelError("model() must return a compiled model: call model.compile(optimizer, loss) in it")
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelError("loss scaling (mixed_float16) is not supported; use float32 or mixed_bfloat16")


def has_own_step(model: keras.Model) -> bool:
    """Whether it says itself what a training step is."""
    return type(model).train_step is not keras.Model.train_step


def refuse_unless_float32(model: keras.Model) -> None:
    """
    Raises:
        ModelError: a variable that is to be trained has another type.
    """
    for v in model.trainable_variables:
        if v.dtype != "float32":
            raise ModelError(
                f"variable {v.path!r} is {v.dtype}; only float32 variables can be trained "
                "(one step sums one float32 vector over the ring)"
            )


def loss_is_a_sum(model: keras.Model) -> bool:
    """Whether the losses are sums over the records; else they are means.

    Raises:
        ModelError: they are neither, or some are one and some the other.
    """
    kinds = set()
    for loss in keras.tree.flatten(model.loss):
        if loss is None:
            continue
        reduction = loss.reduction if isinstance(loss, keras.losses.Loss) else "sum_over_batch_size"
        if reduction in MEANS:
            kinds.add("mean")
        elif reduction == "sum":
            kinds.add("sum")
        else:
            raise ModelError(
                f"loss {loss.name!r} has reduction {reduction!r}; over a ring only "
                '"sum_over_batch_size" and "sum" have a meaning'
            )
    if len(kinds) > 1:
        raise ModelError("some losses are sums and some are means; give all of them the same reduction")
    return kinds == {"sum"}
