"""The model as the ring sees it: a vector to be summed, and an update that takes the sum.

    gradients(batch)  ->  vector     this rank's gradients, times its records
    [ the ring sums the vectors of all ranks ]
    update(vector)                   the user's optimizer, with the exact mean

`gradients` has no side effect: what a forward pass would change (moving averages, counters) is
a result there (trainer/forward.py). Only `update` changes the model, and it is called only after
the whole sum has come back. So a step that breaks anywhere has not happened.

The mean is exact for uneven batches, because each rank's part is weighted with its records
and the sum is divided by all of them. What in a loss is no mean over records (masks, weights,
sums) is corrected before the backward pass, with totals that the ring sums inside the step
(trainer/loss_terms.py); a model without such terms does not pay for it. Moving averages
(BatchNorm) are averaged by records. Random layers draw from (job seed, step, rank): different
on each rank, the same when a step is done again, with no state to keep.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import DataError, ModelError
from trainer import control, rows
from trainer.batch_types import BatchTypes, tensor_tree
from trainer.data import Batch
from trainer.fingerprint import fingerprint
from trainer.inner_sum import InnerSum
from trainer.loss_terms import BROKEN_ASSUMPTION
from trainer.model_support import (
    moving,
    output,
    refuse_fixed_batches,
    refuse_unless_compiled,
    refuse_unless_float32,
)
from trainer.ring.base import Vector
from trainer.step_graphs import NeedsTotals, StepGraphs
from trainer.training_metrics import TrainingMetrics
from trainer.trial import Inexact, try_model


class KerasLearner:
    """A compiled Keras model, taken apart into the two halves of a step.

    Args:
        model: compiled; its optimizer, loss and metrics are used as they are.
        sample: a batch of real records, to build, try and trace with; None when there are none.
        others: further batches; where their shapes differ, the model is traced for any.
        reduce: the ring's (trainer/ring/base.py), for what a step sums before its gradients.
        inexact: what to do about a model that a ring does not train as Keras would: warn, refuse or allow.
        warn: is told of it.

    Raises:
        ModelError: the model cannot be trained this way; the text says why.
    """

    def __init__(
        self,
        model: keras.Model,
        sample: Batch | None,
        others: Sequence[Batch] = (),
        reduce: Callable[[Vector], Vector] | None = None,
        inexact: str = "warn",
        warn: Callable[[str], None] = print,
    ):
        self.model = model
        self._inner_sum = None if reduce is None else InnerSum(reduce)
        refuse_unless_compiled(model)
        if sample is not None:
            self._build(sample)
        self._variables = _state_of(model)
        self._metrics: TrainingMetrics | None = None
        if sample is not None:
            self._types = BatchTypes(sample, others)
            self._sample = self._types.tensors(sample)
            trial = partial(try_model, model, self._types, sample, Inexact(inexact, warn))
            self._metrics = TrainingMetrics(model, self._types, sample, warn)
            self._variables += self._metrics.variables
            self._graphs = StepGraphs(model, self._types, sample, self._metrics, self._inner_sum, trial)
            self._rows: tuple[tf.Tensor, ...] = ()  # of this step
            self._length = self._graphs.layout.length  # of this step's vectors, without the control vector

    # --- the two halves of a step

    def gradients(self, batch: Batch, contribution: np.ndarray, step: int, rank: int) -> tf.Tensor:
        """This rank's part of the step: float32 [length + len(contribution)].

        Args:
            contribution: the control vector this rank writes; the records, loss and
                non-finite fields are added here.

        Raises:
            DataError: the batch is not what the model was traced for, and no graph is for both.
            ModelError: what the trial at the start has found does not hold for this batch.
            RingBroken: in a sum inside the step.
        """
        tensors = self._compared(batch)
        if self._graphs.layout.tables:
            rows.refuse_rank(rank)
        draw = np.array([step, rank, rank], np.int64)
        draw[:2] = draw[:2] * _SALTS % _SEEDS
        with self._errors(batch):
            alive = (True,) if self._graphs.synchronized else ()
            return self._noted(self._graphs.gradients(*tensors, contribution, draw, *alive))

    def nothing(self, contribution: np.ndarray) -> tf.Tensor:
        """The part of a rank that has no batch: weight zero.

        Raises:
            RingBroken: in a sum inside the step.
        """
        if self._inner_sum is not None and self._graphs.synchronized:  # it takes part in every sum
            with self._inner_sum.ring_errors():
                draw = np.zeros(3, np.int64)
                return self._noted(self._graphs.gradients(*self._sample, contribution, draw, False))
        if self._inner_sum is not None and self._graphs.totals:
            self._inner_sum(tf.zeros([self._graphs.totals]))
        if tables := self._graphs.layout.tables:
            self._note(rows.nothing(self._inner_sum, len(tables)))
        return self._graphs.nothing(contribution, self._length)

    def update(self, vector: tf.Tensor) -> None:
        """Take the ring's sum: one optimizer update with the exact mean gradient."""
        self._graphs.update(vector, *self._rows)

    def agreed(self, vector: tf.Tensor) -> control.Agreed:
        """What the control vector at the end of a summed vector says."""
        return control.read(np.asarray(memoryview(vector))[self._length :])

    def _noted(self, given: Any) -> tf.Tensor:
        """The vector that a graph has given, after its rows are noted."""
        if not self._graphs.layout.tables:
            return given
        vector, all_rows = given
        self._note(all_rows)
        return vector

    def _note(self, all_rows: tf.Tensor) -> None:
        """How many rows of each table lie in the vectors of this step: the same on all ranks."""
        layout = self._graphs.layout
        flat = [n * rows.width(v) for n, v in zip(all_rows.numpy().tolist(), layout.tables, strict=True)]
        self._rows, self._length = (all_rows,), layout.length + sum(flat)

    def take_metrics(self) -> dict[str, float]:
        """The compiled metrics over the records of all steps since they were taken last.

        It is a change of the state: to be made on all ranks after the same step.
        """
        return self._metrics.take() if self._metrics else {}

    def finish_training(self) -> None:
        """What Keras' `fit` does at its end, before the model is evaluated and saved. No step may follow.

        An optimizer with `use_ema` puts its averages in the place of the weights.
        """
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    # --- the state

    def state(self) -> np.ndarray:
        """All of the training state (weights, moving averages, optimizer slots, metrics), uint8 [bytes]."""
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

    # --- the model's variables, and each batch's types

    def _build(self, sample: Batch) -> None:
        """Create every variable: weights, loss, optimizer slots. Changes no value that is there already."""
        model = self.model
        refuse_fixed_batches(model)
        before = [(v, v.numpy()) for v in model.variables]
        x, y, weights = tensor_tree(sample)
        y_pred = output(model, x, training=False)
        model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=False)
        for v, value in before:
            v.assign(value)
        refuse_unless_float32(model)
        model.optimizer.build(model.trainable_variables)

    def _compared(self, batch: Batch) -> list[Any]:
        """The batch's tensors, of types that the graph is for: it is traced anew where it has to be."""
        if not self._types.know(batch) and self._types.widen(batch):
            before = self._graphs.layout
            try:
                after = self._graphs.trace_gradients(batch)
            except NeedsTotals as needs:
                raise DataError(
                    f"the batch of {batch} has other shapes than the first records, and the loss is a mean "
                    "over what differs. Let feed() pad all batches alike, or the first five records differ "
                    "as well"
                ) from needs
            except (ValueError, TypeError, tf.errors.OpError) as error:
                raise DataError(_not_both(batch, error)) from error
            if before.key != after.key:
                raise ModelError(
                    f"the batch of {batch} has other shapes, with which the model trains other variables"
                )
        return self._types.tensors(batch)

    @contextlib.contextmanager
    def _errors(self, batch: Batch) -> Iterator[None]:
        """What a step raises, in our words."""
        with self._inner_sum.ring_errors() if self._inner_sum else contextlib.nullcontext():
            try:
                yield
            except tf.errors.InvalidArgumentError as error:
                if BROKEN_ASSUMPTION in str(error):
                    raise ModelError(
                        f"the batch of {batch}: {BROKEN_ASSUMPTION}, as it was in the first records. Let the "
                        'loss be a mean over records, or use reduction="mean_with_sample_weight" and weights '
                        "of zero"
                    ) from error
                if self._types.differs_from_the_first(batch):
                    raise DataError(_not_both(batch, error)) from error
                raise


# Odd constants, so that (step, rank) spreads over the two words of a seed.
_SALTS = np.array([2654435761, 2246822519], np.int64)
_SEEDS = 1 << 31


def _state_of(model: keras.Model) -> list[keras.Variable]:
    return [*model.trainable_variables, *moving(model), *model.optimizer.variables]


def _not_both(batch: Batch, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "[[" not in line]
    return (
        f"the batch of {batch} has other shapes than the batches before it, and the model does not take "
        f"both: {lines[-1] if lines else type(error).__name__}"
    )
