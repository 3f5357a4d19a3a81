# SPDX-License-Identifier: Apache-2.0
"""hvd.DistributedOptimizer for Keras 3, and for Keras 2 (tf-keras).

Keras 3 calls `optimizer.apply(gradients)` for each batch. Horovod 0.28.1 overrides methods that Keras 3 does
not call, so each rank would train by itself. Here `apply` itself averages the gradients over all ranks. On
Keras 2 `apply_gradients` does that: `fit`, `minimize` and loops of a script all call it.

Horovod pairs operations by name. The names here are those of the optimizer and the variable's number, not of
the graph: a new worker has traced its graphs in a different order than the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras.src import backend

from edl.errors import ModelError

MIXED = (
    "mixed_float16 with hvd.DistributedOptimizer(optimizer): a rank with an overflow would skip the "
    "all-reduce of the others. Use hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
)
_numbers = itertools.count(1)  # of the optimizers of this process


@dataclass(frozen=True)
class Options:
    """The arguments of hvd.DistributedOptimizer.

    Args:
        groups: the number of groups in which gradients are reduced, or lists of variables; 0: no groups.
        passes: batches whose gradients are added up before they are reduced.
        average_passes: whether the sum over `passes` is divided by their number.
        scale_local: whether gradients of local variables are divided by the number of ranks.
    """

    number: int
    op: Any
    compression: Any
    sparse_as_dense: bool
    predivide: float
    groups: int | Sequence[Sequence[Any]]
    passes: int
    average_passes: bool
    scale_local: bool


class Distributed:
    """What a distributed optimizer adds to its optimizer's class."""

    horovod: Options

    def register_local_var(self, var: Any) -> None:
        """Leave the gradients of a variable out of the all-reduce."""
        self.local_variables.add(var.ref())  # type: ignore[attr-defined]

    def _train(self, grads: list[Any], variables: list[Any], update: Callable[[list[Any]], Any]) -> None:
        """Average the gradients over all ranks, and call `update` with them."""
        if self.horovod.passes == 1:
            update(self._reduced(grads, variables))
            return
        # Variables must exist before the branch, and gradients that are None are so for each batch.
        sums, count = self._accumulators(variables)
        for total, grad in zip(sums, grads, strict=True):
            if grad is not None:
                total.assign_add(tf.convert_to_tensor(grad))
        scale = 1.0 / self.horovod.passes if self.horovod.average_passes else 1.0

        def reduce() -> tf.Tensor:
            due = [None if g is None else total * scale for total, g in zip(sums, grads, strict=True)]
            update(self._reduced(due, variables))
            for total in sums:
                total.assign(tf.zeros_like(total))
            return count.assign(0, read_value=True)

        now = count.assign_add(1, read_value=True)
        tf.cond(now >= self.horovod.passes, reduce, lambda: tf.identity(now))

    def _accumulators(self, variables: Sequence[Any]) -> tuple[list[tf.Variable], tf.Variable]:
        found = self.__dict__.get("_horovod_sums")
        if found is None:
            with tf.init_scope():
                sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]
                found = _Hidden((sums, tf.Variable(0, dtype=tf.int64, trainable=False)))
            self.__dict__["_horovod_sums"] = found
        sums, count = found.held
        return sums, count

    def _reduced(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients after the all-reduce, in the same order."""
        mine: set[Any] = self.local_variables  # type: ignore[attr-defined]
        result = [
            _divided(grad) if self.horovod.scale_local and v.ref() in mine else grad
            for grad, v in zip(grads, variables, strict=True)
        ]
        due = [i for i, v in enumerate(variables) if grads[i] is not None and v.ref() not in mine]
        for group in self._groups(due, variables):
            for i, reduced in zip(group, self._all_reduce([grads[i] for i in group], group[0]), strict=True):
                result[i] = reduced
        return result

    def _groups(self, due: Sequence[int], variables: Sequence[Any]) -> Iterator[list[int]]:
        """Divide the indices of variables into the groups that are reduced together."""
        groups = self.horovod.groups
        if isinstance(groups, int):
            count = groups or len(due)
            yield from ([*due[len(due) * k // count : len(due) * (k + 1) // count]] for k in range(count))
            return
        number = {v.ref(): k for k, group in enumerate(groups) for v in group}
        keys = {i: number.get(variables[i].ref(), len(groups) + i) for i in due}
        for key in sorted(set(keys.values())):
            yield [i for i in due if keys[i] == key]

    def _all_reduce(self, grads: list[Any], first: int) -> list[Any]:
        options = self.horovod
        if options.sparse_as_dense:
            grads = [tf.convert_to_tensor(grad) for grad in grads]
        average = options.op == hvd.Average
        arguments = {
            "op": options.op,
            "compression": options.compression,
            "prescale_factor": 1.0 / options.predivide if average else 1.0,
            "postscale_factor": options.predivide if average else 1.0,
            "name": f"HorovodAllreduce_optimizer{options.number}_{first}",
            "ignore_name_scope": True,
        }
        if len(grads) == 1:
            return [hvd.allreduce(grads[0], **arguments)]
        return list(hvd.grouped_allreduce(grads, **arguments)) if grads else []


class Keras3(Distributed):
    """The methods that Keras 3 calls."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Average the gradients over all ranks, then update the variables."""
        me: Any = self
        variables = list(me._trainable_variables if trainable_variables is None else trainable_variables)
        if not me.built:
            with backend.name_scope(me.name, caller=me):
                me.build(variables)

        def update(due: list[Any]) -> None:
            super(Keras3, me).apply(due, variables)  # type: ignore[misc]

        self._train(list(grads), variables, update)


class Keras2(Distributed):
    """The methods that Keras 2 calls, of its new and of its legacy optimizers."""

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **options: Any) -> Any:
        """Average the gradients over all ranks, then update the variables; returns `iterations`."""
        me: Any = self
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]

        def update(due: list[Any]) -> None:
            pairs = zip(due, variables, strict=True)
            super(Keras2, me).apply_gradients(pairs, *args, **options)  # type: ignore[misc]

        self._train([grad for grad, _ in pairs], variables, update)
        return me.iterations


class _Hidden:
    """Keeps variables from being tracked as the optimizer's own: they are no part of a saved model."""

    def __init__(self, held: Any):
        self.held = held


def _divided(grad: Any) -> Any:
    return None if grad is None else tf.convert_to_tensor(grad) / tf.cast(hvd.size_op(), grad.dtype)


def distributed_optimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    use_locking: bool = False,
) -> Any:
    """Return an optimizer like `optimizer` that averages gradients over all ranks before each update.

    The arguments are those of `horovod.tensorflow.keras.DistributedOptimizer`. With
    `backward_passes_per_step`, `optimizer.iterations` counts updates, not batches.

    Raises:
        ModelError: an argument is not supported; the message names it.
    """
    of_keras3 = isinstance(optimizer, keras.optimizers.Optimizer)
    if not of_keras3 and not isinstance(optimizer, optimizers_of_keras2()):
        raise ModelError(
            f"hvd.DistributedOptimizer: expected an optimizer of Keras, found {type(optimizer).__module__}."
            f"{type(optimizer).__name__}"
        )
    if not of_keras3 and tf.keras.mixed_precision.global_policy().name == "mixed_float16":
        raise ModelError("hvd.DistributedOptimizer: mixed_float16 is not supported on Keras 2; use Keras 3")
    if op not in (hvd.Average, hvd.Sum):
        raise ModelError(
            "hvd.DistributedOptimizer(op=): expected hvd.Average or hvd.Sum; Adasum needs MPI or NCCL"
        )
    if process_set is not hvd.global_process_set:
        raise ModelError("hvd.DistributedOptimizer(process_set=): not supported, because a ring can change")
    chosen = num_groups if groups is None else groups
    if not isinstance(chosen, list) and chosen < 0:
        raise ModelError(
            f"hvd.DistributedOptimizer(groups={chosen}): expected a number, at least 0, or a list"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None) and backward_passes_per_step > 1:
        raise ModelError(
            "hvd.DistributedOptimizer(backward_passes_per_step=): not with gradient_accumulation_steps"
        )
    kind = type(optimizer)
    if issubclass(kind, Distributed):
        raise ModelError("hvd.DistributedOptimizer: the optimizer is distributed already")
    # Saved models name the optimizer's own class, and load without Horovod.
    added = Keras3 if of_keras3 else Keras2
    made: Any = type(kind.__name__, (added, kind), {"__module__": kind.__module__})
    if of_keras3:
        result = made.from_config(optimizer.get_config())
    else:  # it keeps its slots: an optimizer of Keras 2 does not know the variables that it was built for
        result = optimizer
        object.__setattr__(result, "__class__", made)
    fixed = result.__dict__
    fixed["local_variables"] = set()
    fixed["horovod"] = Options(
        next(_numbers),
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        chosen,
        backward_passes_per_step,
        average_aggregated_gradients,
        scale_local_gradients,
    )
    if of_keras3 and optimizer.built:
        result.build(optimizer._trainable_variables)
        for mine, known in zip(result.variables, optimizer.variables, strict=True):
            mine.assign(known)
    return result


def optimizers_of_keras2() -> tuple[type, ...]:
    """The classes of optimizers of tf-keras; none where `tf.keras` is Keras 3."""
    if not is_keras2():
        return ()
    return tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer


def is_keras2() -> bool:
    """Whether `tf.keras` is tf-keras (TF_USE_LEGACY_KERAS=1)."""
    return tf.keras.Model is not keras.Model


def partial_distributed_optimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return a distributed optimizer that leaves the variables of `local_layers` out of the all-reduce."""
    result = distributed_optimizer(optimizer, *args, **options)
    layers = [local_layers] if isinstance(local_layers, tf.keras.layers.Layer) else local_layers or []
    for layer in layers:
        for variable in layer.trainable_weights:
            result.register_local_var(variable)
    return result


def refuse_compile(model: Any, optimizer: Any) -> None:
    """Refuse a model whose ranks would not agree on which updates they skip.

    Raises:
        ModelError: Keras would put a loss scale around the distributed optimizer.
    """
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if isinstance(optimizer, Distributed) and not scales and model.dtype_policy.name == "mixed_float16":
        raise ModelError(MIXED)
