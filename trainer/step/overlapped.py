# SPDX-License-Identifier: Apache-2.0
"""A step with several sums, which travel while it computes; and an update in place, when all are here.

    totals   of a loss that is divided by them (masks)             before backward, where there are some
    n        one sum for each large gradient                       as soon as backward has made it
    rest     [ small gradients | averages | counters | metrics | control ]
    update   the optimizer's, of one variable after the other      when Python has read what was agreed

The graph of the sums has no side effect: they are its results, and nothing else. So if anything in it
fails, the step has not happened. `apply` is a second graph, of the sums and the variables alone: the
same for a rank with a batch and for one without, which takes part in the sums with zeros; at once or later,
as a member that is catching up must. In memory the gradients are there twice at most,
and neither weights nor slots are (trainer/step/fused_updates.py).

Where Python has to do something between the gradients and the sums (rows on servers are staged; a model runs
eagerly), they are two graphs, and nothing is sent before all is computed. Layers with statistics of the whole
batch, totals of a loss, and the numbers of rows that tables take one by one are sums before the others.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.model import arrays, batch_types
from edl.trainer.model.captured import attributes_of
from edl.trainer.model.data import Batch
from edl.trainer.model.graphs import concrete, flat
from edl.trainer.model.model_support import is_scaled
from edl.trainer.step import sparse_gradients
from edl.trainer.step.finite import after, factors, finite_as
from edl.trainer.step.inner_sum import RingAllReduce
from edl.trainer.step.served_rows import Staged
from edl.trainer.step.step_graphs import HasRows, Layout, NeedsTotals, StepGraphs, turns

SMALL = 1 << 16  # bytes: a gradient of fewer travels with the others of its kind
LATE = 1 << 22  # bytes: the last gradient, if smaller, is handed to Horovod together with the rest


class OverlappedStep(StepGraphs):
    """A step whose large gradients are summed while the backward pass computes.

    Args:
        total: makes the sums.
        divided: a batch may come in several pieces.
        wire: as what type large gradients travel.
        others: see StepGraphs.
    """

    def __init__(self, *others: Any, total: RingAllReduce, divided: bool = False, wire: str = "float32"):
        super().__init__(*others)
        model, types, sample = others[:3]
        self._of_ring += total.variables
        # Code that runs eagerly cannot run the operation of a graph.
        self._before = self._inner_sum if model.run_eagerly else total
        self._total, self._divided, self._wire = total, divided, wire
        self._sample = types.tensors(sample)
        self._apart = False  # whether the sums are a graph of their own
        self._carried: list[tf.TensorSpec] = []
        self._step: Callable[..., list[tf.Tensor]]
        self._carry: Callable[..., list[tf.Tensor]]
        self._last: Callable[..., list[tf.Tensor]]
        self._send: Callable[..., list[tf.Tensor]]
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
            if self._added_up:
                layout = self.trace(sample)
        self.layout = layout
        told, zeros = (tf.TensorSpec([n], tf.float32) for n in (control.LENGTH, len(self._large) + 2))
        self._nothing = flat(concrete(self._nothing_graph, told, zeros))

    def look_up(self, tensors: list[Any], draw: np.ndarray) -> None:
        """Find out beforehand which rows a step will need. Does nothing if the model has no rows on servers.

        Args:
            tensors: the tensors of its only piece; the very same list is passed to `allreduce_step`.
            draw: as there.
        """
        if self._served is not None and not self._model.run_eagerly:
            self._served.look_up(tensors, draw)

    def begin_pull(self, tensors: list[Any], step: int, last: Commit) -> None:
        """Request the rows that were looked up for these tensors.

        Args:
            step: for which they are.
            last: the one before it, which is not in the model yet.
        """
        if self._served is not None:
            self._served.begin_pull(tensors, step, last)

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

    def allreduce_step(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray, records: int, step: int
    ) -> control.StepResult:
        """Take part in all sums of a step. Changes nothing.

        Args:
            pieces: the tensors of the batch's pieces, which are computed one after the other; none: there is
                no batch.
            contribution: this rank's control vector, without what the batch adds to it.
            draw: a seed's two words, and the rank.
            records: the number of records of the whole step, on all ranks.
            step: that is taken: rows are those of the state there.

        Raises:
            RingBroken: one of the sums did not come back, unless TensorFlow raises it: see `ring_errors`.
        """
        self._at = None
        sums = self._sums(pieces, contribution, draw, records, step)
        if sums.agreed.records in (0, records) or sums.agreed.nonfinite:
            return sums
        # Some records were bad, which other ranks could not know. All ranks see it now, and repeat the sums.
        # What servers were sent does not depend on the number of records, and is not sent again.
        return self._sums(pieces, contribution, draw, sums.agreed.records, step, staging=False)

    def _sums(
        self,
        pieces: Sequence[list[Any]],
        contribution: np.ndarray,
        draw: np.ndarray,
        records: int,
        step: int,
        staging: bool = True,
    ) -> control.StepResult:
        if not pieces and not self._synchronized:
            total, _, *reduced = self._nothing(tf.constant(contribution), tf.zeros([len(self._large) + 2]))
            agreed = control.read(np.asarray(memoryview(total)))
            return control.StepResult(agreed, False, 0.0, self._nbytes_of(reduced), reduced)
        if self._by_row:
            sparse_gradients.refuse_rank(int(draw[2]))
        call = np.array([self._total.next_call()], np.int64)
        whole = tf.constant(records, tf.float32)
        # Where layers sum over the ring, a rank without a batch takes part in each sum, with the sample.
        *first, last = turns(pieces or [self._sample], contribution, draw)

        def given(tensors: list[Any], told: np.ndarray, drawn: np.ndarray) -> list[tf.Tensor]:
            found = [*map(arrays.tensor, tensors), tf.constant(told)]
            found += [tf.constant(np.append(drawn, call)), whole]
            if self._synchronized:
                found.append(tf.constant(bool(pieces)))
            if self._served is not None:
                found += self._served.inputs(tensors, drawn, step if pieces else None, self.meanwhile)
            return found

        carried = [tf.zeros(spec.shape) for spec in self._carried] if first or self._apart else []
        counts: list[tf.Tensor] = []
        staged: list[Staged] = []
        for piece in (*first, last) if self._apart else first:
            made = self._carry(*given(*piece), *carried)
            carried, others = made[: len(self._large) + 1], made[len(self._large) + 1 :]
            if self._served is not None:
                *others, self._at = others
                tables = len(self._lookups.tables)
                others, of_rows = others[:-tables], others[-tables:]
                staged += [self._served.to_stage(of_rows)] if pieces and staging else []
            counts = others
        if staged:
            self._lookups.stage(step, int(draw[2]), staged, self.meanwhile)
        if self._apart:
            found = [*self._send(tf.constant(call[0]), *carried), *counts]
        else:
            found = (self._last if first else self._step)(*given(*last), *carried)
        told, ready_at, *reduced = found
        numbers = np.asarray(memoryview(told))
        waited = max(0.0, time.time() - float(ready_at))
        agreed, bad = control.read(numbers[: control.LENGTH]), bool(numbers[control.LENGTH])
        return control.StepResult(agreed, bad, waited, self._nbytes_of(reduced), reduced)

    def apply(self, sums: control.StepResult) -> None:
        """Change the model: one update of the optimizer, with the exact mean of the gradients."""
        self._update(tf.constant(sums.agreed.records, tf.float32), *sums.given)

    def summed(self, given: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums of a step's result, one for each variable in the order of the layout."""
        return self._divide(self.layout, given)

    @contextlib.contextmanager
    def ring_errors(self) -> Iterator[None]:
        """Inside this context, an error of a graph is raised as RingBroken if the ring broke."""
        with self._total.ring_errors(), self._inner_sum.ring_errors():
            yield

    def trace(self, batch: Batch) -> Layout:
        """Make the graph for arrays of the present types; for batches of any length, in rings of any size.

        Raises:
            NeedsTotals, HasRows: the graph must be built in a different way.
        """
        self._found: Layout | None = None
        # XLA cannot wait for a ring, and would compile anew for each number of rows.
        waits = self._totals or self._synchronized or self._by_row or self._served
        jit = bool(self._model.jit_compile and not waits)
        # Python stages gradients of rows, or runs the model, before the sums; XLA need not compile them.
        self._apart = bool(self._model.run_eagerly or self._served or jit)
        if self._served is not None:
            draw = tf.TensorSpec([3], tf.int64)
            self._served.use(self._graph("ids", self._ids_graph, *self._types.signature, draw))
        signature: list[tf.TensorSpec] = [
            *self._types.signature,
            tf.TensorSpec([control.LENGTH], tf.float32),
            tf.TensorSpec([4], tf.int64),
            tf.TensorSpec([], tf.float32),
            *([tf.TensorSpec([], tf.bool)] if self._synchronized else []),
            *self._lookups.signature,
        ]
        if self._model.run_eagerly:  # nothing is traced: the layout is found by a step that is no ring's
            forward, gradients = self._alone(batch_types.leaves(batch))
            self._found = self._lay_out(forward, gradients)
            self._others["layers"] = list(attributes_of(self._model).values())
            self._prepare(self._found)
        if self._apart:
            self._carry = self._graph("step", self._ours, *signature, jit=jit)
        else:
            self._step = self._graph("step", self._step_graph, *signature)
        assert self._found is not None
        if self._divided and not self._by_row:
            carried = self._carried = self._summed_specs()
            self._carry = self._graph("carry", self._ours, *signature, *carried, jit=jit)
            if not self._apart:
                self._last = self._graph("last", self._step_graph, *signature, *carried)
        if self._apart:
            call = tf.TensorSpec([], tf.int64)
            self._send = flat(concrete(self._send_graph, call, *self._summed_specs()))
        return self._found

    # --- the graphs

    def _step_graph(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Arguments: see `_ours`."""
        made = self._ours(*arguments)
        count = len(self._large) + 1
        call = arguments[len(self._types.signature) + 1][3]
        return [*self._send_graph(call, *made[:count]), *made[count:]]

    def _send_graph(self, call: tf.Tensor, *ours: tf.Tensor) -> list[tf.Tensor]:
        """Sum what this rank has for the sums of a step, in the call of this number.

        Returns the summed control vectors, and after them whether this rank's part is not finite or spoils
        the sum; when the part was ready; the sums.
        """
        *large, rest = ours
        with tf.control_dependencies([*large, rest]):
            ready_at = tf.timestamp()
            self._total.mark(call)
        bad = rest[-1]
        if large and 4 * math.prod(large[0].shape) < LATE:
            # Backward makes it last. Horovod negotiates in rounds: so it and the rest take one and not two.
            with tf.control_dependencies([rest]):
                large[0] = tf.identity(large[0])
        total, spoiled, *reduced = self._reduced(large, rest)
        # Python reads one tensor, and a time in the host's memory, so a GPU sends one tensor.
        return [tf.concat([total, [bad + spoiled]], 0), ready_at, *reduced]

    def _ours(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """This rank's contribution to the sums: of large gradients, and of the rest.

        Arguments: the batch's tensors, the control vector, (a seed's two words, rank, the number of the
        call), the records of the whole step; where layers sum over the ring, whether this rank has records;
        the rows on servers of each table, and their places; and what the pieces of the batch before this one
        have for the sums.

        Returns the large gradients; the rest; where the model has rows, how many of them all ranks have, by
        table; where it has rows on servers, their gradients and `_optimizer_at`.
        """
        count, tables = len(self._types.signature), len(self._lookups.tables)
        tensors, (contribution, draw, whole, *others) = arguments[:count], arguments[count:]
        alive = others.pop(0) if self._synchronized else None
        rows, places, carried = others[:tables], others[tables : 2 * tables], others[2 * tables :]
        ring = self._inner_sum if self._synchronized else None
        lookups = None
        if self._served is not None:
            lookups = self._lookups.given(rows, places, self._served.ids if self._model.run_eagerly else None)

        def masked(tensor: tf.Tensor) -> tf.Tensor:
            return tensor if alive is None else tf.where(alive, tensor, tf.zeros_like(tensor))

        forward = self._forward(self._types.packed(tensors), draw[:2], ring, alive, lookups)
        self._require(forward)
        records = masked(forward.records)
        # What the gradients are to be divided by is known: so the loss is, once, and not each of them.
        # (No gradient may be a constant: TensorFlow would sum it while it optimizes the graph.)
        is_sum = self._is_sum(forward) and not self._totals
        totals = None
        with forward.tape:
            loss = forward.loss
            if self._totals:
                parts = masked(forward.terms.parts())
                with tf.control_dependencies([parts]):
                    self._before.mark(draw[3])
                totals = self._before(parts, "totals")
                with tf.control_dependencies([totals]):
                    self._before.mark(tf.zeros([], tf.int64))
                loss = forward.terms.corrected(loss, totals)
            weight = tf.cast(whole > 0, tf.float32) if is_sum else tf.math.divide_no_nan(records, whole)
            weighted = masked(self._model.optimizer.scale_loss(loss * weight))
        told = masked(loss if is_sum else loss * records)
        gradients = self._gradients_of(forward, weighted)
        layout = self._lay_out(forward, gradients)
        if self._found is None:
            self._found = layout
            self._prepare(layout)
        dense = [g for g in gradients if isinstance(g, tf.Tensor)]
        large = [dense[i] for i in self._large]
        flattened = [tf.reshape(g, [-1]) for i, g in enumerate(dense) if i not in self._large]
        small = tf.concat([*flattened, *self._changes(forward, layout), tf.zeros([0])], 0)
        added = self._added(forward, layout, totals)
        counts, written = self._rows(gradients, draw[2], alive)
        # Servers divide by the records that all ranks really had.
        of_rows = [g * whole for g in forward.of_rows] if layout.divided else forward.of_rows
        if is_scaled(self._model):  # the optimizer looks at the sum of the gradients by itself
            checked = told
        else:
            # Each rank checks its own part, and the sum reports it to all: they agree in any order of
            # additions.
            seen = [finite_as(g) for g in large]
            parts = [small, *written, *of_rows]
            checked = told + tf.add_n([*map(tf.reduce_sum, parts), *seen])
            large = [after(n, g) if factors(g) else g for n, g in zip(seen, large, strict=True)]
        bad = masked(1.0 - tf.cast(tf.math.is_finite(checked), tf.float32))
        said = contribution[control.LEAVE : control.LOSS]
        ours = masked(tf.concat([small, *added, *written], 0))
        rest = tf.concat([ours, [records], said, [told, bad]], 0)
        summed = [*map(masked, large), rest]
        if carried:
            summed = [g + before for g, before in zip(summed, carried, strict=True)]
        return [*summed, *counts, *of_rows, *([self._optimizer_at()] if tables else [])]

    def _summed_specs(self) -> list[tf.TensorSpec]:
        """The signature of what `_ours` has for the sums."""
        assert self._found is not None
        rest = None if self._found.tables else self._rest + control.LENGTH
        shapes = [*(self._found.trained[i].shape for i in self._large), [rest]]
        return [tf.TensorSpec(shape, tf.float32) for shape in shapes]

    def _nothing_graph(self, contribution: tf.Tensor, zeros: tf.Tensor) -> list[tf.Tensor]:
        """The same sums, on a rank without a batch.

        Args:
            zeros: as many as there are sums, so that each is of another, and none of a constant.
        """
        before = [self._before(tf.fill([self._totals], zeros[-2]), "totals")] if self._totals else []
        tables, size = self.layout.tables, tf.constant(self._rest)
        counts: list[tf.Tensor] = []
        if tables:
            total = lambda v: self._before(v + zeros[-2], "counts")  # noqa: E731
            counts = [sparse_gradients.nothing(total, len(tables))]
            size += sum(counts[0][i] * sparse_gradients.width(v) for i, v in enumerate(tables))
        shapes = [self.layout.trained[i].shape for i in self._large]
        large = [tf.fill(shape, zeros[i]) for i, shape in enumerate(shapes)]
        said = contribution[control.LEAVE : control.LOSS]
        parts = [tf.fill([size], zeros[-1]), zeros[-1:], said, tf.fill([2], zeros[-1])]
        with tf.control_dependencies(before):  # no operation here uses the totals, and they must be computed
            rest = tf.concat(parts, 0)
        return [*self._reduced(large, rest), *counts]

    def _reduced(self, large: list[tf.Tensor], rest: tf.Tensor) -> list[tf.Tensor]:
        """Sum over the ring: the same operations under the same names, with or without a batch.

        Returns the summed control vectors; 1 where values were finite before the sums and are not after them;
        the sums of large gradients; the sum of all the rest.
        """
        sums = [self._total(g, str(i), self._wire) for i, g in zip(self._large, large, strict=True)]
        rest = self._total(rest, "rest")
        told, spoiled = rest[-control.LENGTH :], tf.constant(0.0)
        # A narrower type has a smaller largest number. An optimizer that scales the loss checks it by itself.
        if self._wire != "float32" and sums and not is_scaled(self._model):
            # All ranks have the same sums, and see the same.
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in sums])
            spoiled = tf.where(finite | (told[control.NONFINITE] > 0), 0.0, 1.0)
            told += spoiled * tf.one_hot(control.NONFINITE, control.LENGTH)
        return [told, spoiled, *sums, rest[: -control.LENGTH]]

    def _prepare(self, layout: Layout) -> None:
        """Derive values from the layout, before the rest of the graph is made."""
        nbytes = [4 * math.prod(v.shape) for v in layout.trained]
        self._large = [i for i, n in enumerate(nbytes) if n >= SMALL]  # of the trained variables
        self._rest = sum(n for i, n in enumerate(layout.sizes) if i not in self._large)
        specs = [tf.TensorSpec(layout.trained[i].shape, tf.float32) for i in self._large]
        self._nbytes = sum(nbytes[i] for i in self._large)
        specs.append(tf.TensorSpec([None if layout.tables else self._rest], tf.float32))
        specs += [tf.TensorSpec([len(layout.tables)], tf.int32)] if layout.tables else []
        with tf.init_scope():  # a graph of its own
            self._update = self._graph(
                "update",
                lambda whole, *sums: self._update_graph(layout, whole, list(sums)),
                tf.TensorSpec([], tf.float32),
                *specs,
                changes_nothing=False,
            )

    def _nbytes_of(self, sums: list[tf.Tensor]) -> int:
        return self._nbytes + 4 * int(sums[len(self._large)].shape[0])

    def _update_graph(self, layout: Layout, whole: tf.Tensor, sums: list[tf.Tensor]) -> None:
        pieces = self._divide(layout, sums)
        trained, dense = len(layout.trained), len(layout.sizes)
        gradients: dict[int, Any] = {
            id(v): tf.reshape(piece, v.shape)
            for v, piece in zip(layout.trained, pieces[:trained], strict=True)
        }
        for v, piece in zip(layout.tables, pieces[dense:], strict=True):
            gradients[id(v)] = sparse_gradients.read(piece, v)
        self._put(layout, 1.0 / whole, pieces[trained:dense], gradients)
