"""The graphs of a step: this rank's part of the sum, and what is made of the sum.

A vector holds, in this order: the gradients, what the forward pass has assigned, by how much counters were
raised, and the control vector (trainer/control.py). `Layout` says what lies where.

How the graph of the gradients must be made shows while it is traced. Where a loss is not known to be made of
means, the model is tried first (trainer/trial.py). Where its gradients depend on totals of the ring, the
graph has a sum before them. Then it is traced again, until it is the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from trainer import batch_types, control
from trainer.batch_norm import is_synchronized
from trainer.batch_types import BatchTypes
from trainer.data import Batch
from trainer.exactness import Findings
from trainer.forward import Forward
from trainer.graphs import compiled
from trainer.inner_sum import InnerSum
from trainer.model_support import is_plain, is_scaled


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
        inner_sum: InnerSum | None,
        try_model: Callable[[], Findings],
    ):
        self._model, self._types, self._inner_sum = model, types, inner_sum
        self.synchronized = is_synchronized(model)
        self.totals = 0  # floats that a step sums before its gradients
        self._findings: Findings | None = None  # of a trial, where one was needed
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
        self.layout = layout
        floats = tf.TensorSpec([None], tf.float32)
        self.nothing = compiled(lambda told: tf.concat([tf.zeros([layout.length]), told], 0), floats)
        self.update = self._graph(self._update_graph, floats)

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
            tf.TensorSpec([2], tf.int64),
            *([tf.TensorSpec([], tf.bool)] if self.synchronized else []),
            # XLA cannot wait for a ring.
            jit=bool(self._model.jit_compile) and not self.totals and not self.synchronized,
        )
        if self._model.run_eagerly:  # nothing was traced: the layout is found by a step that is no ring's
            forward = self._forward(batch_types.leaves(batch), tf.zeros([2], tf.int64))
            self._lay_out(forward, forward.gradients(forward.loss))
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
        return Forward(self._model, self._types.tree(leaves), salt, verdicts, ring, alive)

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

    def _lay_out(self, forward: Forward, gradients: list[tf.Tensor | None]) -> Layout:
        self._require(forward)
        summed = self._findings.summed if self._findings else frozenset()
        divided = not (is_scaled(self._model) or (self._is_sum(forward) and not self.totals))
        self._found = Layout.of(self._model, forward, gradients, summed, divided)
        return self._found

    def _gradients_graph(self, *arguments: tf.Tensor) -> tf.Tensor:
        # Where layers sum over the ring, a rank without records takes part with the sample, not `alive`.
        *tensors, contribution, salt, alive = arguments if self.synchronized else (*arguments, None)
        ring = self._inner_sum if self.synchronized else None
        forward = self._forward(self._types.packed(tensors), salt, ring, alive)
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
        gradients = forward.gradients(weighted)
        layout = self._lay_out(forward, gradients)
        after = {id(v): (before, value) for v, before, value in forward.changes}
        parts = [tf.reshape(g, [-1]) for g in gradients if g is not None]
        parts += [tf.reshape(after[id(v)][1], [-1]) * records for v in layout.averaged]
        for v in layout.counters:
            old, new = (tf.cast(value, tf.float32) for value in after[id(v)])
            parts.append(tf.reshape(new - old, [-1]) * (1.0 if v.path in layout.summed else records))
        if scaled:  # the optimizer looks at the sum of the gradients by itself, and takes smaller steps
            finite = tf.math.is_finite(loss)
        else:
            # A sum is finite when all of its parts are (or so large that they are as bad): one cheap pass.
            finite = tf.math.is_finite(weighted + tf.add_n([tf.reduce_sum(part) for part in parts]))
        ours = tf.stack([records, told, contribution[control.LEAVE], 1.0 - tf.cast(finite, tf.float32)])
        vector = tf.concat([*parts, ours], 0)
        if alive is not None:
            mask = tf.one_hot(layout.length + control.LEAVE, tf.shape(vector)[0])
            vector = tf.where(alive, vector, mask * contribution[control.LEAVE])
        return tf.concat([vector, contribution[control.IDLE :]], 0)

    def _update_graph(self, vector: tf.Tensor) -> None:
        layout, model = self.layout, self._model
        share = 1.0 / vector[layout.length + control.RECORDS]
        pieces = iter(tf.split(vector, [*layout.sizes, -1]))
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
        model.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in model.trainable_variables])


@dataclass(frozen=True, eq=False)
class Layout:
    """What lies where in the vector, in front of the control vector, and what it means."""

    trained: list[keras.Variable]
    averaged: list[keras.Variable]  # moving averages: changed by the forward pass
    counters: list[keras.Variable]  # likewise, but whole numbers or truth values, of which the change is sent
    summed: frozenset[str]  # paths of counters that count records; the others count steps
    divided: bool  # whether gradients are sums of means times records

    @staticmethod
    def of(
        model: keras.Model,
        forward: Forward,
        gradients: list[tf.Tensor | None],
        summed: frozenset[str],
        divided: bool,
    ) -> Layout:
        trained = [v for v, g in zip(model.trainable_variables, gradients, strict=True) if g is not None]
        if not trained:
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
        return Layout(trained, floats, counters, summed, divided)

    @property
    def all(self) -> list[keras.Variable]:
        return [*self.trained, *self.averaged, *self.counters]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layouts that are."""
        return [*map(id, self.all)], len(self.trained), len(self.averaged), self.divided

    @cached_property
    def sizes(self) -> list[int]:
        return [int(np.prod(v.shape)) for v in self.all]

    @cached_property
    def length(self) -> int:
        return sum(self.sizes)


class _NotTried(Exception):
    """It takes real records to know how this model's step is made of parts."""
