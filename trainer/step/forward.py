# SPDX-License-Identifier: Apache-2.0
"""A forward pass that changes nothing: what it would change is a result, as the loss is.

It runs in a Keras `StatelessScope`, which does two things more than Keras' own. A layer may assign a variable
that is trained (SpectralNormalization does). What follows is then computed with the assigned value, and the
gradient is that of the assigned value, as where Keras trains: the way to the value is not differentiated. And
a loss or a metric may have variables that the model does not list: they are noted when they are read or
assigned (`Forward.others`), and an assignment is one of the changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.embedding.recording import Given, Recorder
from edl.trainer.model.captured import metric_variables
from edl.trainer.model.model_support import computes_its_own_loss, is_plain, moving, output, output_losses
from edl.trainer.step import sparse_gradients
from edl.trainer.step.batch_norm import synchronized
from edl.trainer.step.inner_sum import InnerSum
from edl.trainer.step.loss_terms import Terms, Verdict


class Forward:
    """The forward pass of some records, and the loss.

    Args:
        tree: features, labels and weights, as tensors.
        salt: is added to all seeds, int64 [2].
        verdicts: on terms of the loss that do not show what they are; None before there are any.
        ring: for layers with statistics of the whole batch; None for statistics of the given records.
        alive: whether the records count in it.
        metrics: their variables, and the values from which they begin; each is one of the `changes`.
        lookups: gives layers the rows that are on servers (trainer/embedding/lookups.py).
    """

    def __init__(
        self,
        model: keras.Model,
        tree: Any,
        salt: tf.Tensor,
        verdicts: Sequence[Verdict] | None = None,
        ring: InnerSum | None = None,
        alive: Any = True,
        metrics: Sequence[tuple[keras.Variable, Any]] = (),
        lookups: Given | Recorder | None = None,
    ):
        x, y, weights = tree
        self._model = model
        self.records = tf.cast(_count(x), tf.float32)
        told = {id(v) for v, _ in metrics}
        means = [mean for mean in output_losses(model) if id(mean.total) in told]
        self.terms = Terms(self.records, is_plain(model), verdicts, several=bool(means))
        self.tape = tf.GradientTape(watch_accessed_variables=False)  # to be opened again for what follows
        self.of_rows: list[tf.Tensor] = []
        self._rows = lookups.rows if lookups is not None else []
        given = lookups.looked_up if lookups is not None else contextlib.nullcontext
        with (
            self.tape,
            given(),
            _Scope(self.tape, model, salt, metrics) as self._scope,
            self.terms.noted(),
            synchronized(ring, alive),
        ):
            self.tape.watch(self._rows)
            self.y_pred = output(model, x, training=True)
            loss = model._compute_loss(x=x, y=y, y_pred=self.y_pred, sample_weight=weights, training=True)
            # Whether the loss has parts that are no terms: weight decay by regularizers, a sum made by hand.
            self.more_than_terms = bool(model.losses) or computes_its_own_loss(model)
            self.loss = _number(loss)
            # Keras weights them with batches, where it does not see how many records there are.
            self.output_losses = [
                tf.math.divide_no_nan(self.added_to(mean.total), self.added_to(mean.count)) for mean in means
            ]
        if metrics:
            with self._scope, given():
                model.compute_metrics(x, y, self.y_pred, sample_weight=weights)

    def gradients(self, target: tf.Tensor, optimizer: Any = None) -> list[Any]:
        """Compute the gradients of a target under `tape` for each trainable variable. Call it only once.

        Also sets `of_rows`, the gradients for the given rows.

        Args:
            optimizer: gradients of tables may be slices for it (trainer/step/sparse_gradients.py); None if
                all gradients must be dense.
        """
        leaves = [self._scope.leaves[id(v)] for v in self._model.trainable_variables]
        flat = iter(
            self.tape.gradient(target, [*self._rows, *(leaf for of_one in leaves for leaf in of_one)])
        )
        self.of_rows = [_of_rows(rows, next(flat)) for rows in self._rows]
        found = [[next(flat) for _ in of_one] for of_one in leaves]
        pairs = zip(self._model.trainable_variables, found, strict=True)
        return [g[0] if optimizer is not None and _are_rows(g, v, optimizer) else _added(g) for v, g in pairs]

    @property
    def changes(self) -> list[tuple[keras.Variable, tf.Tensor, tf.Tensor]]:
        """The changes that the pass would make: variable, value before, value after.

        Seeds and metrics are left out.
        """
        return self._scope.changes

    @property
    def others(self) -> list[keras.Variable]:
        """Variables that it reads or assigns and the model does not list, in the order of the code."""
        return self._scope.others

    def added_to(self, metric: keras.Variable) -> tf.Tensor:
        """The records' contribution to a variable of a metric."""
        return self._scope.added_to(metric)


class _Scope(keras.StatelessScope):
    def __init__(
        self,
        tape: tf.GradientTape,
        model: keras.Model,
        salt: tf.Tensor,
        metrics: Sequence[tuple[keras.Variable, Any]],
    ):
        self._tape, self._salt = tape, salt
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._before = [
            (v, tf.convert_to_tensor(v.value)) for v in (*model.trainable_variables, *moving(model))
        ]
        self._listed = len(self._before)
        self._passed_by = {id(v) for v in metric_variables(model)}
        self.leaves = {id(v): [value] for v, value in self._before[: len(model.trainable_variables)]}
        tape.watch([leaf for (leaf,) in self.leaves.values()])
        given = [(v, self._salted(v, value)) for v, value in self._before]
        self._metrics = {id(v): tf.constant(initial, v.dtype) for v, initial in metrics}
        given += [(v, self._metrics[id(v)]) for v, _ in metrics]
        super().__init__(state_mapping=given, collect_losses=True)

    @property
    def others(self) -> list[keras.Variable]:
        """The variables that the forward pass assigns and that were not listed in advance."""
        return [v for v, _ in self._before[self._listed :]]

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        found = super().get_current_value(variable)
        return self._noted(variable) if found is None else found

    def _noted(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value of a variable that the model does not list; None if it is none of the state."""
        if id(variable) in self._passed_by or variable._value is None:
            return None
        # In a loop or a branch there is another graph, whose tensors nothing outside of it can use.
        with self._graph.as_default() if self._graph is not None else contextlib.nullcontext():
            before = variable._value.read_value()
            value = self._salted(variable, before)
        self._before.append((variable, before))
        super().add_update((variable, value))
        return value

    def _is_elsewhere(self, value: tf.Tensor) -> bool:
        return self._graph is not None and tf.is_symbolic_tensor(value) and value.graph is not self._graph

    def _salted(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        return value + tf.cast(self._salt, variable.dtype) if _is_seed(variable) else value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if super().get_current_value(variable) is None:
            self._noted(variable)
        if self._is_elsewhere(value) and not _is_seed(variable) and id(variable) not in self._passed_by:
            raise ModelError(
                f"variable {variable.path!r} is assigned in a loop or a branch of the forward pass: its "
                "new value cannot be followed. Assign the value that the loop returns, outside of it"
            )
        if id(variable) in self.leaves:
            value = tf.stop_gradient(value)
            self._tape.watch(value)
            self.leaves[id(variable)].append(value)
        super().add_update((variable, value))

    @property
    def changes(self) -> list[tuple[keras.Variable, tf.Tensor, tf.Tensor]]:
        """The assigned variables, each with its value before and after the forward pass."""
        now = [(v, before, self.get_current_value(v)) for v, before in self._before if not _is_seed(v)]
        return [(v, before, after) for v, before, after in now if after is not before]

    def added_to(self, metric: keras.Variable) -> tf.Tensor:
        """What the forward pass has added to a variable of a metric, float32."""
        before, after = self._metrics[id(metric)], self.get_current_value(metric)
        return tf.cast(after, tf.float32) - tf.cast(before, tf.float32)


def _are_rows(gradients: list[Any], variable: keras.Variable, optimizer: Any) -> bool:
    if len(gradients) != 1 or not isinstance(gradients[0], tf.IndexedSlices):
        return False
    return sparse_gradients.travels_as_rows(optimizer, variable.shape)


def _of_rows(rows: tf.Tensor, gradient: Any) -> tf.Tensor:
    return tf.zeros_like(rows) if gradient is None else tf.convert_to_tensor(gradient)


def _added(gradients: list[Any]) -> tf.Tensor | None:
    found = [tf.convert_to_tensor(g) for g in gradients if g is not None]
    return None if not found else found[0] if len(found) == 1 else tf.add_n(found)


def _number(loss: Any) -> tf.Tensor:
    if not tf.is_tensor(loss) or loss.shape.rank != 0:
        what = f"has shape {tuple(loss.shape)}" if tf.is_tensor(loss) else f"is {type(loss).__name__}"
        raise ModelError(f"the loss of the model must be one number, but it {what}")
    return tf.cast(loss, tf.float32)


def _is_seed(v: keras.Variable) -> bool:
    return bool(v.name == "seed_generator_state")


def _count(x: Any) -> tf.Tensor:
    """The records of a batch."""
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first)[0]
