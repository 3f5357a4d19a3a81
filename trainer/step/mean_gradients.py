# SPDX-License-Identifier: Apache-2.0
"""Optimizers that are given the ring's gradients, and not this rank's, while a step runs.

The step is the user's: which optimizers it has, where it keeps them and how it calls them is its own
affair. So they are not looked for: `apply` of every Keras optimizer comes by here (`apply_gradients`
calls it), and does what it always does, unless a step runs on this thread. Then the gradients are
summed over the ring first, each rank's weighted with its records. What the optimizer does with
gradients (clipping, loss scaling, accumulation, constraints) it does with the mean, as all others do.

Promise: what was equal on all ranks before `apply` is equal on all ranks after it, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow

from edl.errors import ModelError
from edl.trainer.ring.base import Vector
from edl.trainer.step import sparse_gradients
from edl.trainer.step.inner_sum import InnerSum

SUMMED = ("float32", "float16", "bfloat16")  # all of them as float32
CONDITIONAL = (
    control_flow.CondBranchFuncGraph,
    control_flow.WhileCondFuncGraph,
    control_flow.WhileBodyFuncGraph,
)


@dataclass(frozen=True)
class Call:
    """One call of an optimizer in a step."""

    optimizer: str  # its name
    length: int  # of all gradients
    graph: Any  # in which it was made; None in code that runs eagerly
    operations: range  # of the graph, those that it has made


class MeanGradients:
    """The optimizer calls of one model's steps.

    Args:
        reduce: the ring's all-reduce.
    """

    def __init__(self, reduce: Callable[[Vector], Vector]):
        self.sum = InnerSum(reduce)
        # Variables, because a function that the step calls may have been traced in another step.
        self.records = tf.Variable(0.0, trainable=False, name="records_of_this_rank")
        self._rank = tf.Variable(0, dtype=tf.int64, trainable=False, name="rank")
        self.not_finite = tf.Variable(0.0, trainable=False, name="gradients_of_this_rank_that_are_not_finite")
        self.spoiled = tf.Variable(0.0, trainable=False, name="sums_that_are_not_finite")
        self.calls: list[Call] = []  # of the step that runs, or has run last
        self.called = False  # in any step
        self.theirs: list[
            Any
        ] = []  # variables of the optimizers and those that they update; found in a dry run
        self.expected: list[int] | None = None  # lengths of the calls that each step must make
        # About gradients of tables that an optimizer applies row by row (trainer/step/sparse_gradients.py):
        self.rows: list[int | None] = []  # how many of each, of the step that has run last eagerly
        # Those, counted over a step, that are added up all the same.
        self.added_up: frozenset[int] = frozenset()
        self.by_row = True  # whether any is not

    @property
    def variables(self) -> list[tf.Variable]:
        """Variables that belong to no model."""
        return [*self.sum.variables, self.records, self._rank, self.not_finite, self.spoiled]

    @contextlib.contextmanager
    def in_charge(self, dry_run: bool = False) -> Iterator[None]:
        """While a step runs on this thread, or is traced.

        Args:
            dry_run: there is no ring, so the optimizers are built and do nothing.

        Raises:
            ModelError: what it does with its optimizers cannot be done over a ring.
        """
        _route_all()
        self.calls, self.rows = [], []
        _here.means, _here.dry_run = self, dry_run
        try:
            yield
        finally:
            _here.means = None
        if self.expected is not None and len(self.calls) < len(self.expected):
            raise ModelError(_UNEVEN.format("an optimizer"))

    def apply(
        self, optimizer: Any, gradients: list[Any], variables: Any, original: Callable[..., None]
    ) -> None:
        """Call `original` with the mean over the ring, in place of `optimizer.apply` in a step.

        Raises:
            ModelError: ranks may not all reach this call, or its gradients have another length than in the
                first step.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        _refuse_where_a_rank_may_not_come(optimizer, graph)
        begin = len(graph.get_operations()) if graph else 0
        trained = list(optimizer._trainable_variables if variables is None else variables)
        gradients = [self._by_row(optimizer, g) for g in gradients]
        length = sum(math.prod(v.shape) for v, g in zip(trained, gradients, strict=True) if g is not None)
        if self.expected is not None and self.expected[len(self.calls) :][:1] != [length]:
            raise ModelError(_UNEVEN.format(f"optimizer {optimizer.name!r}"))
        if not _here.dry_run:
            mean = self._mean(optimizer, gradients, trained)
            _here.means = None  # what the optimizer itself calls is given the mean already
            try:
                original(optimizer, mean, variables)
            finally:
                _here.means = self
        else:
            if not optimizer.built:
                optimizer.build(trained)
            self.theirs += [*optimizer.variables, *trained]
        self.called = True
        end = len(graph.get_operations()) if graph else 0
        self.calls.append(Call(optimizer.name, length, graph, range(begin, end)))

    def _by_row(self, optimizer: Any, gradient: Any) -> Any:
        """The gradient as it is summed: slices of a table, or dense."""
        if gradient is None or not (
            isinstance(gradient, tf.IndexedSlices) and sparse_gradients.one_by_one(optimizer)
        ):
            return None if gradient is None else tf.convert_to_tensor(gradient)
        nth = len(self.rows)
        self.rows.append(int(gradient.indices.shape[0]) if tf.executing_eagerly() else None)
        return gradient if self.by_row and nth not in self.added_up else tf.convert_to_tensor(gradient)

    def fault_of(self, part: tf.Tensor) -> tf.Tensor:
        """Return 1.0 if this rank's part of a sum is the first value that is not finite, else 0.0.

        After a sum that is not finite, no later value is finite on any rank, which is not that rank's fault.
        """
        ours = ~tf.math.is_finite(tf.reduce_sum(part)) & (self.spoiled.read_value() == 0.0)
        return tf.cast(ours, tf.float32)

    def begin(self, records: tf.Tensor, rank: tf.Tensor) -> None:
        """A step of so many records on this rank begins. A rank without records may give any rank."""
        self.records.assign(records)
        self._rank.assign(rank)
        self.not_finite.assign(0.0)
        self.spoiled.assign(0.0)

    def differentiable(self, vector: tf.Tensor) -> tf.Tensor:
        """The sum over the ring, for a forward pass in which all records count alike.

        Each rank's loss is the mean over its own records, and its gradients are weighted with them when they
        are summed; so is what comes back through here from the losses of others.
        """
        records = self.records.read_value()

        @tf.custom_gradient
        def summed(vector: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def gradient(above: tf.Tensor) -> tf.Tensor:
                ours = tf.where(records > 0, above * records, tf.zeros_like(above))
                return tf.math.divide_no_nan(self.sum(ours), records)

            return self.sum(vector), gradient

        return summed(vector)

    def _mean(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        present = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        for g, _ in present:
            if g.dtype.name not in SUMMED:
                raise ModelError(
                    f"optimizer {optimizer.name!r} is given a gradient of type {g.dtype.name}; over a "
                    f"ring only gradients of type {', '.join(SUMMED)} are summed"
                )
        if not present:
            return gradients
        records = self.records.read_value()
        parts, sizes = self._parts([g for g, _ in present], [v for _, v in present], records)
        ours = tf.concat(parts, 0)
        # A rank without records has computed something all the same, which may be no number.
        ours = tf.where(records > 0, ours, tf.zeros_like(ours))
        checked = not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)  # which sees to it by itself
        if checked:
            self.not_finite.assign_add(self.fault_of(ours))
        total = self.sum(tf.concat([ours, [records]], 0))
        if checked:
            self.spoiled.assign_add(1.0 - tf.cast(tf.reduce_all(tf.math.is_finite(total)), tf.float32))
        pieces = tf.split(total[:-1], sizes, num=len(present))
        means = iter(_mean_of(g, piece, v, total[-1]) for (g, v), piece in zip(present, pieces, strict=True))
        return [None if g is None else next(means) for g in gradients]

    def _parts(
        self, gradients: list[Any], variables: list[Any], records: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor | int]]:
        """Each gradient times the records, as a part of the summed vector; and its length."""
        tables = {id(g): n for n, g in enumerate(g for g in gradients if isinstance(g, tf.IndexedSlices))}
        if tables:
            counts = [tf.shape(g.indices)[0] for g in gradients if id(g) in tables]
            counts = [tf.where(records > 0, n, 0) for n in counts]
            before, all_rows = sparse_gradients.counted(self.sum, self._rank.read_value(), counts)
        parts, sizes = [], []
        for g, v in zip(gradients, variables, strict=True):
            nth = tables.get(id(g))
            if nth is None:
                parts.append(tf.reshape(tf.cast(g, tf.float32), [-1]) * records)
                sizes.append(tf.size(g))
            else:
                values = tf.cast(g.values, tf.float32) * records
                slices = sparse_gradients.first(
                    tf.IndexedSlices(values, g.indices, g.dense_shape), counts[nth]
                )
                parts.append(sparse_gradients.written(slices, before[nth], all_rows[nth]))
                sizes.append(all_rows[nth] * sparse_gradients.width(v))
        return parts, sizes


def _mean_of(gradient: Any, piece: tf.Tensor, variable: Any, records: tf.Tensor) -> Any:
    """The mean over the ring, made as the gradient is, of its part of the sum."""
    if isinstance(gradient, tf.IndexedSlices):
        found = sparse_gradients.read(piece, variable)
        values = tf.cast(tf.math.divide_no_nan(found.values, records), gradient.dtype)
        return tf.IndexedSlices(values, found.indices, found.dense_shape)
    mean = tf.cast(tf.math.divide_no_nan(piece, records), gradient.dtype)
    return tf.ensure_shape(tf.reshape(mean, tf.shape(gradient)), gradient.shape)


_UNEVEN = (
    "train_step() calls {} depending on the data (in tf.cond, tf.while_loop or an `if`). Over a ring "
    "every worker must make the same calls in each step, with the same variables. Call it always, with "
    "gradients of zero where nothing is to change"
)


def _refuse_where_a_rank_may_not_come(optimizer: Any, graph: Any) -> None:
    while graph is not None:
        if isinstance(graph, CONDITIONAL):
            raise ModelError(_UNEVEN.format(f"optimizer {optimizer.name!r}"))
        graph = getattr(graph, "outer_graph", None)


class _Here(threading.local):
    means: MeanGradients | None = None  # of the step that runs on this thread
    dry_run = False


_here = _Here()


def _route_all() -> None:
    """Make `apply` of all optimizer classes, the user's too, call `_here` first."""
    classes = [c for c in keras.optimizers.Optimizer.__mro__ if "apply" in c.__dict__]
    for cls in classes:  # grows
        classes += cls.__subclasses__()
        method = cls.__dict__.get("apply")
        if method is not None and not hasattr(method, "is_routed"):
            cls.apply = _routed(method)


def _routed(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        unknown = trainable_variables is None and not self.built  # which Keras refuses
        if _here.means is None or not gradients or unknown:
            return original(self, gradients, trainable_variables)
        return _here.means.apply(self, gradients, trainable_variables, original)

    apply.is_routed = True  # type: ignore[attr-defined]
    return apply
