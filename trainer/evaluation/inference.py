# SPDX-License-Identifier: Apache-2.0
"""A model that is evaluated, or predicts, and is not trained: what the loop needs of it is its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.evaluation.reading_step import ReadingStep
from edl.trainer.model import snapshot
from edl.trainer.model.batch_types import divided, tensor_tree
from edl.trainer.model.fingerprint import fingerprint
from edl.trainer.model.model_support import moving
from edl.trainer.model.variable_spec import VariableSpec
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.ring.base import Vector

AT_ONCE = 256  # records that are predicted in one call


class InferenceLearner:
    """The state of a model that no step changes.

    Args:
        model: built.
        reduce: the ring's (trainer/ring/base.py).
        tables: whose rows are on servers.
    """

    can_catch_up = True

    def __init__(
        self, model: keras.Model, reduce: Callable[[Vector], Vector], tables: tuple[Table, ...] = ()
    ):
        self.model, self._reduce, self.tables = model, reduce, tables
        self._variables = [*model.trainable_variables, *moving(model)]

    def allreduce_step(
        self,
        batch: Batch | None,
        contribution: np.ndarray,
        step: int,
        rank: int,
        records: int,
        following: Following = nothing_follows,
    ) -> control.StepResult:
        """A step without records: it makes the last evaluation batch safe."""
        assert batch is None, "no record is trained on"
        began = time.monotonic()
        total = np.asarray(self._reduce(tf.constant(contribution)))
        return control.StepResult(control.read(total), False, time.monotonic() - began, total.nbytes, None)

    def apply(self, sums: control.StepResult) -> None:
        raise AssertionError("no record is trained on")

    def commit(self, step: int, sums: control.StepResult) -> Commit:
        """The outcome of a step without records."""
        return Commit(step, skipped=True, scale=0.0, learning_rate=0.0, iteration=0)

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        snapshot.change(self._variables, values)

    def kept(self) -> snapshot.Kept:
        """A copy of the state for `restore`, after something was tried."""
        return snapshot.Kept(self._variables)

    def restore(self, kept: snapshot.Kept) -> None:
        kept.put_back()

    has_loss = True

    def take_metrics(self) -> dict[str, Value]:
        return {}

    @property
    def nbytes(self) -> int:
        return snapshot.nbytes(self._variables)

    def variable_specs(self) -> list[VariableSpec]:
        return snapshot.variable_specs(self._variables, self.model)

    def parts(self) -> list[np.ndarray]:
        return snapshot.parts(self._variables)

    def prepared(self, parts: list[np.ndarray]) -> list[Any]:
        return snapshot.prepared(self._variables, parts)

    def take_over(self, values: list[Any]) -> None:
        snapshot.take_over(self._variables, values)

    def fingerprint(self) -> str:
        return fingerprint(self.model)

    def digest(self) -> str:
        return snapshot.digest(self.parts())


class Predictor:
    """Computes the model's outputs for a batch, by name.

    Args:
        sample: real records, to trace and to try it with.
        lookups: the lookups of the model's rows on servers; None if no rows are on servers.

    Raises:
        ModelError: its outputs are no arrays.
    """

    def __init__(self, model: keras.Model, sample: Batch, lookups: Lookups | None = None):
        self._run = ReadingStep(model, "predict_step", sample, _features, lookups)
        self._divided: tuple[Batch, list[Batch]] | None = None  # of the batch that is next
        self(sample)

    def __call__(self, batch: Batch, following: Following = nothing_follows) -> dict[str, np.ndarray]:
        """Return the outputs for a batch.

        Args:
            following: the batch that will be predicted next, if it is there already.
        """
        pieces, found = self._pieces(batch), list[dict[str, np.ndarray]]()

        def next_piece(at: int) -> Batch | None:
            if at + 1 < len(pieces):
                return pieces[at + 1]
            after = following()
            return self._pieces(after)[0] if after is not None else None

        for at, piece in enumerate(pieces):
            found.append(_named(self._run(piece, partial(next_piece, at))))
        return {name: np.concatenate([outputs[name] for outputs in found]) for name in found[0]}

    def _pieces(self, batch: Batch) -> list[Batch]:
        """The very same ones, if it is asked for the same batch again."""
        if self._divided is None or self._divided[0] is not batch:
            self._divided = batch, divided(batch, -(-len(batch) // AT_ONCE))
        return self._divided[1]


def _features(batch: Batch) -> Any:
    return (tensor_tree(batch)[0],)


def _named(outputs: Any) -> dict[str, np.ndarray]:
    if isinstance(outputs, Mapping):
        named = dict(outputs)
    elif isinstance(outputs, Sequence):
        named = {f"output_{number}": value for number, value in enumerate(outputs)}
    else:
        named = {"output": outputs}
    for name, value in named.items():
        if not isinstance(value, tf.Tensor):
            raise ModelError(f"the model's output {name!r} is a {type(value).__name__}, expected a tensor")
    return {str(name): value.numpy() for name, value in named.items()}
