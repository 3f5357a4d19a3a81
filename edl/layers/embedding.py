# SPDX-License-Identifier: Apache-2.0
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

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.layers import row_location

COMBINERS = (None, "sum", "mean", "sqrtn")
IDS = (1 << 63) - 1  # number of ids that texts are hashed to


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
        """Create the table, or leave it to the servers; the module's docstring lists the cases.

        Raises:
            ValueError: the layer has no `input_dim`, but the table must be a variable.
        """
        if self.built:
            return
        if self.vocabulary is None:
            self.vocabulary = row_location.saved().counts().get(self.name)
        if self.vocabulary is not None:
            self._add_saved(self.vocabulary)
        elif row_location.are_elsewhere():
            self.on_servers = True
        elif self.input_dim is not None:
            self.embeddings = self.add_weight(
                name="embeddings", shape=(self.input_dim, self.dim), initializer=self.initializer
            )
        elif row_location.are_to_be_loaded():
            self.awaits_rows, self.vocabulary = True, 0
            self._add_saved(0)
        else:
            if where := row_location.saved().where:
                there = ", ".join(map(repr, row_location.saved().counts())) or "no table"
                raise ValueError(
                    f"layer {self.name!r} has no input_dim, and {where} has no rows of it (it has "
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
        """Look up the vectors of ids, and combine those of a record if the layer has a combiner.

        Args:
            inputs: ids, integers or texts: [batch] or [batch, n], dense, ragged or sparse.
            weights: a weight for each id, of the same shape; only with a combiner.

        Returns:
            float [..., dim]: one vector for each id, or [batch, dim] with a combiner.

        Raises:
            ValueError: weights or sparse ids are given to a layer without a combiner.
            TypeError: ids are neither integers nor texts.
        """
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
        """Return the mask of ids other than 0 with `mask_zero`, bool of the shape of `inputs`; else None.

        Raises:
            ValueError: the ids are texts, which have no id 0.
        """
        plain = not isinstance(inputs, tf.SparseTensor | tf.RaggedTensor) and not getattr(inputs, "ragged", 0)
        if not self.mask_zero or self.combiner is not None or not plain:
            return None
        if keras.backend.standardize_dtype(inputs.dtype) == "string":
            raise ValueError(f"layer {self.name!r} has mask_zero for texts, which needs a combiner")
        return keras.ops.not_equal(inputs, 0)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """Return the symbolic output: shape and `dim`; with a combiner, `dim` replaces the last axis."""
        shape = tuple(inputs.shape)
        ragged = bool(getattr(inputs, "ragged", False)) and self.combiner is None
        kept = shape if self.combiner is None or len(shape) < 2 else shape[:-1]
        return keras.KerasTensor((*kept, self.dim), dtype=self.compute_dtype, ragged=ragged)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, as Keras saves them."""
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
        """Save a plain table as Keras' Embedding does, so that either layer can load it."""
        if self.is_plain:
            store["0"] = self.embeddings  # like Keras' Embedding
        else:
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load a table saved by this layer or by Keras' Embedding.

        The rows go to the servers if the layer's table is there.
        """
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
        """Convert inputs to ids, int64 of the same shape.

        Raises:
            TypeError: the inputs are neither integers nor texts.
        """
        if inputs.dtype == tf.string:
            count = self.input_dim or IDS
            if not self.mask_zero:
                return tf.strings.to_hash_bucket_fast(inputs, count)
            found = 1 + tf.strings.to_hash_bucket_fast(inputs, count - 1)
            return tf.where(inputs == "", tf.zeros_like(found), found)
        # While Keras loads a model of a custom class, it calls it with floats: it only knows the shapes.
        floats = self.float_ids or row_location.is_loaded_by_keras()
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
        if (source := row_location.source()) is not None:
            return source(self, ids)
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
