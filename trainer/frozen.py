"""A model that is evaluated, or predicts, and is not trained: what the loop needs of it is its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from trainer import arrays, control, snapshot
from trainer.batch_types import divided, tensor_tree
from trainer.data import Batch
from trainer.described import Described
from trainer.fingerprint import fingerprint
from trainer.model_support import moving
from trainer.ring.base import Vector
from trainer.roles import Commit, Table

AT_ONCE = 256  # records that are predicted in one call


class FrozenLearner:
    """The state of a model that no step changes.

    Args:
        model: built.
        reduce: the ring's (trainer/ring/base.py).
    """

    follows = True

    def __init__(self, model: keras.Model, reduce: Callable[[Vector], Vector]):
        self.model, self._reduce = model, reduce
        self._variables = [*model.trainable_variables, *moving(model)]

    def sums(
        self, batch: Batch | None, contribution: np.ndarray, step: int, rank: int, records: int
    ) -> control.Sums:
        """A step without records: it makes the last round safe."""
        assert batch is None, "no record is trained on"
        began = time.monotonic()
        total = np.asarray(self._reduce(tf.constant(contribution)))
        return control.Sums(control.read(total), False, time.monotonic() - began, total.nbytes, None)

    def apply(self, sums: control.Sums) -> None:
        raise AssertionError("no record is trained on")

    tables: tuple[Table, ...] = ()

    def commit(self, step: int, sums: control.Sums) -> Commit:
        """Of a step without records."""
        return Commit(step, skipped=True, scale=0.0, learning_rate=0.0, iteration=0)

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        snapshot.change(self._variables, values)

    def take_metrics(self) -> dict[str, float]:
        return {}

    @property
    def nbytes(self) -> int:
        return snapshot.nbytes(self._variables)

    def described(self) -> list[Described]:
        return snapshot.described(self._variables, self.model)

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


def predictor(model: keras.Model, sample: Batch) -> Callable[[Batch], dict[str, np.ndarray]]:
    """What gives the model's outputs for a batch, by name.

    Raises:
        ModelError: its outputs are no arrays.
    """
    step = model.predict_step
    run = (
        step
        if model.run_eagerly
        else tf.function(lambda data: step(data), autograph=False, reduce_retracing=True)
    )
    if not model.run_eagerly:
        spec = lambda a: arrays.spec(arrays.standard(a))  # noqa: E731
        run.get_concrete_function((keras.tree.map_structure(spec, sample.x),))

    def predict(batch: Batch) -> dict[str, np.ndarray]:
        found: list[dict[str, np.ndarray]] = []
        for piece in divided(batch, -(-len(batch) // AT_ONCE)):
            x, _, _ = tensor_tree(piece)
            found.append(_named(run((x,))))
        return {name: np.concatenate([outputs[name] for outputs in found]) for name in found[0]}

    predict(sample)
    return predict


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
