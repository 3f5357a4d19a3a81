# SPDX-License-Identifier: Apache-2.0
"""The terms of a loss, and how each follows from the parts that the ranks have of a batch.

A ring weights each rank's loss with its records. That is what Keras computes from the whole batch as
long as every term of the loss is a mean over records. Not every one is:

    a mean over what masks or weights leave     the sum of all numerators / the sum of all denominators
    reduction="sum", and sums made by hand      the sum of the parts

So while a loss is computed, its terms are noted: at the one place where Keras reduces losses
(`keras.src.losses.loss.reduce_weighted_values`), and where layers add theirs (`Layer.add_loss`). What a
term is a mean over is read off there, before Keras divides by it. `corrected` then gives each term the
weight that it has in the whole batch, from totals of the ring.

A term that is only a number (a loss function that reduces by itself, `add_loss`) does not show what it
is a mean over: trainer/step/exactness.py finds out, with real records, and hands in verdicts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from edl.errors import ModelError
from edl.trainer.model.model_support import of_keras


class Kind(Enum):
    """The rule that computes a term of the whole batch from the terms of its parts."""

    MEAN = "mean"  # weighted with the records; also what depends on nothing but the model's weights
    RATIO = "ratio"  # weighted with its own denominator
    SUM = "sum"  # added
    UNKNOWN = "unknown"  # not determined yet


@dataclass(frozen=True)
class Verdict:
    """The kind that the trial has determined for an unknown term."""

    kind: Kind
    per_record: float | None = None  # values for each record, of a mean of values: must stay so


@dataclass(frozen=True, eq=False)
class Term:
    """One term of the loss of a batch."""

    name: str
    kind: Kind
    value: tf.Tensor  # a number
    denominator: tf.Tensor | None  # float32: what a mean is a mean over; None: it does not show


class Terms:
    """The terms of one loss, in the order in which they are computed.

    Args:
        records: the number of records of the batch, float32.
        plain: nothing but Keras' own code leads to its own losses: their values are records, or a fixed
            number for each.
        verdicts: for the unknown terms, in their order; None before they were found out.
        several: more than one loss will be `corrected`.
    """

    def __init__(
        self,
        records: tf.Tensor,
        plain: bool,
        verdicts: Sequence[Verdict] | None = None,
        several: bool = False,
    ) -> None:
        self.found: list[Term] = []
        self._records, self._plain = records, plain
        self._verdicts = None if verdicts is None else list(verdicts)
        # From the terms to the loss.
        self._tape = tf.GradientTape(persistent=several, watch_accessed_variables=False)
        self._open: list[tuple[keras.losses.Loss, int]] = []  # that are being computed; the terms before it

    @property
    def unknown(self) -> bool:
        """Whether the effect of the batch's size on a term is unknown."""
        return any(term.kind is Kind.UNKNOWN for term in self.found)

    @property
    def all_means(self) -> bool:
        """Whether the loss is a mean over records, so that nothing is to be corrected."""
        return all(term.kind is Kind.MEAN for term in self.found)

    @property
    def all_sums(self) -> bool:
        """Whether every term is a sum over the records."""
        return bool(self.found) and all(term.kind is Kind.SUM for term in self.found)

    def parts(self) -> tf.Tensor:
        """Return what `corrected` needs of this batch in the ring's totals: float32 [1 + RATIO terms]."""
        ratios = [t.denominator for t in self.found if t.kind is Kind.RATIO]
        return tf.stack([self._records, *ratios])

    def corrected(self, loss: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
        """The loss, such that its mean over the ring, weighted with records, is the loss of the whole batch.

        Args:
            loss: made of these terms, while they were `noted`.
            totals: the sum over the ring of all `parts`.
        """
        share = self._records / totals[0]
        weights = self._tape.gradient(
            loss, [t.value for t in self.found], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        nth = 0
        for term, weight in zip(self.found, weights, strict=True):
            if term.kind is Kind.RATIO:
                nth += 1
                ratio = tf.math.divide_no_nan(term.denominator, totals[nth]) / share
            elif term.kind is Kind.SUM:
                ratio = 1.0 / share
            else:
                continue
            extra = tf.stop_gradient(weight * tf.cast(ratio - 1.0, weight.dtype)) * term.value
            loss = loss + tf.cast(extra, loss.dtype)
        return loss

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside this context, the terms of a computed loss are noted."""
        with _PATCHING, self._tape:
            keras_loss.Loss.__call__ = lambda *a, **k: self._loss(*a, **k)
            keras_loss.reduce_weighted_values = self._reduce
            keras.layers.Layer.add_loss = lambda layer, loss: self._add_loss(layer, loss)
            try:
                yield
            finally:
                keras_loss.Loss.__call__ = _CALL
                keras_loss.reduce_weighted_values = _REDUCE
                keras.layers.Layer.add_loss = _ADD_LOSS

    # --- at the places where Keras makes terms

    def _loss(self, loss: keras.losses.Loss, *arguments: Any, **named: Any) -> tf.Tensor:
        self._open.append((loss, len(self.found)))
        try:
            return _CALL(loss, *arguments, **named)
        finally:
            self._open.pop()

    def _reduce(
        self,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> tf.Tensor:
        value = _REDUCE(values, sample_weight, mask, reduction, dtype)
        loss, before = self._open[-1] if self._open else (None, len(self.found))
        if len(self.found) > before:
            return value  # made of other losses, which are noted
        values = keras.ops.convert_to_tensor(values, dtype=dtype)
        if values.shape.rank == 0:
            return self._note("a loss function", Kind.UNKNOWN, value)
        if reduction in (None, "none"):
            if len(self._open) > 1:
                return value  # a user's own loss around it makes a number of these values, which is noted
            raise ModelError(
                f"a loss has reduction {reduction!r}, so it is no number; "
                'use "sum_over_batch_size", "mean_with_sample_weight" or "sum"'
            )
        if reduction == "sum":
            return self._note("a sum", Kind.SUM, value)
        if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            weights, mask = (None if t is None else tf.cast(t, values.dtype) for t in (sample_weight, mask))
            weights = keras_loss.apply_mask(weights, mask, values.dtype, reduction)
            return self._note("a weighted mean", Kind.RATIO, value, tf.reduce_sum(weights))
        if mask is not None:
            return self._note("a masked mean", Kind.RATIO, value, tf.reduce_sum(tf.cast(mask, tf.float32)))
        if any(n is None for n in values.shape[1:]):
            return self._note("a mean", Kind.RATIO, value, tf.size(values))
        kept = self._plain and of_keras(loss) and of_keras(getattr(loss, "fn", loss))
        return self._note("a mean", Kind.MEAN if kept else Kind.UNKNOWN, value, tf.size(values))

    def _add_loss(self, layer: keras.layers.Layer, loss: Any) -> None:
        def number(value: Any) -> Any:
            if not tf.is_tensor(value):
                return value  # Keras refuses it
            # As Keras will sum it.
            value = value if value.dtype.is_floating else tf.cast(value, keras.config.floatx())
            return self._note(f"add_loss() of layer {layer.name!r}", Kind.UNKNOWN, tf.reduce_sum(value))

        _ADD_LOSS(layer, [number(value) for value in keras.tree.flatten(loss)])

    def _note(self, name: str, kind: Kind, value: tf.Tensor, denominator: Any = None) -> tf.Tensor:
        denominator = None if denominator is None else tf.cast(denominator, tf.float32)
        if kind is Kind.UNKNOWN and self._verdicts is not None:
            verdict = self._verdicts.pop(0)
            kind = verdict.kind
            if verdict.per_record is not None:
                _assert_fixed(name, denominator, self._records, verdict.per_record)
        value = tf.identity(value)  # a distinct tensor, even where a loss returns a different loss unchanged
        self._tape.watch(value)
        self.found.append(Term(name, kind, value, denominator))
        return value


def _assert_fixed(name: str, count: tf.Tensor, records: tf.Tensor, per_record: float) -> None:
    fixed = tf.abs(count - per_record * records) < 0.5
    tf.debugging.Assert(fixed, [f"{name}: {BROKEN_ASSUMPTION}", per_record, count, records])


BROKEN_ASSUMPTION = "the loss is not a mean over a fixed number of values for each record"
_PATCHING = threading.RLock()  # Keras is one for all threads
_CALL = keras_loss.Loss.__call__
_REDUCE = keras_loss.reduce_weighted_values
_ADD_LOSS = keras.layers.Layer.add_loss
