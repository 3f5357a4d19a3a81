"""The trial at the start: the first records, in two parts and together, and what is told of it.

What is compared, and what follows from it, is trainer/exactness.py's. Here it is a batch that is divided, and
a user who is warned, or whose job ends before it has cost anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from edl.errors import ModelError
from trainer import arrays, batch_types
from trainer.batch_types import BatchTypes
from trainer.data import Batch
from trainer.exactness import Findings, Trial, tried
from trainer.forward import Forward
from trainer.loss_terms import Verdict
from trainer.model_support import is_half


@dataclass(frozen=True)
class Inexact:
    """What is done about a model that a ring does not train as Keras would (training.inexactLoss)."""

    choice: str = "warn"  # warn, refuse or allow
    warn: Callable[[str], None] = print

    def told(self, findings: Sequence[str]) -> None:
        """
        Raises:
            ModelError: there are some, and they are to be refused.
        """
        if not findings or self.choice == "allow":
            return
        words = (
            "a ring does not train this model as Keras alone would, because its loss or a layer of yours "
            f"mixes the records of a batch: {'; '.join(findings)}. What comes out depends on the number "
            "of workers (training.inexactLoss: allow accepts that, refuse ends such a job at its start)"
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


def try_model(model: keras.Model, types: BatchTypes, sample: Batch, inexact: Inexact) -> Findings:
    """Find out, with real records, whether a ring trains this model as Keras would.

    Raises:
        ModelError: it does not, and that is to be refused.
    """
    if len(sample) < 2:
        return Findings()  # then no batch is ever divided

    def attempt(part: list[Any], verdicts: Sequence[Verdict] | None, totals: tf.Tensor | None) -> Trial:
        forward = Forward(model, types.tree(part), tf.zeros([2], tf.int64), verdicts)
        loss = forward.loss
        if totals is not None:
            with forward.tape:
                loss = forward.terms.corrected(loss, totals)
        gradients = [g for g in forward.gradients(loss) if g is not None]
        return Trial(forward.terms, loss, gradients, forward.changes)

    parts, sizes = halves(sample)
    found = tried(attempt, parts, sizes, batch_types.leaves(sample), half=is_half(model))
    inexact.told(found.inexact)
    return found
