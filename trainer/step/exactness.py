# SPDX-License-Identifier: Apache-2.0
"""Whether the step of a ring is the step that Keras would make: tried once, with a few real records.

A ring computes the parts of a batch one by one. From them follows what Keras makes of the whole batch,
if its loss is made of means and sums over records. Any layer or loss may break that, Keras' own too
(UnitNormalization(axis=0), losses.Circle). So it is tried at the start: two parts of a batch and the whole of
it, and what the ring would make of the two is compared with what the whole one gives.

    the outputs and the loss                    do they depend on other records of the batch?
    a term of the loss that is only a number    is it a mean or a sum?
    a counter that the forward pass raises      once for each step, or for each record?
    the gradient                                is it the one of the whole batch?

For a model made of Keras' own code, only the first is checked, in three forward passes of a few records
(`tried_forward`). A user's code can change a gradient alone, so its gradients are compared (`tried`).

So that a difference means something, random layers draw the same for every record meanwhile, and
BatchNormalization, whose statistics are those of a worker's part (docs/models.md), uses its averages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from edl.errors import ModelError
from edl.trainer.step.loss_terms import Kind, Term, Terms, Verdict

TOLERANCE = 1e-3  # float32 adds up in another order: some 1e-5. What is no mean is 1e-2 and more off
HALF_TOLERANCE = 5e-2


@dataclass(frozen=True, eq=False)
class Trial:
    """The result of a forward and backward pass of some records."""

    terms: Terms
    loss: tf.Tensor
    gradients: list[tf.Tensor]  # none of a forward pass alone
    outputs: list[tf.Tensor]  # dense ones
    changes: list[tuple[keras.Variable, tf.Tensor, tf.Tensor]]  # see trainer/step/forward.py


# Runs some records, given the verdicts and the ring's totals, as far as they are known.
Try = Callable[[Any, "Sequence[Verdict] | None", "tf.Tensor | None"], Trial]


@dataclass(frozen=True)
class Findings:
    """The result of the trial."""

    verdicts: tuple[Verdict, ...] | None = None  # for the terms that were unknown
    summed: frozenset[str] = frozenset()  # paths of counters whose increments add up; others are raised once
    inexact: tuple[str, ...] = ()  # what depends on how a batch is divided, in words


def tried(
    attempt: Try, parts: Sequence[Any], sizes: tuple[int, int], whole: Any, half: bool = False
) -> Findings:
    """Compare the parts of a batch with the whole batch.

    Args:
        attempt: runs some records, given the verdicts and the totals of the ring.
        half: the model computes in 16 bits.

    Raises:
        ModelError: the forward pass changes a whole number in a way that a ring cannot follow.
    """
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    with records_alone(sizes):
        first = [attempt(records, None, None) for records in (*parts, whole)]
        unknown = [[t for t in trial.terms.found if t.kind is Kind.UNKNOWN] for trial in first]
        verdicts = tuple(_verdict(a, b, c, sizes) for a, b, c in zip(*unknown, strict=True))
        known = [attempt(records, verdicts, None).terms.parts() for records in parts]
        one, other = (attempt(records, verdicts, known[0] + known[1]) for records in parts)
        all_of_it = first[2]  # Keras' own word
        with _raised([v for v, _, _ in all_of_it.changes if "int" in v.dtype]):
            again = [attempt(records, None, None) for records in (*parts, whole)]
    inexact = []
    off = _off(_flat(one), _flat(other), _flat(all_of_it), sizes)
    if off > tolerance:
        inexact.append(
            f"the gradient of {sum(sizes)} records differs by {off:.1%} from that of {sizes[0]} and "
            f"{sizes[1]} of them put together"
        )
    inexact += _inexact_averages(one, other, all_of_it, sizes, tolerance)
    summed = set()
    for nth, (v, _, _) in enumerate(all_of_it.changes):
        if keras.backend.is_float_dtype(v.dtype):
            continue
        a, b, c = (_increment(t, nth) for t in first)
        steady = v.dtype == "bool" or all(
            np.array_equal(_increment(t, nth), _increment(u, nth)) for t, u in zip(first, again, strict=True)
        )
        if steady and np.array_equal(a, c) and np.array_equal(b, c):
            continue
        if steady and np.array_equal(a + b, c):
            summed.add(v.path)
            continue
        raise ModelError(
            f"the forward pass changes variable {v.path!r} of type {v.dtype} neither by the same for "
            "every batch "
            "(then the ring would, too) nor by something for every record (then the ring would add it up)"
        )
    return Findings(verdicts, frozenset(summed), tuple(inexact))


def tried_forward(
    attempt: Try, parts: Sequence[Any], sizes: tuple[int, int], whole: Any, half: bool = False
) -> Findings | None:
    """Compare the outputs and the loss of two parts of a batch with those of the whole.

    Args:
        attempt: as in `tried`, without a backward pass.

    Returns:
        None if `tried` must find out more: it is not known of what a term of the loss is a mean, or whole
        numbers change.
    """
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    drawn, trials = random.getstate(), []
    with records_alone(sizes):
        for records in (*parts, whole):
            random.setstate(drawn)  # AugMix draws from it
            trials.append(attempt(records, None, None))
    one, other, all_of_it = trials
    counters = [v for v, _, _ in all_of_it.changes if not keras.backend.is_float_dtype(v.dtype)]
    if all_of_it.terms.unknown or counters:
        return None
    totals = one.terms.parts() + other.terms.parts()
    ours, others = ([np.asarray(t.terms.corrected(t.loss, totals), np.float64)] for t in (one, other))
    off = _off(ours, others, [np.asarray(all_of_it.loss, np.float64)], sizes)
    inexact = []
    if off > tolerance:
        inexact.append(f"the loss {_of(sizes, off)}")
    outputs = [[np.asarray(array, np.float64) for array in t.outputs] for t in (one, other, all_of_it)]
    together = [np.concatenate(pair) for pair in zip(*outputs[:2], strict=True)]
    off = 1.0
    if [a.shape for a in together] == [a.shape for a in outputs[2]]:
        off = _difference(together, outputs[2], [together])
    if off > tolerance:
        inexact.append(f"the model's outputs {_of(sizes, off)}")
    return Findings((), inexact=(*inexact, *_inexact_averages(one, other, all_of_it, sizes, tolerance)))


def _of(sizes: tuple[int, int], off: float) -> str:
    return f"of {sum(sizes)} records differ by {off:.1%} from those of {sizes[0]} and {sizes[1]} of them"


def _inexact_averages(
    one: Trial, other: Trial, whole: Trial, sizes: tuple[int, int], tolerance: float
) -> list[str]:
    """The floating-point variables whose change in the forward pass depends on how a batch is divided."""
    found = []
    for nth, (v, _, _) in enumerate(whole.changes):
        if keras.backend.is_float_dtype(v.dtype):
            a, b, c = ([np.asarray(t.changes[nth][2], np.float64)] for t in (one, other, whole))
            off = _off(a, b, c, sizes)
            if off > tolerance:
                found.append(f"variable {v.path!r}, which the forward pass changes, differs by {off:.1%}")
    return found


def _increment(trial: Trial, nth: int) -> np.ndarray:
    _, before, after = trial.changes[nth]
    return np.asarray(after).astype(np.int64) - np.asarray(before).astype(np.int64)


@contextmanager
def _raised(counters: list[keras.Variable]) -> Iterator[None]:
    """Inside this context, the counters are 100 higher: their changes should not depend on their values."""
    before = [(v, v.numpy()) for v in counters]
    try:
        for v, value in before:
            v.assign(value + np.asarray(100, value.dtype))
        yield
    finally:
        for v, value in before:
            v.assign(value)


def _verdict(a: Term, b: Term, whole: Term, sizes: tuple[int, int]) -> Verdict:
    if whole.denominator is not None:  # a mean over values: how many are there for each record?
        counts = [float(np.asarray(t.denominator)) for t in (a, b, whole)]
        each = counts[2] / sum(sizes)
        fixed = np.allclose(counts, [each * n for n in (*sizes, sum(sizes))], rtol=1e-6)
        return Verdict(Kind.MEAN, each) if fixed else Verdict(Kind.RATIO)
    values = [float(t.value) for t in (a, b, whole)]
    mean = np.average(values[:2], weights=sizes)
    total = sum(values[:2])
    # What is neither is taken for a mean; the gradients then tell that it is none.
    return Verdict(Kind.SUM if abs(total - values[2]) < abs(mean - values[2]) else Kind.MEAN)


def _flat(trial: Trial) -> list[np.ndarray]:
    return [np.asarray(t, np.float64) for t in (trial.loss, *trial.gradients)]


def _off(
    one: list[np.ndarray], other: list[np.ndarray], whole: list[np.ndarray], sizes: tuple[int, int]
) -> float:
    """The difference between the weighted mean of two parts and the whole; as `_difference`."""
    shares = [size / sum(sizes) for size in sizes]
    ring = [shares[0] * a + shares[1] * b for a, b in zip(one, other, strict=True)]
    return _difference(ring, whole, [one, other])


def _difference(ring: list[np.ndarray], whole: list[np.ndarray], parts: list[list[np.ndarray]]) -> float:
    """Return the ring's difference from the whole batch, relative to the largest value; 0 if it is undefined.

    The largest value may be that of a part, since parts may nearly cancel each other.
    """
    size = max(_norm(arrays) for arrays in (ring, whole, *parts))
    off = _norm([a - b for a, b in zip(ring, whole, strict=True)])
    return off / size if np.isfinite(off) and np.isfinite(size) and size > 0 else 0.0


def _norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(a)) for a in arrays)))


def difference(ours: np.ndarray, other: np.ndarray, whole: np.ndarray) -> float:
    """The difference between the sum of two parts of a batch and the whole; as `_difference`."""
    parts = [np.asarray(a, np.float64) for a in (ours, other)]
    return _difference([parts[0] + parts[1]], [np.asarray(whole, np.float64)], [[a] for a in parts])


@contextmanager
def records_alone(sizes: tuple[int, int]) -> Iterator[None]:
    """Inside this context, Keras' layers compute each record independently of its batch, as far as they can.

    Args:
        sizes: the sizes of the two parts of a batch.
    """
    counts = {*sizes, sum(sizes)}

    def alike(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def drawn(shape: Any, *arguments: Any, **named: Any) -> tf.Tensor:
            shape = [int(n) for n in shape]
            # A step of one's own may draw for two batches at once, of real and generated records.
            if not shape or not any(shape[0] and shape[0] % n == 0 for n in counts):
                return draw(shape, *arguments, **named)
            return tf.broadcast_to(draw([1, *shape[1:]], *arguments, **named), shape)

        return drawn

    normalize = keras.layers.BatchNormalization.call
    draws = {name: getattr(backend.random, name) for name in (*_BY_SHAPE, "dropout")}
    elastic = backend.image.elastic_transform
    try:
        keras.layers.BatchNormalization.call = lambda layer, inputs, training=None, mask=None: normalize(
            layer, inputs, training=False, mask=mask
        )
        for name in _BY_SHAPE:
            setattr(backend.random, name, alike(draws[name]))
        backend.random.dropout = lambda inputs, *_, **__: inputs
        backend.image.elastic_transform = lambda images, *_, **__: images  # draws by itself
        yield
    finally:
        keras.layers.BatchNormalization.call = normalize
        backend.image.elastic_transform = elastic
        for name, draw in draws.items():
            setattr(backend.random, name, draw)


_BY_SHAPE = ("normal", "uniform", "truncated_normal", "randint")
