"""The model as the ring sees it: a vector to be summed, and an update that takes the sum.

    gradients(batch)  ->  vector     this rank's gradients, times its records
    [ the ring sums the vectors of all ranks ]
    update(vector)                   the user's optimizer, with the exact mean

`gradients` has no side effect: it runs the model in a Keras `StatelessScope`, so what a
forward pass would change (moving averages, seeds) is a result here. Only `update` changes
the model, and it is called only after the whole sum has come back. So a step that breaks
anywhere has not happened.

The mean is exact for uneven batches, because each rank's part is weighted with its records
and the sum is divided by all of them. Moving averages (BatchNorm) are averaged the same way.
Random layers draw from (job seed, step, rank): different on each rank, the same when a step
is done again, with no state to keep.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from trainer import control
from trainer.data import Batch
from trainer.fingerprint import fingerprint
from trainer.graphs import compiled
from trainer.model_support import loss_is_a_sum, refuse_unless_compiled, refuse_unless_float32


class KerasLearner:
    """A compiled Keras model, taken apart into the two halves of a step.

    Args:
        model: compiled; its optimizer, loss and metrics are used as they are.
        sample: a batch of real records, to build and trace with; None when there are none.

    Raises:
        ModelError: the model cannot be trained this way; the text says why.
    """

    def __init__(self, model: keras.Model, sample: Batch | None):
        self.model = model
        refuse_unless_compiled(model)
        self._sums = loss_is_a_sum(model)
        if sample is not None:
            self._build(sample)
        self._variables = _state_of(model)
        if sample is not None:
            self._trace(sample)

    # --- the two halves of a step

    def gradients(self, batch: Batch, contribution: np.ndarray, step: int, rank: int) -> tf.Tensor:
        """This rank's part of the step: float32 [length + len(contribution)].

        Args:
            contribution: the control vector this rank writes; the records, loss and
                non-finite fields are added here.
        """
        salt = np.array([step, rank], np.int64) * _SALTS % _SEEDS
        return self._gradients(*self._flatten(batch), contribution, salt)

    def nothing(self, contribution: np.ndarray) -> tf.Tensor:
        """The part of a rank that has no batch: weight zero."""
        return self._nothing(contribution)

    def update(self, vector: tf.Tensor) -> None:
        """Take the ring's sum: one optimizer update with the exact mean gradient."""
        self._update(vector)

    def agreed(self, vector: tf.Tensor) -> control.Agreed:
        """What the control vector at the end of a summed vector says."""
        return control.read(np.asarray(memoryview(vector))[self.length :])

    # --- the state

    def state(self) -> np.ndarray:
        """All of the training state (weights, moving averages, optimizer slots), uint8 [bytes]."""
        parts = [np.ascontiguousarray(v.numpy()).reshape(-1).view(np.uint8) for v in self._variables]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def load(self, state: np.ndarray) -> None:
        """Take over another worker's `state`.

        Raises:
            ModelError: it is not the state of this model; nothing is changed then.
        """
        sizes = [int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in self._variables]
        if sum(sizes) != len(state):
            raise ModelError(f"the ring's state has {len(state)} bytes, this worker's model has {sum(sizes)}")
        parts = np.split(state, np.cumsum(sizes)[:-1])
        for v, part in zip(self._variables, parts, strict=True):
            v.assign(part.copy().view(np.dtype(v.dtype)).reshape(v.shape))  # copied, to be aligned

    def fingerprint(self) -> str:
        return fingerprint(self.model)

    def digest(self) -> str:
        """SHA-256 of the state: equal on two workers when their models are, bit for bit."""
        return hashlib.sha256(self.state().tobytes()).hexdigest()

    # --- building

    def _build(self, sample: Batch) -> None:
        """Create every variable: weights, loss, optimizer slots. Changes no value."""
        y_pred = self.model(_as_tensors(sample.x), training=False)
        self.model.compute_loss(
            x=_as_tensors(sample.x),
            y=_as_tensors(sample.y),
            y_pred=y_pred,
            sample_weight=_as_tensors(sample.weights),
        )
        refuse_unless_float32(self.model)
        self.model.optimizer.build(self.model.trainable_variables)

    def _trace(self, sample: Batch) -> None:
        self._structure = (sample.x, sample.y, sample.weights)
        specs = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in self._flatten(sample)]
        floats, salt = tf.TensorSpec([None], tf.float32), tf.TensorSpec([2], tf.int64)
        # Batches of any length, in rings of any size, share one graph.
        self._gradients = compiled(self._gradients_graph, *specs, floats, salt)  # finds the layout
        self.length = self._layout.length
        self._nothing = compiled(lambda told: tf.concat([tf.zeros([self.length]), told], 0), floats)
        self._update = compiled(self._update_graph, floats)

    def _flatten(self, batch: Batch) -> list[np.ndarray]:
        """The batch's arrays in a fixed order, in the types that Keras would give the model."""
        return [_standard(a) for a in keras.tree.flatten((batch.x, batch.y, batch.weights)) if a is not None]

    def _unflatten(self, tensors: list[tf.Tensor]) -> Any:
        left = iter(tensors)
        return keras.tree.map_structure(lambda a: None if a is None else next(left), self._structure)

    def _gradients_graph(self, *arguments: tf.Tensor) -> tf.Tensor:
        *tensors, contribution, salt = arguments
        model = self.model
        x, y, weights = self._unflatten(tensors)
        records = tf.cast(tf.shape(tensors[0])[0], tf.float32)
        trainable = [v.value for v in model.trainable_variables]
        rest = _moving(model)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(trainable)
            values = dict(zip(map(id, model.trainable_variables), trainable, strict=True))
            mapping = [(v, values[id(v)]) for v in model.trainable_variables]
            given = [v.value + tf.cast(salt, v.dtype) if _is_seed(v) else v.value for v in rest]
            mapping += zip(rest, given, strict=True)
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
                y_pred = model(x, training=True)
                loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=True)
                extra = bool(model.losses)
            weight = 1.0 if self._sums else records
            weighted = loss * weight  # before differentiating: one product instead of one per variable
        gradients = tape.gradient(weighted, trainable)
        if self._sums and extra:
            raise ModelError(
                'a loss with reduction="sum" cannot be combined with regularizers or add_loss(): their part '
                'would be counted once per worker. Use reduction="sum_over_batch_size".'
            )
        self._layout = _Layout.of(model, gradients, rest, given, scope)
        parts = [tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradients if g is not None]
        parts += [tf.reshape(scope.get_current_value(v), [-1]) * records for v in self._layout.averaged]
        # A sum is finite when all of its parts are (or so large that they are as bad): one cheap pass.
        finite = tf.math.is_finite(weighted + tf.add_n([tf.reduce_sum(part) for part in parts]))
        ours = tf.stack([records, weighted, contribution[control.LEAVE], 1.0 - tf.cast(finite, tf.float32)])
        return tf.concat([*parts, ours, contribution[control.IDLE :]], 0)

    def _update_graph(self, vector: tf.Tensor) -> None:
        layout = self._layout
        records = vector[layout.length + control.RECORDS]
        pieces = tf.split(vector, [*layout.sizes, -1])
        share = 1.0 / records
        count = len(layout.trained)
        gradients = [
            tf.reshape(piece if self._sums else piece * share, v.shape)
            for piece, v in zip(pieces, layout.trained, strict=False)
        ]
        self.model.optimizer.apply(gradients, layout.trained)
        for v, total in zip(layout.averaged, pieces[count:], strict=False):
            v.assign(tf.reshape(total * share, v.shape))


@dataclass(frozen=True)
class _Layout:
    """What lies where in the vector, in front of the control vector."""

    trained: list[keras.Variable]
    averaged: list[keras.Variable]  # moving averages: changed by the forward pass, not by the optimizer

    @staticmethod
    def of(
        model: keras.Model,
        gradients: list[tf.Tensor | None],
        rest: list[keras.Variable],
        given: list[tf.Tensor],
        scope: keras.StatelessScope,
    ) -> _Layout:
        trained = [v for v, g in zip(model.trainable_variables, gradients, strict=True) if g is not None]
        if not trained:
            raise ModelError(
                "no trainable variable of the model influences the loss: nothing would be trained"
            )
        changed = [
            v
            for v, before in zip(rest, given, strict=True)
            if scope.get_current_value(v) is not before and not _is_seed(v)
        ]
        for v in changed:
            if v.dtype != "float32":
                raise ModelError(
                    f"variable {v.path!r} of type {v.dtype} changes in the forward pass; only float32 "
                    "variables can (they are averaged over the ring)"
                )
        return _Layout(trained, changed)

    @property
    def all(self) -> list[keras.Variable]:
        return [*self.trained, *self.averaged]

    @property
    def sizes(self) -> list[int]:
        return [int(np.prod(v.shape)) for v in self.all]

    @property
    def length(self) -> int:
        return sum(self.sizes)


# Odd constants, so that (step, rank) spreads over the two words of a seed.
_SALTS = np.array([2654435761, 2246822519], np.int64)
_SEEDS = 1 << 31


def _is_seed(v: keras.Variable) -> bool:
    return bool(v.name == "seed_generator_state")


def _moving(model: keras.Model) -> list[keras.Variable]:
    """What is neither trained nor a metric: moving averages and seeds."""
    metrics = {id(v) for v in model.metrics_variables}
    return [v for v in model.non_trainable_variables if id(v) not in metrics]


def _state_of(model: keras.Model) -> list[keras.Variable]:
    return [*model.trainable_variables, *_moving(model), *model.optimizer.variables]


def _standard(array: Any) -> np.ndarray:
    """As Keras's fit would take it: floats in the default precision."""
    array = np.asarray(array)
    if array.dtype == np.float64:
        return array.astype(keras.config.floatx())
    if array.dtype.kind == "U" or array.dtype == object:
        return array.astype(bytes) if array.dtype.kind == "U" else array
    return array


def _as_tensors(tree: Any) -> Any:
    return keras.tree.map_structure(lambda a: None if a is None else tf.convert_to_tensor(_standard(a)), tree)
