"""A model with all weights on parameter servers (mode=ps): a step gives gradients, and changes nothing.

    put         the weights as the servers have them now
    gradients   means over the step's records, of every weight that it trains, as rows

It is the learner of a ring of one, and never applies anything: the servers do, with the model's optimizer.
What a forward pass changes (moving averages) travels as a change that they add.

What is neither on servers nor made anew by each worker (learning rate, counters that callbacks may change)
is small, and kept beside the ledger: `beside`.
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
from edl.trainer.model.data import Batch
from edl.trainer.model.model_support import moving
from edl.trainer.ps_client.interfaces import StepGradients
from edl.trainer.runtime.serialization import decode, encode
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.step_graphs import Layout

DENSE, MOVING = "edl/dense", "edl/moving"  # tables; no layer of Keras has such a name
ADDED = json.dumps(
    {"class_name": "SGD", "config": {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}}
)
CLIPPED = ("clipnorm", "global_clipnorm", "clipvalue")  # here, where the whole gradient is
# What an optimizer may have that takes more than a row and its gradient, and that nobody does.
REFUSED = ("weight_decay", "use_ema", "loss_scale_factor", "gradient_accumulation_steps", "amsgrad")


class ServedLearner(KerasLearner):
    """
    Args:
        model, sample, others, inexact, warn, pieces: as of KerasLearner.

    Raises:
        ModelError: it cannot be trained so; the text says why.
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
        super().__init__(model, sample, others, _alone, inexact, warn, None, pieces, at_once=True)
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
        # As it is now: callbacks change the learning rate, and tables stay what they were declared.
        self.served = (*self.tables, *_dense_tables(model.optimizer))
        self._dense, self._moving = DenseRows(model.trainable_variables), DenseRows(floats)
        self._averaged = tuple(self._moving.place(v) for v in averaged)
        trained = layout.trained if layout is not None else []
        self._trained = tuple(self._dense.place(v) for v in trained)
        # The state, as a checkpoint has it: the optimizer's slots are on the servers, too.
        self._everything, optimizer = self._variables, model.optimizer
        own = [v for v in optimizer.variables if v is optimizer.iterations or v is optimizer._learning_rate]
        self._variables = [*model.trainable_variables, *moving(model), *own, *self.others]
        served = {id(v) for v in (*model.trainable_variables, *floats)}
        self._beside = [place for place, v in enumerate(self._variables) if id(v) not in served]
        self._ids = [_fixed(rows.ids) for rows in (self._dense, self._moving)]
        places = (tuple(range(len(self._dense.variables))), self._averaged)
        self._each = [_fixed(r.ids_of(p)) for r, p in zip((self._dense, self._moving), places, strict=True)]
        self._pushed = [
            _fixed(self._dense.ids_of(self._trained)), _fixed(self._moving.ids_of(self._averaged)),
        ]  # fmt: skip

    # --- as rows

    def dense_values(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """All dense rows as they are here: of each table, ids and rows."""
        nothing = [(np.zeros(0, np.int64), np.zeros((0, t.dim), np.float32)) for t in self.tables]
        values = self._dense.values(), self._moving.values()
        return [*nothing, *zip(self._ids, values, strict=True)]

    def dense_ids(self, whole: bool) -> list[np.ndarray]:
        """Of the rows of the two dense tables: all, or those that change from step to step."""
        return self._ids if whole else self._each

    def put(self, whole: bool, rows: Sequence[np.ndarray]) -> None:
        """The dense weights are those of these rows from now on. Args: see `dense_ids`."""
        moving_places = tuple(range(len(self._moving.variables))) if whole else self._averaged
        self._dense.put(tuple(range(len(self._dense.variables))), rows[0])
        self._moving.put(moving_places, rows[1])

    # --- a step

    def gradients(
        self, step: int, batch: Batch, of_rows: Callable[[], Sequence[tuple[np.ndarray, np.ndarray]]]
    ) -> StepGradients:
        """
        Args:
            of_rows: gives, once they are made, what was staged for the rows of embeddings.

        Raises:
            as `sums`.
        """
        optimizer = self.model.optimizer
        optimizer.iterations.assign(step)  # which a schedule of the learning rate asks for
        before = [self._moving.value(place) for place in self._averaged]
        sums = self.sums(batch, control.write(step), step, 0, len(batch))
        agreed, rate = sums.agreed, float(np.asarray(optimizer.learning_rate))
        if agreed.nonfinite or not agreed.records:
            return StepGradients(step, self._nothing, agreed.loss, 0, rate, skipped=True)
        layout, vector = self._step.layout, np.asarray(sums.given.vector)
        share = np.float32(1.0 / agreed.records)
        scale = share if layout.divided else np.float32(1.0)
        pieces = np.split(vector[: layout.length], np.cumsum(layout.sizes)[:-1])
        trained = len(layout.trained)
        gradients = self._clipped([piece * scale for piece in pieces[:trained]])
        averages = pieces[trained : trained + len(layout.averaged)]
        changes = [old.reshape(-1) - new * share for old, new in zip(before, averages, strict=True)]
        dense = self._dense.packed(dict(zip(self._trained, gradients, strict=True)))
        moved = self._moving.packed(dict(zip(self._averaged, changes, strict=True)))
        rows = [(ids, values * scale) for ids, values in of_rows()] if self.tables else []
        given = [*rows, (self._pushed[0], dense), (self._pushed[1], moved)]
        return StepGradients(step, given, agreed.loss, agreed.records, rate)

    @property
    def _nothing(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.zeros(0, np.int64), np.zeros((0, t.dim), np.float32)) for t in self.served]

    def _clipped(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        """As the model's optimizer would: it sees the whole gradient here, and no server does."""
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
        """So many steps are in the weights."""
        self.model.optimizer.iterations.assign(step)

    def beside(self) -> bytes:
        """What of the state is on no server."""
        parts = self.parts()
        return encode([parts[place] for place in self._beside])

    def take_beside(self, data: bytes) -> None:
        """
        Raises:
            ModelError: it is of another model.
        """
        self.change(dict(zip(self._beside, decode(data), strict=True)))

    def refuse_changed(self, changed: Mapping[int, Any]) -> None:
        """
        Raises:
            ModelError: callbacks have changed what servers have.
        """
        if wrong := sorted(set(changed) - set(self._beside)):
            name = self.described()[wrong[0]].name
            raise ModelError(
                f"a callback has changed {name!r} while the model is trained: in mode=ps the weights are on "
                "servers, and a callback can change the learning rate, stop the training, and read weights. "
                "Set mode=hybrid or mode=train for one that changes weights"
            )

    def kept(self) -> Any:
        """With the slots, which a step of the warm-up changes."""
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


def _alone(vector: Any) -> Any:
    return vector


def _fixed(ids: np.ndarray) -> np.ndarray:
    """Not to be written to: which server has which of them is computed once."""
    ids.setflags(write=False)
    return ids


def _within(gradient: np.ndarray, limit: float) -> np.ndarray:
    norm = float(np.sqrt(np.vdot(gradient, gradient)))
    return gradient * np.float32(limit / norm) if norm > limit else gradient


def _refuse_optimizer(optimizer: Any) -> None:
    """
    Raises:
        ModelError: servers cannot do what it does.
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
