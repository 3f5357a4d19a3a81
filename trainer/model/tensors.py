# SPDX-License-Identifier: Apache-2.0
"""Tensors of a user's own loop as NumPy arrays, and back.

No framework is imported: a value of one exists only if the user's code has imported it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.trainer.model.arrays import is_tensor, tensorflow


def flatten(tree: Any) -> list[Any]:
    """The leaves of lists, tuples and dicts (by key); None is a leaf."""
    if isinstance(tree, dict):
        return [leaf for key in _keys(tree) for leaf in flatten(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in flatten(item)]
    return [tree]


def pack(like: Any, leaves: Sequence[Any]) -> Any:
    """The reverse of `flatten`, in the structure of `like`."""
    return _packed(like, iter(leaves))


def _packed(tree: Any, following: Iterator[Any]) -> Any:
    # No function within `pack`: it would refer to itself, and keep the leaves until the garbage is collected.
    if isinstance(tree, dict):
        found = {key: _packed(tree[key], following) for key in _keys(tree)}
        return {key: found[key] for key in tree}
    if isinstance(tree, list | tuple):
        items = [_packed(item, following) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return next(following)


def _keys(tree: dict[Any, Any]) -> list[Any]:
    return sorted(tree, key=lambda key: (type(key).__name__, key))


@dataclass(frozen=True)
class Spec:
    """The shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    is_float: bool
    of_tensorflow: bool = False

    def restore(self, mean: np.ndarray) -> Any:
        """Convert a mean, float32 or float64 [shape], to a tensor of this type. It may share the memory."""
        if not self.of_tensorflow:
            return mean.astype(self.dtype, copy=False)
        tf = tensorflow()
        with tf.device("CPU:0"):
            return tf.cast(tf.convert_to_tensor(mean), self.dtype)


def spec(tensor: Any) -> Spec | None:
    """Describe a tensor; None if it is none."""
    if is_tensor(tensor) or _is_slices(tensor):
        return Spec(tuple(tensor.shape), tensor.dtype.name, tensor.dtype.is_floating, of_tensorflow=True)
    if not hasattr(tensor, "shape"):
        return None
    array = np.asarray(tensor)
    return Spec(array.shape, array.dtype.name, array.dtype.kind in "fV")  # V: bfloat16 of ml_dtypes


def array(tensor: Any) -> np.ndarray:
    """The values in host memory, without a copy where that is possible."""
    if _is_slices(tensor):
        tensor = tensorflow().convert_to_tensor(tensor)
    if is_tensor(tensor):
        try:
            return np.asarray(memoryview(tensor))
        except ValueError:  # bfloat16: Python has no name for it
            return np.asarray(tensor.numpy())
    return np.asarray(tensor)


def is_symbolic(tensor: Any) -> bool:
    """Whether it is a tensor of a graph that is being traced, and has no value."""
    return (tf := tensorflow()) is not None and (tf.inside_function() or tf.is_symbolic_tensor(tensor))


def _is_slices(tensor: Any) -> bool:
    return (tf := tensorflow()) is not None and isinstance(tensor, tf.IndexedSlices)
