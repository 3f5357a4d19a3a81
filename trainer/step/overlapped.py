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

What keeps a model out is found before the first step (CannotOverlap): sums inside its layers (synchronized
statistics) or for each row of a table, an optimizer that scales the loss by itself, and code that runs
eagerly; totals, where XLA compiles or where there are several pieces. It takes trainer/step/vector.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.embedding.interfaces import Commit
from edl.trainer.model import arrays
from edl.trainer.model.data import Batch
from edl.trainer.model.graphs import concrete, flat
from edl.trainer.model.model_support import is_scaled
from edl.trainer.step.background_compile import BackgroundCompiled
from edl.trainer.step.step_graphs import HasRows, Layout, NeedsTotals, StepGraphs, turns

SMALL = 1 << 16  # bytes: a gradient of fewer travels with the others of its kind
LATE = 1 << 22  # bytes: the last gradient, if smaller, is handed to Horovod together with the rest
SAFE = 1e30  # for the square of a float32: with any rounding, the number itself is far from the largest


class CannotOverlap(Exception):
    """The gradients of this model cannot be summed while others are computed."""


class RingAllReduce(Protocol):
    """Sums over the ring, made by a graph (trainer/ring/graph_all_reduce.py, trainer/step/inner_sum.py)."""

    WIRES: tuple[str, ...]  # the types as which numbers can travel

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """The ring's own, which a graph with sums captures; they are not the model's."""
        ...

    def __call__(self, tensor: tf.Tensor, /, name: str, wire: str = "float32") -> tf.Tensor:
        """Return the sum over all ranks.

        Args:
            wire: the type as which the numbers travel.
        """
        ...

    def next_call(self) -> int:
        """Count a call of the graph: returns its number."""
        ...

    def mark(self, call: tf.Tensor) -> None:
        """Let the graph note that this call waits for a sum and computes nothing; 0: it computes.

        The note is for the watchdog (trainer/runtime/watchdog.py). It is no part of the step.
        """
        ...

    def ring_errors(self) -> AbstractContextManager[None]:
        """Raise the ring's error, and not what TensorFlow makes of it, if one breaks the call of a graph."""
        ...


class OverlappedStep(StepGraphs):
    """A step whose large gradients are summed while the backward pass computes.

    Args:
        total: makes the sums.
        divided: a batch may come in several pieces.
        wire: as what type large gradients travel.
        others: see StepGraphs.

    Raises:
        CannotOverlap: it is not for this model.
    """

    def __init__(self, *others: Any, total: RingAllReduce, divided: bool = False, wire: str = "float32"):
        model, sample = others[0], others[2]
        super().__init__(*others)
        self._of_ring += total.variables
        self._total, self._divided, self._wire = total, divided, wire
        self._carried: list[tf.TensorSpec] = []
        self._step: Callable[..., list[tf.Tensor]]
        self._carry: Callable[..., list[tf.Tensor]]
        self._last: Callable[..., list[tf.Tensor]]
        if self._synchronized or model.run_eagerly or self._lookups.tables:
            raise CannotOverlap
        layout: Layout | None = None
        while layout is None:
            try:
                layout = self.trace(sample)
            except NeedsTotals as needs:
                if divided or model.jit_compile or is_scaled(model):
                    raise CannotOverlap from needs
                self._totals = needs.count
            except HasRows as error:
                raise CannotOverlap from error
        self.layout = layout
        told, zeros = (tf.TensorSpec([n], tf.float32) for n in (control.LENGTH, len(self._large) + 2))
        self._nothing = flat(concrete(self._nothing_graph, told, zeros))

    def look_up(self, tensors: list[Any], draw: np.ndarray) -> None:
        pass  # it has no rows on servers

    def begin_pull(self, tensors: list[Any], step: int, last: Commit) -> None:
        pass

    def warm_up(self) -> None:
        """Nothing to do: a joining member runs the same graphs as all others."""

    def allreduce_step(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray, records: int, step: int
    ) -> control.StepResult:
        sums = self._sums(pieces, contribution, draw, records)
        if sums.agreed.records in (0, records) or sums.agreed.nonfinite:
            return sums
        # Some records were bad, which other ranks could not know. All ranks see it now, and repeat the sums.
        return self._sums(pieces, contribution, draw, sums.agreed.records)

    def _sums(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray, records: int
    ) -> control.StepResult:
        if not pieces:
            total, _, *reduced = self._nothing(tf.constant(contribution), tf.zeros([len(self._large) + 2]))
            agreed = control.read(np.asarray(memoryview(total)))
            return control.StepResult(agreed, False, 0.0, self._nbytes, reduced)
        whole = tf.constant(records, tf.float32)
        call = np.array([self._total.next_call()], np.int64)
        *first, last = (
            [*map(arrays.tensor, tensors), tf.constant(told), tf.constant(np.append(drawn, call)), whole]
            for tensors, told, drawn in turns(pieces, contribution, draw)
        )
        if first:
            carried = [tf.zeros(spec.shape) for spec in self._carried]
            for given in first:
                carried = self._carry(*given, *carried)
            told, ready_at, *reduced = self._last(*last, *carried)
        else:
            told, ready_at, *reduced = self._step(*last)
        numbers = np.asarray(memoryview(told))
        waited = max(0.0, time.time() - float(ready_at))
        agreed, bad = control.read(numbers[: control.LENGTH]), bool(numbers[control.LENGTH])
        return control.StepResult(agreed, bad, waited, self._nbytes, reduced)

    def apply(self, sums: control.StepResult) -> None:
        self._update(tf.constant(sums.agreed.records, tf.float32), *sums.given)

    def ring_errors(self) -> AbstractContextManager[None]:
        return self._total.ring_errors()

    def trace(self, batch: Batch) -> Layout:
        self._found: Layout | None = None
        signature: list[tf.TensorSpec] = [
            *self._types.signature,
            tf.TensorSpec([control.LENGTH], tf.float32),
            tf.TensorSpec([4], tf.int64),
            tf.TensorSpec([], tf.float32),
        ]
        jit = self._model.jit_compile
        graph = concrete(self._carry_graph if jit else self._step_graph, *signature)
        self._note(graph, "step")
        assert self._found is not None
        if jit:
            self._step = self._summed(BackgroundCompiled(graph, signature))
        else:
            self._step = flat(graph)
        if self._divided:
            carried = self._carried = self._summed_specs()
            graph = concrete(self._carry_graph, *signature, *carried)
            if jit:
                self._carry = BackgroundCompiled(graph, [*signature, *carried])
                self._last = self._summed(self._carry)
            else:
                self._carry = flat(graph)
                self._last = flat(concrete(self._step_graph, *signature, *carried))
        return self._found

    # --- the graphs

    def _step_graph(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Arguments: see `_ours`."""
        large, rest = self._ours(*arguments)
        return self._sums_graph(arguments[len(self._types.signature) + 1], *large, rest)

    def _summed(self, made: Callable[..., list[tf.Tensor]]) -> Callable[..., list[tf.Tensor]]:
        """Sum the result of a graph over the ring, in a second graph, which XLA need not compile."""
        draw = len(self._types.signature) + 1
        specs = [tf.TensorSpec([4], tf.int64), *self._summed_specs()]
        summed = flat(concrete(self._sums_graph, *specs))
        return lambda *arguments: summed(arguments[draw], *made(*arguments))

    def _sums_graph(self, draw: tf.Tensor, *made: tf.Tensor) -> list[tf.Tensor]:
        """Sum this rank's contribution over the ring.

        Arguments: see `_ours`, and its results.
        """
        *large, rest = made
        with tf.control_dependencies(made):
            ready_at = tf.timestamp()
            self._total.mark(draw[3])
        bad = rest[-1]
        if large and 4 * math.prod(large[0].shape) < LATE:
            # Backward makes it last. Horovod negotiates in rounds: so it and the rest take one and not two.
            with tf.control_dependencies([rest]):
                large[0] = tf.identity(large[0])
        total, spoiled, *reduced = self._reduced(large, rest)
        # Python reads one tensor, and a time in the host's memory, so a GPU sends one tensor.
        return [tf.concat([total, [bad + spoiled]], 0), ready_at, *reduced]

    def _carry_graph(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """The contribution of the micro-batches so far, with one more. Arguments: see `_ours`."""
        large, rest = self._ours(*arguments)
        return [*large, rest]

    def _ours(self, *arguments: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """This rank's contribution to the sums: of large gradients, and of the rest.

        Arguments: the batch's tensors, the control vector, (a seed's two words, rank, the number of the
        call), the records of the whole step, and what the pieces of the batch before this one have for the
        sums.
        """
        count = len(self._types.signature)
        tensors, (contribution, draw, whole, *carried) = arguments[:count], arguments[count:]
        forward = self._forward(self._types.packed(tensors), draw[:2])
        self._require(forward)
        records = forward.records
        # What the gradients are to be divided by is known: so the loss is, once, and not each of them.
        # (No gradient may be a constant: TensorFlow would sum it while it optimizes the graph.)
        is_sum = self._is_sum(forward) and not self._totals
        totals = None
        with forward.tape:
            loss = forward.loss
            if self._totals:
                parts = forward.terms.parts()
                with tf.control_dependencies([parts]):
                    self._total.mark(draw[3])
                totals = self._total(parts, "totals")
                with tf.control_dependencies([totals]):
                    self._total.mark(tf.zeros([], tf.int64))
                loss = forward.terms.corrected(loss, totals)
            weight = tf.cast(whole > 0, tf.float32) if is_sum else records / whole
            weighted = self._model.optimizer.scale_loss(loss * weight)
        told = loss if is_sum else loss * records
        gradients = forward.gradients(weighted, self._model.optimizer)
        layout = self._lay_out(forward, gradients)
        if self._found is None:
            self._found = layout
            self._prepare(layout)
        dense = [g for g in gradients if g is not None]
        large = [dense[i] for i in self._large]
        flattened = [tf.reshape(g, [-1]) for i, g in enumerate(dense) if i not in self._large]
        small = tf.concat([*flattened, *self._changes(forward, layout), tf.zeros([0])], 0)
        added = self._added(forward, layout, totals)
        # Each rank checks its own part, and the sum reports it to all: they agree in any order of additions.
        seen = [finite_as(g) for g in large]
        bad = 1.0 - tf.cast(tf.math.is_finite(told + tf.add_n([tf.reduce_sum(small), *seen])), tf.float32)
        large = [_after(n, g) if _factors(g) else g for n, g in zip(seen, large, strict=True)]
        said = contribution[control.LEAVE : control.LOSS]
        rest = tf.concat([small, *added, [records], said, [told, bad]], 0)
        if carried:
            *large, rest = (g + before for g, before in zip([*large, rest], carried, strict=True))
        return large, rest

    def _summed_specs(self) -> list[tf.TensorSpec]:
        """The signature of `_ours`' result."""
        assert self._found is not None
        shapes = [self._found.trained[i].shape for i in self._large] + [[self._rest + control.LENGTH]]
        return [tf.TensorSpec(shape, tf.float32) for shape in shapes]

    def _nothing_graph(self, contribution: tf.Tensor, zeros: tf.Tensor) -> list[tf.Tensor]:
        """The same sums, on a rank without a batch.

        Args:
            zeros: as many as there are sums, so that each is of another, and none of a constant.
        """
        totals = [self._total(tf.fill([self._totals], zeros[-2]), "totals")] if self._totals else []
        shapes = [self.layout.trained[i].shape for i in self._large]
        large = [tf.fill(shape, zeros[i]) for i, shape in enumerate(shapes)]
        said = contribution[control.LEAVE : control.LOSS]
        parts = [tf.fill([self._rest], zeros[-1]), zeros[-1:], said, tf.fill([2], zeros[-1])]
        with tf.control_dependencies(totals):  # no operation here uses the totals, and they must be computed
            rest = tf.concat(parts, 0)
        return self._reduced(large, rest)

    def _reduced(self, large: list[tf.Tensor], rest: tf.Tensor) -> list[tf.Tensor]:
        """Sum over the ring: the same operations under the same names, with or without a batch.

        Returns the summed control vectors; 1 where values were finite before the sums and are not after them;
        the sums of large gradients; the sum of all the rest.
        """
        sums = [self._total(g, str(i), self._wire) for i, g in zip(self._large, large, strict=True)]
        rest = self._total(rest, "rest")
        told, spoiled = rest[self._rest :], tf.constant(0.0)
        if self._wire != "float32" and sums:  # a narrower type has a smaller largest number
            # All ranks have the same sums, and see the same.
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in sums])
            spoiled = tf.where(finite | (told[control.NONFINITE] > 0), 0.0, 1.0)
            told += spoiled * tf.one_hot(control.NONFINITE, control.LENGTH)
        return [told, spoiled, *sums, rest[: self._rest]]

    def _prepare(self, layout: Layout) -> None:
        """Derive values from the layout, before the rest of the graph is made."""
        nbytes = [4 * math.prod(v.shape) for v in layout.trained]
        self._large = [i for i, n in enumerate(nbytes) if n >= SMALL]  # of the trained variables
        self._rest = sum(n for i, n in enumerate(layout.sizes) if i not in self._large)
        specs = [tf.TensorSpec(layout.trained[i].shape, tf.float32) for i in self._large]
        whole, rest = (tf.TensorSpec(shape, tf.float32) for shape in ([], [self._rest]))
        with tf.init_scope():  # a graph of its own
            update = concrete(lambda *given: self._update_graph(layout, *given), whole, *specs, rest)
        self._note(update, "update", changes_nothing=False)
        self._update = flat(update)
        self._nbytes = sum(4 * math.prod(spec.shape) for spec in [*specs, rest])

    def _update_graph(self, layout: Layout, whole: tf.Tensor, *sums: tf.Tensor) -> None:
        *large, rest = sums
        sizes = [n for i, n in enumerate(layout.sizes) if i not in self._large]
        small = iter(tf.split(rest, sizes) if sizes else ())
        each = dict(zip(self._large, large, strict=True))
        pieces = [each[i] if i in each else next(small) for i in range(len(layout.sizes))]
        count = len(layout.trained)
        gradients = {
            id(v): tf.reshape(piece, v.shape) for v, piece in zip(layout.trained, pieces[:count], strict=True)
        }
        self._put(layout, 1.0 / whole, pieces[count:], gradients)


def finite_as(gradient: tf.Tensor) -> tf.Tensor:
    """Return a scalar that is finite if and only if the whole gradient is: its sum, or a bound of the sum.

    (A sum of finite numbers may overflow, but then the numbers are so large that it is as bad.)

    A product of matrices is finite if its factors are finite and not very large. So the product need not be
    read: the factors are far smaller, where there are more weights than records. A GPU has read it before it
    has reported which branch to take.
    """
    factors = _factors(gradient)
    if not factors or tf.config.list_logical_devices("GPU"):
        return tf.reduce_sum(gradient)
    # No element is larger than the product of the norms. (l2_loss: half of the square.)
    bound = math.prod(tf.nn.l2_loss(factor) for factor in factors)
    return tf.cond(bound < SAFE, lambda: 0.0, lambda: tf.reduce_sum(gradient))


def _factors(gradient: tf.Tensor) -> list[tf.Tensor]:
    """The factors of a product of matrices in float32; None for any other operation."""
    op = gradient.op
    return list(op.inputs) if op.type == "MatMul" and gradient.dtype == tf.float32 else []


def _after(first: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, when `first` has no more need of it: then its memory can be used for what is made of it."""
    with tf.control_dependencies([first]):
        return tf.identity(tensor)
