# SPDX-License-Identifier: Apache-2.0
"""The values of many variables: taken without a copy, sent, prepared, and taken over.

TensorFlow never writes into a value that is still referenced: an update gives the variable a new value, or
copies the present one first. So values that were read stay what the variables were.

To take values over is quick: what takes time is done before, on any thread, by `prepared`.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.trainer.model import digests
from edl.trainer.model.variable_spec import VariableSpec

LARGE = 1 << 20  # bytes of a part that is worth not being copied


def parts(variables: Sequence[Any]) -> list[np.ndarray]:
    """The value of each now, uint8 [bytes]."""
    return [array(_value(v)).reshape(-1).view(np.uint8) for v in variables]


def in_host_memory(variable: Any) -> Any:
    """The variable's value now, as a tensor in host memory. Only that of a GPU's variable is copied."""
    value = _value(variable)
    if value.device.endswith("CPU:0"):
        return value
    with tf.device("CPU:0"):
        return tf.identity(value)


def variable_specs(variables: Sequence[Any], model: keras.Model) -> list[VariableSpec]:
    """Describe the variables, Keras' or TensorFlow's; later ones of the same name are numbered.

    Args:
        model: whose weights are among them.
    """
    trained, of_model = (
        {id(each) for v in those for each in (v, v.value)}
        for those in (model.trainable_variables, model.weights)
    )
    # TensorFlow numbers the names of what is made while a step is traced; Keras' paths are the same anywhere.
    paths = {id(v.value): v.path for v in model.variables}
    found: list[VariableSpec] = []
    times = Counter[str]()
    for v in variables:
        value, name = _value(v), paths.get(id(v)) or str(getattr(v, "path", v.name)).partition(":")[0]
        times[name] += 1
        unlike = name if times[name] == 1 else f"{name}#{times[name]}"
        shape = tuple(int(n) for n in value.shape)
        found.append(VariableSpec(unlike, str(value.dtype.name), shape, id(v) in trained, id(v) in of_model))
    return found


def nbytes(variables: Sequence[Any]) -> int:
    """Return the size of the variables' values in bytes, which is the sum of the lengths of their `parts`."""
    return sum(map(_nbytes, variables))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All parts in one array, uint8 [bytes]."""
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def divided(variables: Sequence[Any], state: np.ndarray) -> list[np.ndarray]:
    """The reverse of `joined`.

    Raises:
        ModelError: it is not of these variables.
    """
    sizes = [_nbytes(v) for v in variables]
    if sum(sizes) != len(state):
        raise ModelError(f"the ring's state has {len(state)} bytes, this worker's model has {sum(sizes)}")
    return np.split(state, np.cumsum(sizes)[:-1]) if sizes else []


class Room(np.ndarray):
    """A tensor's memory, uint8 [bytes], which may be written to: the tensor was not used yet."""

    tensor: Any

    @staticmethod
    def of(tensor: Any) -> Room:
        """View the bytes of a tensor as an array that keeps the tensor alive."""
        address = np.asarray(memoryview(tensor)).ctypes.data
        memory = (ctypes.c_uint8 * len(tensor)).from_address(address)
        found = np.ctypeslib.as_array(memory).view(Room)
        found.tensor = tensor
        return found


def allocate(nbytes: int) -> np.ndarray:
    """Allocate memory for a part to be received, uint8 [bytes].

    `prepared` makes a value of it without a copy: memory that is touched for the first time costs more than
    the write.
    """
    if nbytes < LARGE:
        return np.empty(nbytes, np.uint8)
    return Room.of(_empty([nbytes]))


def prepared(variables: Sequence[Any], parts: list[np.ndarray]) -> list[Any]:
    """Convert parts for `take_over`. Only the list changes: each part is removed as soon as it is converted.

    Raises:
        ModelError: the parts are not of these variables.
    """
    given, expected = [len(part) for part in parts], [_nbytes(v) for v in variables]
    if given != expected:
        raise ModelError(
            f"the ring's state has {len(given)} variables of {sum(given)} bytes, this worker's model has "
            f"{len(expected)} of {sum(expected)}"
        )
    parts.reverse()
    return [_tensor(parts.pop(), _value(v)) for v in variables]


def take_over(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Give the variables the values that were prepared for them: nothing is copied."""
    for v, value in zip(variables, values, strict=True):
        v.assign(value)


def change(variables: Sequence[Any], values: Mapping[int, np.ndarray]) -> None:
    """Set some of the variables, by index, to these values, uint8 [bytes] each."""
    some = [variables[place] for place in values]
    take_over(some, prepared(some, list(values.values())))


class Kept:
    """The values of the variables now, to be put back once.

    What is the same number everywhere, as most slots are in the beginning, is kept as that number: then the
    memory of the variables is all that is there while something else is tried with them.
    """

    def __init__(self, variables: Sequence[Any]):
        values = [_value(v) for v in variables]
        self._variables, self._values = variables, [(_smallest(value), value.shape) for value in values]

    def put_back(self) -> None:
        """Assign the kept values, and drop each, so that memory holds one state and one variable more."""
        for v in reversed(self._variables):  # one after the other: what is kept is dropped
            v.assign(tf.broadcast_to(*self._values.pop()))  # of its shape then, which may be any


def _smallest(value: Any) -> Any:
    """The value, or, if that is the same to the bit everywhere, one of its elements."""
    bits = array(value).reshape(-1)
    bits = bits.view(f"u{bits.itemsize}") if bits.itemsize in (1, 2, 4, 8) else bits
    same = bits.size > 1 and bool((bits == bits[0]).all())
    return tf.constant(tf.reshape(value, [-1])[0]) if same else value


def filled(shape: Sequence[int], fill: Callable[[np.ndarray], None]) -> Any:
    """A new float32 tensor, made without a copy.

    Args:
        fill: writes the values; takes the tensor's memory, float32 [values], uninitialised.
    """
    bytes_of = _empty([*shape, tf.float32.size])
    if math.prod(shape):
        fill(memory(bytes_of))
    with tf.device("CPU:0"):
        return tf.bitcast(bytes_of, tf.float32)


def memory(value: Any) -> np.ndarray:
    """The memory of a tensor as float32 [values], for writing. Nothing else may use the tensor yet."""
    found: Any = (ctypes.c_float * (array(value).nbytes // 4)).from_address(array(value).ctypes.data)
    found.tensor = value  # which must not be freed before
    return np.ctypeslib.as_array(found)


def digest(parts: Sequence[np.ndarray]) -> str:
    """Equal for values that are equal, bit for bit."""
    return digests.digest(parts).hex()


def _value(variable: Any) -> Any:
    """The variable's value as an eager tensor."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).read_value()


def _tensor(part: np.ndarray, like: Any) -> Any:
    """Convert a part to a tensor: without a copy if its memory came from `allocate`, else with one.

    Other threads run meanwhile. TensorFlow's own copy holds Python's lock, for a tenth of a second where much
    memory is touched for the first time.
    """
    if not (like.dtype.is_floating or like.dtype.is_integer):
        array = np.require(part.view(like.dtype.as_numpy_dtype).reshape(like.shape), requirements=["A", "C"])
        with tf.device("CPU:0"):
            return tf.constant(array)
    if isinstance(part, Room):
        bytes_of = part.tensor
    else:
        bytes_of, array = _empty([part.nbytes]), np.ascontiguousarray(part)
        to = np.asarray(memoryview(bytes_of))
        ctypes.memmove(to.ctypes.data, array.ctypes.data, array.nbytes)  # the tensor was not used yet
    size = [like.dtype.size] if like.dtype.size > 1 else []
    with tf.device("CPU:0"):
        return tf.bitcast(tf.reshape(bytes_of, [*like.shape, *size]), like.dtype)


def _empty(shape: Sequence[int]) -> Any:
    """A tensor of bytes that are not set, uint8 of this shape.

    TensorFlow looks at new numbers of a floating type if the user asked for it (`enable_check_numerics`). So
    memory is filled as bytes, and named numbers afterwards.
    """
    with tf.device("CPU:0"):
        return tf.raw_ops.Empty(shape=shape, dtype=tf.uint8)


def array(value: Any) -> np.ndarray:
    """An eager tensor as an array, without a copy where Python has a name for its type."""
    try:
        return np.asarray(memoryview(value))
    except ValueError:  # bfloat16: Python has no name for it
        return np.asarray(value.numpy())


def _nbytes(variable: Any) -> int:
    value = _value(variable)
    return int(math.prod(value.shape) * value.dtype.size)
