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
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import DataError, ModelError
from trainer import arrays, control
from trainer.batch_norm import is_synchronized
from trainer.data import Batch
from trainer.exactness import Findings, Trial, tried
from trainer.fingerprint import fingerprint
from trainer.forward import Forward
from trainer.graphs import compiled
from trainer.inner_sum import InnerSum
from trainer.loss_terms import BROKEN_ASSUMPTION, Verdict
from trainer.model_support import (
    is_half,
    is_plain,
    is_scaled,
    moving,
    output,
    refuse_fixed_batches,
    refuse_unless_compiled,
    refuse_unless_float32,
)
from trainer.ring.base import Vector


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
        self._inexact, self._warn = inexact, warn
        refuse_unless_compiled(model)
        if sample is not None:
            self._build(sample)
        self._variables = _state_of(model)
        self._nothing: Callable[..., tf.Tensor]
        self._update: Callable[..., None]
        if sample is not None:
            self._trace(sample, others)

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
        salt = np.array([step, rank], np.int64) * _SALTS % _SEEDS
        with self._errors(batch):
            alive = (True,) if self._synchronized else ()
            return self._gradients(*tensors, contribution, salt, *alive)

    def nothing(self, contribution: np.ndarray) -> tf.Tensor:
        """The part of a rank that has no batch: weight zero.

        Raises:
            RingBroken: in a sum inside the step.
        """
        if self._inner_sum is not None and self._synchronized:  # it takes part in every sum
            with self._inner_sum.ring_errors():
                return self._gradients(*self._sample, contribution, np.zeros(2, np.int64), False)
        if self._inner_sum is not None and self._totals:
            self._inner_sum(tf.zeros([self._totals]))
        return self._nothing(contribution)

    def update(self, vector: tf.Tensor) -> None:
        """Take the ring's sum: one optimizer update with the exact mean gradient."""
        self._update(vector)

    def agreed(self, vector: tf.Tensor) -> control.Agreed:
        """What the control vector at the end of a summed vector says."""
        return control.read(np.asarray(memoryview(vector))[self.length :])

    def finish_training(self) -> None:
        """What Keras' `fit` does at its end, before the model is evaluated and saved. No step may follow.

        An optimizer with `use_ema` puts its averages in the place of the weights.
        """
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

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
        """Create every variable: weights, loss, optimizer slots. Changes no value that is there already."""
        model = self.model
        refuse_fixed_batches(model)
        before = [(v, v.numpy()) for v in model.variables]
        tensors = (arrays.tensor(leaf) for leaf in _leaves(_tree(sample)))
        x, y, weights = _unflatten(_tree(sample), tensors)
        y_pred = output(model, x, training=False)
        model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights, training=False)
        for v, value in before:
            v.assign(value)
        refuse_unless_float32(model)
        model.optimizer.build(model.trainable_variables)

    def _trace(self, sample: Batch, others: Sequence[Batch]) -> None:
        self._structure = _tree(sample)
        self._specs = [arrays.spec(leaf) for leaf in _leaves(self._structure)]
        self._known: list[tuple[Any, ...]] = []  # types of batches that need no comparison any more
        for batch in (sample, *others):
            self._widen(batch)
        self._layout: _Layout | None = None
        self._synchronized = is_synchronized(self.model)
        self._sample = _parts(_leaves(self._structure))
        self._totals = 0  # floats that a step sums before its gradients
        self._findings: Findings | None = None  # of a trial, where one was needed
        if not is_plain(self.model):
            self._findings = self._try(sample)
        while self._layout is None:
            try:
                self._trace_gradients(sample)
            except _NotTried:
                self._findings = self._try(sample)
            except _NeedsTotals as needs:
                self._totals = needs.count
        floats = tf.TensorSpec([None], tf.float32)
        self._nothing = compiled(lambda told: tf.concat([tf.zeros([self.length]), told], 0), floats)
        self._update = self._graph(self._update_graph, floats)

    def _trace_gradients(self, batch: Batch) -> None:
        """The graph for arrays of the present specs; for batches of any length, in rings of any size."""
        self._gradients = self._graph(
            self._gradients_graph,
            *tf.nest.flatten(self._specs, expand_composites=True),
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([2], tf.int64),
            *([tf.TensorSpec([], tf.bool)] if self._synchronized else []),
            # XLA cannot wait for a ring.
            jit=bool(self.model.jit_compile) and not self._totals and not self._synchronized,
        )
        if self.model.run_eagerly:  # nothing was traced: the layout is found by a step that is no ring's
            forward = self._forward(_leaves(_tree(batch)), tf.zeros([2], tf.int64))
            self._lay_out(forward, forward.gradients(forward.loss))

    def _graph(
        self, function: Callable[..., Any], *signature: tf.TensorSpec, jit: bool = False
    ) -> Callable[..., Any]:
        if self.model.run_eagerly:  # the user wants to see each step
            return lambda *values: function(*map(tf.convert_to_tensor, values))
        return compiled(function, *signature, jit=jit)

    def _try(self, sample: Batch) -> Findings:
        """Find out, with real records, whether a ring trains this model as Keras would."""
        leaves, size = _leaves(_tree(sample)), len(sample)
        if size < 2:
            return Findings()  # then no batch is ever divided

        def attempt(part: list[Any], verdicts: Sequence[Verdict] | None, totals: tf.Tensor | None) -> Trial:
            forward = self._forward(part, tf.zeros([2], tf.int64), verdicts)
            loss = forward.loss
            if totals is not None:
                with forward.tape:
                    loss = forward.terms.corrected(loss, totals)
            gradients = [g for g in forward.gradients(loss) if g is not None]
            return Trial(forward.terms, loss, gradients, forward.changes)

        first = size // 2
        parts = [[arrays.cut(leaf, *ends) for leaf in leaves] for ends in ((0, first), (first, size))]
        found = tried(attempt, parts, (first, size - first), leaves, half=is_half(self.model))
        if found.inexact and self._inexact != "allow":
            words = (
                "a ring does not train this model as Keras alone would, because its loss or a layer of yours "
                f"mixes the records of a batch: {'; '.join(found.inexact)}. What comes out depends on "
                "the number "
                "of workers (training.inexactLoss: allow accepts that, refuse ends such a job at its start)"
            )
            if self._inexact == "refuse":
                raise ModelError(words)
            self._warn(words)
        return found

    # --- batches

    def _compared(self, batch: Batch) -> list[Any]:
        """The batch's arrays, of types that the graph is for: it is traced anew where it has to be."""
        leaves = _leaves(_tree(batch))
        if _type(_tree(batch)) not in self._known:
            before, layout = self._specs, self._layout
            self._widen(batch)
            if self._specs != before:
                try:
                    self._trace_gradients(batch)
                except _NeedsTotals as needs:
                    raise DataError(
                        f"{_of(batch)} has other shapes than the first records, and the loss is a "
                        "mean over what "
                        "differs. Let feed() pad all batches alike, or the first five records differ as well"
                    ) from needs
                except (ValueError, TypeError, tf.errors.OpError) as error:
                    raise DataError(_not_both(batch, error)) from error
                assert layout is not None and self._layout is not None
                if layout.key != self._layout.key:
                    raise ModelError(
                        f"{_of(batch)} has other shapes, with which the model trains other variables"
                    )
        return _parts(leaves)

    def _widen(self, batch: Batch) -> None:
        """Have the specs cover this batch too.

        Raises:
            DataError: no graph could be for it and those before it.
        """
        tree = _tree(batch)
        names, expected = _names(tree), _names(self._structure)
        if names != expected:
            raise DataError(
                f"{_of(batch)} has the arrays {', '.join(names)}, but the first had "
                f"{', '.join(expected)}; all "
                "batches must have the same"
            )
        specs, leaves = [], _leaves(tree)
        for name, traced, leaf in zip(names, self._specs, leaves, strict=True):
            wider = arrays.wider(traced, leaf)
            if isinstance(wider, str):
                raise DataError(f"{_of(batch)}: {name} {wider}")
            specs.append(wider)
        self._specs = specs
        self._known.append(_type(tree))

    @contextlib.contextmanager
    def _errors(self, batch: Batch) -> Iterator[None]:
        """What a step raises, in our words."""
        with self._inner_sum.ring_errors() if self._inner_sum else contextlib.nullcontext():
            try:
                yield
            except tf.errors.InvalidArgumentError as error:
                if BROKEN_ASSUMPTION in str(error):
                    raise ModelError(
                        f"{_of(batch)}: {BROKEN_ASSUMPTION}, as it was in the first records. Let the "
                        "loss be a mean "
                        'over records, or use reduction="mean_with_sample_weight" and weights of zero'
                    ) from error
                if _type(_tree(batch)) != self._known[0]:
                    raise DataError(_not_both(batch, error)) from error
                raise

    # --- the graphs

    @property
    def length(self) -> int:
        """Of what lies in front of the control vector."""
        assert self._layout is not None
        return self._layout.length

    def _forward(
        self,
        leaves: list[Any],
        salt: tf.Tensor,
        verdicts: Sequence[Verdict] | None = None,
        ring: InnerSum | None = None,
        alive: Any = True,
    ) -> Forward:
        if verdicts is None and self._findings is not None:
            verdicts = self._findings.verdicts
        tree = _unflatten(self._structure, map(arrays.tensor, leaves))
        return Forward(self.model, tree, salt, verdicts, ring, alive)

    def _is_sum(self, forward: Forward) -> bool:
        """Whether the loss of a batch is the sum of those of its parts, so that nothing is divided."""
        return forward.terms.all_sums and not forward.more_than_terms and not is_scaled(self.model)

    def _require(self, forward: Forward) -> None:
        """
        Raises:
            _NotTried, _NeedsTotals: what the step of this model takes, and is not there yet.
        """
        terms = forward.terms
        counters = [v for v, _, _ in forward.changes if not keras.backend.is_float_dtype(v.dtype)]
        if self._findings is None and (terms.unknown or counters):
            raise _NotTried
        exact = terms.all_means or self._is_sum(forward)
        if not self._totals and (is_scaled(self.model) or not exact):
            raise _NeedsTotals(terms.parts().shape[0])

    def _lay_out(self, forward: Forward, gradients: list[tf.Tensor | None]) -> _Layout:
        self._require(forward)
        summed = self._findings.summed if self._findings else frozenset()
        divided = not (is_scaled(self.model) or (self._is_sum(forward) and not self._totals))
        self._layout = _Layout.of(self.model, forward, gradients, summed, divided)
        return self._layout

    def _gradients_graph(self, *arguments: tf.Tensor) -> tf.Tensor:
        # Where layers sum over the ring, a rank without records takes part with the sample, not `alive`.
        *tensors, contribution, salt, alive = arguments if self._synchronized else (*arguments, None)
        ring = self._inner_sum if self._synchronized else None
        leaves = tf.nest.pack_sequence_as(self._specs, tensors, expand_composites=True)
        forward = self._forward(leaves, salt, ring=ring, alive=alive)
        self._require(forward)
        records, loss, scaled = forward.records, forward.loss, is_scaled(self.model)
        with forward.tape:
            if self._totals:
                assert self._inner_sum is not None, "this model needs a ring inside its steps"
                parts = forward.terms.parts()
                totals = self._inner_sum(parts if alive is None else tf.where(alive, parts, 0))
                loss = forward.terms.corrected(loss, totals)
            # The loss is weighted before it is differentiated: one product instead of one for each variable.
            told = loss if self._is_sum(forward) and not self._totals else loss * records
            # In 16 bits too large a number is lost: nothing larger than what Keras has for the whole batch.
            weighted = self.model.optimizer.scale_loss(loss * (records / totals[0]) if scaled else told)
            weighted = weighted if alive is None else tf.where(alive, weighted, 0)
        gradients = forward.gradients(weighted)
        layout = self._lay_out(forward, gradients)
        after = {id(v): (before, value) for v, before, value in forward.changes}
        parts = [tf.reshape(g, [-1]) for g in gradients if g is not None]
        parts += [tf.reshape(after[id(v)][1], [-1]) * records for v in layout.averaged]
        for v in layout.counters:
            old, new = (tf.cast(value, tf.float32) for value in after[id(v)])
            parts.append(tf.reshape(new - old, [-1]) * (1.0 if v.path in layout.summed else records))
        if scaled:  # the optimizer looks at the sum of the gradients by itself, and takes smaller steps
            finite = tf.math.is_finite(loss)
        else:
            # A sum is finite when all of its parts are (or so large that they are as bad): one cheap pass.
            finite = tf.math.is_finite(weighted + tf.add_n([tf.reduce_sum(part) for part in parts]))
        ours = tf.stack([records, told, contribution[control.LEAVE], 1.0 - tf.cast(finite, tf.float32)])
        vector = tf.concat([*parts, ours], 0)
        if alive is not None:
            mask = tf.one_hot(self.length + control.LEAVE, tf.shape(vector)[0])
            vector = tf.where(alive, vector, mask * contribution[control.LEAVE])
        return tf.concat([vector, contribution[control.IDLE :]], 0)

    def _update_graph(self, vector: tf.Tensor) -> None:
        layout, model = self._layout, self.model
        assert layout is not None
        share = 1.0 / vector[layout.length + control.RECORDS]
        pieces = iter(tf.split(vector, [*layout.sizes, -1]))
        gradients = {
            id(v): tf.reshape(piece * share if layout.divided else piece, v.shape)
            for v, piece in zip(layout.trained, pieces, strict=False)
        }
        # What the forward pass assigns comes first, as it does in Keras: it may be a weight that is trained.
        for v, piece in zip(layout.averaged, pieces, strict=False):
            v.assign(tf.reshape(piece * share, v.shape))
        for v, piece in zip(layout.counters, pieces, strict=False):
            raised = tf.reshape(piece if v.path in layout.summed else piece * share, v.shape)
            v.assign(tf.cast(tf.cast(v.value, tf.int64) + tf.cast(tf.round(raised), tf.int64), v.dtype))
        model.optimizer.apply_gradients([(gradients.get(id(v)), v) for v in model.trainable_variables])


@dataclass(frozen=True, eq=False)
class _Layout:
    """What lies where in the vector, in front of the control vector, and what it means."""

    trained: list[keras.Variable]
    averaged: list[keras.Variable]  # moving averages: changed by the forward pass
    counters: list[keras.Variable]  # likewise, but whole numbers or truth values, of which the change is sent
    summed: frozenset[str]  # paths of counters that count records; the others count steps
    divided: bool  # whether gradients are sums of means times records

    @staticmethod
    def of(
        model: keras.Model,
        forward: Forward,
        gradients: list[tf.Tensor | None],
        summed: frozenset[str],
        divided: bool,
    ) -> _Layout:
        trained = [v for v, g in zip(model.trainable_variables, gradients, strict=True) if g is not None]
        if not trained:
            raise ModelError(
                "no trainable variable of the model influences the loss: nothing would be trained"
            )
        changed = [v for v, _, _ in forward.changes]
        floats = [v for v in changed if keras.backend.is_float_dtype(v.dtype)]
        for v in floats:
            if v.dtype != "float32":
                raise ModelError(
                    f"variable {v.path!r} of type {v.dtype} changes in the forward pass; of floating-point "
                    "variables, only float32 can (they are averaged over the ring)"
                )
        counters = [v for v in changed if not keras.backend.is_float_dtype(v.dtype)]
        return _Layout(trained, floats, counters, summed, divided)

    @property
    def all(self) -> list[keras.Variable]:
        return [*self.trained, *self.averaged, *self.counters]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layouts that are."""
        return [*map(id, self.all)], len(self.trained), len(self.averaged), self.divided

    @property
    def sizes(self) -> list[int]:
        return [int(np.prod(v.shape)) for v in self.all]

    @property
    def length(self) -> int:
        return sum(self.sizes)


class _NotTried(Exception):
    """It takes real records to know how this model's step is made of parts."""


class _NeedsTotals(Exception):
    """The gradients of this model depend on totals of the ring."""

    def __init__(self, count: int):
        self.count = count


# Odd constants, so that (step, rank) spreads over the two words of a seed.
_SALTS = np.array([2654435761, 2246822519], np.int64)
_SEEDS = 1 << 31


def _state_of(model: keras.Model) -> list[keras.Variable]:
    return [*model.trainable_variables, *moving(model), *model.optimizer.variables]


def _of(batch: Batch) -> str:
    return f"the batch of {batch}"


def _not_both(batch: Batch, error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "[[" not in line]
    return (
        f"{_of(batch)} has other shapes than the batches before it, and the model does not take both: "
        f"{lines[-1] if lines else type(error).__name__}"
    )


def _tree(batch: Batch) -> Any:
    return batch.x, batch.y, batch.weights


def _type(tree: Any) -> tuple[Any, ...]:
    """Equal for batches that one graph takes without a comparison. Cheap: it is made of each batch."""
    if isinstance(tree, dict):
        return ("dict", *((key, _type(tree[key])) for key in sorted(tree)))
    if isinstance(tree, list | tuple):
        return ("list", *map(_type, tree))
    return () if tree is None else arrays.key(tree)


def _leaves(tree: Any) -> list[Any]:
    """The arrays in a fixed order, in the types that Keras would give the model."""
    return [arrays.standard(a) for a in keras.tree.flatten(tree) if a is not None]


def _parts(leaves: list[Any]) -> list[Any]:
    """The tensors that ragged and sparse arrays are made of, in their place."""
    if any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in leaves):
        return tf.nest.flatten(leaves, expand_composites=True)
    return leaves


def _unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    return keras.tree.map_structure(lambda a: None if a is None else next(leaves), structure)


def _names(tree: Any) -> list[str]:
    """Of the leaves, as the user knows them."""
    found = []
    for path, leaf in keras.tree.flatten_with_path(tree):
        if leaf is not None:
            inside = "".join(f"[{key!r}]" for key in path[1:])
            found.append(("features", "labels", "weights")[path[0]] + inside)
    return found
