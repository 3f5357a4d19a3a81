"""An embedding layer for more ids than a variable can hold.

The model does not depend on where a table's rows are:

    variable    an ordinary variable of `input_dim` rows: in plain Keras, or if a ring holds the whole model
    servers     not in this process: they are looked up (trainer/embedding/lookups.py)
    saved       a variable of the seen ids, and one of their rows: the form in which a model is saved. They
                are not trained, unless `layer.embeddings.trainable = True`. For a layer that a custom model
                class creates, their number is known once weights are loaded into the layer

Ids are integers of up to 64 bits, or texts. The id of a text is its 64-bit FarmHash fingerprint (modulo
2^63 - 1, or modulo `input_dim`), which is the same on every machine and in every version.

Promise: a layer returns the same outputs and gradients for the same rows, wherever these are. In a saved
table, ids that no step has seen have rows of zeros.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving import serialization_lib

COMBINERS = (None, "sum", "mean", "sqrtn")
IDS = (1 << 63) - 1  # number of ids that texts are hashed to

# Returns the rows, float32 [n, dim], of a layer's ids, int64 [n].
Source = Callable[["Embedding", tf.Tensor], tf.Tensor]


@keras.saving.register_keras_serializable(package="edl")
class Embedding(keras.layers.Layer):
    """An embedding layer like `keras.layers.Embedding`, for any ids.

        Embedding(16)(ids)                          [batch] -> [batch, 16], [batch, n] -> [batch, n, 16]
        Embedding(16, combiner="mean")(ids)         [batch, n] -> [batch, 16]; also for ragged and sparse ids
        Embedding(16, combiner="sum")(ids, weights)

    Args:
        dim: length of a vector.
        combiner: how the vectors of a record's ids (along the last axis) are combined into one: "sum",
            "mean", or "sqrtn", the sum divided by the root of the sum of the squared weights. A record
            without ids gets zeros. None: vectors are not combined.
        initializer: initializer of the rows.
        optimizer: optimizer of the rows, with its own learning rate; None: the model's. It is used only if
            the rows are on servers.
        input_dim: upper bound of the ids (exclusive). None: unbounded; the rows must be on servers then.
        mask_zero: the id 0 means "no id": it is masked, or left out if vectors are combined; so is an empty
            text, in the latter case.
        min_count: on servers, number of steps with an id from which on its row is learned.
        ttl_steps: on servers, number of steps without an id after which its row is forgotten; 0: never.
        float_ids: ids may be floats, as in keras.layers.Embedding.
        vocabulary: number of rows of the saved table; set by the code that loads a model.
    """

    def __init__(
        self,
        dim: int,
        *,
        combiner: str | None = None,
        initializer: Any = "uniform",
        optimizer: Any = None,
        input_dim: int | None = None,
        mask_zero: bool = False,
        min_count: int = 0,
        ttl_steps: int = 0,
        float_ids: bool = False,
        vocabulary: int | None = None,
        **others: Any,
    ):
        super().__init__(**others)
        self.built: bool
        self.dim = _whole("dim", dim, 1)
        if combiner not in COMBINERS:
            raise ValueError(f"unknown combiner {combiner!r} (expected None, 'sum', 'mean' or 'sqrtn')")
        self.combiner = combiner
        self.initializer = keras.initializers.get(initializer)
        # As text: Keras would save an optimizer's variables with the layer.
        self.optimizer = None if optimizer is None else _as_json(optimizer)
        self.input_dim = None if input_dim is None else _whole("input_dim", input_dim, 2 if mask_zero else 1)
        self.mask_zero = bool(mask_zero)
        self.min_count, self.ttl_steps = _whole("min_count", min_count), _whole("ttl_steps", ttl_steps)
        self.float_ids = bool(float_ids)
        self.vocabulary = None if vocabulary is None else _whole("vocabulary", vocabulary)
        self.supports_masking = True
        self.autocast = False
        self.on_servers = False  # whether the rows are on servers; set when the layer is built
        self.awaits_rows = False  # whether it is built as a saved table whose size is unknown yet
        self.ids: keras.Variable | None = None  # ids of a saved table, in ascending order
        self.embeddings: keras.Variable | None = None
        self.reader: Callable[[np.ndarray], np.ndarray] | None = (
            None  # returns rows of ids if no source is set
        )
        # Is called with a file's arrays of this layer, if its rows are on servers.
        self.loader: Callable[[list[np.ndarray]], None] | None = None

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        if self.vocabulary is None:
            self.vocabulary = _saved.counts().get(self.name)
        if self.vocabulary is not None:
            self._add_saved(self.vocabulary)
        elif _elsewhere.rows and not _to_be_loaded.depth:
            self.on_servers = True
        elif self.input_dim is not None:
            self.embeddings = self.add_weight(
                name="embeddings", shape=(self.input_dim, self.dim), initializer=self.initializer
            )
        elif _to_be_loaded.depth or is_loaded_by_keras():
            self.awaits_rows, self.vocabulary = True, 0
            self._add_saved(0)
        else:
            if _saved.where:
                there = ", ".join(map(repr, _saved.counts())) or "no table"
                raise ValueError(
                    f"layer {self.name!r} has no input_dim, and {_saved.where} has no rows of it (it has "
                    f"rows of: {there}). Give the layer the name that it was trained with"
                )
            raise ValueError(
                f"layer {self.name!r} has no input_dim, so any number of ids, but its rows are a variable of "
                "the model here: train it with mode=auto or mode=hybrid (evaluate and predict with what that "
                "has saved: initFrom.path), or give it one: "
                f"Embedding({self.dim}, input_dim=...). To load what was trained into it in a program of "
                "your own, make and call the model in `with edl.layers.rows_to_be_loaded():`"
            )
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        if weights is not None and self.combiner is None:
            raise ValueError(f"layer {self.name!r} is given weights, which need a combiner")
        if isinstance(inputs, tf.SparseTensor):
            if self.combiner is None:
                raise ValueError(f"layer {self.name!r} is given sparse ids, which need a combiner")
            counts = inputs.dense_shape[0]
            given = weights.values if isinstance(weights, tf.SparseTensor) else weights
            return self._combined(inputs.values, inputs.indices[:, 0], counts, given)
        if isinstance(inputs, tf.RaggedTensor):
            if self.combiner is None:
                return inputs.with_flat_values(self._cast(self._rows(self._ids(inputs.flat_values))))
            if inputs.ragged_rank != 1 or inputs.flat_values.shape.rank != 1:
                raise ValueError(
                    f"layer {self.name!r} combines ragged ids of rank 2 only, not {inputs.shape}"
                )
            given = weights.flat_values if isinstance(weights, tf.RaggedTensor) else weights
            return self._combined(inputs.flat_values, inputs.value_rowids(), inputs.nrows(), given)
        ids = self._ids(tf.convert_to_tensor(inputs))
        rows = tf.reshape(self._rows(tf.reshape(ids, [-1])), tf.concat([tf.shape(ids), [self.dim]], 0))
        rows = tf.ensure_shape(rows, [*ids.shape, self.dim])
        if self.combiner is None or (ids.shape.rank == 1 and weights is None and not self.mask_zero):
            return self._cast(rows)
        if ids.shape.rank == 1:
            rows, ids = rows[:, None], ids[:, None]
            weights = None if weights is None else tf.reshape(weights, [-1, 1])
        factor = tf.ones(tf.shape(ids)) if weights is None else tf.cast(weights, tf.float32)
        if self.mask_zero:
            factor *= tf.cast(ids != 0, tf.float32)
        total = tf.reduce_sum(rows * factor[..., None], -2)
        return self._cast(tf.math.divide_no_nan(total, self._divisor(factor, _sum_of_last)[..., None]))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        plain = not isinstance(inputs, tf.SparseTensor | tf.RaggedTensor) and not getattr(inputs, "ragged", 0)
        if not self.mask_zero or self.combiner is not None or not plain:
            return None
        if keras.backend.standardize_dtype(inputs.dtype) == "string":
            raise ValueError(f"layer {self.name!r} has mask_zero for texts, which needs a combiner")
        return keras.ops.not_equal(inputs, 0)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        shape = tuple(inputs.shape)
        ragged = bool(getattr(inputs, "ragged", False)) and self.combiner is None
        kept = shape if self.combiner is None or len(shape) < 2 else shape[:-1]
        return keras.KerasTensor((*kept, self.dim), dtype=self.compute_dtype, ragged=ragged)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "dim": self.dim,
            "combiner": self.combiner,
            "initializer": keras.initializers.serialize(self.initializer),
            "optimizer": self.optimizer,
            "input_dim": self.input_dim,
            "mask_zero": self.mask_zero,
            "min_count": self.min_count,
            "ttl_steps": self.ttl_steps,
            **({"float_ids": True} if self.float_ids else {}),
            "vocabulary": 0 if self.on_servers and self.ids is None else self.vocabulary,
        }

    @property
    def is_plain(self) -> bool:
        """Whether it is equivalent to Keras' Embedding: it has replaced one, and has all of its rows."""
        return self.ids is not None and self.float_ids and self.vocabulary == self.input_dim

    def save_own_variables(self, store: Any) -> None:
        if self.is_plain:
            store["0"] = self.embeddings  # like Keras' Embedding
        else:
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        if self.loader is not None and self.on_servers and self.ids is None:
            self.loader([np.asarray(store[key]) for key in sorted(store.keys())])
        elif self.is_plain and len(store.keys()) == 1:
            assert self.ids is not None and self.embeddings is not None
            self.ids.assign(np.arange(len(store["0"])))
            self.embeddings.assign(store["0"])
        else:
            if self.ids is not None and len(store.keys()) == 2 and len(store["0"]) != self.vocabulary:
                self._resize(len(store["0"]))  # the class did not know the number of rows, or it differs
            super().load_own_variables(store)
            self.awaits_rows = False

    # --- a table that is saved

    def fill(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Hold these rows until `empty` is called, so that the model can be saved, or used without servers.

        Args:
            ids: int64 [n], each once.
            rows: float32 [n, dim].
        """
        order = np.argsort(ids)
        self._resize(len(ids))
        assert self.ids is not None and self.embeddings is not None
        self.ids.assign(ids[order])
        self.embeddings.assign(rows[order])

    def empty(self) -> None:
        """Drop the saved table: the rows are on the servers again."""
        if self.ids is None:
            return
        self._untrack_variable(self.ids)
        self._untrack_variable(self.embeddings)
        self.ids = self.embeddings = self.vocabulary = None

    def _resize(self, count: int) -> None:
        """Create a saved table of `count` rows, without values yet."""
        self.empty()
        self._tracker.unlock()
        try:
            self._add_saved(count)
        finally:
            self._tracker.lock()
        self.vocabulary = count

    def _add_saved(self, count: int) -> None:
        self.ids = self.add_weight(
            name="ids", shape=(count,), dtype="int64", initializer="zeros", trainable=False
        )
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(count, self.dim),
            dtype="float32",
            initializer="zeros",
            trainable=False,  # so that the saved model keeps the optimizer's variables as they are
        )

    # --- rows

    def _ids(self, inputs: tf.Tensor) -> tf.Tensor:
        """Convert inputs to ids, int64 of the same shape."""
        if inputs.dtype == tf.string:
            count = self.input_dim or IDS
            if not self.mask_zero:
                return tf.strings.to_hash_bucket_fast(inputs, count)
            found = 1 + tf.strings.to_hash_bucket_fast(inputs, count - 1)
            return tf.where(inputs == "", tf.zeros_like(found), found)
        # While Keras loads a model of a custom class, it calls it with floats: it only knows the shapes.
        floats = self.float_ids or is_loaded_by_keras()
        if not inputs.dtype.is_integer and not (floats and inputs.dtype.is_floating):
            raise TypeError(
                f"layer {self.name!r} is given {inputs.dtype.name}: ids must be integers or texts"
            )
        return tf.cast(inputs, tf.int64)

    def _rows(self, ids: tf.Tensor) -> tf.Tensor:
        """Look up the rows of ids [n], float32 [n, dim]."""
        if self.awaits_rows:
            return self._read(ids)  # a graph that is traced now may run after the rows are loaded
        if self.ids is not None:
            if not self.vocabulary:
                return tf.zeros([tf.size(ids), self.dim])
            known = _value(self.ids)
            places = tf.minimum(tf.searchsorted(known, ids), self.vocabulary - 1)
            rows = tf.gather(_value(self.embeddings), places)
            return tf.where((tf.gather(known, places) == ids)[:, None], rows, tf.zeros_like(rows))
        if not self.on_servers:
            return tf.gather(_value(self.embeddings), ids)
        if _here.source is not None:
            return _here.source(self, ids)
        return self._read(ids)

    def _read(self, ids: tf.Tensor) -> tf.Tensor:
        """Look up rows when the graph runs, in any graph. They have no gradient."""
        unique, places = tf.unique(ids)
        rows = tf.numpy_function(self._asked, [unique], tf.float32)
        return tf.gather(tf.ensure_shape(rows, [None, self.dim]), places)

    def _asked(self, ids: np.ndarray) -> np.ndarray:
        if self.reader is not None:
            return self.reader(ids)
        if self.vocabulary:  # rows have been loaded meanwhile
            assert self.ids is not None and self.embeddings is not None
            known, rows = self.ids.numpy(), self.embeddings.numpy()
            places = np.minimum(np.searchsorted(known, ids), self.vocabulary - 1)
            return np.where((known[places] == ids)[:, None], rows[places], np.float32(0))
        return np.zeros((len(ids), self.dim), np.float32)  # while a model is being built

    def _combined(self, inputs: tf.Tensor, records: tf.Tensor, count: tf.Tensor, weights: Any) -> tf.Tensor:
        """Combine the rows of ids [n], given the record of each, to [count, dim]."""
        ids = self._ids(inputs)
        factor = tf.ones([tf.size(ids)]) if weights is None else tf.cast(weights, tf.float32)
        if self.mask_zero:
            factor *= tf.cast(ids != 0, tf.float32)
        add = lambda values: tf.math.unsorted_segment_sum(values, records, count)  # noqa: E731
        total = add(self._rows(ids) * factor[:, None])
        return self._cast(tf.math.divide_no_nan(total, self._divisor(factor, add)[:, None]))

    def _divisor(self, factor: tf.Tensor, add: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        if self.combiner == "mean":
            return add(factor)
        if self.combiner == "sqrtn":
            return tf.sqrt(add(factor * factor))
        return tf.ones_like(add(factor))

    def _cast(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.cast(rows, self.compute_dtype)


# --- for code that trains a model with these layers


@contextlib.contextmanager
def rows_elsewhere() -> Iterator[None]:
    """A context in which layers are built without variables: their rows are on servers.

    It applies to all threads.
    """
    before, _elsewhere.rows = _elsewhere.rows, True
    try:
        yield
    finally:
        _elsewhere.rows = before


def keep_rows_elsewhere() -> None:
    """Build all further layers of this process as in `rows_elsewhere`."""
    _elsewhere.rows = True


@contextlib.contextmanager
def rows_to_be_loaded() -> Iterator[None]:
    """A context for building layers without `input_dim` whose rows are loaded with the model's weights later.

    It applies to all threads. Rows are zeros until weights are loaded.

        with edl.layers.rows_to_be_loaded():
            model = my_model.model()
            model(features)  # needed for a custom model class, which is built when it is called
        model.load_weights("model.weights.h5")
    """
    _to_be_loaded.depth += 1
    try:
        yield
    finally:
        _to_be_loaded.depth -= 1


@contextlib.contextmanager
def saved_tables(counts: Callable[[], Mapping[str, int]], where: str = "") -> Iterator[None]:
    """A context in which layers are built with saved tables, to be filled with rows of a job with servers.

    It applies to all threads, and to layers whose rows that job has saved.

    Args:
        counts: returns the number of ids by layer name; called once, if any layer is built.
        where: description of where the rows are; empty: nowhere.
    """
    global _saved
    before, _saved = _saved, _Saved(cache(counts), where)
    try:
        yield
    finally:
        _saved = before


@contextlib.contextmanager
def rows_from(source: Source) -> Iterator[None]:
    """A context in which layers of this thread get rows that are on servers from `source`."""
    before, _here.source = _here.source, source
    try:
        yield
    finally:
        _here.source = before


class _Elsewhere:
    rows = False


@dataclass(frozen=True)
class _Saved:
    counts: Callable[[], Mapping[str, int]] = dict
    where: str = ""


class _Here(threading.local):
    source: Source | None = None


class _ToBeLoaded:
    depth = 0


_elsewhere, _here, _saved, _to_be_loaded = _Elsewhere(), _Here(), _Saved(), _ToBeLoaded()


def is_loaded_by_keras() -> bool:
    """Whether this runs inside `keras.models.load_model`.

    It builds the layers of a custom model class before it loads their weights.
    """
    # A private function, as Keras 3 has no public one: keras.config and keras.saving do not expose this.
    return serialization_lib.in_safe_mode() is not None


def _value(variable: Any) -> tf.Tensor:
    return tf.convert_to_tensor(variable.value)


def _sum_of_last(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(values, -1)


def _whole(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least}")
    return int(value)


def _as_json(optimizer: Any) -> str:
    if isinstance(optimizer, str) and optimizer.startswith("{"):
        return optimizer
    return json.dumps(keras.optimizers.serialize(keras.optimizers.get(optimizer)), sort_keys=True)
