# SPDX-License-Identifier: Apache-2.0
"""BatchNormalization(synchronized=True): its statistics are those of the whole batch, summed over the ring.

Each such layer costs a step four more sums, two forward and two backward: the loss of each rank depends on
the records of all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import keras
import tensorflow as tf


class Reducer(Protocol):
    """An all-reduce over the ring with a gradient, such as InnerSum."""

    def differentiable(self, vector: tf.Tensor) -> tf.Tensor:
        """Return the sum of `vector` over all ranks, as an operation with a gradient."""
        ...


BatchNormalization = keras.layers.BatchNormalization


def is_synchronized(model: keras.Model) -> bool:
    """True if a BatchNormalization of the model takes its moments from all ranks (`synchronized=True`)."""
    return any(
        isinstance(layer, BatchNormalization) and layer.synchronized for layer in model._flatten_layers()
    )


@contextmanager
def synchronized(ring: Reducer | None, alive: tf.Tensor) -> Iterator[None]:
    """Make synchronized layers use the statistics of the whole ring inside this context.

    Args:
        ring: the ring's all-reduce; None to change nothing.
        alive: whether the records of this rank count.
    """
    if ring is None:
        yield
        return

    def moments(layer: Any, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return (
            _moments(layer, inputs, mask, ring, alive)
            if layer.synchronized
            else _MOMENTS(layer, inputs, mask)
        )

    with _PATCHING:
        BatchNormalization._moments = moments
        try:
            yield
        finally:
            BatchNormalization._moments = _MOMENTS


def _moments(
    layer: Any, inputs: tf.Tensor, mask: Any, ring: Reducer, alive: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over the records of all ranks, as `BatchNormalization._moments`."""
    axes, channels = layer._reduction_axes, int(inputs.shape[layer.axis])
    shape = [channels if axis == layer.axis % inputs.shape.rank else 1 for axis in range(inputs.shape.rank)]
    kept = tf.ones_like(inputs, tf.bool)
    if mask is not None:
        kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))

    def total(*values: tf.Tensor) -> list[tf.Tensor]:
        """The sum over all ranks, for each channel."""
        ours = tf.concat([tf.reduce_sum(tf.where(kept, a, 0), axes) for a in values], 0)
        return tf.split(ring.differentiable(tf.where(alive, ours, 0)), len(values))

    # First the mean, then the squares about it: the mean of the squares less the mean's would lose digits.
    count, values = total(tf.ones_like(inputs), inputs)
    count = count if mask is None else count + keras.config.epsilon()  # as Keras does
    mean = values / count
    (squares,) = total(tf.square(inputs - tf.reshape(mean, shape)))
    return mean, squares / count


_PATCHING = threading.RLock()  # Keras is one for all threads
_MOMENTS = BatchNormalization._moments
