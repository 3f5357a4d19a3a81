"""The arrays of a batch as TensorFlow is given them: dense, ragged, sparse, or of strings.

A graph is traced for arrays of certain types (`spec`). An array of another type is compared with them,
never misread: `wider` is a type that covers both, or the words for what differs.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import DataError

MOST_LOOKED_AT = 1000  # values of an array, for a message


def standard(array: Any) -> Any:
    """As Keras' `fit` would give it to the model: floats in the default precision, text as a tensor."""
    if array is None:
        return None
    if not isinstance(array, np.ndarray) and tf.is_tensor(array):  # the question takes long
        return tf.cast(array, keras.config.floatx()) if array.dtype == tf.float64 else array
    array = np.asarray(array)
    if array.dtype == np.float64:
        return array.astype(keras.config.floatx())
    if array.dtype.kind == "T":  # NumPy's variable-width strings, which TensorFlow does not know
        array = array.astype(object)
    if array.dtype.kind not in "USO":
        return array
    try:
        return tf.constant(array)
    except (ValueError, TypeError) as error:
        kinds = sorted({type(value).__name__ for value in array.flat[:MOST_LOOKED_AT]})
        raise DataError(
            f"gives an array of Python objects ({', '.join(kinds)}), and must give numbers or text of one "
            "type (np.array(values, dtype), or tf.ragged.constant where records differ in length)"
        ) from error


def tensor(array: Any) -> Any:
    """A standard array as a tensor."""
    if isinstance(array, np.ndarray):
        return tf.constant(array)
    return array if tf.is_tensor(array) else tf.convert_to_tensor(array)


def key(array: Any) -> tuple[Any, ...]:
    """Equal for arrays of the same type. Cheap: it is taken of each array of each batch."""
    return type(array), array.dtype, tuple(array.shape[1:])


def spec(array: Any) -> tf.TypeSpec:
    """The type of a standard array, with any number of records."""
    shape = [None, *array.shape[1:]] if len(array.shape) else []
    if isinstance(array, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, array.dtype, array.ragged_rank, array.row_splits.dtype)
    if isinstance(array, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, array.dtype)
    return tf.TensorSpec(shape, array.dtype)


def wider(traced: tf.TypeSpec, array: Any) -> tf.TypeSpec | str:
    """A type that covers both, or why there is none."""
    found = spec(array)
    both = None if type(found) is not type(traced) else traced.most_specific_common_supertype([found])
    if both is None or both.shape.rank is None:
        return f"is {_shown(found)}, but was {_shown(traced)} when the model was traced"
    return both


def nbytes(tree: Any) -> int:
    """About how much memory the arrays take, raw or standard."""
    return sum(_nbytes(array) for array in keras.tree.flatten(tree) if array is not None)


def _nbytes(array: Any) -> int:
    if isinstance(array, tf.RaggedTensor):
        array = array.flat_values
    if isinstance(array, tf.SparseTensor):
        array = array.values
    if tf.is_tensor(array) and array.dtype == tf.string:
        array = array.numpy()
    if tf.is_tensor(array):
        return int(array.shape.num_elements() or 0) * int(array.dtype.size)
    array = np.asarray(array)
    if array.dtype != object:
        return int(array.nbytes)
    return sum(8 + (len(v) if isinstance(v, str | bytes) else np.asarray(v).nbytes) for v in array.flat)


def cut(array: Any, start: int, stop: int) -> Any:
    """The records [start, stop) of a standard array."""
    if isinstance(array, tf.SparseTensor):
        shape = [stop - start, *array.shape[1:]]
        return tf.sparse.slice(array, [start] + [0] * (len(shape) - 1), shape)
    return array[start:stop]


def _shown(type_: tf.TypeSpec) -> str:
    kind = {tf.RaggedTensorSpec: "ragged ", tf.SparseTensorSpec: "sparse "}.get(type(type_), "")
    return f"{kind}{type_.dtype.name} {['any' if n is None else n for n in type_.shape]}".replace("'", "")
