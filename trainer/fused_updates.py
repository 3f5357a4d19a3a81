"""The update of an optimizer's variables by one operation for each, in place.

Keras writes an update as a dozen operations on whole arrays, each of which has its result in memory of its
own. For the optimizers that are used most, TensorFlow has an operation that reads gradient, variable and
slots once, writes them once, and needs no memory besides: Adam of 25 million parameters takes 23 ms so, and
57 ms by itself (one thread). It computes the same formula; but of Adam's `1 - beta` Keras takes the float32,
and TensorFlow subtracts the float32 of beta, as the correction of the bias does in both. So an update may
differ from Keras' by 7e-6 of itself.

Like all that changes a variable, it leaves alone a value that somebody else has read: then it writes into a
copy (trainer/snapshot.py counts on that).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

Update = Callable[[Any, Any, Any], None]  # of a gradient, a variable of TensorFlow's, and the learning rate


@contextlib.contextmanager
def fused(optimizer: Any) -> Iterator[None]:
    """Of a graph that is made inside, updates of `optimizer` are one operation for each variable, where there
    is one for what it does."""
    make = _MAKERS.get(type(optimizer))  # a class of the user's own may do something else
    update = make(optimizer) if make else None
    if update is None:
        yield
        return
    object.__setattr__(optimizer, "update_step", update)  # past Keras, which would keep track of it
    try:
        yield
    finally:
        object.__delattr__(optimizer, "update_step")


def _sgd(optimizer: Any) -> Update:
    def update(gradient: Any, variable: Any, rate: Any) -> None:
        if not _is_plain(gradient, variable):
            type(optimizer).update_step(optimizer, gradient, variable, rate)
        elif optimizer.momentum == 0:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=_number(rate), delta=gradient)
        else:
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle, accum=_slot(optimizer, "momentums", variable), lr=_number(rate),
                grad=gradient, momentum=_number(optimizer.momentum), use_nesterov=optimizer.nesterov,
            )  # fmt: skip

    return update


def _adam(optimizer: Any) -> Update | None:
    if optimizer.amsgrad:
        return None
    powers: list[tf.Tensor] = []  # made once in the graph, for all variables

    def update(gradient: Any, variable: Any, rate: Any) -> None:
        if not _is_plain(gradient, variable):
            type(optimizer).update_step(optimizer, gradient, variable, rate)
            return
        if not powers:
            step = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, tf.float32)
            powers.extend(tf.pow(_number(beta), step) for beta in (optimizer.beta_1, optimizer.beta_2))
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle, m=_slot(optimizer, "_momentums", variable),
            v=_slot(optimizer, "_velocities", variable), beta1_power=powers[0], beta2_power=powers[1],
            lr=_number(rate), beta1=_number(optimizer.beta_1), beta2=_number(optimizer.beta_2),
            epsilon=_number(optimizer.epsilon), grad=gradient,
        )  # fmt: skip

    return update


_MAKERS: dict[type, Callable[[Any], Update | None]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
}


def _is_plain(gradient: Any, variable: Any) -> bool:
    return isinstance(gradient, tf.Tensor) and gradient.dtype == variable.dtype == tf.float32


def _slot(optimizer: Any, name: str, variable: Any) -> tf.Tensor:
    return getattr(optimizer, name)[optimizer._get_variable_index(variable)].value.handle


def _number(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float32)
