# SPDX-License-Identifier: Apache-2.0
"""Whether gradients are finite, without a pass over each of them."""

from __future__ import annotations

import math

import tensorflow as tf

SAFE = 1e30  # for the square of a float32: with any rounding, the number itself is far from the largest


def finite_as(gradient: tf.Tensor) -> tf.Tensor:
    """Return a scalar that is finite if and only if the whole gradient is: its sum, or a bound of the sum.

    (A sum of finite numbers may overflow, but then the numbers are so large that it is as bad.)

    A product of matrices is finite if its factors are finite and not very large. So the product need not be
    read: the factors are far smaller, where there are more weights than records. A GPU has read it before it
    has reported which branch to take.
    """
    found = factors(gradient)
    if not found or tf.config.list_logical_devices("GPU"):
        return tf.reduce_sum(gradient)
    # No element is larger than the product of the norms. (l2_loss: half of the square.)
    bound = math.prod(tf.nn.l2_loss(factor) for factor in found)
    return tf.cond(bound < SAFE, lambda: 0.0, lambda: tf.reduce_sum(gradient))


def factors(gradient: tf.Tensor) -> list[tf.Tensor]:
    """The factors of a product of matrices in float32; None for any other operation."""
    if tf.executing_eagerly():
        return []
    op = gradient.op
    return list(op.inputs) if op.type == "MatMul" and gradient.dtype == tf.float32 else []


def after(first: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, when `first` has no more need of it: then its memory can be used for what is made of it."""
    with tf.control_dependencies([first]):
        return tf.identity(tensor)
