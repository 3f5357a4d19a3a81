# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows are on parameter servers (edl/layers), and their phases in a step.

    ids         a graph runs the forward pass up to the ids, and makes those of each table unique
    pull        fetch the rows of these ids
    gradients   the step's graph takes the rows as further inputs, and returns their gradients
    stage       store the gradients on the servers before this rank takes part in the step's all-reduce

The forward pass is traced twice and requests rows in the same order, so the position identifies a table's
ids. Ids may depend on anything but rows. An evaluation or a prediction does the same, without gradients
(trainer/evaluation/reading_step.py). Other code that runs a model outside of a step (a user's callback)
requests rows while it runs, layer by layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from edl.errors import DataError, ModelError
from edl.layers.embedding import Embedding
from edl.trainer.embedding import table_specs
from edl.trainer.embedding.interfaces import Begun, Commit, Rows, RowsAhead
from edl.trainer.embedding.recording import Given, Recorder

MAX_PLAIN = 1 << 28  # bytes of a table that is saved as Keras does, with rows that were never trained


@runtime_checkable
class WholeTables(Protocol):
    """Rows that can be had all at once."""

    def all_rows(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """All rows of the table of this number, at this worker's state.

        Returns:
            ids int64 [n], each once, in any order, and rows float32 [n, dim].
        """
        ...


@runtime_checkable
class AnyRows(Protocol):
    """Rows for any ids, including ids that were never trained."""

    def rows_of(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Return the rows of these ids at this worker's state, float32 [n, dim], initial rows included."""
        ...


class Lookups:
    """The lookups of one model.

    Args:
        model: built.
        trained: otherwise its rows stay as they are, and an id that has none has zeros, as in a saved model.

    Raises:
        ModelError: what the model asks for cannot be done; the text says why.
    """

    def __init__(self, model: keras.Model, trained: bool = True):
        self._model = model
        self.layers = [layer for layer in model._flatten_layers() if _is_on_servers(layer)]
        if self.layers and trained:
            table_specs.refuse_optimizer(getattr(model, "optimizer", None))
        self.tables = tuple(
            table_specs.trained(layer, model) if trained else table_specs.kept(layer) for layer in self.layers
        )
        names = [table.name for table in self.tables]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ModelError(
                f"several layers are named {twice[0]!r}: each edl.layers.Embedding is a table of its own, "
                "and its name identifies its rows. Give them different names, or use one layer several times"
            )
        self.rows: Rows | None = None
        self.at: Callable[[], int] = lambda: 0  # the step of the state that the model has
        self._numbers = {id(layer): number for number, layer in enumerate(self.layers)}
        self._ahead: Asked | None = None
        self._failed: Exception | None = None
        self._failing = threading.Lock()
        for number, layer in enumerate(self.layers):
            layer.reader = self._reader(number)

    def number(self, layer: Embedding) -> int:
        """Return the number of the layer's table.

        Raises:
            ModelError: the model calls the layer, but does not have it as an attribute.
        """
        try:
            return self._numbers[id(layer)]
        except KeyError:
            raise ModelError(
                f"layer {layer.name!r}, an edl.layers.Embedding, is called by the model, but is none of its "
                "layers: make it an attribute of the model or of a layer"
            ) from None

    # --- a step

    def recorder(self) -> Recorder:
        """Return a recorder for the run of a forward pass up to the ids."""
        return Recorder(self)

    def given(self, rows: Sequence[tf.Tensor], places: Sequence[tf.Tensor], ids: Any = None) -> Given:
        """Return the rows for the second run of a forward pass.

        Args:
            rows, places: of each table, as `pull` and `Recorder.unique` return them.
            ids: of each table, to check that both runs request the same ids; None to skip the check.
        """
        return Given(self, list(rows), list(places), ids)

    @property
    def signature(self) -> list[tf.TensorSpec]:
        """The signature of the rows and positions of all tables."""
        return [
            *(tf.TensorSpec([None, table.dim], tf.float32) for table in self.tables),
            *(tf.TensorSpec([None], tf.int32) for _ in self.tables),
        ]

    def pull(
        self, step: int, ids: Sequence[np.ndarray], meanwhile: Callable[[], None] = lambda: None
    ) -> list[np.ndarray]:
        """Pull the rows of these ids.

        Args:
            meanwhile: is done while the servers send them, if they were asked for before.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and isinstance(self.rows, RowsAhead):
            if ahead.is_of(step, self.rows.generation, ids):
                found: list[np.ndarray] = _done_after(meanwhile, ahead.begun)
                return found
            ahead.begun.forget()
        return self._pull(step, ids)

    def _pull(self, step: int, ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        assert self.rows is not None, "no rows were set"
        for layer, some in zip(self.layers, ids, strict=True):
            _refuse_outside(layer, some)
        return self.rows.pull(step, ids)

    def begin_pull(self, step: int, ids: Sequence[np.ndarray], last: Commit) -> None:
        """Request the rows of the state after a step, before `pull` is called with the very same `ids`.

        Args:
            last: that step, which is not in this worker's state yet.
        """
        if self._ahead is not None:  # of a ring that has broken
            self._ahead.begun.forget()
            self._ahead = None
        if isinstance(self.rows, RowsAhead) and all(map(_is_inside, self.layers, ids)):
            self._ahead = Asked(step, self.rows.generation, ids, self.rows.begin_pull(step, ids, last))

    def stage(
        self,
        step: int,
        rank: int,
        pieces: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Send the gradients of a step's rows.

        Args:
            pieces: of each piece of the batch, of each table: ids, each once, and gradients of their rows.
            meanwhile: is done while the servers write them.
        """
        assert self.rows is not None, "no rows were set"
        gradients = [_added(of_table) for of_table in zip(*pieces, strict=True)]
        if not isinstance(self.rows, RowsAhead):
            self.rows.stage(step, rank, gradients)
            meanwhile()
            return
        _done_after(meanwhile, self.rows.begin_stage(step, rank, gradients))

    # --- outside of a step

    def ask(self, ids: Sequence[np.ndarray]) -> Asked | None:
        """Request rows of the model's state, which a later `read` returns.

        Args:
            ids: the ids of each table, without duplicates.

        Returns:
            the pending request; None if rows cannot be requested ahead.
        """
        if not isinstance(self.rows, RowsAhead) or not all(map(_is_inside, self.layers, ids)):
            return None
        step = self.at()
        return Asked(step, self.rows.generation, ids, self.rows.begin_pull(step, ids))

    def read(self, ids: Sequence[np.ndarray], asked: Asked | None = None) -> list[np.ndarray]:
        """Return rows of the model's state, for each table.

        Args:
            asked: the result of an earlier `ask` with the very same ids.

        Raises:
            as `pull`.
        """
        if asked is not None:
            if isinstance(self.rows, RowsAhead) and asked.is_of(self.at(), self.rows.generation, ids):
                found: list[np.ndarray] = asked.begun.result()
                return found
            asked.forget()
        return self._pull(self.at(), ids)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise an error of `pull` as it was, not in TensorFlow's words, if the model runs outside of a step.

        Raises:
            OpError: TensorFlow's error, if no `pull` has failed.
        """
        self._failed = None
        try:
            yield
        except tf.errors.OpError:
            if self._failed is None:
                raise
            raise self._failed from self._failed.__cause__

    def _reader(self, number: int) -> Callable[[np.ndarray], np.ndarray]:
        def read(ids: np.ndarray) -> np.ndarray:
            nothing = np.zeros(0, np.int64)
            asked = [ids if n == number else nothing for n in range(len(self.tables))]
            try:
                return self._pull(self.at(), asked)[number]
            except Exception as error:
                with self._failing:
                    self._failed = self._failed or error
                raise

        return read

    # --- a model that is saved

    @property
    def missing(self) -> str:
        """What a saved model lacks, in words; empty if nothing."""
        if not self.tables or isinstance(self.rows, WholeTables):
            return ""
        names = ", ".join(repr(table.name) for table in self.tables)
        return (
            f"the saved model has zeros for all rows of {names}: the servers cannot be asked for all of them "
            "yet. They are in the job's checkpoints"
        )

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Inside this context, the model has all rows as variables, so that it can be saved.

        `missing` names rows that could not be copied.
        """
        try:
            self._fill()
            yield
        finally:
            self._empty()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Inside `filled`, the model computes as it was trained, with all rows."""
        if not self.missing:
            yield
            return
        self._empty()
        try:
            yield
        finally:
            self._fill()

    def _fill(self) -> None:
        for number, layer in enumerate(self.layers):
            if isinstance(self.rows, AnyRows) and _is_to_be_plain(layer):
                ids = np.arange(layer.input_dim)
                layer.fill(ids, self.rows.rows_of(number, ids))
            elif isinstance(self.rows, WholeTables):
                layer.fill(*self.rows.all_rows(number))
            else:
                layer.fill(np.zeros(0, np.int64), np.zeros((0, layer.dim), np.float32))
        self._forget_graphs()

    def _empty(self) -> None:
        for layer in self.layers:
            layer.empty()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Drop the graphs that Keras caches: their lookups were decided when they were traced."""
        if self.tables:
            self._model.train_function = self._model.test_function = self._model.predict_function = None


def _done_after(meanwhile: Callable[[], None], begun: Begun) -> Any:
    """The result of what was begun, once something else is done."""
    try:
        meanwhile()
    except BaseException:
        begun.forget()
        raise
    return begun.result()


@dataclass(frozen=True, eq=False)
class Asked:
    """Rows that were asked for before they are needed."""

    step: int
    generation: int
    ids: Sequence[np.ndarray]
    begun: Begun

    def is_of(self, step: int, generation: int, ids: Sequence[np.ndarray]) -> bool:
        """Whether these rows were requested for this state and these very ids."""
        return self.ids is ids and (self.step, self.generation) == (step, generation)

    def forget(self) -> None:
        """Drop the request: its rows are not needed."""
        self.begun.forget()


def _is_to_be_plain(layer: Embedding) -> bool:
    """Whether it is saved with all rows: it has replaced a keras.layers.Embedding, which is no larger."""
    return layer.float_ids and layer.input_dim is not None and 4 * layer.input_dim * layer.dim <= MAX_PLAIN


def _is_on_servers(layer: Any) -> bool:
    return isinstance(layer, Embedding) and layer.on_servers


def _refuse_outside(layer: Embedding, ids: np.ndarray) -> None:
    if not _is_inside(layer, ids):
        least, most = int(ids.min()), int(ids.max())
        raise DataError(
            f"layer {layer.name!r} is given the id {least if least < 0 else most}; its input_dim is "
            f"{layer.input_dim}"
        )


def _is_inside(layer: Embedding, ids: np.ndarray) -> bool:
    return layer.input_dim is None or not len(ids) or (ids.min() >= 0 and ids.max() < layer.input_dim)


def _added(pieces: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of several pieces of a batch, with each id once."""
    if len(pieces) == 1:
        return pieces[0]
    ids, places = np.unique(np.concatenate([ids for ids, _ in pieces]), return_inverse=True)
    total = np.zeros((len(ids), pieces[0][1].shape[1]), np.float32)
    np.add.at(total, places, np.concatenate([values for _, values in pieces]))
    return ids, total
