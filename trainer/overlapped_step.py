"""A step with several sums, as one graph in which nothing waits: forward, backward, sums, and new values.

    head     [ records | leave, step, change ]                     before anything is computed
    n        one sum for each large gradient                       as soon as backward has made it
    rest     [ small gradients | averages | counters | metrics | loss, non-finite ]
    update   the optimizer's new values, each as soon as its sum is there

The graph has no side effect: the new values are results, as the loss is. `apply` has the variables take
them over, after Python has read what was agreed: no copy, no arithmetic. So whatever breaks, and wherever, the
step has not happened; and who keeps the values from before `apply` has a snapshot of them, without a copy.

A rank without a batch takes part in the same sums with zeros. It is given the sums themselves, and `apply`
computes the new values from them: at once, or later, as one must who has not the state yet that they are for.

What keeps a model out is found before the first step (CannotOverlap): sums before its gradients (totals of a
loss, synchronized statistics) or for each row of a table, an optimizer whose update is not known to be free of
side effects, graphs that XLA compiles, and code that runs eagerly. It takes trainer/vector_step.py.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from trainer import control, rows
from trainer.data import Batch
from trainer.graphs import concrete
from trainer.step_graphs import HasRows, Layout, NeedsTotals, NotTried, StepGraphs

SMALL = 1 << 16  # bytes: a gradient of fewer travels with the others of its kind


class CannotOverlap(Exception):
    """This model takes another way."""


class RingSums(Protocol):
    """Sums over the ring, made by a graph (trainer/ring/horovod.py, trainer/inner_sum.py)."""

    def __call__(self, tensor: tf.Tensor, /, name: str) -> tf.Tensor: ...

    def ring_errors(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, eq=False)
class Reduced:
    """The sums themselves, of a rank that had no batch."""

    tensors: list[tf.Tensor]


@dataclass(frozen=True, eq=False)
class NewValues:
    """What follows from the sums, for each variable that changes."""

    tensors: list[tf.Tensor]


class OverlappedStep(StepGraphs):
    """
    Args:
        total: makes the sums.
        others: see StepGraphs.

    Raises:
        CannotOverlap: it is not for this model.
    """

    def __init__(self, *others: Any, total: RingSums):
        model, sample = others[0], others[2]
        super().__init__(*others)
        self._total = total
        if self._synchronized or model.run_eagerly or model.jit_compile or not is_functional(model.optimizer):
            raise CannotOverlap
        self._update: Any = None
        layout: Layout | None = None
        while layout is None:
            try:
                layout = self.trace(sample)
            except NotTried:
                self._findings = self._try_model()
            except (NeedsTotals, HasRows) as error:
                raise CannotOverlap from error
        self.layout = layout
        floats = tf.TensorSpec([None], tf.float32)
        self._nothing = concrete(self._nothing_graph, floats, floats)

    def sums(self, tensors: list[Any] | None, contribution: np.ndarray, draw: np.ndarray) -> control.Sums:
        told = tf.constant(contribution)
        if tensors is None:
            zeros = tf.zeros([len(self._large) + 1])
            head, tail, *reduced = self._nothing(told, zeros)
            nbytes = sum(4 * int(tf.size(r)) for r in reduced)
            return control.Sums(_agreed(head, tail), False, 0.0, nbytes, Reduced([head, *reduced]))
        given = map(tf.convert_to_tensor, tensors)
        head, tail, bad, ready_at, *new = self._step(*given, told, tf.constant(draw), _ONE)
        waited = max(0.0, time.time() - float(ready_at))
        return control.Sums(_agreed(head, tail), bool(bad), waited, 0, NewValues(new))

    def apply(self, sums: control.Sums) -> None:
        given = sums.given
        new = given.tensors if isinstance(given, NewValues) else self._update(*given.tensors)
        for handle, value in zip(self._handles, new, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def ring_errors(self) -> AbstractContextManager[None]:
        return self._total.ring_errors()

    def trace(self, batch: Batch) -> Layout:
        self._found: Layout | None = None
        self._step = concrete(
            self._step_graph,
            *self._types.signature,
            tf.TensorSpec([control.LENGTH], tf.float32),
            tf.TensorSpec([3], tf.int64),
            tf.TensorSpec([], tf.float32),
        )
        assert self._found is not None
        return self._found

    # --- the graphs

    def _step_graph(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Arguments: the batch's tensors, the control vector, (a seed's two words, rank), and the number 1.

        Because of that number no gradient is a constant, which TensorFlow would sum while it optimizes the
        graph.
        """
        *tensors, contribution, draw, one = arguments
        forward = self._forward(self._types.packed(tensors), draw[:2])
        self._require(forward)
        records = forward.records
        with forward.tape:
            told = one * (forward.loss if self._is_sum(forward) else forward.loss * records)
        gradients = forward.gradients(told, rows.one_by_one(self._model.optimizer))
        layout = self._found = self._lay_out(forward, gradients)
        self._prepare(layout)
        dense = [g for g in gradients if g is not None]
        large = [dense[i] for i in self._large]
        flat = [tf.reshape(g, [-1]) for i, g in enumerate(dense) if i not in self._large]
        small = tf.concat([*flat, *self._changes(forward, layout), tf.zeros([0])], 0)
        added = [tf.reshape(forward.added_to(v), [-1]) for v in layout.metrics]
        # A sum is finite when all of its parts are (or so large that they are as bad): one cheap pass. Each
        # rank looks at its own part and all hear of it: they agree, in whatever order each of them adds up.
        finite = tf.math.is_finite(told + tf.add_n([tf.reduce_sum(part) for part in (*large, small)]))
        bad = 1.0 - tf.cast(finite, tf.float32)
        with tf.control_dependencies([*large, small]):
            ready_at = tf.timestamp()
        head = tf.concat([[records], contribution[control.LEAVE : control.HEAD]], 0)
        reduced = self._reduced(head, large, tf.concat([small, *added, [told, bad]], 0))
        head, tail, *rest = reduced
        return [head, tail, bad, ready_at, *self._update(head, *rest)]

    def _nothing_graph(self, contribution: tf.Tensor, zeros: tf.Tensor) -> list[tf.Tensor]:
        """The same sums, of a rank without a batch.

        Args:
            zeros: as many as there are sums beside the head, each of its own, so that they are no constants.
        """
        head = tf.concat([zeros[:1], contribution[control.LEAVE : control.HEAD]], 0)
        shapes = [self.layout.trained[i].shape for i in self._large]
        large = [tf.fill(shape, zeros[i]) for i, shape in enumerate(shapes)]
        return self._reduced(head, large, tf.fill([self._rest + 2], zeros[-1]))

    def _reduced(self, head: tf.Tensor, large: list[tf.Tensor], rest: tf.Tensor) -> list[tf.Tensor]:
        """The same operations under the same names, whether there is a batch or not: head, tail, the sums of
        large gradients, and what else there is."""
        head = self._total(head, "head")
        sums = [self._total(g, str(i)) for i, g in zip(self._large, large, strict=True)]
        rest = self._total(rest, "rest")
        return [head, rest[self._rest :], *sums, rest[: self._rest]]

    def _prepare(self, layout: Layout) -> None:
        """What follows from the layout, before the rest of the graph is made."""
        nbytes = [4 * math.prod(v.shape) for v in layout.trained]
        self._large = [i for i, n in enumerate(nbytes) if n >= SMALL]  # of the trained variables
        self._rest = sum(n for i, n in enumerate(layout.sizes) if i not in self._large)
        specs = [tf.TensorSpec(layout.trained[i].shape, tf.float32) for i in self._large]
        floats = [tf.TensorSpec([n], tf.float32) for n in (control.HEAD, self._rest)]
        with tf.init_scope():  # a graph of its own: ranks with and without a batch compute the same
            self._update = concrete(
                lambda *sums: self._update_graph(layout, *sums), floats[0], *specs, floats[1]
            )

    def _update_graph(self, layout: Layout, head: tf.Tensor, *sums: tf.Tensor) -> list[tf.Tensor]:
        """The new values of all variables that change; and which those are."""
        *large, rest = sums
        share = 1.0 / head[control.RECORDS]
        sizes = [n for i, n in enumerate(layout.sizes) if i not in self._large]
        small = iter(tf.split(rest, sizes) if sizes else ())
        each = dict(zip(self._large, large, strict=True))
        pieces = [each[i] if i in each else next(small) for i in range(len(layout.sizes))]
        count = len(layout.trained)
        gradients = {
            id(v): tf.reshape(piece * share if layout.divided else piece, v.shape)
            for v, piece in zip(layout.trained, pieces[:count], strict=True)
        }
        model, optimizer = self._model, self._model.optimizer
        # What the forward pass assigns comes first, as it does in Keras: it may be a weight that is trained.
        new = {id(v): value for v, value in zip(layout.changing, self._changed(layout, share, pieces[count:]),
                                               strict=True)}  # fmt: skip
        held = [*model.trainable_variables, *optimizer.variables]
        before = {id(v): new.get(id(v), tf.convert_to_tensor(v.value)) for v in held}
        with _functional(), keras.StatelessScope(state_mapping=[(v, before[id(v)]) for v in held]) as scope:
            optimizer.apply_gradients([(gradients.get(id(v)), v) for v in model.trainable_variables])
            after = {id(v): scope.get_current_value(v) for v in held}
        new |= {key: tf.convert_to_tensor(value) for key, value in after.items() if value is not before[key]}
        changed = [v for v in {id(v): v for v in (*held, *layout.changing)}.values() if id(v) in new]
        self._handles = [v.value.handle for v in changed]
        return [tf.cast(new[id(v)], v.dtype) for v in changed]


_ONE = np.float32(1)


def _agreed(head: tf.Tensor, tail: tf.Tensor) -> control.Agreed:
    return control.read(np.concatenate([memoryview(head), memoryview(tail)]))


def is_functional(optimizer: Any) -> bool:
    """Whether its update is known to be a function: of its variables, the model's, and the gradients."""
    overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency  # by branches of TensorFlow's own
    return type(optimizer) in FUNCTIONAL and not (optimizer.gradient_accumulation_steps or overwrites)


o = keras.optimizers
# Of Keras' own, those that compute the same in a StatelessScope as on variables (tests/process/keras). One
# does not: ScheduleFreeAdamW reads a variable once more after it has changed it.
FUNCTIONAL = frozenset({
    o.SGD, o.RMSprop, o.Adam, o.AdamW, o.Adadelta, o.Adagrad, o.Adamax, o.Adafactor, o.Nadam, o.Ftrl, o.Lion,
    o.Lamb, o.Muon,
})  # fmt: skip


@contextlib.contextmanager
def _functional() -> Iterator[None]:
    """Inside, Keras' optimizers work in a StatelessScope.

    On TensorFlow they refuse to, because of tf.distribute, which is not used here; the methods that they
    have for all backends do not mind. These are put into the class that all of them have in common, so that
    what an optimizer overrides still comes first.
    """
    replaced = {name: getattr(BaseOptimizer, name) for name in _GENERIC}
    # Inside a StatelessScope, `value` is a tensor.
    replaced["_var_key"] = lambda _, v: (v._value if isinstance(v, keras.Variable) else v)._unique_id
    before = {name: vars(TFOptimizer)[name] for name in replaced}
    try:
        for name, method in replaced.items():
            setattr(TFOptimizer, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(TFOptimizer, name, method)


_GENERIC = ("assign", "assign_add", "assign_sub", "_backend_update_step", "_apply_weight_decay")
