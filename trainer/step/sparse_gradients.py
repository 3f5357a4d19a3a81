# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table (`Embedding`): one row for each time that one was looked up.

TensorFlow gives such a gradient as slices, and leaves a row that was looked up twice in it twice. Keras'
optimizers take them one by one: Adam adds up the squares of both, not the square of their sum. So where that
makes a difference, the sum of dense gradients is not enough: the optimizer must be given what it would be
given for the whole batch, the slices of all ranks, in the order of the ranks.

It pays, too, where a table is large: the rows of a batch are few beside it.

A sum over the ring is all that there is, so each rank writes its slices at a place of its own in a vector
that is zero elsewhere. For that it must know how many the ranks before it have: one small sum before.

    before, total = counted(sum, rank, counts)
    flat = written(slices, before, total)       each rank's
    [ the ring sums the vectors of all ranks ]
    slices = read(flat, variable)               those of all
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError

RANKS = 1024  # that have a place among the counts
LIMB = 1 << 12  # an index is two numbers, which float32 holds exactly up to 2^36
PLACE = 2
LARGE = 1 << 24  # bytes of a table: to sum a gradient as large takes longer than what goes before its rows


def travels_as_rows(optimizer: Any, shape: Sequence[int]) -> bool:
    """Whether the gradient of a table of this shape is summed as slices.

    It is so where it makes a difference, and where the table is large and the optimizer takes slices.
    """
    plain = type(optimizer) is keras.optimizers.SGD and not (
        optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor is not None
    )
    return one_by_one(optimizer) or (plain and 4 * math.prod(shape) >= LARGE)


def one_by_one(optimizer: Any) -> bool:
    """Whether it matters that the optimizer is given rows one by one.

    It does not where it only adds them up, be it at once (SGD) or before it does anything else with them
    (accumulated gradients). Where Keras itself fails with rows, they are added up too.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return one_by_one(optimizer.inner_optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        inner = optimizer._optimizer_map
        return any(map(one_by_one, (inner.default_optimizer, *inner.values())))
    if optimizer.gradient_accumulation_steps or optimizer.loss_scale_factor is not None:
        return False
    if type(optimizer) is keras.optimizers.SGD:
        clips = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
        return any(clip is not None for clip in clips)
    return not (isinstance(optimizer, keras.optimizers.RMSprop) and optimizer.centered)


def refuse_rank(rank: int) -> None:
    """Refuse a rank beyond the number of counts.

    Raises:
        ModelError: there is no place for this rank among the counts.
    """
    if rank >= RANKS:
        raise ModelError(
            f"a ring of more than {RANKS} workers cannot sum the rows of an Embedding one by one; use fewer "
            "workers, or SGD"
        )


def counted(
    total: Callable[[tf.Tensor], tf.Tensor] | None, rank: Any, counts: Sequence[tf.Tensor | int]
) -> tuple[tf.Tensor, tf.Tensor]:
    """The number of rows of each table on the ranks before this one, and on all ranks; int32 [tables].

    Args:
        total: sums over the ring; None without a ring.
        counts: this rank's number of rows of each table.
    """
    ours = tf.cast(tf.stack(counts), tf.int32)
    if total is None:
        return tf.zeros_like(ours), ours
    places = tf.one_hot(rank, RANKS, dtype=tf.float32) * tf.cast(ours, tf.float32)[:, None]
    all_ = tf.reshape(total(tf.reshape(places, [-1])), [len(counts), RANKS])
    before = tf.where(tf.range(RANKS) < tf.cast(rank, tf.int32), all_, 0.0)
    return tuple(tf.cast(tf.reduce_sum(n, 1), tf.int32) for n in (before, all_))


def nothing(total: Callable[[tf.Tensor], tf.Tensor] | None, tables: int) -> tf.Tensor:
    """The number of rows of each table on all ranks, for a rank without rows; int32 [tables]."""
    return counted(total, 0, [0] * tables)[1]


def width(variable: Any) -> int:
    """Floats that one row takes."""
    return PLACE + int(np.prod(variable.shape[1:]))


def written(slices: tf.IndexedSlices, before: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Write slices into their place in a vector of all ranks' slices: float32 [total * width]."""
    indices = tf.cast(slices.indices, tf.int64)
    place = tf.cast(tf.stack([indices // LIMB, indices % LIMB], 1), tf.float32)
    count = tf.shape(indices)[0]
    values = tf.reshape(tf.cast(slices.values, tf.float32), [count, int(np.prod(slices.values.shape[1:]))])
    block = tf.concat([place, values], 1)
    return tf.reshape(tf.pad(block, [[before, total - before - count], [0, 0]]), [-1])


def read(flat: tf.Tensor, variable: Any) -> tf.IndexedSlices:
    """The slices of all ranks, of the gradient of `variable`."""
    block = tf.reshape(flat, [-1, width(variable)])
    high, low = (tf.cast(block[:, i], tf.int64) for i in range(PLACE))
    values = tf.reshape(block[:, PLACE:], [-1, *variable.shape[1:]])
    return tf.IndexedSlices(values, high * LIMB + low, tf.constant(tuple(variable.shape), tf.int64))


def first(slices: tf.IndexedSlices, count: tf.Tensor) -> tf.IndexedSlices:
    """Return the first `count` of the slices; `count` is a scalar tensor."""
    return tf.IndexedSlices(slices.values[:count], slices.indices[:count], slices.dense_shape)
