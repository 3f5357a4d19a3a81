# SPDX-License-Identifier: Apache-2.0
"""Fused optimizer updates: a few in-place operations for each variable.

Keras writes an update as a dozen operations on whole arrays, and each operation allocates its result. For the
most common optimizers, TensorFlow has an operation that reads gradient, variable and slots once, and writes
them once.

That operation computes Adam's `1 - beta` from the float32 of beta, where Keras rounds the double. For 0.999
they differ by 1.3e-5, and so would the velocities, in every step to the same side. So a velocity is updated
beforehand with Keras' factor, and the operation receives a beta of 1, which leaves the velocity unchanged.
The same is done for a momentum whose factor differs by more than the rounding of one update (`CLOSE`). The
results then differ from Keras' as its graph, eager and XLA modes do from each other. For 25 million
parameters this takes 2.1 times as long as the operation alone, and half as long as Keras' operations (one
thread).

Like every update of a variable, it does not overwrite a value that is still referenced: then it writes into a
copy (trainer/model/snapshot.py counts on that).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

CLOSE = 5e-7  # relative difference of the two factors: 0.9, the default of a momentum, has 2e-7

Update = Callable[[Any, Any, Any], None]  # of a gradient, a variable of TensorFlow's, and the learning rate


@contextlib.contextmanager
def fused(optimizer: Any) -> Iterator[None]:
    """Fuse the updates of `optimizer` in a graph traced inside this context.

    Each variable has one operation, if TensorFlow has an operation for this optimizer.
    """
    if not fuse(optimizer, _Once()):
        yield
        return
    try:
        yield
    finally:
        object.__delattr__(optimizer, "update_step")


Numbers = Callable[[Callable[[], list[Any]]], list[Any]]  # of an update, by a function that computes them


def fuse(optimizer: Any, numbers: Numbers = lambda compute: compute()) -> bool:
    """Fuse the updates of `optimizer` from now on. False if TensorFlow has no operation for it.

    Args:
        numbers: returns what all variables of an update share. By default it is computed for each variable.
    """
    make = _MAKERS.get(type(optimizer))  # a class of the user's own may do something else
    update = make(optimizer, numbers) if make else None
    if update is not None:
        object.__setattr__(optimizer, "update_step", update)  # past Keras, which would keep track of it
    return update is not None


class _Once:
    """Computes the numbers of an update once in a graph, for all variables."""

    def __init__(self) -> None:
        self._found: list[Any] = []

    def __call__(self, compute: Callable[[], list[Any]]) -> list[Any]:
        self._found = self._found or compute()
        return self._found


def _sgd(optimizer: Any, numbers: Numbers) -> Update:
    def update(gradient: Any, variable: Any, rate: Any) -> None:
        if not _is_plain(gradient, variable):
            type(optimizer).update_step(optimizer, gradient, variable, rate)
        elif optimizer.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=_number(rate), delta=gradient)
        else:
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle,
                accum=_slot(optimizer, "momentums", variable),
                lr=_number(rate),
                grad=gradient,
                momentum=_number(optimizer.momentum),
                use_nesterov=optimizer.nesterov,
            )

    return update


def _adam(optimizer: Any, numbers: Numbers) -> Update | None:
    if optimizer.amsgrad:
        return None
    betas = [float(beta) for beta in (optimizer.beta_1, optimizer.beta_2)]
    first, second = (beta if _is_close(beta) else 1.0 for beta in betas)

    def powers_now() -> list[Any]:
        step = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, tf.float32)
        return [tf.pow(_number(beta), step) for beta in betas]

    def update(gradient: Any, variable: Any, rate: Any) -> None:
        if not _is_plain(gradient, variable):
            type(optimizer).update_step(optimizer, gradient, variable, rate)
            return
        powers = numbers(powers_now)
        m, v = (_slot(optimizer, name, variable) for name in ("_momentums", "_velocities"))
        if first == 1:
            _move(m, gradient, 1 - betas[0])
        if second == 1:
            _move(v, tf.square(gradient), 1 - betas[1])
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=m,
            v=v,
            beta1_power=powers[0],
            beta2_power=powers[1],
            lr=_number(rate),
            beta1=_number(first),
            beta2=_number(second),
            epsilon=_number(optimizer.epsilon),
            grad=gradient,
        )

    return update


_MAKERS: dict[type, Callable[[Any, Numbers], Update | None]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
}


def _is_close(beta: float) -> bool:
    """Whether 1 - beta is the same in float32, whichever is rounded."""
    ours, keras_factor = 1 - np.float32(beta), np.float32(1 - beta)
    return bool(abs(ours - keras_factor) <= CLOSE * keras_factor)


def _move(slot: tf.Tensor, target: tf.Tensor, factor: float) -> None:
    """Compute `slot += (target - slot) * factor` in place."""
    away = target - tf.raw_ops.ReadVariableOp(resource=slot, dtype=tf.float32)
    tf.raw_ops.ResourceApplyGradientDescent(var=slot, alpha=_number(-factor), delta=away)


def _is_plain(gradient: Any, variable: Any) -> bool:
    return isinstance(gradient, tf.Tensor) and gradient.dtype == variable.dtype == tf.float32


def _slot(optimizer: Any, name: str, variable: Any) -> tf.Tensor:
    return getattr(optimizer, name)[optimizer._get_variable_index(variable)].value.handle


def _number(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float32)
