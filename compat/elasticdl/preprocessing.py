# SPDX-License-Identifier: Apache-2.0
"""The layers and the feature column of elasticdl_preprocessing, with ElasticDL's results.

They take dense, sparse or ragged tensors. Keras has layers like most of them, but with other arguments, and
some give other ids: the vocabulary of keras.layers.StringLookup begins at 1.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import keras
import tensorflow as tf

from edl.compat.elasticdl.columns import concatenated_categorical_column
from edl.compat.elasticdl.operations import PACKAGE
from edl.errors import ModelError
from edl.layers import Embedding

Kind = TypeVar("Kind", bound=type[keras.layers.Layer])
LAYERS: dict[str, Any] = {}  # by their names in ElasticDL


def _known(kind: Kind) -> Kind:
    """Add a layer to LAYERS, and let Keras load models that have it."""
    LAYERS[kind.__name__] = kind
    registered: Kind = keras.saving.register_keras_serializable(package=PACKAGE)(kind)
    return registered


class _Layer(keras.layers.Layer):
    """A layer without weights, whose arguments are its attributes.

    Args:
        arguments: the arguments of this layer, which are saved with it.
        others: arguments of all layers, such as `name`.
    """

    def __init__(self, arguments: dict[str, Any], others: dict[str, Any]):
        super().__init__(**others)
        self.autocast = False  # Keras would cast the inputs to float32
        self._arguments = tuple(arguments)
        for name, value in arguments.items():
            setattr(self, name, value)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **{name: getattr(self, name) for name in self._arguments}}


class _OfValues(_Layer):
    """A layer that replaces each value by another."""

    def call(self, inputs: Any) -> Any:
        return _of_values(self.value, inputs)

    def value(self, values: Any) -> Any:
        """Return the new values of a dense tensor."""
        raise NotImplementedError


def _of_values(value: Callable[[Any], Any], inputs: Any) -> Any:
    if isinstance(inputs, tf.SparseTensor):
        return inputs.with_values(value(inputs.values))
    if isinstance(inputs, tf.RaggedTensor):
        return tf.ragged.map_flat_values(value, inputs)
    return value(inputs)


def _within(values: Any, end: int, default: int) -> Any:
    """The values as int64; `default` in place of those outside [0, end)."""
    ids = tf.cast(values, tf.int64)
    return tf.where((ids < 0) | (ids >= end), tf.constant(default, tf.int64), ids)


@_known
class Discretization(_OfValues):
    """The number of boundaries that are less than or equal to a value, int64."""

    bins: Sequence[float]

    def __init__(self, bins: Sequence[float], **others: Any):
        super().__init__({"bins": [*map(float, bins)]}, others)

    def num_bins(self) -> int:
        return len(self.bins) + 1

    def value(self, values: Any) -> Any:
        return tf.cast(tf.raw_ops.Bucketize(input=values, boundaries=self.bins), tf.int64)


@_known
class Hashing(_OfValues):
    """The hash of a text or a whole number, int64 in [0, num_bins)."""

    num_bins: int

    def __init__(self, num_bins: int, **others: Any):
        if not num_bins or num_bins < 0:
            raise ModelError(f"Hashing: num_bins is {num_bins!r}, expected a positive number")
        super().__init__({"num_bins": num_bins}, others)

    def value(self, values: Any) -> Any:
        texts = tf.as_string(values) if values.dtype.is_integer else values
        return tf.strings.to_hash_bucket_fast(texts, self.num_bins)


@_known
class IndexLookup(_OfValues):
    """The index of a text in a vocabulary, int64. The ids of unknown texts follow those of the vocabulary.

    Args:
        vocabulary: the texts, or the path of a file with one in each line.
        num_oov_tokens: number of ids of unknown texts; with 0, they get -1.
    """

    vocabulary: list[str]
    num_oov_tokens: int

    def __init__(self, vocabulary: Sequence[str] | str, num_oov_tokens: int = 1, **others: Any):
        if isinstance(vocabulary, str):
            vocabulary = [line.strip() for line in tf.io.gfile.GFile(vocabulary).read().splitlines()]
        texts = [*vocabulary]
        if repeated := [text for text, count in Counter(texts).items() if count > 1]:
            raise ModelError(f"IndexLookup: the vocabulary has {repeated[0]!r} more than once")
        super().__init__({"vocabulary": texts, "num_oov_tokens": num_oov_tokens}, others)
        ids = tf.lookup.KeyValueTensorInitializer(texts, tf.range(len(texts), dtype=tf.int64))
        self._table = (
            tf.lookup.StaticVocabularyTable(ids, num_oov_tokens)
            if num_oov_tokens
            else tf.lookup.StaticHashTable(ids, -1)
        )

    def vocab_size(self) -> int:
        return len(self.vocabulary) + self.num_oov_tokens

    def value(self, values: Any) -> Any:
        return self._table.lookup(values)


@_known
class LogRound(_OfValues):
    """The rounded logarithm of a number, int64 in [0, num_bins); `default_value` for others."""

    num_bins: int
    default_value: int
    base: float | None

    def __init__(self, num_bins: int, default_value: int = 0, base: float | None = None, **others: Any):
        super().__init__({"num_bins": num_bins, "default_value": default_value, "base": base}, others)

    def value(self, values: Any) -> Any:
        found = tf.math.log(tf.cast(values, tf.float64))
        if self.base is not None:
            found /= tf.math.log(tf.constant(self.base, tf.float64))
        return _within(tf.math.round(found), self.num_bins, self.default_value)


@_known
class Normalizer(_OfValues):
    """(x - subtractor) / divisor, float32."""

    subtractor: float
    divisor: float

    def __init__(self, subtractor: float, divisor: float, **others: Any):
        if not divisor:
            raise ModelError("Normalizer: divisor is 0")
        super().__init__({"subtractor": subtractor, "divisor": divisor}, others)

    def value(self, values: Any) -> Any:
        return (tf.cast(values, tf.float32) - self.subtractor) / self.divisor


@_known
class RoundIdentity(_OfValues):
    """The rounded number, int64 in [0, num_buckets); `default_value` for others."""

    num_buckets: int
    default_value: int

    def __init__(self, num_buckets: int, default_value: int = 0, **others: Any):
        super().__init__({"num_buckets": num_buckets, "default_value": default_value}, others)

    def value(self, values: Any) -> Any:
        return _within(tf.math.round(values), self.num_buckets, self.default_value)


@_known
class ToNumber(_OfValues):
    """The number in a text, or a number in another type; `default_value` for an empty text."""

    out_type: str
    default_value: float

    def __init__(self, out_type: Any, default_value: float, **others: Any):
        super().__init__({"out_type": tf.as_dtype(out_type).name, "default_value": default_value}, others)

    def value(self, values: Any) -> Any:
        if values.dtype != tf.string:
            return tf.cast(values, self.out_type)
        texts = tf.where(tf.equal(values, ""), str(self.default_value), values)
        return tf.strings.to_number(texts, tf.as_dtype(self.out_type))


class _WithoutValue(_Layer):
    """A layer that leaves out a value: by default the empty text, -1 among whole numbers, and `of_floats`."""

    of_floats: float | None = None
    ignore_value: Any

    def ignored(self, dtype: Any) -> Any:
        """Return the value that is left out, as a tensor; None for none."""
        value = self.ignore_value
        if value is None:
            value = "" if dtype == tf.string else -1 if dtype.is_integer else self.of_floats
        return None if value is None else tf.cast(value, dtype)


@_known
class ToRagged(_WithoutValue):
    """The values of each row as a ragged tensor. ElasticDL's layer has `sep`, too, and does not use it."""

    def __init__(self, sep: str = ",", ignore_value: Any = None, **others: Any):
        super().__init__({"sep": sep, "ignore_value": ignore_value}, others)

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, tf.RaggedTensor):
            inputs = tf.RaggedTensor.from_tensor(inputs)
        value = self.ignored(inputs.dtype)
        return inputs if value is None else tf.ragged.boolean_mask(inputs, tf.not_equal(inputs, value))


@_known
class ToSparse(_WithoutValue):
    """The values as a sparse tensor."""

    of_floats = 0.0

    def __init__(self, ignore_value: Any = None, **others: Any):
        super().__init__({"ignore_value": ignore_value}, others)

    def call(self, inputs: Any) -> Any:
        if isinstance(inputs, tf.SparseTensor):
            return inputs
        indices = tf.where(tf.not_equal(inputs, self.ignored(inputs.dtype)))
        return tf.SparseTensor(indices, tf.gather_nd(inputs, indices), tf.shape(inputs, out_type=tf.int64))


@_known
class ConcatenateWithOffset(_Layer):
    """The tensors side by side, after an offset has been added to each.

    Args:
        offsets: one for each tensor; None for none.
    """

    offsets: Sequence[int] | None
    axis: int

    def __init__(self, offsets: Sequence[int] | None, axis: int = -1, **others: Any):
        super().__init__({"offsets": None if offsets is None else [*offsets], "axis": axis}, others)

    def call(self, inputs: Any) -> Any:
        if not isinstance(inputs, list | tuple):
            return inputs
        offsets = [0] * len(inputs) if self.offsets is None else self.offsets
        if len(offsets) != len(inputs):
            raise ModelError(f"ConcatenateWithOffset: {len(offsets)} offsets for {len(inputs)} tensors")
        moved = [
            _of_values(partial(operator.add, offset), tensor) if offset else tensor
            for offset, tensor in zip(offsets, inputs, strict=True)
        ]
        if isinstance(moved[0], tf.SparseTensor):
            return tf.sparse.concat(axis=self.axis, sp_inputs=moved)
        return tf.concat(moved, axis=self.axis)


def sparse_embedding(
    input_dim: int | None,
    output_dim: int,
    embeddings_initializer: Any = "uniform",
    combiner: str = "mean",
    **others: Any,
) -> Embedding:
    """SparseEmbedding, as the layer of edl. In dense tensors, ElasticDL ignored the id 0; here it counts."""
    return Embedding(
        output_dim,
        combiner=combiner,
        initializer=embeddings_initializer,
        input_dim=input_dim or None,
        float_ids=True,
        **others,
    )


LAYERS["SparseEmbedding"] = sparse_embedding
MODULES: dict[str, dict[str, Any]] = {
    "elasticdl_preprocessing.layers": LAYERS,
    "elasticdl_preprocessing.feature_column.feature_column": {
        "concatenated_categorical_column": concatenated_categorical_column
    },
    **{
        f"elasticdl_preprocessing.layers.{re.sub('(?<=.)(?=[A-Z])', '_', name).lower()}": {name: layer}
        for name, layer in LAYERS.items()
    },
}
