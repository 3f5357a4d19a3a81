"""The values of many variables: taken without a copy, sent, prepared, and taken over.

TensorFlow never writes into a value that somebody else has read: what changes a variable gives it a new
value, or copies the present one first. So values that were read stay what the variables were.

To take values over is quick: what takes time is done before, on any thread, by `prepared`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from trainer.described import Described


def parts(variables: Sequence[Any]) -> list[np.ndarray]:
    """The value of each now, uint8 [bytes]."""
    return [_array(_value(v)).reshape(-1).view(np.uint8) for v in variables]


def described(variables: Sequence[Any], model: keras.Model) -> list[Described]:
    """Each of them, Keras' or TensorFlow's; of several of one name, the later ones are numbered.

    Args:
        model: whose weights are among them.
    """
    trained, of_model = (
        {id(each) for v in those for each in (v, v.value)}
        for those in (model.trainable_variables, model.weights)
    )
    found: list[Described] = []
    times = Counter[str]()
    for v in variables:
        value, name = _value(v), str(getattr(v, "path", v.name)).partition(":")[0]
        times[name] += 1
        unlike = name if times[name] == 1 else f"{name}#{times[name]}"
        shape = tuple(int(n) for n in value.shape)
        found.append(Described(unlike, str(value.dtype.name), shape, id(v) in trained, id(v) in of_model))
    return found


def nbytes(variables: Sequence[Any]) -> int:
    return sum(map(_nbytes, variables))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """All parts as one, uint8 [bytes]."""
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def divided(variables: Sequence[Any], state: np.ndarray) -> list[np.ndarray]:
    """What `joined` has joined.

    Raises:
        ModelError: it is not of these variables.
    """
    sizes = [_nbytes(v) for v in variables]
    if sum(sizes) != len(state):
        raise ModelError(f"the ring's state has {len(state)} bytes, this worker's model has {sum(sizes)}")
    return np.split(state, np.cumsum(sizes)[:-1]) if sizes else []


def prepared(variables: Sequence[Any], parts: list[np.ndarray]) -> list[Any]:
    """These values, for `take_over`. Changes nothing but the list: each part is dropped as soon as its value
    is made.

    Raises:
        ModelError: they are not of these variables.
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
    """Give some of the variables, by their place, other values: uint8 [bytes] each."""
    some = [variables[place] for place in values]
    take_over(some, prepared(some, list(values.values())))


def digest(parts: Sequence[np.ndarray]) -> str:
    """SHA-256: equal for values that are equal, bit for bit."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.data)
    return found.hexdigest()


def _value(variable: Any) -> Any:
    """As an eager tensor: of Keras' variable, or of TensorFlow's."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).read_value()


def _tensor(part: np.ndarray, like: Any) -> Any:
    array = part.view(like.dtype.as_numpy_dtype).reshape(like.shape)
    return tf.constant(np.require(array, requirements="A"))


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(memoryview(value))
    except ValueError:  # bfloat16: Python has no name for it
        return np.asarray(value.numpy())


def _nbytes(variable: Any) -> int:
    value = _value(variable)
    return int(math.prod(value.shape) * value.dtype.size)
