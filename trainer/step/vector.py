# SPDX-License-Identifier: Apache-2.0
"""A step with one sum: of one vector, after which the optimizer runs.

    [ gradients x records | moving averages x records | counters | metrics | rows | control ]

It takes every model that can be trained over a ring; what needs a sum before the gradients, or after them,
has it (trainer/step/inner_sum.py). Only `apply` changes the model.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.model import batch_types
from edl.trainer.model.captured import attributes_of
from edl.trainer.model.data import Batch
from edl.trainer.model.graphs import compiled, concrete, flat
from edl.trainer.model.model_support import is_scaled
from edl.trainer.ring.base import Vector
from edl.trainer.step import sparse_gradients
from edl.trainer.step.background_compile import BackgroundCompiled
from edl.trainer.step.forward import Forward
from edl.trainer.step.step_graphs import HasRows, Layout, NeedsTotals, StepGraphs, turns
from edl.trainer.step.trial import doubled

HERE = "CPU:0"  # where arrays can be read without a copy


@dataclass(frozen=True, eq=False)
class Total:
    """The ring's sum of all vectors, and how many rows of each table lie in it."""

    vector: tf.Tensor
    rows: tuple[tf.Tensor, ...]  # int32 [tables], where there are tables


Staged = list[tuple[np.ndarray, np.ndarray]]  # of each table on servers: ids, and the gradients of their rows


@dataclass(frozen=True, eq=False)
class _Found:
    """The ids that records look up.

    Args:
        tensors, draw: the inputs that the ids were found for.
        ids: the unique ids of each table.
        places: the positions in `ids` of all requested ids, int32 tensors.
    """

    tensors: list[Any]
    draw: np.ndarray
    ids: list[np.ndarray]
    places: Sequence[tf.Tensor]


class _Ids(threading.local):
    """The ids of each table on servers, for the step that runs on this thread."""

    ids: Sequence[np.ndarray] | None = None


class VectorStep(StepGraphs):
    """A step whose gradients are summed as one vector.

    Args:
        reduce: the ring's (trainer/ring/base.py).
        dense: the gradients of tables are not rows, for any optimizer.
        others: see StepGraphs.
    """

    def __init__(self, *others: Any, reduce: Callable[[Vector], Vector], dense: bool = False):
        super().__init__(*others)
        self._dense = dense
        _, types, sample = others[:3]
        self._reduce = reduce
        self._sample = types.tensors(sample)
        self._eager_ids = _Ids()
        self._ahead: _Found | None = None
        self._at: tf.Tensor | None = None  # where the optimizer was in the step that was summed last
        self._added_up: frozenset[int] = frozenset()  # tables whose gradients are not rows
        layout: Layout | None = None
        while layout is None:
            try:
                layout = self.trace(sample)
            except NeedsTotals as needs:
                self._totals = needs.count
            except HasRows:
                self._by_row = True
        if layout.tables:
            self._added_up = self._the_same_in_each_batch(layout, sample)
            layout = self.trace(sample)
        self.layout = layout
        floats = tf.TensorSpec([None], tf.float32)
        self._nothing = compiled(
            lambda told, length: tf.concat([tf.zeros([length]), told], 0), floats, tf.TensorSpec([], tf.int32)
        )
        of_rows = [tf.TensorSpec([len(layout.tables)], tf.int32)] if layout.tables else []
        self._update = self._graph(self._update_graph, floats, *of_rows)

    def allreduce_step(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray, records: int, step: int
    ) -> control.StepResult:
        self._at = None
        ours, of_tables = self._all(pieces, contribution, draw, step)
        ready_at = time.monotonic()
        total = self._reduce(ours)
        waited = time.monotonic() - ready_at
        agreed, own = (control.read(_end(v)) for v in (total, ours))
        return control.StepResult(agreed, own.nonfinite, waited, 4 * len(total), Total(total, of_tables))

    def apply(self, sums: control.StepResult) -> None:
        self._update(sums.given.vector, *sums.given.rows)

    def optimizer_at(self) -> tuple[float, int]:
        if self._at is None:  # this rank had no records
            return super().optimizer_at()
        rate, iterations = np.asarray(self._at).tolist()
        return rate, int(iterations)

    @property
    def indivisible(self) -> str:
        """Why a batch must be one piece; empty: it need not."""
        return (
            "its loss is divided by totals of the whole step (masks, or weights that are summed)"
            if self._totals
            else "BatchNormalization(synchronized=True) takes the whole step"
            if self._synchronized
            else "its optimizer takes the rows of an Embedding one by one"
            if self.layout.tables
            else ""
        )

    def warm_up(self) -> None:
        pass  # all ranks run the same graphs

    @contextlib.contextmanager
    def ring_errors(self) -> Iterator[None]:
        with self._inner_sum.ring_errors():
            yield

    def trace(self, batch: Batch) -> Layout:
        self._ahead = None
        self._found: Layout | None = None
        if self._lookups.tables:
            self._ids = self._graph(self._ids_graph, *self._types.signature, tf.TensorSpec([3], tf.int64))
        self._gradients = self._graph(
            self._gradients_graph,
            *self._types.signature,
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([3], tf.int64),
            *self._lookups.signature,
            *([tf.TensorSpec([], tf.bool)] if self._synchronized else []),
            # XLA cannot wait for a ring; and it would compile anew for each number of rows.
            jit=bool(self._model.jit_compile)
            and not (self._totals or self._synchronized or self._by_row or self._lookups.tables),
        )
        if self._model.run_eagerly:  # nothing was traced: the layout is found by a step that is no ring's
            lookups = self._lookups.recorder() if self._lookups.tables else None
            forward = self._forward(batch_types.leaves(batch), tf.zeros([2], tf.int64), lookups=lookups)
            self._found = self._lay_out(forward, self._gradients_of(forward, forward.loss))
            self._others["layers"] = list(attributes_of(self._model).values())
        assert self._found is not None
        return self._found

    def _all(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray, step: int
    ) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        """`_ours`, of all pieces together; what rows have to learn from them is on the servers then."""
        if not pieces:
            return self._ours(None, contribution, draw)
        first, *others = turns(pieces, contribution, draw)
        staged: list[Staged] = []
        ours, of_tables = self._ours(*first, step, staged)
        for piece in others:  # then there are no tables in the ring
            ours += self._ours(*piece, step, staged)[0]
        if staged:
            self._lookups.stage(step, int(draw[2]), staged, self.meanwhile)
        return ours, of_tables

    def _ours(
        self,
        tensors: list[Any] | None,
        contribution: np.ndarray,
        draw: np.ndarray,
        step: int = 0,
        staged: list[Staged] | None = None,
    ) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        """This rank's vector; and how many rows of each table of the ring lie in the vectors of this step.

        Args:
            staged: takes what there is for servers.
        """
        tables = self.layout.tables
        if tensors is not None or self._synchronized:  # a rank without a batch has a part in every sum
            if tables:
                sparse_gradients.refuse_rank(int(draw[2]))
            alive = (tensors is not None,) if self._synchronized else ()
            given, of_rows = self._run(
                self._sample if tensors is None else tensors, contribution, draw, alive, step, tensors is None
            )
            if of_rows and staged is not None:
                staged.append(of_rows)
            return (given[0], (given[1],)) if tables else (given[0], ())
        if self._totals:
            self._inner_sum(tf.zeros([self._totals]))
        if not tables:
            return self._nothing(contribution, self.layout.length), ()
        counts = sparse_gradients.nothing(self._inner_sum, len(tables))
        flat = sum(
            n * sparse_gradients.width(v) for n, v in zip(counts.numpy().tolist(), tables, strict=True)
        )
        return self._nothing(contribution, self.layout.length + flat), (counts,)

    def _run(
        self,
        tensors: list[Any],
        contribution: np.ndarray,
        draw: np.ndarray,
        alive: tuple[bool, ...],
        step: int,
        idle: bool = False,
    ) -> tuple[list[tf.Tensor], Staged]:
        """Run the gradients' graph for some records. Return its result and the gradients of rows on servers.

        Args:
            idle: the records contribute nothing, so rows of zeros will do.
        """
        if not self._lookups.tables:
            return self._gradients(*tensors, contribution, draw, *alive), []
        found = self._found_ids(tensors, draw)
        ids, places = found.ids, found.places
        if idle:
            rows = [
                np.zeros((len(i), t.dim), np.float32) for i, t in zip(ids, self._lookups.tables, strict=True)
            ]
        else:
            rows = self._lookups.pull(step, ids, self.meanwhile)
        self._eager_ids.ids = ids
        *given, self._at = self._gradients(*tensors, contribution, draw, *rows, *places, *alive)
        given, of_rows = given[: -len(ids)], given[-len(ids) :]
        learned = [layer.trainable for layer in self._lookups.layers]
        # Rows that are not trained are sent to the servers, too: their initial values belong to the model.
        return given, [
            (some, np.asarray(g) if trained else np.zeros_like(g))
            for some, g, trained in zip(ids, of_rows, learned, strict=True)
        ]

    def look_up(self, tensors: list[Any], draw: np.ndarray) -> None:
        self._ahead = None
        if self._lookups.tables and not self._model.run_eagerly:
            self._ahead = self._found_ids(tensors, draw)

    def begin_pull(self, tensors: list[Any], step: int, last: Commit) -> None:
        if self._ahead is not None and self._ahead.tensors is tensors:
            self._lookups.begin_pull(step, self._ahead.ids, last)

    def _found_ids(self, tensors: list[Any], draw: np.ndarray) -> _Found:
        """The ids that some records look up; cached."""
        ahead = self._ahead
        if ahead is not None and ahead.tensors is tensors and np.array_equal(ahead.draw, draw):
            return ahead
        count = len(self._lookups.tables)
        found = self._ids(*tensors, draw)
        return _Found(tensors, draw, [some.numpy() for some in found[:count]], found[count:])

    def _graph(
        self, function: Callable[..., Any], *signature: tf.TensorSpec, jit: bool = False
    ) -> Callable[..., list[tf.Tensor]]:
        """Gives the results in a row, and takes arrays as well as tensors."""
        if self._model.run_eagerly:  # the user wants to see each step
            return lambda *values: tf.nest.flatten(function(*map(tf.convert_to_tensor, values)))
        graph = concrete(function, *signature)
        self._note(graph, function.__name__, changes_nothing=function != self._update_graph)
        call = BackgroundCompiled(graph, signature) if jit else flat(graph)
        return lambda *values: call(*(v if isinstance(v, tf.Tensor) else tf.constant(v) for v in values))

    def _the_same_in_each_batch(self, layout: Layout, sample: Batch) -> frozenset[int]:
        """Tables whose rows are not looked up for each record: their ids.

        Examples are places in a text, and the different ids of a batch. Each rank computes a gradient for
        these rows, while Keras computes one for the whole batch. So these gradients are summed like all
        others.
        """
        with self._inner_sum.made_by(lambda v: v):
            once, twice = map(self._count_rows, (batch_types.leaves(sample), doubled(sample)))
        tables = zip(layout.tables, twice == 2 * once, strict=True)
        return frozenset(id(v) for v, by_record in tables if not by_record)

    def _count_rows(self, leaves: list[Any]) -> np.ndarray:
        """The number of rows of each table that one rank's step would look up for these records."""
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        told, draw = np.zeros(control.LENGTH, np.float32), np.zeros(3, np.int64)
        given, _ = self._run(tensors, told, draw, (True,) if self._synchronized else (), 0, idle=True)
        return np.asarray(given[1])

    def _gradients_of(self, forward: Forward, target: tf.Tensor) -> list[Any]:
        found = forward.gradients(target, None if self._dense else self._model.optimizer)
        pairs = zip(self._model.trainable_variables, found, strict=True)
        return [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) and id(v) in self._added_up else g
            for v, g in pairs
        ]

    def _ids_graph(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """The ids of each table, and the places of all that are asked for among them.

        Arguments: the batch's tensors, and (a seed's two words, rank).
        """
        *tensors, draw = arguments
        recorder = self._lookups.recorder()
        self._forward(self._types.packed(tensors), draw[:2], lookups=recorder)
        ids, places = recorder.unique()
        return [*ids, *places]

    def _gradients_graph(self, *arguments: tf.Tensor) -> Any:
        """The vector; where the model has rows, also how many of them all ranks have, by table.

        Arguments: the batch's tensors, the control vector, (a seed's two words, rank), the rows that are on
        servers, of each table, and their places; and, where layers sum over the ring, whether this rank has
        records: one that has none takes part with the sample. The gradients of these rows are given last, and
        where the optimizer is.
        """
        *others, alive = arguments if self._synchronized else (*arguments, None)
        count = len(self._lookups.tables)
        (*tensors, contribution, draw), given = (
            others[: len(others) - 2 * count],
            others[len(others) - 2 * count :],
        )
        ring = self._inner_sum if self._synchronized else None
        lookups = None
        if count:
            known = self._eager_ids.ids if self._model.run_eagerly else None
            lookups = self._lookups.given(given[:count], given[count:], known)
        forward = self._forward(self._types.packed(tensors), draw[:2], ring, alive, lookups)
        self._require(forward)
        records, loss, scaled = forward.records, forward.loss, is_scaled(self._model)
        totals: Any = None
        with forward.tape:
            if self._totals:
                parts = forward.terms.parts()
                totals = self._inner_sum(parts if alive is None else tf.where(alive, parts, 0))
                loss = forward.terms.corrected(loss, totals)
            # The loss is weighted before it is differentiated: one product instead of one for each variable.
            told = loss if self._is_sum(forward) and not self._totals else loss * records
            # In 16 bits too large a number is lost: nothing larger than what Keras has for the whole batch.
            weighted = self._model.optimizer.scale_loss(loss * (records / totals[0]) if scaled else told)
            weighted = weighted if alive is None else tf.where(alive, weighted, 0)
        gradients = self._gradients_of(forward, weighted)
        layout = self._found = self._lay_out(forward, gradients)
        slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        parts = [tf.reshape(g, [-1]) for g in gradients if isinstance(g, tf.Tensor)]
        parts += self._changes(forward, layout)
        checked = parts + forward.of_rows
        parts = parts + self._added(forward, layout, totals)
        if slices:
            counts = [tf.shape(g.indices)[0] for g in slices]
            if alive is not None:
                counts = [tf.where(alive, n, 0) for n in counts]
                slices = [sparse_gradients.first(g, n) for g, n in zip(slices, counts, strict=True)]
            before, all_rows = sparse_gradients.counted(self._inner_sum, draw[2], counts)
            written = [sparse_gradients.written(g, before[i], all_rows[i]) for i, g in enumerate(slices)]
            parts, checked = parts + written, checked + written
        if scaled:  # the optimizer looks at the sum of the gradients by itself, and takes smaller steps
            finite = tf.math.is_finite(loss)
        else:
            # A sum is finite when all of its parts are (or so large that they are as bad): one cheap pass.
            finite = tf.math.is_finite(weighted + tf.add_n([tf.reduce_sum(part) for part in checked]))
        bad = 1.0 - tf.cast(finite, tf.float32)
        if alive is not None:
            parts, records, told, bad = (
                tf.nest.map_structure(lambda t: tf.where(alive, t, 0), t) for t in (parts, records, told, bad)
            )
        said = contribution[control.LEAVE : control.LOSS]
        vector = tf.concat([*parts, [records], said, [told, bad]], 0)
        found = [vector, all_rows] if slices else [vector]
        return [*found, *forward.of_rows, self._optimizer_at()] if count else found

    def _optimizer_at(self) -> tf.Tensor:
        """Return the learning rate and the iterations, float64 [2].

        As results of a graph they cost next to nothing, while reading two variables outside of one takes 0.2
        ms in the midst of a step.
        """
        optimizer = self._model.optimizer
        numbers = optimizer.learning_rate, optimizer.iterations
        return tf.stack([tf.cast(tf.convert_to_tensor(n), tf.float64) for n in numbers])

    def _update_graph(self, vector: tf.Tensor, *all_rows: tf.Tensor) -> None:
        layout = self.layout
        flat = [all_rows[0][i] * sparse_gradients.width(v) for i, v in enumerate(layout.tables)]
        share = 1.0 / vector[sum(flat, layout.length) + control.RECORDS]
        pieces = tf.split(vector, [*layout.sizes, *flat, -1], num=len(layout.sizes) + len(flat) + 1)[:-1]
        trained, dense = len(layout.trained), len(layout.sizes)
        gradients = {
            id(v): tf.reshape(piece * share if layout.divided else piece, v.shape)
            for v, piece in zip(layout.trained, pieces[:trained], strict=True)
        }
        for v, piece in zip(layout.tables, pieces[dense:], strict=True):
            found = sparse_gradients.read(piece, v)
            values = found.values * share if layout.divided else found.values
            gradients[id(v)] = tf.IndexedSlices(values, found.indices, found.dense_shape)
        self._put(layout, share, pieces[trained:dense], gradients)


def _end(vector: Vector) -> np.ndarray:
    """The control vector in it. Of what lies in a GPU's memory, only that is brought here."""
    if isinstance(vector, tf.Tensor) and not vector.device.endswith(HERE):
        vector = vector[-control.LENGTH :]
    return np.asarray(memoryview(vector))[-control.LENGTH :]
