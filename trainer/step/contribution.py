# SPDX-License-Identifier: Apache-2.0
"""What one rank contributes to the sums of a step: gradients, and what the forward pass and metrics change.

The model is tried first with a few real records (trainer/step/trial.py). Tracing shows how the graph of the
gradients must be built. If its gradients depend on totals of the ring, the graph has a sum before them. If it
looks up rows that an optimizer takes one by one, the graph has a sum after them. The graph is then traced
again, until it is the right one. The order of the contributions: trainer/step/layout.py.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.embedding.recording import Given, Recorder
from edl.trainer.model import batch_types
from edl.trainer.model.batch_types import BatchTypes
from edl.trainer.model.model_support import is_scaled, output_losses
from edl.trainer.records.batches import Batch
from edl.trainer.step import sparse_gradients
from edl.trainer.step.batch_norm import is_synchronized
from edl.trainer.step.exactness import Findings
from edl.trainer.step.finite import after, factors, finite_as
from edl.trainer.step.forward import Forward
from edl.trainer.step.inner_sum import InnerSum, RingAllReduce
from edl.trainer.step.layout import Layout
from edl.trainer.step.served_rows import ServedRows
from edl.trainer.step.training_metrics import TrainingMetrics
from edl.trainer.step.trial import doubled


class NeedsTotals(Exception):
    """The gradients of this model depend on totals of the ring, for which the graph has no sum."""

    def __init__(self, count: int):
        self.count = count


class HasRows(Exception):
    """The model's gradients have rows, for which the graph has no sum."""


class Contribution:
    """The functions that a step's graphs are traced from, with and without records.

    Args:
        model: a built model.
        types: the types of the batches; the graph of the gradients takes their tensors.
        metrics: the metrics that the training updates.
        findings: of the trial of the model.
        lookups: the lookups of rows that are on servers.
        inner_sum: the all-reduce of layers that take statistics over the whole step.
        total: the all-reduce of all else.
        dense: the gradients of tables are not rows, for any optimizer.
    """

    def __init__(
        self,
        model: keras.Model,
        types: BatchTypes,
        metrics: TrainingMetrics,
        findings: Findings,
        lookups: Lookups,
        inner_sum: InnerSum,
        total: RingAllReduce,
        dense: bool = False,
    ):
        self.model, self.types, self.lookups = model, types, lookups
        self.inner_sum, self.total = inner_sum, total
        self.served = ServedRows(lookups, model.run_eagerly) if lookups.tables else None
        self.synchronized = is_synchronized(model)
        self.totals = 0  # floats that a step sums before its gradients
        self.in_pieces = False  # whether a batch may come in pieces: then its totals come before all of them
        self.by_row = False  # whether the gradients of tables are rows
        self.layout: Layout | None = None  # set while a graph is traced, unless it is known
        self.others: list[keras.Variable] = []  # that the forward pass uses and the model does not list
        self._metrics = [(v, metrics.initial(v)) for v in metrics.variables]
        self._findings, self._dense = findings, dense
        self._added_up: frozenset[int] = frozenset()  # tables whose gradients are added up all the same
        # Code that runs eagerly cannot run the operation of a graph.
        self._before = inner_sum if model.run_eagerly else total  # of totals and counts, before gradients

    @property
    def signature(self) -> list[tf.TensorSpec]:
        """The signature of `make`, without what is carried."""
        return [
            *self.types.signature,
            tf.TensorSpec([control.LENGTH], tf.float32),
            tf.TensorSpec([4], tf.int64),
            tf.TensorSpec([], tf.float32),
            *([tf.TensorSpec([], tf.bool)] if self.synchronized else []),
            *([tf.TensorSpec([self.totals], tf.float32)] if self.totals_first else []),
            *self.lookups.signature,
        ]

    def make(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Compute this rank's contribution to the sums: large gradients, and the rest.

        Arguments: the batch's tensors, the control vector, (a seed's two words, rank, the number of the
        call), the records of the whole step; where layers sum over the ring, whether this rank has records;
        the totals, if they come first; the inputs of rows on servers (`ServedRows.inputs`); and what the
        pieces of the batch before this one have for the sums.

        Returns the large gradients; the rest; where the model has rows, how many of them all ranks have, by
        table; where it has rows on servers, their gradients and `_optimizer_at`.
        """
        count, tables = len(self.types.signature), len(self.lookups.tables)
        tensors, (contribution, draw, whole, *others) = arguments[:count], arguments[count:]
        alive = others.pop(0) if self.synchronized else None
        totals = others.pop(0) if self.totals_first else None
        rows, places, carried = others[:tables], others[tables : 2 * tables], others[2 * tables :]
        ids = None
        if self.model.run_eagerly:
            ids, carried = [some.numpy() for some in carried[:tables]], carried[tables:]
        ring = self.inner_sum if self.synchronized else None
        lookups = self.lookups.given(rows, places, ids) if self.served is not None else None

        def masked(tensor: tf.Tensor) -> tf.Tensor:
            return tensor if alive is None else tf.where(alive, tensor, tf.zeros_like(tensor))

        forward = self._forward(self.types.packed(tensors), draw[:2], ring, alive, lookups)
        self._require_totals(forward)
        records = masked(forward.records)
        # What the gradients are to be divided by is known: so the loss is, once, and not each of them.
        # (No gradient may be a constant: TensorFlow would sum it while it optimizes the graph.)
        is_sum = self._is_sum(forward) and not self.totals
        with forward.tape:
            loss = forward.loss
            if self.totals:
                totals = self.totals_of(masked(forward.terms.parts()), draw[3]) if totals is None else totals
                loss = forward.terms.corrected(loss, totals)
            weight = tf.cast(whole > 0, tf.float32) if is_sum else tf.math.divide_no_nan(records, whole)
            weighted = masked(self.model.optimizer.scale_loss(loss * weight))
        told = masked(loss if is_sum else loss * records)
        gradients = self._gradients_of(forward, weighted)
        layout = self._lay_out(forward, gradients)
        dense = [g for g in gradients if isinstance(g, tf.Tensor)]
        large = [dense[i] for i in layout.large]
        flattened = [tf.reshape(g, [-1]) for i, g in enumerate(dense) if i not in layout.large]
        small = tf.concat([*flattened, *layout.changes(forward), tf.zeros([0])], 0)
        added = self._added(forward, layout, totals)
        counts, written = self._rows(gradients, draw[2], alive)
        # Servers divide by the records that all ranks really had.
        of_rows = [g * whole for g in forward.of_rows] if layout.divided else forward.of_rows
        if is_scaled(self.model):  # the optimizer looks at the sum of the gradients by itself
            checked = told
        else:
            # Each rank checks its own part, and the sum reports it to all: they agree in any order of
            # additions.
            seen, large = self._seen(large)
            parts = [small, *written, *of_rows]
            checked = told + tf.add_n([*map(tf.reduce_sum, parts), *seen])
        bad = masked(1.0 - tf.cast(tf.math.is_finite(checked), tf.float32))
        said = contribution[control.LEAVE : control.LOSS]
        ours = masked(tf.concat([small, *added, *written], 0))
        summed = self._summands([*map(masked, large)], ours, records, said, told, bad)
        if carried:
            summed = [g + before for g, before in zip(summed, carried, strict=True)]
        return [*summed, *counts, *of_rows, *([self._optimizer_at()] if tables else [])]

    def make_nothing(self, contribution: tf.Tensor, zeros: tf.Tensor) -> list[tf.Tensor]:
        """Take part in the same sums without a batch. Returns what `make` does, without rows on servers.

        Args:
            zeros: as many as there are sums, so that each is of another, and none of a constant.
        """
        assert self.layout is not None
        layout, size = self.layout, tf.constant(self.layout.rest)
        ours = tf.fill([self.totals], zeros[-2])
        before = [self._before(ours, "totals")] if self.totals and not self.totals_first else []
        counts: list[tf.Tensor] = []
        if tables := layout.tables:
            total = lambda v: self._before(v + zeros[-2], "counts")  # noqa: E731
            counts = [sparse_gradients.nothing(total, len(tables))]
            size += sum(counts[0][i] * sparse_gradients.width(v) for i, v in enumerate(tables))
        large = [tf.fill(layout.trained[i].shape, zeros[nth]) for nth, i in enumerate(layout.large)]
        said, zero = contribution[control.LEAVE : control.LOSS], zeros[-1]
        with tf.control_dependencies(before):  # no operation here uses the totals, and they must be computed
            summed = self._summands(large, tf.fill([size], zero), zero, said, zero, zero, empty=True)
        return [*summed, *counts]

    # --- totals

    @property
    def totals_first(self) -> bool:
        """Whether a step sums its totals before it computes a piece of the batch."""
        return bool(self.totals) and self.in_pieces

    def parts(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Compute a piece's parts of the totals. Arguments: its tensors; a seed's two words, and rank."""
        *tensors, draw = arguments
        return [self._parts_of(self._forward(self.types.packed(tensors), draw[:2]).terms.parts())]

    def totals_of(self, parts: tf.Tensor, call: tf.Tensor) -> tf.Tensor:
        """Sum what the ranks have for the totals, in the call of this number."""
        with tf.control_dependencies([parts]):
            self._before.mark(call)
        totals = self._totals_from(self._before(parts, "totals"))
        with tf.control_dependencies([totals]):
            self._before.mark(tf.zeros([], tf.int64))
        return totals

    @property
    def parts_size(self) -> int:
        """The number of values that travel for the totals."""
        return self.totals

    def _parts_of(self, values: tf.Tensor) -> tf.Tensor:
        """Return what travels for these values of a piece."""
        return values

    def _totals_from(self, sums: tf.Tensor) -> tf.Tensor:
        """Return the values whose `_parts_of` add up to these sums."""
        return sums

    # --- what travels

    def _seen(self, large: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return numbers that are finite if all large gradients are, and the gradients for further use."""
        seen = [finite_as(g) for g in large]
        return seen, [after(n, g) if factors(g) else g for n, g in zip(seen, large, strict=True)]

    @property
    def variables(self) -> list[tf.Variable]:
        """Variables that the graphs capture, and that are not the model's."""
        return [*self.inner_sum.variables, *self.total.variables]

    def _summands(
        self,
        large: list[tf.Tensor],
        ours: tf.Tensor,
        records: tf.Tensor,
        said: tf.Tensor,
        told: tf.Tensor,
        bad: tf.Tensor,
        empty: bool = False,
    ) -> list[tf.Tensor]:
        """Return the summands of the ring's sums: of the large gradients, and of all the rest.

        Args:
            empty: whether all values are zeros, of a rank without records.
        """
        return [*large, tf.concat([ours, [records], said, [told, bad]], 0)]

    def read(self, rest: tf.Tensor) -> list[tf.Tensor]:
        """Return the summed control vectors, and the values before them in the sum of all the rest."""
        return [rest[-control.LENGTH :], rest[: -control.LENGTH]]

    def sums(self, more: int = control.LENGTH) -> list[tf.TensorSpec]:
        """The types of the sums, or of what `read` makes of them if `more` is 0."""
        assert self.layout is not None
        rest = None if self.layout.tables else self.layout.rest + more
        shapes = [*(self.layout.trained[i].shape for i in self.layout.large), [rest]]
        return [tf.TensorSpec(shape, tf.float32) for shape in shapes]

    def ids(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Find the ids of each table on servers, and the places of all that are asked for among them.

        Arguments: the batch's tensors, and (a seed's two words, rank).
        """
        *tensors, draw = arguments
        recorder = self.lookups.recorder()
        self._forward(self.types.packed(tensors), draw[:2], lookups=recorder)
        ids, places = recorder.unique()
        return [*ids, *places]

    # --- how the graph must be built

    def lay_out_eagerly(self, batch: Batch) -> None:
        """Find the layout by a step that is no ring's, of a model that is not traced.

        Raises:
            NeedsTotals, HasRows: the graph must be built in a different way.
        """
        forward, gradients = self._alone(batch_types.leaves(batch))
        self._require_totals(forward)
        self._lay_out(forward, gradients)

    def add_up_tables(self, sample: Batch) -> bool:
        """Sum the gradients of some tables as those of other variables. Returns whether there are any.

        The rows of these tables are not looked up for each record. Examples are places in a text, and the
        different ids of a batch. Each rank computes a gradient for these rows, while Keras computes one for
        the whole batch.
        """
        assert self.layout is not None
        once, twice = map(self._count_rows, (batch_types.leaves(sample), doubled(sample)))
        tables = zip(self.layout.tables, once, twice, strict=True)
        self._added_up = frozenset(id(v) for v, n, doubled_n in tables if doubled_n != 2 * n)
        return bool(self._added_up)

    def _count_rows(self, leaves: list[Any]) -> list[int]:
        """The number of rows of each table that one rank's step would look up for these records."""
        _, gradients = self._alone(leaves)
        return [int(tf.shape(g.indices)[0]) for g in gradients if isinstance(g, tf.IndexedSlices)]

    def _alone(self, leaves: list[Any]) -> tuple[Forward, list[Any]]:
        """The forward pass and the gradients of some records, eagerly, without a ring."""
        lookups = self.lookups.recorder() if self.lookups.tables else None
        forward = self._forward(leaves, tf.zeros([2], tf.int64), lookups=lookups)
        return forward, self._gradients_of(forward, forward.loss)

    def _is_sum(self, forward: Forward) -> bool:
        """Whether the loss of a batch is the sum of those of its parts, so that nothing is divided."""
        return forward.terms.all_sums and not forward.more_than_terms

    def _require_totals(self, forward: Forward) -> None:
        """Require the sum of totals that this model's step needs.

        Raises:
            NeedsTotals: the graph has no sum of totals yet, which the step of this model takes.
        """
        terms = forward.terms
        if not (self.totals or terms.all_means or self._is_sum(forward)):
            raise NeedsTotals(terms.parts().shape[0])

    def _lay_out(self, forward: Forward, gradients: list[Any]) -> Layout:
        """Return the layout of this step, and keep it if none is known.

        Raises:
            HasRows: the graph has no sum of rows yet, which the step of this model takes.
        """
        self.others = forward.others
        if not self.by_row and any(isinstance(g, tf.IndexedSlices) for g in gradients):
            raise HasRows
        divided = bool(self.totals) or not self._is_sum(forward)
        metrics, has_rows = [v for v, _ in self._metrics], bool(self.lookups.tables)
        layout = Layout.of(self.model, forward, gradients, self._findings.summed, divided, metrics, has_rows)
        self.layout = self.layout or layout
        return layout

    # --- parts of a contribution

    def _forward(
        self,
        leaves: list[Any],
        salt: tf.Tensor,
        ring: InnerSum | None = None,
        alive: Any = True,
        lookups: Given | Recorder | None = None,
    ) -> Forward:
        tree = self.types.tree(leaves)
        return Forward(self.model, tree, salt, self._findings.verdicts, ring, alive, self._metrics, lookups)

    def _gradients_of(self, forward: Forward, target: tf.Tensor) -> list[Any]:
        found = forward.gradients(target, None if self._dense else self.model.optimizer)
        pairs = zip(self.model.trainable_variables, found, strict=True)
        return [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) and id(v) in self._added_up else g
            for v, g in pairs
        ]

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
        for mean, loss in zip(output_losses(self.model), losses, strict=bool(losses)):
            of_losses |= {id(mean.total): loss * weight, id(mean.count): forward.records}
        parts = (of_losses.get(id(v)) for v in layout.metrics)
        return [
            tf.reshape(forward.added_to(v) if part is None else part, [-1])
            for v, part in zip(layout.metrics, parts, strict=True)
        ]

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

    def _optimizer_at(self) -> tf.Tensor:
        """Return the learning rate and the iterations, float64 [2].

        As results of a graph they cost next to nothing, while reading two variables outside of one takes 0.2
        ms in the midst of a step.
        """
        optimizer = self.model.optimizer
        numbers = optimizer.learning_rate, optimizer.iterations
        return tf.stack([tf.cast(tf.convert_to_tensor(n), tf.float64) for n in numbers])
