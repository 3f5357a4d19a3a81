# SPDX-License-Identifier: Apache-2.0
"""The model, as the ring trains it: an all-reduce without side effects, and an update with its result.

    allreduce_step(batch)  ->  StepResult   this rank's gradients times its records, summed over the ring
    apply(result)                           the user's optimizer, with the exact mean

`allreduce_step` has no side effect: what a forward pass would change (moving averages, counters) is part of
the result (trainer/step/forward.py). Only `apply` changes the model, and it is called only after all sums
have come back. So a step that breaks anywhere has not happened. How a model's step is summed is chosen at the
start, by what the model contains (trainer/step/contribution.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import DataError, ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit, Rows, Table
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.model import snapshot
from edl.trainer.model.batch_types import BatchTypes, divided, tensor_tree
from edl.trainer.model.captured import distinct, is_generator, metric_variables, plain, undone
from edl.trainer.model.fingerprint import fingerprint
from edl.trainer.model.model_support import (
    moving,
    output,
    refuse_fixed_batches,
    refuse_unless_compiled,
    refuse_unless_float32,
)
from edl.trainer.model.variable_spec import VariableSpec
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.ring.base import Vector
from edl.trainer.step.contribution import Contribution, NeedsTotals
from edl.trainer.step.inner_sum import Alone, InnerSum, RingAllReduce
from edl.trainer.step.loss_terms import BROKEN_ASSUMPTION
from edl.trainer.step.overlapped import SEEDS, OverlappedStep
from edl.trainer.step.training_metrics import TrainingMetrics
from edl.trainer.step.trial import Inexact, try_model


class KerasLearner:
    """A compiled Keras model, split into the two halves of a step.

    Args:
        model: compiled; its optimizer, loss and metrics are used as they are.
        sample: a batch of real records, to build, try and trace the model with; None without records.
        others: further batches; if their shapes differ, the model is traced for any shape.
        reduce: the ring's all-reduce (trainer/ring/base.py); None without a ring: gradients are not summed,
            and none are rows of a table.
        inexact: what to do with a model that a ring does not train exactly as Keras would: warn, refuse or
            allow.
        warn: called with a warning about it.
        in_graph: all-reduce operations that a graph can run while it computes; None to use `reduce`.
        pieces: the number of micro-batches that a batch is divided into.
        wire: the type in which large gradients travel.
        rows: the rows of the model's tables; None if they are in this process.

    Raises:
        ModelError: the model cannot be trained this way; the text says why.
    """

    _contribution: type[Contribution] = Contribution
    _stepper: type[OverlappedStep] = OverlappedStep
    _sums_dense = False  # whether gradients of tables are dense for any optimizer
    _in_pieces = "training.accumulateSteps must be 1 for"

    def __init__(
        self,
        model: keras.Model,
        sample: Batch | None,
        others: Sequence[Batch],
        reduce: Callable[[Vector], Vector] | None,
        inexact: str = "warn",
        warn: Callable[[str], None] = print,
        in_graph: RingAllReduce | None = None,
        pieces: int = 1,
        wire: str = "float32",
        rows: Rows | None = None,
    ):
        self.model, self._pieces = model, pieces
        refuse_unless_compiled(model)
        if sample is not None:
            self._build(sample)
        self.lookups = Lookups(model)
        self.use(rows or LocalRows(self.lookups.tables))
        self._next: tuple[Batch, list[Any], int] | None = None  # the next step's batch, tensors and number
        self._fingerprint = ""
        self._variables = _state_of(model)
        self._metrics: TrainingMetrics | None = None
        if sample is not None:
            self._types = BatchTypes(sample, others)
            self._metrics = TrainingMetrics(model, self._types, sample, warn)
            self._variables += self._metrics.variables
            findings = try_model(model, self._types, sample, Inexact(inexact, warn))
            inner_sum = InnerSum(reduce) if reduce is not None else Alone()
            total = in_graph or inner_sum
            dense = self._sums_dense or reduce is None
            ours = self._contribution(
                model, self._types, self._metrics, findings, self.lookups, inner_sum, total, dense
            )
            self._step = self._stepper(ours, sample, pieces > 1, wire)
            if pieces > 1 and self._step.indivisible:
                raise ModelError(
                    f"{self._in_pieces} this model, because each worker's part of a step must be computed in "
                    f"one piece: {self._step.indivisible}"
                )
            self._variables += self._captured()

    # --- the two halves of a step

    def allreduce_step(
        self,
        batch: Batch | None,
        contribution: np.ndarray,
        step: int,
        rank: int,
        records: int,
        following: Following = nothing_follows,
    ) -> control.StepResult:
        """Compute this rank's gradients, and take part in all sums of a step.

        Args:
            batch: this rank's part; None if it has none: it takes part with weight zero.
            contribution: the control vector of this rank; the records, the loss and whether all is finite are
                added here.
            step: the step's number.
            records: the number of records of the whole step, on all ranks.
            following: returns this rank's part of the next step, if it has been read: the rows that it looks
                up are found out while this step waits for servers.

        Raises:
            DataError: the batch has shapes that the model was not traced for, and no graph takes both.
            ModelError: what the trial at the start has found does not hold for this batch.
            RingBroken: one of the sums did not come back.
        """
        pieces = [] if batch is None else self._compared(batch)
        ahead = partial(self._look_ahead, step + 1, rank, following)
        with self._errors(batch):
            return self._step.allreduce_step(pieces, contribution, _draw(step, rank), records, step, ahead)

    def ready(self, batch: Batch) -> Batch:
        """Convert a batch's arrays to tensors, if the step can take them unchanged.

        It runs on the thread that reads, so that the step need not wait for it.
        """
        if self._pieces > 1 or not self._types.know(batch):
            return batch
        tensors = [arrays.tensor(array) for array in self._types.tensors(batch)]
        x, y, weights = self._types.tree(self._types.packed(tensors))
        return replace(batch, x=x, y=y, weights=weights, tensors=tensors)

    def _look_ahead(self, step: int, rank: int, following: Following) -> None:
        """Find out the embedding rows of `step` while the one before it waits.

        It is called while that step waits for its own rows, and again while its gradients are written, if the
        batch was not there the first time. Errors in its records are raised when the batch is trained.
        """
        batch = following()
        if self._next is not None and self._next[0] is batch and self._next[2] == step:
            return
        self._next = None
        # Its shapes are new: the step itself must trace for them.
        if batch is None or not len(batch) or batch.tensors is None:
            return
        tensors = batch.tensors
        with contextlib.suppress(DataError, tf.errors.OpError, ValueError, TypeError):
            self._step.look_up(tensors, _draw(step, rank))
            self._next = batch, tensors, step

    def apply(self, result: control.StepResult) -> None:
        """Make one update with the exact mean gradient, and with what the forward pass has changed."""
        self._step.apply(result)

    @property
    def variables(self) -> list[Any]:
        """All variables of the state, Keras' and TensorFlow's, in the order of `parts`."""
        return self._variables

    @property
    def others(self) -> list[Any]:
        """Variables of the state that neither the model nor its optimizer lists, such as those of losses."""
        return distinct(self._variables, [*_state_of(self.model), *metric_variables(self.model)])

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables whose rows are on servers."""
        return self.lookups.tables

    def use(self, rows: Rows, at: Callable[[], int] = lambda: 0) -> None:
        """Set the storage of the tables' rows.

        Args:
            at: returns the step of the model's state, whose rows an evaluation must use.
        """
        self.lookups.rows, self.lookups.at = rows, at

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Inside this context, the model has the rows of its tables as variables, so that it can be saved."""
        return self.lookups.filled()

    def live(self) -> contextlib.AbstractContextManager[None]:
        """Inside `whole`, read rows from their servers, if not all of them could be copied."""
        return self.lookups.live()

    def missing(self) -> str:
        """What a saved model lacks, in words; empty if nothing."""
        return self.lookups.missing

    def commit(self, step: int, result: control.StepResult) -> Commit:
        """What the servers need to know of this step, before it is applied here."""
        agreed = result.agreed
        if agreed.nonfinite or not agreed.records or not self.tables:
            return Commit(step, skipped=True, scale=0.0, learning_rate=0.0, iteration=0)
        scale = 1.0 / agreed.records if self._step.layout.divided else 1.0
        rate, iterations = self._step.optimizer_at()
        return Commit(step, skipped=False, scale=scale, learning_rate=rate, iteration=iterations)

    def begin_pull(self, step: int, last: Commit) -> None:
        """Request the rows of the next step's records, if they are known; carries `last` to the servers."""
        if self._next is not None and self._next[2] == step:
            self._step.begin_pull(self._next[1], step, last)

    has_loss = True

    def take_metrics(self) -> dict[str, Value]:
        """Return the compiled metrics over the records of all steps since the last call, and reset them.

        It changes the state, so all ranks must call it after the same step.
        """
        return self._metrics.take() if self._metrics else {}

    def finish_training(self) -> None:
        """Do what Keras' `fit` does at its end, before the model is evaluated and saved. No step may follow.

        An optimizer with `use_ema` replaces the weights by their averages.
        """
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    # --- the state

    can_catch_up = True

    @property
    def nbytes(self) -> int:
        return snapshot.nbytes(self._variables)

    def state(self) -> np.ndarray:
        """All of the training state (weights, moving averages, optimizer slots, metrics), uint8 [bytes]."""
        return snapshot.joined(self.parts())

    def variable_specs(self) -> list[VariableSpec]:
        return snapshot.variable_specs(self._variables, self.model)

    def parts(self) -> list[np.ndarray]:
        """Snapshot the state without a copy, uint8 [bytes] for each variable.

        Later updates do not change the snapshot.
        """
        return snapshot.parts(self._variables)

    def load(self, state: np.ndarray) -> None:
        """Replace the state by a different worker's `state`.

        Raises:
            ModelError: it is not a state of this model; nothing is changed then.
        """
        self.take_over(self.prepared(snapshot.divided(self._variables, state)))

    def prepared(self, parts: list[np.ndarray]) -> list[Any]:
        """Convert a different worker's `parts` for `take_over`, on any thread. Raises as `load` does."""
        return snapshot.prepared(self._variables, parts)

    def take_over(self, values: list[Any]) -> None:
        """Replace the state by what `prepared` has returned."""
        snapshot.take_over(self._variables, values)

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Set some of the variables of `parts`, by index."""
        snapshot.change(self._variables, values)

    def kept(self) -> snapshot.Kept:
        """A copy of the state for `restore`, after something was tried."""
        return snapshot.Kept(self._variables)

    def restore(self, kept: snapshot.Kept) -> None:
        kept.put_back()

    def fingerprint(self) -> str:
        # Computed before any callback changes the model.
        self._fingerprint = self._fingerprint or fingerprint(self.model)
        return self._fingerprint

    def digest(self) -> str:
        """XXH3 of the state: equal on two workers if their models are equal, bit for bit."""
        return snapshot.digest(self.parts())

    # --- the model's variables, and each batch's types

    def _build(self, sample: Batch) -> None:
        """Create every variable: weights, loss, optimizer slots. Changes no existing value."""
        model = self.model
        refuse_fixed_batches(model)
        x, y, weights = tensor_tree(sample)
        with undone():
            y_pred = output(model, x, training=False)
            model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=False)
        refuse_unless_float32(model)
        model.optimizer.build(model.trainable_variables)

    def _captured(self) -> list[Any]:
        """Return variables that a step reads or assigns and that are not in the state yet.

        Metrics that are not reported are left out, since no step changes them, and so are generators, which
        are each worker's own.
        """
        known = [*self._variables, *metric_variables(self.model)]
        return [v for v in distinct(self._step.captured, known) if not is_generator(plain(v))]

    def _compared(self, batch: Batch) -> list[list[Any]]:
        """Return the tensors of the batch's pieces, of types that the graph accepts.

        A graph that does not accept them yet is traced anew.

        Raises:
            DataError: the loss is a mean over a dimension in which the batch differs from the first records,
                or the model cannot take its shapes.
            ModelError: with the batch's shapes the model trains or reads other variables.
        """
        if batch.tensors is not None:
            return [batch.tensors]
        if self._next is not None and self._next[0] is batch:
            return [self._next[1]]
        if not self._types.know(batch) and self._types.widen(batch):
            self._retrace(batch)
        return [self._types.tensors(piece) for piece in self._divided(batch)]

    def _divided(self, batch: Batch) -> list[Batch]:
        return divided(batch, self._pieces)

    def _retrace(self, batch: Batch) -> None:
        """Trace the graph anew for a batch that it does not accept.

        Raises:
            DataError: the model cannot take its shapes as well.
            ModelError: with these shapes the model trains or reads other variables.
        """
        before = self._step.layout
        try:
            self._step.trace(batch)
        except NeedsTotals as needs:
            raise DataError(
                f"the batch of {batch} has other shapes than the first records, and the loss is a mean "
                "over what differs. Let feed() pad all batches alike, or the first five records differ "
                "as well"
            ) from needs
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise DataError(_not_both(batch, error)) from error
        if before.key != self._step.layout.key or self._captured():
            raise ModelError(
                f"the batch of {batch} has other shapes, with which the model trains other variables or "
                "reads others"
            )

    @contextlib.contextmanager
    def _errors(self, batch: Batch | None) -> Iterator[None]:
        """Raise a step's errors with a message that names the batch.

        Raises:
            ModelError: an assumption that held for the first records does not hold for this batch.
            DataError: the model cannot take the batch's shapes, which differ from the first batch's.
            InvalidArgumentError: the model's own error, with no batch or a batch like the first one.
        """
        try:
            with self._step.ring_errors():
                yield
        except tf.errors.InvalidArgumentError as error:
            if batch is None:
                raise
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
_SALTS = 2654435761, 2246822519


def _draw(step: int, rank: int) -> np.ndarray:
    """The two words of a seed, and the rank."""
    return np.array([step * _SALTS[0] % SEEDS, rank * _SALTS[1] % SEEDS, rank], np.int64)


def _state_of(model: keras.Model) -> list[keras.Variable]:
    return [*model.trainable_variables, *moving(model), *model.optimizer.variables]


def _not_both(batch: Batch, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "[[" not in line]
    return (
        f"the batch of {batch} has other shapes than the batches before it, and the model does not take "
        f"both: {lines[-1] if lines else type(error).__name__}"
    )
