# SPDX-License-Identifier: Apache-2.0
"""A model's own `train_step`, traced and run, and the graphs around it.

The variables that the step changes, with and without its optimizers, are found before the first step: in its
graph, or by running it once if the model runs eagerly. How a ring makes such a step:
trainer/step/own_step.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.model.captured import (
    assigned_in,
    attributes_of,
    depends_on,
    distinct,
    is_generator,
    metric_variables,
    metrics_of,
    plain,
    read_in,
)
from edl.trainer.model.graphs import compiled, concrete
from edl.trainer.model.model_support import flat_logs, is_half
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch
from edl.trainer.ring.base import Vector
from edl.trainer.step.batch_norm import is_synchronized, synchronized
from edl.trainer.step.mean_gradients import MeanGradients
from edl.trainer.step.trial import Inexact, Run, try_own_step


class OwnStepGraphs:
    """The user's step over a ring, whose changes are put back unless the step is accepted.

    Args:
        model: a compiled model.
        sample: a batch of real records; None without records.
        reduce: the ring's all-reduce, for the sums within a step.
        inexact, warn: as in trainer/step/learner.py.

    Raises:
        ModelError: the step cannot be run over a ring; the text says why.
    """

    def __init__(
        self,
        model: keras.Model,
        sample: Batch | None,
        reduce: Callable[[Vector], Vector],
        inexact: str = "warn",
        warn: Callable[[str], None] = print,
    ):
        self.model = model
        self._name = f"{type(model).__name__}.train_step()"
        self._means, self._reduce = MeanGradients(reduce), reduce
        self._fingerprint = ""
        self._variables = _distinct(model.variables)
        self._before: list[tf.Tensor] | None = None  # values of the variables, while a step is not accepted
        self._losses: list[str] = []
        self._shapes: list[tuple[int, ...]] = []  # of what the step returns by these names
        self._whole_epoch: list[bool] = []  # whether it is a metric's result over the steps of an epoch
        self._graphs: dict[tuple[tf.TypeSpec, ...], Any] = {}  # of the step, by the types of the records
        # Losses that the steps returned since the last read: the sums over their records, the number of these
        # records, and the losses of the last step.
        self._told = tf.Variable(tf.zeros([1], tf.float64), shape=[None], trainable=False, name="losses_told")
        self._sample = sample
        if sample is not None:
            self._build(sample)
        if tables := Lookups(model).tables:
            raise ModelError(
                f"the rows of layer {tables[0].name!r} are on servers, but {self._name} is a step of its "
                "own, which says itself how all is trained. Override compute_loss() instead, or give the "
                "layer an input_dim and train it with mode=train"
            )
        if sample is not None:
            if len(sample) > 1 and (inexact != "allow" or self._means.rows):
                self._try(sample, Inexact(inexact, warn))
        else:
            self._leave_out_metrics()

    @property
    def _size(self) -> int:
        """The number of values that the step returns."""
        return sum(map(math.prod, self._shapes))

    def _put_back(self) -> None:
        """Undo the step that was not accepted."""
        if self._before is not None:
            before, self._before = self._before, None
            self._restore(*before)

    # --- a step

    def _run(self, batch: Batch, records: int, contribution: np.ndarray, draw: np.ndarray) -> tf.Tensor:
        self._put_back()
        self._before = self._begin(np.float32(records), draw)
        try:
            with self._means.sum.ring_errors():
                losses = self._step(tensors_of(batch))
            self._ours = self._collect(contribution, losses, *self._touched_before())
        except BaseException:
            self._put_back()
            raise
        return self._ours

    def _step(self, tensors: list[tf.Tensor]) -> tf.Tensor:
        """The user's step: its losses, float32 [n]."""
        if self.model.run_eagerly:
            return self._train_step(*tensors)
        kind = _kind(tensors)
        if kind not in self._graphs:  # records of another length than any before: traced as Keras does it
            self._graphs[kind] = concrete(self._train_step, *kind)
        return self._graphs[kind](*tensors)

    def _train_step(self, *tensors: tf.Tensor, dry_run: bool = False) -> tf.Tensor:
        left = iter(tensors)
        x, y, weights = keras.tree.map_structure(lambda a: None if a is None else next(left), self._structure)
        ring = self._means if is_synchronized(self.model) and not dry_run else None
        with self._means.in_charge(dry_run), synchronized(ring, self._means.records.read_value() > 0):
            losses = flat_logs(self.model.train_step(keras.utils.pack_x_y_sample_weight(x, y, weights)))
        if not isinstance(losses, dict) or not losses:
            raise ModelError(
                f"{self._name} must return a dict of its losses, e.g. {{'loss': loss}}, not {losses!r}"
            )
        given = [tf.cast(value, tf.float32) for value in losses.values()]
        given = [value if value.shape.is_fully_defined() else tf.reduce_mean(value) for value in given]
        self._losses, self._shapes = list(losses), [tuple(value.shape) for value in given]
        # All steps and all workers have what the first has.
        if not (self._whole_epoch and tf.executing_eagerly()):
            self._whole_epoch = self._results_of_metrics(losses)
        return tf.concat([tf.reshape(value, [-1]) for value in given], 0)

    def _results_of_metrics(self, losses: Mapping[str, Any]) -> list[bool]:
        """Return for each entry whether `fit` reports it over the whole epoch.

        If the entries have the names of the model's metrics, `fit` asks the metrics. Otherwise it keeps what
        the last step returned, which covers the epoch if metrics computed it.
        """
        results: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # Keras': compiled metrics that train_step() does not update
            results = flat_logs(self.model.get_metrics_result())
        if losses.keys() == results.keys():
            return [True] * len(losses)
        if tf.executing_eagerly():  # nothing shows where a number comes from but its value
            return [any(np.array_equal(v, result) for result in results.values()) for v in losses.values()]
        variables = metric_variables(self.model)
        return [tf.is_symbolic_tensor(v) and depends_on(v, variables) for v in losses.values()]

    def _touched_before(self) -> list[tf.Tensor]:
        assert self._before is not None
        return [self._before[i] for i in self._touched]

    # --- building

    def _build(self, sample: Batch) -> None:
        """Create every variable, and find those that the step touches. Changes no value.

        Raises:
            ModelError: `train_step` calls no Keras optimizer, or assigns a variable that is not numeric.
        """
        self._structure = (sample.x, sample.y, sample.weights)
        tensors = tensors_of(sample)
        assigned = self._dry_run(tensors) if self.model.run_eagerly else self._trace(tensors)
        if not self._means.called:
            raise ModelError(
                f"{self._name} calls no Keras optimizer. Over a ring its gradients are summed where it calls "
                "optimizer.apply() or optimizer.apply_gradients(); without such a call the workers' models "
                "would differ"
            )
        self._leave_out_metrics()
        known = {id(v): i for i, v in enumerate(self._variables)}
        self._assigned = [v for v in _distinct(assigned) if id(v) in known and not _is_seed(v)]
        seeds = [v for v in self._variables if _is_seed(v)]
        for v in self._assigned:
            if not (v.dtype.is_floating or v.dtype.is_integer or v.dtype.is_bool):
                raise ModelError(
                    f"{self._name} assigns variable {v.name!r} of type {v.dtype.name}; only numbers can"
                )
        self._touched = [known[id(v)] for v in [*self._assigned, *seeds]]
        self._sizes = [v.shape.num_elements() for v in self._assigned] + [self._size]
        self.length = sum(self._sizes)
        self._told.assign(tf.zeros([2 * self._size + 1], tf.float64))
        floats, ours = tf.TensorSpec([None], tf.float32), tf.TensorSpec([self._size], tf.float32)
        values = [tf.TensorSpec(v.shape, v.dtype) for v in self._variables]
        touched = [values[i] for i in self._touched]
        draw = tf.TensorSpec([2], tf.int64)
        self._begin = compiled(self._begin_graph, tf.TensorSpec([], tf.float32), draw)
        self._collect = compiled(self._collect_graph, floats, ours, *touched)
        self._accept = compiled(self._accept_graph, floats, floats, *touched)
        self._restore = compiled(self._restore_graph, *values)

    def _leave_out_metrics(self) -> None:
        others = [*metric_variables(self.model), *self._means.variables]
        self._variables = _distinct(self._variables, without=others)

    def _trace(self, tensors: list[tf.Tensor]) -> list[tf.Variable]:
        """Trace the step, and read from its graph which variables it has, and which it assigns by itself."""
        kind = _kind(tensors)
        self._graphs = {kind: concrete(self._train_step, *kind)}
        graph = self._graphs[kind]
        self._variables = _distinct([*self._variables, *self.model.variables, *read_in(graph)])
        calls = (call for call in self._means.calls if call.graph is graph.graph)
        assigned = {id(v) for v in assigned_in(graph, without=(i for c in calls for i in c.operations))}
        return [v for v in self._variables if id(v) in assigned]

    def _dry_run(self, tensors: list[tf.Tensor]) -> list[tf.Variable]:
        """Run the step without a ring and without its optimizers, and put back what it has changed.

        Code that is never traced shows only which variables it has, not which ones it assigns: all that are
        not an optimizer's may be.
        """
        self._variables = _distinct([*self._variables, *attributes_of(self.model).values()])
        before = [(v, v.read_value()) for v in self._variables]

        def create(create_next: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
            v = create_next(**options)
            before.append((v, v.read_value()))
            return v

        for v in metric_variables(self.model):  # so that what metrics give differs from what they are given
            if keras.backend.is_float_dtype(v.dtype):
                v.assign(v + 1)
        with tf.variable_creator_scope(create):
            self._train_step(*tensors, dry_run=True)
        for metric in metrics_of(self.model):
            metric.reset_state()
        for v, value in before:
            v.assign(value)
        self._means.expected = [call.length for call in self._means.calls]
        self._variables = _distinct([*(v for v, _ in before), *self._means.theirs])
        theirs = {id(v) for v in _distinct(self._means.theirs)}
        return [v for v in self._variables if id(v) not in theirs]

    def _try(self, sample: Batch, inexact: Inexact) -> None:
        """Find out, with real records, whether a ring makes the steps that Keras would.

        Raises:
            ModelError: it does not, and that is to be refused.
        """
        try:
            found = try_own_step(
                self._alone, lambda: [c.optimizer for c in self._means.calls], sample, is_half(self.model)
            )
        except Exception as error:
            inexact.warn(
                "whether a ring trains this model as Keras alone would could not be tried out: "
                f"{self._name} run eagerly, on {len(sample)} records, raised {type(error).__name__}: {error}"
            )
            return
        if found.added_up:
            self._means.added_up = found.added_up
            self._graphs.clear()  # they sum rows otherwise
        if not any(is_generator(v) for v in self._variables):  # draws for a record what depends on the others
            inexact.told(found.mixed, found.summed)

    def _alone(self, leaves: list[Any], records: int, totals: list[np.ndarray] | None) -> Run:
        """A step without a ring, for what it contributes to its sums. Changes nothing."""
        sums: list[np.ndarray] = []

        def reduce(vector: Vector) -> Vector:
            sums.append(np.asarray(vector))
            return vector if totals is None else tf.constant(totals[len(sums) - 1])

        expected, self._means.expected, self._means.by_row = self._means.expected, None, False
        self._before = self._begin(np.float32(records), np.zeros(2, np.int64))
        try:
            with self._means.sum.made_by(reduce):
                self._train_step(*map(arrays.tensor, leaves))
            before = self._touched_before()
            floats = [(v, b) for v, b in zip(self._assigned, before, strict=False) if v.dtype.is_floating]
            changes = [_change(v, b).numpy() * records for v, b in floats]
        finally:
            self._means.expected, self._means.by_row = expected, True
            self._put_back()
        looked_up = [n for n in self._means.rows if n is not None]
        return Run(sums, np.concatenate([*changes, np.zeros(0, np.float32)]), looked_up)

    # --- the graphs around a step

    def _begin_graph(self, records: tf.Tensor, draw: tf.Tensor) -> list[tf.Tensor]:
        before = [v.read_value() for v in self._variables]
        self._means.begin(records, draw[1])
        for v in self._variables:
            if _is_seed(v):
                v.assign_add(_salt(v, draw))
        for metric in metrics_of(self.model):
            metric.reset_state()
        return before

    def _collect_graph(self, contribution: tf.Tensor, losses: tf.Tensor, *before: tf.Tensor) -> tf.Tensor:
        records = self._means.records.read_value()
        changes = [_change(v, b) for v, b in zip(self._assigned, before, strict=False)]
        ours = tf.concat([*changes, losses], 0)
        ours = tf.where(records > 0, ours * records, tf.zeros_like(ours))
        at_fault = self._means.not_finite.read_value() + self._means.fault_of(ours)
        at = self._losses.index("loss") if "loss" in self._losses else 0
        loss = ours[self.length - self._size + sum(map(math.prod, self._shapes[:at]))]
        said = contribution[control.LEAVE : control.LOSS]
        return tf.concat([ours, [records], said, [loss, at_fault]], 0)

    def _accept_graph(self, total: tf.Tensor, ours: tf.Tensor, *before: tf.Tensor) -> tf.Tensor:
        """Whether each assigned variable has changed as on the other ranks, as far as it should; bool [n]."""
        equal = []
        records = [vector[self.length + control.RECORDS] for vector in (total, ours)]
        means = [
            tf.split(tf.math.divide_no_nan(v[: self.length], n), self._sizes)
            for v, n in zip((total, ours), records, strict=True)
        ]
        for v, b, mean, own in zip(self._assigned, before, *means, strict=False):
            wide, whole = _wide(v), not v.dtype.is_floating
            mean, own = (tf.round(mean), tf.round(own)) if whole else (mean, mean)
            equal.append(tf.reduce_all((mean == own) | (records[1] == 0)))
            v.assign(tf.cast(tf.cast(b, wide) + tf.reshape(tf.cast(mean, wide), v.shape), v.dtype))
        losses = total[self.length - self._size : self.length]
        sums = self._told[: self._size + 1] + tf.cast(tf.concat([losses, [records[0]]], 0), tf.float64)
        self._told.assign(tf.concat([sums, tf.cast(losses / records[0], tf.float64)], 0))
        for i, b in zip(self._touched[len(self._assigned) :], before[len(self._assigned) :], strict=True):
            self._variables[i].assign(b)
        return tf.stack(equal or [tf.constant(True)])

    def _restore_graph(self, *values: tf.Tensor) -> None:
        for v, value in zip(self._variables, values, strict=True):
            v.assign(value)


# Odd constants, so that (step, rank) spreads over the words of a seed.
_SALTS = np.array([2654435761, 2246822519], np.int64)
_SEEDS = 1 << 31


def _is_seed(v: tf.Variable) -> bool:
    """True for Keras' seeds and for the state of a tf.random.Generator."""
    name = v.name.rpartition("/")[2].partition(":")[0]
    return is_generator(v) or (name == "seed_generator_state" and v.dtype.is_integer)


def _salt(v: tf.Variable, draw: tf.Tensor) -> tf.Tensor:
    words = draw * _SALTS % _SEEDS
    return tf.cast(words if v.shape == [2] else tf.broadcast_to(tf.reduce_sum(words), v.shape), v.dtype)


def _distinct(variables: Iterable[Any], without: Iterable[Any] = ()) -> list[tf.Variable]:
    """Return TensorFlow's variables without duplicates, in the order given."""
    return [plain(v) for v in distinct(variables, without)]


def _wide(v: tf.Variable) -> tf.DType:
    """A type in which changes of the variable can be computed."""
    return tf.float32 if v.dtype.is_floating and v.dtype.size <= 4 else tf.float64


def _change(v: tf.Variable, before: tf.Tensor) -> tf.Tensor:
    wide = _wide(v)
    return tf.reshape(tf.cast(tf.cast(v, wide) - tf.cast(before, wide), tf.float32), [-1])


def tensors_of(batch: Batch) -> list[Any]:
    """The batch's arrays in a fixed order, in the types that Keras would give the model."""
    if batch.tensors is not None:
        return list(batch.tensors)
    leaves = keras.tree.flatten((batch.x, batch.y, batch.weights))
    return [arrays.tensor(arrays.standard(a)) for a in leaves if a is not None]


def _kind(tensors: list[Any]) -> tuple[tf.TypeSpec, ...]:
    return tuple(map(arrays.spec, tensors))
