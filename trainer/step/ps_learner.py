# SPDX-License-Identifier: Apache-2.0
"""A model with all weights on parameter servers (mode=ps): a step returns gradients, and changes nothing.

    put         set the weights to those on the servers
    gradients   means over the step's records, for every trained weight, as rows

It is the learner of a ring of one, and never applies an update: the servers do, with the model's optimizer.
Changes by a forward pass (moving averages) are sent as differences that the servers add.

Values that are neither on servers nor computed anew by each worker (the learning rate, counters that
callbacks may change) are small, and are stored beside the ledger: `beside`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.embedding.dense_rows import DIM, DenseRows
from edl.trainer.embedding.interfaces import Table
from edl.trainer.embedding.table_specs import OPTIMIZERS, ZEROS
from edl.trainer.model.captured import distinct
from edl.trainer.model.model_support import moving
from edl.trainer.ps_client.interfaces import StepGradients
from edl.trainer.records.batches import Batch
from edl.trainer.runtime.serialization import decode, encode
from edl.trainer.step.layout import Layout
from edl.trainer.step.learner import KerasLearner

DENSE, MOVING = "edl/dense", "edl/moving"  # tables; no layer of Keras has such a name
ADDED = json.dumps(
    {"class_name": "SGD", "config": {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}}
)
CLIPPED = ("clipnorm", "global_clipnorm", "clipvalue")  # the worker clips: it has the whole gradient
# Options of an optimizer that need more than a row and its gradient; servers do not implement them.
REFUSED = ("weight_decay", "use_ema", "loss_scale_factor", "gradient_accumulation_steps", "amsgrad")


class PsLearner(KerasLearner):
    """A compiled Keras model whose weights are all on parameter servers.

    Args:
        model, sample, others, inexact, warn, pieces: as for KerasLearner.

    Raises:
        ModelError: the model cannot be trained in mode=ps; the text says why.
    """

    def __init__(
        self,
        model: keras.Model,
        sample: Batch | None,
        others: Sequence[Batch],
        inexact: str = "warn",
        warn: Callable[[str], None] = print,
        pieces: int = 1,
    ):
        _refuse_optimizer(model.optimizer)
        super().__init__(model, sample, others, None, inexact, warn, None, pieces)
        layout = self._step.layout if sample is not None else None
        if layout is not None:
            _refuse_changes(model, layout)
        shared = [t.name for t in self.tables if not t.own_learning_rate]
        self._clips = {name: getattr(model.optimizer, name, None) for name in CLIPPED}
        self._clips = {name: limit for name, limit in self._clips.items() if limit is not None}
        if self._clips and shared:
            raise ModelError(
                f"the model's optimizer has {next(iter(self._clips))}, and also trains the rows of layer "
                f"{shared[0]!r}, which servers cannot clip: give the layer an optimizer of its own"
            )
        averaged = layout.averaged if layout is not None else []
        floats = [v for v in distinct([*moving(model), *averaged]) if v.dtype == "float32"]
        # With the present rate: callbacks may change it later, but a table's declaration is constant.
        self.server_tables = (*self.tables, *_dense_tables(model.optimizer))
        self._dense, self._moving = DenseRows(model.trainable_variables), DenseRows(floats)
        self._averaged = tuple(self._moving.place(v) for v in averaged)
        trained = layout.trained if layout is not None else []
        self._trained = tuple(self._dense.place(v) for v in trained)
        # The state of a checkpoint leaves out the optimizer's slots, which are on the servers, too.
        self._everything, optimizer = self._variables, model.optimizer
        own = [v for v in optimizer.variables if v is optimizer.iterations or v is optimizer._learning_rate]
        self._variables = [*model.trainable_variables, *moving(model), *own, *self.others]
        served = {id(v) for v in (*model.trainable_variables, *floats)}
        self._beside = [place for place, v in enumerate(self._variables) if id(v) not in served]
        self._ids = [_fixed(rows.ids) for rows in (self._dense, self._moving)]
        places = (tuple(range(len(self._dense.variables))), self._averaged)
        self._each = [_fixed(r.ids_of(p)) for r, p in zip((self._dense, self._moving), places, strict=True)]
        self._pushed = [
            _fixed(self._dense.ids_of(self._trained)),
            _fixed(self._moving.ids_of(self._averaged)),
        ]

    # --- as rows

    def dense_values(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """All dense rows as they are in this process: ids and rows for each table."""
        nothing = [(np.zeros(0, np.int64), np.zeros((0, t.dim), np.float32)) for t in self.tables]
        values = self._dense.values(), self._moving.values()
        return [*nothing, *zip(self._ids, values, strict=True)]

    def dense_ids(self, whole: bool) -> list[np.ndarray]:
        """The row ids of the two dense tables: all, or only those that change from step to step."""
        return self._ids if whole else self._each

    def put(self, whole: bool, rows: Sequence[np.ndarray]) -> None:
        """Set the dense weights to these rows. Args: see `dense_ids`."""
        moving_places = tuple(range(len(self._moving.variables))) if whole else self._averaged
        self._dense.put(tuple(range(len(self._dense.variables))), rows[0])
        self._moving.put(moving_places, rows[1])

    # --- a step

    def gradients(
        self, step: int, batch: Batch, of_rows: Callable[[], Sequence[tuple[np.ndarray, np.ndarray]]]
    ) -> StepGradients:
        """Compute the gradients of one step.

        Args:
            of_rows: called after the gradients were computed; returns the staged gradients of embedding rows.

        Raises:
            as `allreduce_step`.
        """
        optimizer = self.model.optimizer
        optimizer.iterations.assign(step)  # a schedule of the learning rate reads it
        before = [self._moving.value(place) for place in self._averaged]
        result = self.allreduce_step(batch, control.write(step), step, 0, len(batch))
        agreed, rate = result.agreed, float(np.asarray(optimizer.learning_rate))
        if agreed.nonfinite or not agreed.records:
            return StepGradients(step, self._no_gradients, agreed.loss, 0, rate, skipped=True)
        layout, share = self._step.layout, np.float32(1.0 / agreed.records)
        pieces = [np.asarray(piece).reshape(-1) for piece in layout.divide(result.given)]
        trained = len(layout.trained)
        gradients = self._clipped(pieces[:trained])
        averages = pieces[trained : trained + len(layout.averaged)]
        changes = [old.reshape(-1) - new * share for old, new in zip(before, averages, strict=True)]
        dense = self._dense.packed(dict(zip(self._trained, gradients, strict=True)))
        moved = self._moving.packed(dict(zip(self._averaged, changes, strict=True)))
        scale = share if layout.divided else np.float32(1.0)
        rows = [(ids, values * scale) for ids, values in of_rows()] if self.tables else []
        given = [*rows, (self._pushed[0], dense), (self._pushed[1], moved)]
        return StepGradients(step, given, agreed.loss, agreed.records, rate)

    @property
    def _no_gradients(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.zeros(0, np.int64), np.zeros((0, t.dim), np.float32)) for t in self.server_tables]

    def _clipped(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        """Clip the gradients as the model's optimizer would.

        This worker does it because it has the whole gradient, which no server has.
        """
        if limit := self._clips.get("clipnorm"):
            return [_within(g, float(limit)) for g in gradients]
        if limit := self._clips.get("global_clipnorm"):
            norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradients)))
            return [g * np.float32(limit / norm) for g in gradients] if norm > limit else gradients
        if limit := self._clips.get("clipvalue"):
            return [np.clip(g, -limit, limit) for g in gradients]
        return gradients

    # --- the state

    def at(self, step: int) -> None:
        """Record the number of steps in the weights."""
        self.model.optimizer.iterations.assign(step)

    def beside(self) -> bytes:
        """The part of the state that is on no server."""
        parts = self.parts()
        return encode([parts[place] for place in self._beside])

    def take_beside(self, data: bytes) -> None:
        """Set the part of the state that is on no server.

        Raises:
            ModelError: it belongs to a different model.
        """
        self.change(dict(zip(self._beside, decode(data), strict=True)))

    def refuse_changed(self, changed: Mapping[int, Any]) -> None:
        """Check what callbacks have changed, by index in `parts`.

        Raises:
            ModelError: they have changed weights, which are on servers.
        """
        if wrong := sorted(set(changed) - set(self._beside)):
            name = self.variable_specs()[wrong[0]].name
            raise ModelError(
                f"a callback has changed {name!r} while the model is trained: in mode=ps the weights are on "
                "servers, and a callback can change the learning rate, stop the training, and read weights. "
                "Set mode=hybrid or mode=train for one that changes weights"
            )

    def kept(self) -> Any:
        """A copy of the state with the optimizer's slots, which a step of the warm-up changes."""
        now, self._variables = self._variables, self._everything
        try:
            return super().kept()
        finally:
            self._variables = now


def _dense_tables(optimizer: Any) -> tuple[Table, Table]:
    made = keras.optimizers.serialize(optimizer)
    made["config"]["learning_rate"] = float(np.asarray(optimizer.learning_rate))
    for name in CLIPPED:
        made["config"][name] = None
    dense = Table(DENSE, DIM, ZEROS, json.dumps(made, sort_keys=True))
    return dense, Table(MOVING, DIM, ZEROS, ADDED, own_learning_rate=True)


def _fixed(ids: np.ndarray) -> np.ndarray:
    """Make the ids read-only: their distribution over the servers is cached."""
    ids.setflags(write=False)
    return ids


def _within(gradient: np.ndarray, limit: float) -> np.ndarray:
    norm = float(np.sqrt(np.vdot(gradient, gradient)))
    return gradient * np.float32(limit / norm) if norm > limit else gradient


def _refuse_optimizer(optimizer: Any) -> None:
    """Check the optimizer.

    Raises:
        ModelError: servers cannot apply its updates.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ModelError(
            "the model's optimizer scales the loss (mixed_float16), which servers do not know of; use "
            "mixed_bfloat16 or float32 with mode=ps"
        )
    if name not in OPTIMIZERS or type(optimizer).__module__.split(".")[0] != "keras":
        raise ModelError(
            f"mode is ps, and servers train with {', '.join(OPTIMIZERS)}, not with the model's {name}: "
            "compile the model with one of these, or set mode=hybrid or mode=train"
        )
    for option in REFUSED:
        value = getattr(optimizer, option, None)
        if value not in (None, False):
            raise ModelError(
                f"mode is ps, and the model's optimizer has {option}={value!r}, which servers cannot do: "
                "leave it out, or set mode=hybrid or mode=train"
            )


def _refuse_changes(model: keras.Model, layout: Layout) -> None:
    trained = {id(v) for v in model.trainable_variables}
    for v in (*layout.averaged, *layout.counters):
        if id(v) in trained or v in layout.counters:
            what = "is trained, and also assigned" if id(v) in trained else f"of type {v.dtype} is assigned"
            raise ModelError(
                f"variable {v.path!r} {what} in the forward pass, which workers that take steps in any order "
                "cannot put together: set mode=hybrid or mode=train"
            )
