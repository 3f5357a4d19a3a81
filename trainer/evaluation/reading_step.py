# SPDX-License-Identifier: Apache-2.0
"""A step of Keras that changes no weight (test_step, predict_step), for a sequence of batches.

Rows that are on servers are requested by batch, for all tables at once.

    ids     a graph runs the forward pass up to the ids, which makes those of each table unique
    ask     for their rows: for those of the next batch, while this one is computed
    step    a graph has the rows as further inputs

A model whose own step might ask for others, or that looks up rows where no graph can know the ids before,
asks while it runs, layer by layer: slower, with the same results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import DataError, ModelError
from edl.trainer.embedding.lookups import Asked, Lookups
from edl.trainer.model.model_support import output
from edl.trainer.records import arrays
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.runtime.log import log

NOT_HERE = DataError, ModelError, tf.errors.OpError, ValueError, TypeError  # told when the batch is computed


@dataclass(frozen=True, eq=False)
class _Known:
    """The ids that a batch looks up."""

    batch: Batch
    data: Any
    ids: list[np.ndarray]
    places: Sequence[tf.Tensor]
    asked: Asked | None = None


class ReadingStep:
    """A model's test_step or predict_step as a graph.

    Args:
        model: built.
        name: the name of the step: test_step or predict_step.
        sample: real records, to trace with; it is traced again for records of other shapes.
        given: features, or features, labels and weights, as tensors; the step is given what `fit` makes of
            them.
        lookups: the lookups of the model; None if none of its rows are on servers.
    """

    def __init__(
        self,
        model: keras.Model,
        name: str,
        sample: Batch,
        given: Callable[[Batch], Any],
        lookups: Lookups | None = None,
    ):
        self._model, self._given = model, given
        step = getattr(model, name)
        self._step: Callable[[Any], Any] = lambda data: step(keras.utils.pack_x_y_sample_weight(*data))
        self._lookups = lookups if lookups is not None and lookups.tables else None
        self._next: _Known | None = None
        self._ids: Callable[..., Any] | None = None  # None: layers ask while the step runs
        specs = keras.tree.map_structure(
            lambda a: None if a is None else arrays.spec(arrays.standard(a)), given(sample)
        )
        if self._lookups is not None and not model.run_eagerly and _is_of_keras(model, name):
            try:
                self._trace(self._lookups, specs)
                return
            except ModelError as error:
                log.info(f"rows are asked for layer by layer where the model is not trained: {error}")
        self._run: Any = self._step
        if not model.run_eagerly:
            self._run = _graph(self._step)
            self._run.get_concrete_function(specs)

    def _trace(self, lookups: Lookups, specs: Any) -> None:
        count = len(lookups.tables)

        def run(data: Any, *rows: tf.Tensor) -> Any:
            with lookups.given(rows[:count], rows[count:]).looked_up():
                return self._step(data)

        def find(x: Any) -> list[tf.Tensor]:
            recorder = lookups.recorder()
            with keras.StatelessScope(), recorder.looked_up():
                output(self._model, x, training=False)
            ids, places = recorder.unique()
            return [*ids, *places]

        graph, ids = _graph(run), _graph(find)
        graph.get_concrete_function(specs, *lookups.signature)
        ids.get_concrete_function(specs[0])
        self._run, self._ids = graph, ids

    def __call__(self, batch: Batch, following: Following = nothing_follows) -> Any:
        """Return what the step returns.

        Args:
            following: the batch that will be computed next, if it is there already.

        Raises:
            RingBroken: the ring was cut before the rows were here.
        """
        known, self._next = self._next, None
        if known is not None and known.batch is not batch:
            self._forget(known)
            known = None
        if self._lookups is None:
            return self._run(self._given(batch))
        if self._ids is None:
            with self._lookups.errors():
                return self._run(self._given(batch))
        known = known or self._look_up(batch)
        rows = self._lookups.read(known.ids, known.asked)
        self._next = self._ask_ahead(self._lookups, following())
        return self._run(known.data, *map(tf.constant, rows), *known.places)

    def _ask_ahead(self, lookups: Lookups, batch: Batch | None) -> _Known | None:
        if batch is None or not len(batch):
            return None
        with contextlib.suppress(*NOT_HERE):
            known = self._look_up(batch)
            return _Known(batch, known.data, known.ids, known.places, lookups.ask(known.ids))
        return None

    def _look_up(self, batch: Batch) -> _Known:
        assert self._ids is not None and self._lookups is not None
        data, count = self._given(batch), len(self._lookups.tables)
        found = self._ids(data[0])
        return _Known(batch, data, [some.numpy() for some in found[:count]], found[count:])

    def _forget(self, known: _Known) -> None:
        if known.asked is not None:
            known.asked.forget()


def _graph(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False, reduce_retracing=True)


def _is_of_keras(model: keras.Model, name: str) -> bool:
    return getattr(type(model), name) is getattr(keras.Model, name)
