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

What a rank contributes to the sums: trainer/step/contribution.py. Their order: trainer/step/layout.py.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from edl.trainer.agreement import control
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.model.captured import attributes_of
from edl.trainer.model.graphs import concrete, flat
from edl.trainer.model.model_support import is_scaled
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch
from edl.trainer.step import sparse_gradients
from edl.trainer.step.contribution import Contribution, HasRows, NeedsTotals
from edl.trainer.step.fused_updates import fused
from edl.trainer.step.inner_sum import ROUNDED
from edl.trainer.step.layout import Layout
from edl.trainer.step.served_rows import Staged
from edl.trainer.step.tracer import Graph, Tracer

LATE = 1 << 22  # bytes: the last gradient, if smaller, is handed to Horovod together with the rest


class OverlappedStep:
    """A step whose large gradients are summed while the backward pass computes.

    Args:
        ours: computes what this rank contributes.
        sample: real records, to trace the graphs with.
        divided: a batch may come in several pieces.
        wire: as what type large gradients travel.

    Raises:
        ModelError: the model cannot be trained this way; the text says why.
    """

    _apart = False  # whether the sums are a graph of their own

    def __init__(self, ours: Contribution, sample: Batch, divided: bool = False, wire: str = "float32"):
        self._ours, self._divided, self._wire = ours, divided, wire
        ours.in_pieces = divided and not (ours.model.run_eagerly or ours.served)
        self._model, self._total, self._served = ours.model, ours.total, ours.served
        self._sample = ours.types.tensors(sample)
        self._at: tf.Tensor | None = None  # where the optimizer was in the step that was summed last
        self._tracer = Tracer(ours.model, ours.variables)
        self._carried: list[tf.TensorSpec] = []
        self._step: Graph
        self._parts: Graph
        self._totals: Graph
        self._carry: Graph
        self._last: Graph
        self._send: Graph
        self._update: Graph
        while True:
            try:
                self.trace(sample)
                break
            except NeedsTotals as needs:
                ours.totals = needs.count
            except HasRows:
                ours.by_row = True
        if self.layout.tables and ours.add_up_tables(sample):
            self.trace(sample)
        told, zeros = (tf.TensorSpec([n], tf.float32) for n in (control.LENGTH, len(self.layout.large) + 2))
        self._nothing = flat(concrete(self._nothing_graph, told, zeros))

    def _turns(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray
    ) -> Iterator[tuple[list[Any], np.ndarray, np.ndarray]]:
        return turns(pieces, contribution, draw)

    @property
    def layout(self) -> Layout:
        """The order of the sums."""
        assert self._ours.layout is not None
        return self._ours.layout

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
            if self._ours.totals and not self._ours.totals_first
            else "BatchNormalization(synchronized=True) takes the whole step"
            if self._ours.synchronized
            else "its optimizer takes the rows of an Embedding one by one"
            if self.layout.tables
            else ""
        )

    def allreduce_step(
        self,
        pieces: Sequence[list[Any]],
        contribution: np.ndarray,
        draw: np.ndarray,
        records: int,
        step: int,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> control.StepResult:
        """Take part in all sums of a step. Changes nothing.

        Args:
            pieces: the tensors of the batch's pieces, which are computed one after the other; none: there is
                no batch.
            contribution: this rank's control vector, without what the batch adds to it.
            draw: a seed's two words, and the rank.
            records: the number of records of the whole step, on all ranks.
            step: that is taken: rows are those of the state there.
            meanwhile: is done while the step waits for servers of rows.

        Raises:
            RingBroken: one of the sums did not come back, unless TensorFlow raises it: see `ring_errors`.
        """
        self._at = None
        sums = self._sums(pieces, contribution, draw, records, step, meanwhile)
        if sums.agreed.records in (0, records) or sums.agreed.nonfinite:
            return sums
        # Some records were bad, which other ranks could not know. All ranks see it now, and repeat the sums.
        # What servers were sent does not depend on the number of records, and is not sent again.
        return self._sums(pieces, contribution, draw, sums.agreed.records, step, meanwhile, staging=False)

    def _sums(
        self,
        pieces: Sequence[list[Any]],
        contribution: np.ndarray,
        draw: np.ndarray,
        records: int,
        step: int,
        meanwhile: Callable[[], None],
        staging: bool = True,
    ) -> control.StepResult:
        totals = self._totals_of(pieces, contribution, draw) if self._ours.totals_first else []
        if not pieces and not self._ours.synchronized:
            total, _, *reduced = self._nothing(
                tf.constant(contribution), tf.zeros([len(self.layout.large) + 2])
            )
            agreed = control.read(np.asarray(memoryview(total)))
            return control.StepResult(agreed, False, 0.0, self._nbytes_of(reduced), reduced)
        if self._ours.by_row:
            sparse_gradients.refuse_rank(int(draw[2]))
        call = np.array([self._total.next_call()], np.int64)
        whole = tf.constant(records, tf.float32)
        # Where layers sum over the ring, a rank without a batch takes part in each sum, with the sample.
        *first, last = self._turns(pieces or [self._sample], contribution, draw)

        def given(
            tensors: list[Any], told: np.ndarray, drawn: np.ndarray
        ) -> tuple[list[tf.Tensor], list[np.ndarray]]:
            inputs, ids = [*map(arrays.tensor, tensors), tf.constant(told)], list[np.ndarray]()
            inputs += [tf.constant(np.append(drawn, call)), whole]
            if self._ours.synchronized:
                inputs.append(tf.constant(bool(pieces)))
            inputs += totals
            if self._served is not None:
                rows, ids = self._served.inputs(tensors, drawn, step if pieces else None, meanwhile)
                inputs += rows
            return inputs, ids

        carried = [tf.zeros(spec.shape, spec.dtype) for spec in self._carried] if first or self._apart else []
        counts: list[tf.Tensor] = []
        staged: list[Staged] = []
        for piece in (*first, last) if self._apart else first:
            inputs, ids = given(*piece)
            carried, others = self._carry_on(inputs, carried)
            if self._served is not None:
                *others, self._at = others
                tables = len(self._ours.lookups.tables)
                others, of_rows = others[:-tables], others[-tables:]
                staged += [self._served.to_stage(ids, of_rows)] if pieces and staging else []
            counts = others
        if staged:
            self._ours.lookups.stage(step, int(draw[2]), staged, meanwhile)
        if self._apart:
            found = [*self._send(tf.constant(call[0]), *carried), *counts]
        else:
            found = (self._last if first else self._step)(*given(*last)[0], *carried)
        told, ready_at, *reduced = found
        numbers = np.asarray(memoryview(told))
        waited = max(0.0, time.time() - float(ready_at))
        agreed, bad = control.read(numbers[: control.LENGTH]), bool(numbers[control.LENGTH])
        return control.StepResult(agreed, bad, waited, self._nbytes_of(reduced), reduced)

    def _carry_on(
        self, inputs: list[tf.Tensor], carried: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Compute a piece of the batch; return what is carried after it, and its other results."""
        made, count = self._carry(*inputs, *carried), len(self.layout.large) + 1
        return made[:count], made[count:]

    def apply(self, sums: control.StepResult) -> None:
        """Change the model: one update of the optimizer, with the exact mean of the gradients."""
        self._update(tf.constant(sums.agreed.records, tf.float32), *sums.given)

    def _totals_of(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray
    ) -> list[tf.Tensor]:
        """Sum the totals of a step over all pieces and ranks."""
        parts = [
            self._parts(*map(arrays.tensor, tensors), tf.constant(drawn))[0]
            for tensors, _, drawn in self._turns(pieces, contribution, draw)
        ]
        ours = tf.add_n([tf.zeros([self._ours.parts_size]), *parts])
        return self._totals(ours, tf.constant(self._total.next_call(), tf.int64))

    @contextlib.contextmanager
    def ring_errors(self) -> Iterator[None]:
        """Inside this context, an error of a graph is raised as RingBroken if the ring broke."""
        with self._total.ring_errors(), self._ours.inner_sum.ring_errors():
            yield

    def optimizer_at(self) -> tuple[float, int]:
        """Return the learning rate and iterations of the step that was summed last, for rows on servers."""
        if self._at is None:  # this rank had no records
            optimizer = self._model.optimizer
            return float(np.asarray(optimizer.learning_rate)), int(np.asarray(optimizer.iterations))
        rate, iterations = np.asarray(self._at).tolist()
        return rate, int(iterations)

    # --- the graphs

    @property
    def captured(self) -> list[Any]:
        """Return all variables that the graphs capture and the forward pass meets, in a fixed order."""
        return self._tracer.captured

    def trace(self, batch: Batch) -> None:
        """Make the graphs for arrays of the present types; for batches of any length, in rings of any size.

        Raises:
            NeedsTotals, HasRows: the graph must be built in a different way.
        """
        ours, tracer, eager = self._ours, self._tracer, self._model.run_eagerly
        # XLA cannot wait for a ring, and would compile anew for each number of rows.
        waits = ours.totals or ours.synchronized or ours.by_row or self._served
        jit = bool(self._model.jit_compile and not waits)
        # Python stages gradients of rows, or runs the model, before the sums; XLA need not compile them.
        self._apart = bool(self._apart or eager or self._served or jit)
        if self._served is not None:
            draw = tf.TensorSpec([3], tf.int64)
            self._served.use(tracer.graph("ids", ours.ids, *self._ours.types.signature, draw))
        ours.layout = None
        if eager:
            ours.lay_out_eagerly(batch)
            tracer.note("layers", list(attributes_of(self._model).values()))
        if ours.totals_first:
            draw, call = tf.TensorSpec([3], tf.int64), tf.TensorSpec([], tf.int64)
            self._parts = tracer.graph("totals", ours.parts, *ours.types.signature, draw)
            parts = tf.TensorSpec([ours.parts_size], tf.float32)
            self._totals = flat(concrete(lambda *given: [ours.totals_of(*given)], parts, call))
        if self._apart:
            self._carry = tracer.graph("step", ours.make, *ours.signature, jit=jit)
        else:
            self._step = tracer.graph("step", self._step_graph, *ours.signature)
        tracer.note("forward", ours.others)
        layout, whole = self.layout, tf.TensorSpec([], tf.float32)
        self._nbytes = 4 * sum(layout.sizes[i] for i in layout.large)
        sums = ours.sums(0)
        sums += [tf.TensorSpec([len(layout.tables)], tf.int32)] if layout.tables else []
        self._update = tracer.graph("update", self._update_graph, whole, *sums, changes_nothing=False)
        summed = ours.sums()
        if self._divided and not ours.by_row:
            self._carried = summed
            self._carry = tracer.graph("carry", ours.make, *ours.signature, *summed, jit=jit)
            if not self._apart:
                self._last = tracer.graph("last", self._step_graph, *ours.signature, *summed)
        if self._apart:
            self._send = self._sender(tf.TensorSpec([], tf.int64), *summed)

    def _sender(self, *signature: tf.TensorSpec) -> Graph:
        """Return the graph that sums what the pieces of a batch have carried."""
        return flat(concrete(self._send_graph, *signature))

    def _step_graph(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Compute this rank's contribution and sum it. Arguments: see `Contribution.make`."""
        made = self._ours.make(*arguments)
        count = len(self.layout.large) + 1
        call = arguments[len(self._ours.types.signature) + 1][3]
        return [*self._send_graph(call, *made[:count]), *made[count:]]

    def _send_graph(self, call: tf.Tensor, *ours: tf.Tensor) -> list[tf.Tensor]:
        """Sum what this rank has for the sums of a step, in the call of this number.

        Returns the summed control vectors, and after them whether this rank's part is not finite or spoils
        the sum; when the part was ready; the sums.
        """
        *large, rest = ours
        with tf.control_dependencies([*large, rest]):
            ready_at = _now()
            self._total.mark(call)
        bad = rest[-1]
        if large and 4 * math.prod(large[0].shape) < LATE:
            # Backward makes it last. Horovod negotiates in rounds: so it and the rest take one and not two.
            with tf.control_dependencies([rest]):
                large[0] = tf.identity(large[0])
        total, spoiled, *reduced = self._reduced(large, rest)
        # Python reads one tensor, and a time in the host's memory, so a GPU sends one tensor.
        return [tf.concat([total, [bad + spoiled]], 0), ready_at, *reduced]

    def _nothing_graph(self, contribution: tf.Tensor, zeros: tf.Tensor) -> list[tf.Tensor]:
        """The same sums, on a rank without a batch. Arguments: see `Contribution.make_nothing`."""
        made, count = self._ours.make_nothing(contribution, zeros), len(self.layout.large)
        return [*self._reduced(made[:count], made[count]), *made[count + 1 :]]

    def _reduced(self, large: list[tf.Tensor], rest: tf.Tensor) -> list[tf.Tensor]:
        """Sum over the ring: the same operations under the same names, with or without a batch.

        Returns the summed control vectors; 1 where values were finite before the sums and are not after them;
        the sums of large gradients; the sum of all the rest.
        """
        named = zip(self.layout.large, large, strict=True)
        sums = [self._total(g, str(i), self._wire) for i, g in named]
        told, *others = self._ours.read(self._total(rest, "rest"))
        spoiled = tf.constant(0.0)
        # A narrower type has a smaller largest number. An optimizer that scales the loss checks it by itself.
        if self._wire in ROUNDED and sums and not is_scaled(self._model):
            # All ranks have the same sums, and see the same.
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in sums])
            spoiled = tf.where(finite | (told[control.NONFINITE] > 0), 0.0, 1.0)
            told += spoiled * tf.one_hot(control.NONFINITE, control.LENGTH)
        return [told, spoiled, *sums, *others]

    def _nbytes_of(self, sums: list[tf.Tensor]) -> int:
        return self._nbytes + 4 * int(sums[len(self.layout.large)].shape[0])

    def _update_graph(self, whole: tf.Tensor, *sums: tf.Tensor) -> None:
        """Change the model by the sums of a step: what the forward pass has changed, and the optimizer."""
        layout, model = self.layout, self._model
        pieces, trained, dense = layout.divide([*sums]), len(layout.trained), len(layout.sizes)
        gradients: dict[int, Any] = {
            id(v): tf.reshape(piece, v.shape)
            for v, piece in zip(layout.trained, pieces[:trained], strict=True)
        }
        for v, piece in zip(layout.tables, pieces[dense:], strict=True):
            gradients[id(v)] = sparse_gradients.read(piece, v)
        # What the forward pass assigns comes first, as it does in Keras: it may be a weight that is trained.
        new = layout.new_values(1.0 / whole, pieces[trained:dense])
        for v, value in zip(layout.changing, new, strict=True):
            v.assign(value)
        if not gradients:  # all that is trained is rows
            model.optimizer.iterations.assign_add(1)
            return
        with fused(model.optimizer):
            model.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in model.trainable_variables])


def _now() -> tf.Tensor:
    """Seconds since the epoch, when a graph comes to this operation, float64 in the host's memory."""
    if not is_op_determinism_enabled():
        return tf.timestamp()
    return tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64)  # tf.timestamp is refused


def turns(
    pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray
) -> Iterator[tuple[list[Any], np.ndarray, np.ndarray]]:
    """Yield the tensors, the control vector and the draw (a seed's two words, rank) of each micro-batch.

    Only the last one carries this rank's control vector, the others zeros. Each draws with a seed of its own.
    """
    last = len(pieces) - 1
    for nth, tensors in enumerate(pieces):
        drawn = draw.copy()
        drawn[:2] = (draw[:2] + nth * SALT) % SEEDS
        yield tensors, contribution if nth == last else np.zeros_like(contribution), drawn


SEEDS = 1 << 31
SALT = 1640531527
