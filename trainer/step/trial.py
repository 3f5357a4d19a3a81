# SPDX-License-Identifier: Apache-2.0
"""The trial at the start: run the first records in two parts and together, and report the result.

trainer/step/exactness.py does the comparison and draws the conclusions. This module divides the batch, and
warns the user or ends the job before it has cost anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.model import batch_types
from edl.trainer.model.batch_types import BatchTypes
from edl.trainer.model.model_support import is_half, is_plain
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch
from edl.trainer.step import exactness
from edl.trainer.step.exactness import Findings, Trial, tried
from edl.trainer.step.forward import Forward
from edl.trainer.step.loss_terms import Verdict


@dataclass(frozen=True)
class Inexact:
    """The reaction to a model that a ring does not train as Keras would (training.onInexactLoss)."""

    choice: str = "warn"  # warn, refuse or allow
    warn: Callable[[str], None] = print

    def told(self, findings: Sequence[str], sums: Sequence[str] = ()) -> None:
        """React to the findings.

        Args:
            findings: what mixes the records of a batch.
            sums: what adds them up.

        Raises:
            ModelError: there are some, and they are to be refused.
        """
        if not (findings or sums) or self.choice == "allow":
            return
        why = []
        if sums:
            why.append(
                f"its train_step() adds the records of a batch up: {'; '.join(sums)}. Give tape.gradient() "
                "their mean, keras.ops.mean(loss)"
            )
        if findings:
            why.append(f"its loss or a layer mixes the records of a batch: {'; '.join(findings)}")
        words = (
            f"a ring does not train this model as Keras alone would, because {'; and because '.join(why)}. "
            "What comes out depends on the number of workers (training.onInexactLoss: allow accepts that, "
            "refuse ends such a job at its start)"
        )
        if self.choice == "refuse":
            raise ModelError(words)
        self.warn(words)


def halves(batch: Batch) -> tuple[list[list[Any]], tuple[int, int]]:
    """The arrays of two parts of it, unlike in size where they can be, and their records."""
    size, first = len(batch), len(batch) // 2
    found = batch_types.leaves(batch)
    parts = [[arrays.cut(leaf, *ends) for leaf in found] for ends in ((0, first), (first, size))]
    return parts, (first, size - first)


def doubled(batch: Batch) -> list[Any]:
    """Its arrays, each with all records twice: what is looked up for each record is looked up twice as often.

    Two parts of a batch would not show it. Where equal ids of a batch are looked up once, as feature columns
    do, the rows of the parts may add up to those of the batch by chance.
    """
    return [arrays.doubled(leaf) for leaf in batch_types.leaves(batch)]


def try_model(model: keras.Model, types: BatchTypes, sample: Batch, inexact: Inexact) -> Findings:
    """Find out, with real records, whether a ring trains this model as Keras would.

    Raises:
        ModelError: it does not, and that is to be refused.
    """
    if len(sample) < 2:
        return Findings()  # then no batch is ever divided

    def attempt(
        part: list[Any], verdicts: Sequence[Verdict] | None, totals: tf.Tensor | None, backward: bool = True
    ) -> Trial:
        forward = Forward(model, types.tree(part), tf.zeros([2], tf.int64), verdicts)
        loss = forward.loss
        if totals is not None:
            with forward.tape:
                loss = forward.terms.corrected(loss, totals)
        gradients = [g for g in forward.gradients(loss) if g is not None] if backward else []
        outputs = [y for y in keras.tree.flatten(forward.y_pred) if isinstance(y, tf.Tensor)]
        return Trial(forward.terms, loss, gradients, outputs, forward.changes)

    parts, sizes = halves(sample)
    given = parts, sizes, batch_types.leaves(sample), is_half(model)
    found = exactness.tried_forward(partial(attempt, backward=False), *given) if is_plain(model) else None
    if found is None:
        found = tried(attempt, *given)
    inexact.told(found.inexact)
    return found


@dataclass(frozen=True, eq=False)
class Run:
    """The result of a model's own step for some records."""

    sums: list[np.ndarray]  # what it contributed to each of its sums over the ring
    changes: np.ndarray  # of what it assigns by itself, times the records
    rows: list[int]  # that it looked up, of each gradient that an optimizer takes row by row


# Runs the step on the parts of a batch, with the totals of its sums; None for the sums of its own records.
Runs = Callable[[list[Any], int, "list[np.ndarray] | None"], Run]


@dataclass(frozen=True)
class OwnStepFindings:
    """The result of trying a model's own step.

    Args:
        mixed, summed: what depends on how a batch is divided, in words: it mixes the records, or adds them up
            where a mean over them is expected.
        added_up: which gradients have rows that are not looked up by records (as in
            trainer/step/contribution.py).
    """

    mixed: tuple[str, ...]
    summed: tuple[str, ...]
    added_up: frozenset[int]


def try_own_step(run: Runs, names: Callable[[], list[str]], sample: Batch, half: bool) -> OwnStepFindings:
    """Find what in a model's own step depends on how a batch is divided.

    Two parts of a batch take the step as the ranks of a ring would: each of its sums has the total that it
    has for the whole batch. What the two contribute to it should add up to just that.

    Args:
        names: of the optimizers that have made the sums, after a run.
        half: the model computes in 16 bits.
    """
    parts, sizes = halves(sample)
    tolerance = exactness.HALF_TOLERANCE if half else exactness.TOLERANCE
    with exactness.records_alone(sizes):
        whole, again = (run(batch_types.leaves(sample), len(sample), None) for _ in range(2))
        one, other = (run(part, size, whole.sums) for part, size in zip(parts, sizes, strict=True))
    counts = zip(whole.rows, run(doubled(sample), 2 * len(sample), None).rows, strict=True)
    added_up = frozenset(nth for nth, (once, twice) in enumerate(counts) if twice != 2 * once)
    if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(whole.sums, again.sums, strict=True)):
        # It draws random numbers that cannot be seeded: a difference proves nothing.
        return OwnStepFindings((), (), added_up)
    found, summed = [], []
    for name, a, b, total in zip(names(), one.sums, other.sums, whole.sums, strict=True):
        off = exactness.difference(a, b, total)
        if off > tolerance and _off_from_sum(a, b, total, (*sizes, len(sample))) <= tolerance:
            summed.append(
                f"the gradients for optimizer {name!r} are those of the sum of {len(sample)} losses, one for "
                "each record, as tape.gradient() makes it of a loss that is not one number. A ring takes the "
                "mean over its workers, so from N workers they are about 1/N of what they are in Keras"
            )
        elif off > tolerance:
            found.append(
                f"the gradients for optimizer {name!r} from {len(sample)} records differ by {off:.1%} from "
                f"those of {sizes[0]} and {sizes[1]} of them put together"
            )
    off = exactness.difference(one.changes, other.changes, whole.changes)
    if off > tolerance:
        found.append(f"what {sizes[0]} and {sizes[1]} records assign differs by {off:.1%} from what all do")
    return OwnStepFindings(tuple(found), tuple(summed), added_up)


def _off_from_sum(
    ours: np.ndarray, other: np.ndarray, whole: np.ndarray, records: tuple[int, int, int]
) -> float:
    """Compute how far the contributions of two parts of a batch and of the whole are from a sum over records.

    Each contribution comes multiplied by its number of records, and its last number is that number.
    """
    a, b, c = (v[:-1] / n for v, n in zip((ours, other, whole), records, strict=True))
    return exactness.difference(a, b, c)
