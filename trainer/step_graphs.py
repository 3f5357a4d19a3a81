"""The graphs of a step: this rank's part of the sum, and what is made of the sum.

A vector holds, in this order: the gradients, what the forward pass has assigned, by how much counters were
raised, what is added to the metrics (trainer/training_metrics.py), the rows of tables (trainer/rows.py), and
the control vector (trainer/control.py). `Layout` says what lies where.

How the graph of the gradients must be made shows while it is traced. Where a loss is not known to be made of
means, the model is tried first (trainer/trial.py). Where its gradients depend on totals of the ring, the
graph has a sum before them; where it looks up rows that an optimizer takes one by one, a sum after them. Then
it is traced again, until it is the right one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from trainer import batch_types, control, rows
from trainer.batch_norm import is_synchronized
from trainer.batch_types import BatchTypes
from trainer.data import Batch
from trainer.exactness import Findings
from trainer.forward import Forward
from trainer.graphs import compiled
from trainer.inner_sum import InnerSum
from trainer.model_support import is_plain, is_scaled
from trainer.training_metrics import TrainingMetrics
from trainer.trial import halves


class NeedsTotals(Exception):
    """The gradients of this model depend on totals of the ring, for which the graph has no sum."""

    def __init__(self, count: int):
        self.count = count


class StepGraphs:
    """The graphs of one model's step, traced.

    Args:
        model: built.
        types: of the batches; the graph of the gradients takes their tensors.
        sample: real records.
        metrics: that are told of the training.
        inner_sum: over the ring, for what a step sums before its gradients; None: there is no ring.
        try_model: finds out how the step is made of parts, where that is not known.

    Raises:
        ModelError: the model cannot be trained this way; the text says why.
    """

    def __init__(
        self,
        model: keras.Model,
        types: BatchTypes,
        sample: Batch,
        metrics: TrainingMetrics,
        inner_sum: InnerSum | None,
        try_model: Callable[[], Findings],
    ):
        self._model, self._types, self._inner_sum = model, types, inner_sum
        self._metrics = [(v, metrics.initial(v)) for v in metrics.variables]
        self.synchronized = is_synchronized(model)
        self.totals = 0  # floats that a step sums before its gradients
        self._rows = False  # whether the gradients of tables are rows
        self._added_up: frozenset[int] = frozenset()  # tables of which they are not
        self._findings: Findings | None = None  # of a trial, where one was needed
        self._one_by_one = rows.one_by_one(model.optimizer)
        if not is_plain(model):
            self._findings = try_model()
        layout: Layout | None = None
        while layout is None:
            try:
                layout = self.trace_gradients(sample)
            except _NotTried:
                self._findings = try_model()
            except NeedsTotals as needs:
                self.totals = needs.count
            except _HasRows:
                self._rows = True
        if layout.tables:
            self._added_up = self._the_same_in_each_batch(layout, sample)
            layout = self.trace_gradients(sample)
        self.layout = layout
        floats = tf.TensorSpec([None], tf.float32)
        self.nothing = compiled(
            lambda told, length: tf.concat([tf.zeros([length]), told], 0), floats, tf.TensorSpec([], tf.int32)
        )
        of_rows = [tf.TensorSpec([len(layout.tables)], tf.int32)] if layout.tables else []
        self.update = self._graph(self._update_graph, floats, *of_rows)

    def trace_gradients(self, batch: Batch) -> Layout:
        """Make the graph for arrays of the present types; for batches of any length, in rings of any size.

        Raises:
            NeedsTotals: it is no longer made as it was.
        """
        self._found: Layout | None = None
        self.gradients = self._graph(
            self._gradients_graph,
            *self._types.signature,
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([3], tf.int64),
            *([tf.TensorSpec([], tf.bool)] if self.synchronized else []),
            # XLA cannot wait for a ring.
            jit=bool(self._model.jit_compile) and not (self.totals or self.synchronized or self._rows),
        )
        if self._model.run_eagerly:  # nothing was traced: the layout is found by a step that is no ring's
            forward = self._forward(batch_types.leaves(batch), tf.zeros([2], tf.int64))
            self._lay_out(forward, self._gradients_of(forward, forward.loss))
        assert self._found is not None
        return self._found

    def _graph(
        self, function: Callable[..., Any], *signature: tf.TensorSpec, jit: bool = False
    ) -> Callable[..., Any]:
        if self._model.run_eagerly:  # the user wants to see each step
            return lambda *values: function(*map(tf.convert_to_tensor, values))
        return compiled(function, *signature, jit=jit)

    def _forward(
        self, leaves: list[Any], salt: tf.Tensor, ring: InnerSum | None = None, alive: Any = True
    ) -> Forward:
        verdicts = self._findings.verdicts if self._findings else None
        return Forward(
            self._model, self._types.tree(leaves), salt, verdicts, ring, alive, metrics=self._metrics
        )

    def _the_same_in_each_batch(self, layout: Layout, sample: Batch) -> frozenset[int]:
        """Tables whose rows are not looked up by records (of places in a text, say): their ids.

        Each rank has a gradient for all of these rows, of which Keras has but one for the whole batch. So
        these are added up, as all other gradients are.
        """
        if len(sample) < 2:
            return frozenset()
        parts, _ = halves(sample)
        alone = self._inner_sum.made_by(lambda v: v) if self._inner_sum else contextlib.nullcontext()
        with alone:
            one, other, whole = (self._count_rows(leaves) for leaves in (*parts, batch_types.leaves(sample)))
        tables = zip(layout.tables, one + other == whole, strict=True)
        return frozenset(id(v) for v, by_record in tables if not by_record)

    def _count_rows(self, leaves: list[Any]) -> np.ndarray:
        """Of each table, that the step of one rank with these records would look up."""
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        told, draw = np.zeros(control.LENGTH, np.float32), np.zeros(3, np.int64)
        _, counts = self.gradients(*tensors, told, draw, *([True] if self.synchronized else []))
        return np.asarray(counts)

    def _gradients_of(self, forward: Forward, target: tf.Tensor) -> list[Any]:
        found = forward.gradients(target, self._one_by_one)
        pairs = zip(self._model.trainable_variables, found, strict=True)
        return [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) and id(v) in self._added_up else g
            for v, g in pairs
        ]

    def _is_sum(self, forward: Forward) -> bool:
        """Whether the loss of a batch is the sum of those of its parts, so that nothing is divided."""
        return forward.terms.all_sums and not forward.more_than_terms and not is_scaled(self._model)

    def _require(self, forward: Forward) -> None:
        """
        Raises:
            _NotTried, NeedsTotals: what the step of this model takes, and is not there yet.
        """
        terms = forward.terms
        counters = [v for v, _, _ in forward.changes if not keras.backend.is_float_dtype(v.dtype)]
        if self._findings is None and (terms.unknown or counters):
            raise _NotTried
        exact = terms.all_means or self._is_sum(forward)
        if not self.totals and (is_scaled(self._model) or not exact):
            raise NeedsTotals(terms.parts().shape[0])

    def _lay_out(self, forward: Forward, gradients: list[Any]) -> Layout:
        self._require(forward)
        if not self._rows and any(isinstance(g, tf.IndexedSlices) for g in gradients):
            raise _HasRows
        summed = self._findings.summed if self._findings else frozenset()
        divided = not (is_scaled(self._model) or (self._is_sum(forward) and not self.totals))
        metrics = [v for v, _ in self._metrics]
        self._found = Layout.of(self._model, forward, gradients, summed, divided, metrics)
        return self._found

    def _gradients_graph(self, *arguments: tf.Tensor) -> Any:
        """The vector; where the model has rows, also how many of them all ranks have, by table.

        Arguments: the batch's tensors, the control vector, (a seed's two words, rank), and, where layers sum
        over the ring, whether this rank has records: one that has none takes part with the sample.
        """
        *tensors, contribution, draw, alive = arguments if self.synchronized else (*arguments, None)
        ring = self._inner_sum if self.synchronized else None
        forward = self._forward(self._types.packed(tensors), draw[:2], ring, alive)
        self._require(forward)
        records, loss, scaled = forward.records, forward.loss, is_scaled(self._model)
        with forward.tape:
            if self.totals:
                assert self._inner_sum is not None, "this model needs a ring inside its steps"
                parts = forward.terms.parts()
                totals = self._inner_sum(parts if alive is None else tf.where(alive, parts, 0))
                loss = forward.terms.corrected(loss, totals)
            # The loss is weighted before it is differentiated: one product instead of one for each variable.
            told = loss if self._is_sum(forward) and not self.totals else loss * records
            # In 16 bits too large a number is lost: nothing larger than what Keras has for the whole batch.
            weighted = self._model.optimizer.scale_loss(loss * (records / totals[0]) if scaled else told)
            weighted = weighted if alive is None else tf.where(alive, weighted, 0)
        gradients = self._gradients_of(forward, weighted)
        layout = self._lay_out(forward, gradients)
        after = {id(v): (before, value) for v, before, value in forward.changes}
        slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        parts = [tf.reshape(g, [-1]) for g in gradients if isinstance(g, tf.Tensor)]
        parts += [tf.reshape(after[id(v)][1], [-1]) * records for v in layout.averaged]
        for v in layout.counters:
            old, new = (tf.cast(value, tf.float32) for value in after[id(v)])
            parts.append(tf.reshape(new - old, [-1]) * (1.0 if v.path in layout.summed else records))
        checked = parts
        parts = parts + [tf.reshape(forward.added_to(v), [-1]) for v in layout.metrics]
        if slices:
            counts = [tf.shape(g.indices)[0] for g in slices]
            if alive is not None:
                counts = [tf.where(alive, n, 0) for n in counts]
                slices = [rows.first(g, n) for g, n in zip(slices, counts, strict=True)]
            before, all_rows = rows.counted(self._inner_sum, draw[2], counts)
            written = [rows.written(g, before[i], all_rows[i]) for i, g in enumerate(slices)]
            parts, checked = parts + written, checked + written
        if scaled:  # the optimizer looks at the sum of the gradients by itself, and takes smaller steps
            finite = tf.math.is_finite(loss)
        else:
            # A sum is finite when all of its parts are (or so large that they are as bad): one cheap pass.
            finite = tf.math.is_finite(weighted + tf.add_n([tf.reduce_sum(part) for part in checked]))
        ours = tf.stack([records, told, contribution[control.LEAVE], 1.0 - tf.cast(finite, tf.float32)])
        vector = tf.concat([*parts, ours], 0)
        if alive is not None:
            mask = tf.one_hot(tf.shape(vector)[0] - control.STEP + control.LEAVE, tf.shape(vector)[0])
            vector = tf.where(alive, vector, mask * contribution[control.LEAVE])
        vector = tf.concat([vector, contribution[control.STEP :]], 0)
        return (vector, all_rows) if slices else vector

    def _update_graph(self, vector: tf.Tensor, *all_rows: tf.Tensor) -> None:
        layout, model = self.layout, self._model
        flat = [all_rows[0][i] * rows.width(v) for i, v in enumerate(layout.tables)]
        share = 1.0 / vector[sum(flat, layout.length) + control.RECORDS]
        pieces = iter(tf.split(vector, [*layout.sizes, *flat, -1], num=len(layout.sizes) + len(flat) + 1))
        gradients = {
            id(v): tf.reshape(piece * share if layout.divided else piece, v.shape)
            for v, piece in zip(layout.trained, pieces, strict=False)
        }
        # What the forward pass assigns comes first, as it does in Keras: it may be a weight that is trained.
        for v, piece in zip(layout.averaged, pieces, strict=False):
            v.assign(tf.reshape(piece * share, v.shape))
        for v, piece in zip(layout.counters, pieces, strict=False):
            raised = tf.reshape(piece if v.path in layout.summed else piece * share, v.shape)
            v.assign(tf.cast(tf.cast(v.value, tf.int64) + tf.cast(tf.round(raised), tf.int64), v.dtype))
        for v, piece in zip(layout.metrics, pieces, strict=False):
            v.assign_add(tf.cast(tf.reshape(piece, v.shape), v.dtype))
        for v, piece in zip(layout.tables, pieces, strict=False):
            found = rows.read(piece, v)
            values = found.values * share if layout.divided else found.values
            gradients[id(v)] = tf.IndexedSlices(values, found.indices, found.dense_shape)
        model.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in model.trainable_variables])


@dataclass(frozen=True, eq=False)
class Layout:
    """What lies where in the vector, in front of the control vector, and what it means."""

    trained: list[keras.Variable]
    averaged: list[keras.Variable]  # moving averages: changed by the forward pass
    counters: list[keras.Variable]  # likewise, but whole numbers or truth values, of which the change is sent
    summed: frozenset[str]  # paths of counters that count records; the others count steps
    divided: bool  # whether gradients are sums of means times records
    metrics: list[keras.Variable]  # of which the change is sent, too
    tables: list[keras.Variable]  # likewise trained, by rows; how many there are differs from step to step

    @staticmethod
    def of(
        model: keras.Model,
        forward: Forward,
        gradients: list[Any],
        summed: frozenset[str],
        divided: bool,
        metrics: list[keras.Variable],
    ) -> Layout:
        given = [(v, g) for v, g in zip(model.trainable_variables, gradients, strict=True) if g is not None]
        tables = [v for v, g in given if isinstance(g, tf.IndexedSlices)]
        trained = [v for v, g in given if not isinstance(g, tf.IndexedSlices)]
        if not given:
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
    def all(self) -> list[keras.Variable]:
        return [*self.trained, *self.averaged, *self.counters, *self.metrics]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layouts that are."""
        variables = [*map(id, self.all), *map(id, self.tables)]
        return variables, len(self.trained), len(self.averaged), len(self.tables), self.divided

    @cached_property
    def sizes(self) -> list[int]:
        return [int(np.prod(v.shape)) for v in self.all]

    @cached_property
    def length(self) -> int:
        """Of what is there in each step, so without the rows."""
        return sum(self.sizes)


class _HasRows(Exception):
    """The model's gradients have rows, which a graph compiled with XLA cannot sum."""


class _NotTried(Exception):
    """It takes real records to know how this model's step is made of parts."""
