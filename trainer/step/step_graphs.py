# SPDX-License-Identifier: Apache-2.0
"""The graphs of a step: their ingredients, and how these are determined.

A step sums, in this order: the gradients, the values assigned by the forward pass, the increments of
counters, the increments of the metrics (trainer/step/training_metrics.py), the rows of tables
(trainer/step/sparse_gradients.py), and the control vector (trainer/agreement/control.py). `Layout` describes
the position of each; trainer/step/overlapped.py makes the sums.

The model is tried first with a few real records (trainer/step/trial.py). Tracing shows how the graph of the
gradients must be built. If its gradients depend on totals of the ring, the graph has a sum before them. If it
looks up rows that an optimizer takes one by one, the graph has a sum after them. The graph is then traced
again, until it is the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.embedding.recording import Given, Recorder
from edl.trainer.model import batch_types
from edl.trainer.model.batch_types import BatchTypes
from edl.trainer.model.captured import distinct, read_in, refuse_assigned
from edl.trainer.model.data import Batch
from edl.trainer.model.graphs import concrete, flat
from edl.trainer.model.model_support import output_losses
from edl.trainer.step import sparse_gradients
from edl.trainer.step.background_compile import BackgroundCompiled
from edl.trainer.step.batch_norm import is_synchronized
from edl.trainer.step.exactness import Findings
from edl.trainer.step.forward import Forward
from edl.trainer.step.fused_updates import fused
from edl.trainer.step.inner_sum import InnerSum, RingAllReduce
from edl.trainer.step.served_rows import ServedRows
from edl.trainer.step.training_metrics import TrainingMetrics
from edl.trainer.step.trial import doubled


class NeedsTotals(Exception):
    """The gradients of this model depend on totals of the ring, for which the graph has no sum."""

    def __init__(self, count: int):
        self.count = count


class HasRows(Exception):
    """The model's gradients have rows, for which the graph has no sum."""


class StepGraphs:
    """The graphs of one model's step, traced.

    Args:
        model: a built model.
        types: the types of the batches; the graph of the gradients takes their tensors.
        sample: real records.
        metrics: the metrics that the training updates.
        inner_sum: the all-reduce over the ring for what a step sums before its gradients.
        try_model: determines how the step is made of parts.
        lookups: the lookups of rows that are on servers.
        dense: the gradients of tables are not rows, for any optimizer.

    Raises:
        ModelError: the model cannot be trained this way; the text says why.
    """

    layout: Layout

    def __init__(
        self,
        model: keras.Model,
        types: BatchTypes,
        sample: Batch,
        metrics: TrainingMetrics,
        inner_sum: InnerSum,
        try_model: Callable[[], Findings],
        lookups: Lookups,
        dense: bool = False,
    ):
        self._lookups, self._dense = lookups, dense
        self._served = ServedRows(lookups) if lookups.tables else None
        self._at: tf.Tensor | None = None  # where the optimizer was in the step that was summed last
        self._before: RingAllReduce = inner_sum  # makes the sums before those of the gradients
        self._model, self._types, self._inner_sum = model, types, inner_sum
        self._metrics = [(v, metrics.initial(v)) for v in metrics.variables]
        self._synchronized = is_synchronized(model)
        self._totals = 0  # floats that a step sums before its gradients
        self._large: list[int] = []  # the trained variables, by position, that have a sum of their own
        self._by_row = False  # whether the gradients of tables are rows
        self._added_up: frozenset[int] = frozenset()  # tables whose gradients are added up all the same
        self._findings = try_model()
        self._others: dict[str, list[Any]] = {}  # by graph: the variables that it captures
        self._of_ring = [*inner_sum.variables]  # captured as well, and none of the model

    meanwhile: Callable[[], None] = staticmethod(lambda: None)  # what is done while a step waits for servers

    def optimizer_at(self) -> tuple[float, int]:
        """Return the learning rate and iterations of the step that was summed last, for rows on servers."""
        if self._at is None:  # this rank had no records
            optimizer = self._model.optimizer
            return float(np.asarray(optimizer.learning_rate)), int(np.asarray(optimizer.iterations))
        rate, iterations = np.asarray(self._at).tolist()
        return rate, int(iterations)

    @property
    def captured(self) -> list[Any]:
        """Return all variables that the graphs capture and the forward pass meets, in the order of the code.

        Among them are those of losses, metrics and schedules, which no model lists.
        """
        return distinct(v for found in self._others.values() for v in found)

    def _note(self, graph: Any, name: str, changes_nothing: bool = True) -> None:
        """Note the variables that a concrete function captures.

        Raises:
            ModelError: it should change nothing, and assigns a variable.
        """
        if changes_nothing:
            refuse_assigned(graph, self._of_ring)
        self._others[name] = distinct(read_in(graph), without=self._of_ring)

    def _graph(
        self,
        name: str,
        function: Callable[..., Any],
        *signature: tf.TensorSpec,
        changes_nothing: bool = True,
        jit: bool = False,
    ) -> Callable[..., list[tf.Tensor]]:
        """The function as a graph, unless the user wants to see each step; its results are flat."""
        if self._model.run_eagerly:
            return lambda *values: tf.nest.flatten(function(*map(tf.convert_to_tensor, values)))
        graph = concrete(function, *signature)
        self._note(graph, name, changes_nothing)
        return BackgroundCompiled(graph, signature) if jit else flat(graph)

    def _forward(
        self,
        leaves: list[Any],
        salt: tf.Tensor,
        ring: InnerSum | None = None,
        alive: Any = True,
        lookups: Given | Recorder | None = None,
    ) -> Forward:
        tree = self._types.tree(leaves)
        return Forward(self._model, tree, salt, self._findings.verdicts, ring, alive, self._metrics, lookups)

    def _is_sum(self, forward: Forward) -> bool:
        """Whether the loss of a batch is the sum of those of its parts, so that nothing is divided."""
        return forward.terms.all_sums and not forward.more_than_terms

    def _require(self, forward: Forward) -> None:
        """Require the sum of totals that this model's step needs.

        Raises:
            NeedsTotals: the graph has no sum of totals yet, which the step of this model takes.
        """
        terms = forward.terms
        exact = terms.all_means or self._is_sum(forward)
        if not self._totals and not exact:
            raise NeedsTotals(terms.parts().shape[0])

    def _lay_out(self, forward: Forward, gradients: list[Any]) -> Layout:
        self._require(forward)
        self._others["forward"] = forward.others
        if not self._by_row and any(isinstance(g, tf.IndexedSlices) for g in gradients):
            raise HasRows
        summed = self._findings.summed
        divided = bool(self._totals) or not self._is_sum(forward)
        metrics = [v for v, _ in self._metrics]
        has_rows = bool(self._lookups.tables)
        return Layout.of(self._model, forward, gradients, summed, divided, metrics, has_rows)

    def _the_same_in_each_batch(self, layout: Layout, sample: Batch) -> frozenset[int]:
        """Tables whose rows are not looked up for each record: their ids.

        Examples are places in a text, and the different ids of a batch. Each rank computes a gradient for
        these rows, while Keras computes one for the whole batch. So these gradients are summed like all
        others.
        """
        once, twice = map(self._count_rows, (batch_types.leaves(sample), doubled(sample)))
        tables = zip(layout.tables, once, twice, strict=True)
        return frozenset(id(v) for v, n, doubled_n in tables if doubled_n != 2 * n)

    def _count_rows(self, leaves: list[Any]) -> list[int]:
        """The number of rows of each table that one rank's step would look up for these records."""
        _, gradients = self._alone(leaves)
        return [int(tf.shape(g.indices)[0]) for g in gradients if isinstance(g, tf.IndexedSlices)]

    def _alone(self, leaves: list[Any]) -> tuple[Forward, list[Any]]:
        """The forward pass and the gradients of some records, eagerly, without a ring."""
        lookups = self._lookups.recorder() if self._lookups.tables else None
        forward = self._forward(leaves, tf.zeros([2], tf.int64), lookups=lookups)
        return forward, self._gradients_of(forward, forward.loss)

    def _gradients_of(self, forward: Forward, target: tf.Tensor) -> list[Any]:
        found = forward.gradients(target, None if self._dense else self._model.optimizer)
        pairs = zip(self._model.trainable_variables, found, strict=True)
        return [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) and id(v) in self._added_up else g
            for v, g in pairs
        ]

    def _ids_graph(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """The ids of each table on servers, and the places of all that are asked for among them.

        Arguments: the batch's tensors, and (a seed's two words, rank).
        """
        *tensors, draw = arguments
        recorder = self._lookups.recorder()
        self._forward(self._types.packed(tensors), draw[:2], lookups=recorder)
        ids, places = recorder.unique()
        return [*ids, *places]

    def _optimizer_at(self) -> tf.Tensor:
        """Return the learning rate and the iterations, float64 [2].

        As results of a graph they cost next to nothing, while reading two variables outside of one takes 0.2
        ms in the midst of a step.
        """
        optimizer = self._model.optimizer
        numbers = optimizer.learning_rate, optimizer.iterations
        return tf.stack([tf.cast(tf.convert_to_tensor(n), tf.float64) for n in numbers])

    def _rows(
        self, gradients: list[Any], rank: tf.Tensor, alive: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The numbers of rows that all ranks have, by table, and each table's rows at this rank's places."""
        slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        if not slices:
            return [], []
        counts = [tf.shape(g.indices)[0] for g in slices]
        if alive is not None:
            counts = [tf.where(alive, n, 0) for n in counts]
            slices = [sparse_gradients.first(g, n) for g, n in zip(slices, counts, strict=True)]
        before, all_rows = sparse_gradients.counted(lambda v: self._before(v, "counts"), rank, counts)
        written = [sparse_gradients.written(g, before[i], all_rows[i]) for i, g in enumerate(slices)]
        return [all_rows], written

    @staticmethod
    def _changes(forward: Forward, layout: Layout) -> list[tf.Tensor]:
        """The changes of the forward pass to be summed, flat, in the order of the layout."""
        records, after = forward.records, {id(v): (old, new) for v, old, new in forward.changes}
        parts = [tf.reshape(after[id(v)][1], [-1]) * records for v in layout.averaged]
        for v in layout.counters:
            old, new = (tf.cast(value, tf.float32) for value in after[id(v)])
            parts.append(tf.reshape(new - old, [-1]) * (1.0 if v.path in layout.summed else records))
        return parts

    def _added(self, forward: Forward, layout: Layout, totals: tf.Tensor | None) -> list[tf.Tensor]:
        """The contributions to metrics to be summed, flat, in the order of the layout.

        Args:
            totals: the totals of the ring, if the loss depends on them.
        """
        losses, weight = forward.output_losses, forward.records
        if totals is not None:
            losses = [forward.terms.corrected(loss, totals) for loss in losses]
        elif self._is_sum(forward):
            weight = tf.constant(1.0)  # told for each record, as the sum of all outputs is
        of_losses: dict[int, tf.Tensor] = {}
        for mean, loss in zip(output_losses(self._model), losses, strict=bool(losses)):
            of_losses |= {id(mean.total): loss * weight, id(mean.count): forward.records}
        parts = (of_losses.get(id(v)) for v in layout.metrics)
        return [
            tf.reshape(forward.added_to(v) if part is None else part, [-1])
            for v, part in zip(layout.metrics, parts, strict=True)
        ]

    @staticmethod
    def _changed(layout: Layout, share: tf.Tensor, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        """The new values of `layout.changing`, of their sums over the ring.

        Args:
            share: the share of one record in the step.
        """
        kinds = zip(layout.changing, sums, strict=True)
        new = []
        for at, (v, total) in enumerate(kinds):
            total = tf.reshape(total, v.shape)
            if at < len(layout.averaged):
                new.append(total * share)
            elif at < len(layout.averaged) + len(layout.counters):
                raised = tf.round(total if v.path in layout.summed else total * share)
                new.append(tf.cast(tf.cast(v.value, tf.int64) + tf.cast(raised, tf.int64), v.dtype))
            else:
                new.append(v.value + tf.cast(total, v.dtype))
        return new

    def _divide(self, layout: Layout, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of each variable of the layout, and of the rows of its tables."""
        large, (rest, *counts) = sums[: len(self._large)], sums[len(self._large) :]
        sizes = [n for i, n in enumerate(layout.sizes) if i not in self._large]
        sizes += [counts[0][i] * sparse_gradients.width(v) for i, v in enumerate(layout.tables)]
        small = iter(tf.split(rest, sizes, num=len(sizes)) if sizes else ())
        each = dict(zip(self._large, large, strict=True))
        return [each[i] if i in each else next(small) for i in range(len(layout.sizes) + len(layout.tables))]

    def _put(
        self, layout: Layout, share: tf.Tensor, sums: list[tf.Tensor], gradients: dict[int, Any]
    ) -> None:
        """Change the model: what the forward pass has changed, and an update of the optimizer.

        Args:
            share: the share of one record in the step.
            sums: the sums of `layout.changing`.
            gradients: means, by the id of their variable.
        """
        # What the forward pass assigns comes first, as it does in Keras: it may be a weight that is trained.
        for v, new in zip(layout.changing, self._changed(layout, share, sums), strict=True):
            v.assign(new)
        optimizer = self._model.optimizer
        if not gradients:  # all that is trained is rows
            optimizer.iterations.assign_add(1)
            return
        with fused(optimizer):
            optimizer.apply_gradients([(gradients.get(id(v)), v) for v in self._model.trainable_variables])


def turns(
    pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray
) -> Iterator[tuple[list[Any], np.ndarray, np.ndarray]]:
    """Yield the tensors, the control vector and the draw (a seed's two words, rank) of each micro-batch.

    Only the last one carries this rank's control vector, the others zeros. Each draws with a seed of its own.
    """
    last = len(pieces) - 1
    for nth, tensors in enumerate(pieces):
        drawn = draw.copy()
        drawn[:2] = (draw[:2] + nth * _SALT) % SEEDS
        yield tensors, contribution if nth == last else np.zeros_like(contribution), drawn


SEEDS = 1 << 31
_SALT = 1640531527


@dataclass(frozen=True, eq=False)
class Layout:
    """The order of what a step sums, in front of the control vector."""

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
    def all(self) -> list[keras.Variable]:
        """The variables in the order of the vector: the trained ones, then moving averages and the like."""
        return [*self.trained, *self.changing]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layouts that are."""
        variables = [*map(id, self.all), *map(id, self.tables)]
        return variables, len(self.trained), len(self.averaged), len(self.tables), self.divided

    @cached_property
    def sizes(self) -> list[int]:
        """The number of values of each variable, in the order of the vector."""
        return [int(np.prod(v.shape)) for v in self.all]

    @cached_property
    def length(self) -> int:
        """The length of what each step has, so without embedding rows."""
        return sum(self.sizes)
