# SPDX-License-Identifier: Apache-2.0
"""The arrays of a batch as TensorFlow is given them: dense, ragged, sparse, or of strings.

In a worker of a script TensorFlow is imported only if the script does; until then no array is a tensor.

A graph is traced for arrays of certain types (`spec`). An array of another type is compared with them,
never misread: `wider` is a type that covers both, or the words for what differs.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from edl.data import nest
from edl.data.exact import refuse_masked

if TYPE_CHECKING:
    import tensorflow as tf

# Elements of object arrays that cannot be changed through a read-only view.
_IMMUTABLE = frozenset({str, bytes, int, float, bool, complex, type(None), np.str_, np.bytes_})


def tensorflow() -> Any:
    """TensorFlow, if it is imported; else None."""
    return sys.modules.get("tensorflow")


def is_tensor(array: Any) -> bool:
    """Whether it is a tensor of TensorFlow, dense or composite."""
    return (tf := tensorflow()) is not None and bool(tf.is_tensor(array))


def floatx() -> str:
    """The type of floats that Keras has by default."""
    keras = sys.modules.get("keras")
    return keras.config.floatx() if keras is not None else "float32"


def protected(array: Any) -> Any:
    """The array for code that must not change its memory.

    A NumPy array becomes a read-only view, which costs nothing. Where a view does not protect the data
    (arrays of lists or of arrays, data frames), it is a copy. Tensors are immutable.
    """
    if isinstance(array, np.ndarray) and (
        not array.dtype.hasobject or _IMMUTABLE.issuperset(map(type, array.flat))
    ):
        view = array.view()
        view.flags.writeable = False
        return view
    if is_tensor(array) or not hasattr(array, "__array__"):
        return array
    return copy.deepcopy(array)


def standard(array: Any) -> Any:
    """Convert an array as Keras' `fit` does: floats to the default precision, text to a tensor.

    Without TensorFlow, text stays an array.

    Raises:
        TypeError: TensorFlow has no such type.
        ValueError: no tensor can be made of the array, or some of its values are masked.
    """
    if array is None:
        return None
    if isinstance(array, np.ma.MaskedArray):
        refuse_masked(array)
    tf = tensorflow()
    if not isinstance(array, np.ndarray) and is_tensor(array):  # the question takes long
        return tf.cast(array, floatx()) if array.dtype == tf.float64 else array
    array = np.asarray(array)
    is_bfloat16 = array.dtype.kind == "V" and array.dtype.name == "bfloat16"
    if (array.dtype.kind in "MmV" and not is_bfloat16) or array.dtype.char in "gG":
        raise TypeError(f"TensorFlow has no {array.dtype}")
    if array.dtype == np.float64 or is_bfloat16:
        return array.astype(floatx())
    if array.dtype.kind == "T":  # NumPy's variable-width strings, which TensorFlow does not know
        array = array.astype(object)
    return tf.constant(array) if tf is not None and array.dtype.kind in "USO" else array


def kind_of(array: Any) -> str:
    """The array's type for messages: `an array of datetime64[s]`, `an array of Decimal objects`."""
    array = np.asarray(array, dtype=None if isinstance(array, np.ndarray) else object)
    if array.dtype != object:
        return f"an array of {array.dtype}"
    kinds = {type(value).__name__ for value in array.flat if not isinstance(value, str | bytes)}
    return f"an array of {' and '.join(sorted(kinds))} objects"


def tensor(array: Any) -> Any:
    """A standard array as a tensor."""
    import tensorflow as tf

    if isinstance(array, np.ndarray):
        return tf.constant(array)
    return array if tf.is_tensor(array) else tf.convert_to_tensor(array)


def key(array: Any) -> tuple[Any, ...]:
    """Equal for arrays of the same type. Cheap: it is taken of each array of each batch."""
    return type(array), array.dtype, tuple(array.shape[1:])


def spec(array: Any) -> tf.TypeSpec:
    """The type of a standard array, with any number of records."""
    import tensorflow as tf

    shape = [None, *array.shape[1:]] if len(array.shape) else []
    if isinstance(array, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, array.dtype, array.ragged_rank, array.row_splits.dtype)
    if isinstance(array, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, array.dtype)
    return tf.TensorSpec(shape, array.dtype)


def wider(traced: tf.TypeSpec, array: Any) -> tf.TypeSpec | str:
    """Return a type that covers both, or the reason why no type does."""
    found = spec(array)
    both = None if type(found) is not type(traced) else traced.most_specific_common_supertype([found])
    if both is None or both.shape.rank is None:
        return f"is {_shown(found)}, but was {_shown(traced)} when the model was traced"
    return both


def nbytes(tree: Any) -> int:
    """About how much memory the arrays take, raw or standard."""
    return sum(_nbytes(array) for array in nest.flatten(tree) if array is not None)


def _nbytes(array: Any) -> int:
    if isinstance(array, np.ndarray) and not array.dtype.hasobject:
        return int(array.nbytes)
    if is_tensor(array):
        tf = tensorflow()
        if isinstance(array, tf.RaggedTensor):
            array = array.flat_values
        if isinstance(array, tf.SparseTensor):
            array = array.values
        if array.dtype != tf.string:
            return int(array.shape.num_elements() or 0) * int(array.dtype.size)
        array = array.numpy()
    array = np.asarray(array)
    if array.dtype != object:
        return int(array.nbytes)
    return sum(8 + (len(v) if isinstance(v, str | bytes) else np.asarray(v).nbytes) for v in array.flat)


def cut(array: Any, start: int, stop: int) -> Any:
    """The records [start, stop) of a standard array."""
    import tensorflow as tf

    if isinstance(array, tf.SparseTensor):
        shape = [stop - start, *array.shape[1:]]
        return tf.sparse.slice(array, [start] + [0] * (len(shape) - 1), shape)
    return array[start:stop]


def doubled(array: Any) -> Any:
    """All records of a standard array, followed by the same records again."""
    import tensorflow as tf

    if isinstance(array, tf.SparseTensor):
        return tf.sparse.concat(0, [array, array])
    return tf.concat([array, array], 0) if tf.is_tensor(array) else np.concatenate([array, array])


def _shown(type_: tf.TypeSpec) -> str:
    import tensorflow as tf

    kind = {tf.RaggedTensorSpec: "ragged ", tf.SparseTensorSpec: "sparse "}.get(type(type_), "")
    return f"{kind}{type_.dtype.name} {['any' if n is None else n for n in type_.shape]}".replace("'", "")
