# SPDX-License-Identifier: Apache-2.0
"""The order of what a step sums over the ring, in front of the control vector.

    large gradients | small gradients | averages | counters | metrics | rows of tables

Each large gradient has a sum of its own. All others travel in one vector, which ends with the control vector
(trainer/agreement/control.py). The rows of tables come last, because their number differs from step to step
(trainer/step/sparse_gradients.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.step import sparse_gradients
from edl.trainer.step.forward import Forward

SMALL = 1 << 16  # bytes: a gradient of fewer travels with the others of its kind


@dataclass(frozen=True, eq=False)
class Layout:
    """The variables whose gradients or changes a step sums, in the order of the sums."""

    trained: list[keras.Variable]
    averaged: list[keras.Variable]  # moving averages: changed by the forward pass
    counters: list[keras.Variable]  # likewise, but integers or booleans, whose change is sent
    summed: frozenset[str]  # paths of counters that count records; the others count steps
    divided: bool  # whether gradients are means over the records
    metrics: list[keras.Variable]  # their change is sent, too
    tables: list[keras.Variable]  # likewise trained, by rows; how many there are differs from step to step

    @staticmethod
    def of(
        model: keras.Model,
        forward: Forward,
        gradients: list[Any],
        summed: frozenset[str],
        divided: bool,
        metrics: list[keras.Variable],
        has_rows: bool = False,
    ) -> Layout:
        """Determine which of the model's variables a step sums, in which order.

        Raises:
            ModelError: no trainable variable influences the loss, or a variable that the forward pass changes
                has a type that cannot be averaged.
        """
        given = [(v, g) for v, g in zip(model.trainable_variables, gradients, strict=True) if g is not None]
        tables = [v for v, g in given if isinstance(g, tf.IndexedSlices)]
        trained = [v for v, g in given if not isinstance(g, tf.IndexedSlices)]
        if not given and not has_rows:
            raise ModelError(
                "no trainable variable of the model influences the loss: nothing would be trained"
            )
        changed = [v for v, _, _ in forward.changes]
        floats = [v for v in changed if keras.backend.is_float_dtype(v.dtype)]
        for v in floats:
            if v.dtype != "float32":
                raise ModelError(
                    f"variable {v.path!r} of type {v.dtype} changes in the forward pass; of floating-point "
                    "variables, only float32 can (they are averaged over the ring)"
                )
        counters = [v for v in changed if not keras.backend.is_float_dtype(v.dtype)]
        return Layout(trained, floats, counters, summed, divided, metrics, tables)

    @property
    def changing(self) -> list[keras.Variable]:
        """The variables that the optimizer does not change."""
        return [*self.averaged, *self.counters, *self.metrics]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layouts that are."""
        variables = [*map(id, self.trained), *map(id, self.changing), *map(id, self.tables)]
        return variables, len(self.trained), len(self.averaged), len(self.tables), self.divided

    @cached_property
    def sizes(self) -> list[int]:
        """The number of values of each variable, except for rows of tables."""
        return [int(np.prod(v.shape)) for v in (*self.trained, *self.changing)]

    @cached_property
    def large(self) -> list[int]:
        """The trained variables, by position, whose gradients have sums of their own."""
        return [i for i, _ in enumerate(self.trained) if 4 * self.sizes[i] >= SMALL]

    @cached_property
    def rest(self) -> int:
        """The number of values in the vector with all others, except for rows of tables."""
        return sum(n for i, n in enumerate(self.sizes) if i not in self.large)

    def changes(self, forward: Forward) -> list[tf.Tensor]:
        """Return the summands for `averaged` and `counters` of a forward pass, each flat."""
        records, after = forward.records, {id(v): (old, new) for v, old, new in forward.changes}
        parts = [tf.reshape(after[id(v)][1], [-1]) * records for v in self.averaged]
        for v in self.counters:
            old, new = (tf.cast(value, tf.float32) for value in after[id(v)])
            parts.append(tf.reshape(new - old, [-1]) * (1.0 if v.path in self.summed else records))
        return parts

    def divide(self, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        """Divide the sums of a step into those of each variable, flat, with the rows of tables at the end."""
        large, (rest, *counts) = sums[: len(self.large)], sums[len(self.large) :]
        sizes = [n for i, n in enumerate(self.sizes) if i not in self.large]
        sizes += [counts[0][i] * sparse_gradients.width(v) for i, v in enumerate(self.tables)]
        small = iter(tf.split(rest, sizes, num=len(sizes)) if sizes else ())
        each = dict(zip(self.large, large, strict=True))
        return [each[i] if i in each else next(small) for i in range(len(self.sizes) + len(self.tables))]

    def new_values(self, share: tf.Tensor, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the new values of `changing`.

        Args:
            share: the share of one record in the step.
            sums: the sums over the ring for these variables.
        """
        new = []
        for at, (v, total) in enumerate(zip(self.changing, sums, strict=True)):
            total = tf.reshape(total, v.shape)
            if at < len(self.averaged):
                new.append(total * share)
            elif at < len(self.averaged) + len(self.counters):
                raised = tf.round(total if v.path in self.summed else total * share)
                new.append(tf.cast(tf.cast(v.value, tf.int64) + tf.cast(raised, tf.int64), v.dtype))
            else:
                new.append(v.value + tf.cast(total, v.dtype))
        return new
