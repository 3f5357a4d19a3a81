# SPDX-License-Identifier: Apache-2.0
"""Nests of arrays, as in Keras' `fit`: tuples, lists and dicts of arrays, of any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np


def leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path, such as `[0]['age']`."""
    if isinstance(nest, dict):
        for key, value in nest.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(nest, tuple | list):
        for index, value in enumerate(nest):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, nest


def map_leaves(function: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """Apply `function` to the leaves of nests that have the same structure.

    Raises:
        ValueError: the nests differ in structure; the message says how.
    """
    if isinstance(nest, dict):
        for other in others:
            if not isinstance(other, dict) or other.keys() != nest.keys():
                keys = list(other) if isinstance(other, dict) else type(other).__name__
                raise ValueError(f"keys {list(nest)} and {keys}")
        return {key: map_leaves(function, nest[key], *(other[key] for other in others)) for key in nest}
    if isinstance(nest, tuple | list):
        for other in others:
            if not isinstance(other, tuple | list) or len(other) != len(nest):
                what = f"{len(other)} entries" if isinstance(other, tuple | list) else type(other).__name__
                raise ValueError(f"{len(nest)} entries and {what}")
        mapped = [map_leaves(function, *entries) for entries in zip(nest, *others, strict=True)]
        if isinstance(nest, tuple) and hasattr(nest, "_fields"):
            return type(nest)(*mapped)  # a named tuple
        return type(nest)(mapped)
    for other in others:
        if isinstance(other, dict | tuple | list):
            raise ValueError(f"a {type(nest).__name__} and a {type(other).__name__}")
    return function(nest, *others)


def flatten(nest: Any) -> list[Any]:
    """The leaves; None is one."""
    return [leaf for _, leaf in leaves(nest)]


def pack(like: Any, flat: Sequence[Any]) -> Any:
    """The reverse of `flatten`, in the structure of `like`."""
    following = iter(flat)
    return map_leaves(lambda _: next(following), like)


def as_unpacked(data: Any) -> Any:
    """Unpack data like Keras: a list of arrays counts as the tuple (x, y, weights).

    Trailing entries that are None are removed.
    """
    if isinstance(data, list) and not is_leaf_list(data):
        data = tuple(data)
    if isinstance(data, tuple) and not hasattr(data, "_fields"):
        while len(data) > 1 and data[-1] is None:
            data = data[:-1]
    return data


def with_ones(data: Any, count: int) -> Any:
    """Replace weights of an output that are None by ones: for Keras both mean that all records count alike.

    Args:
        data: features, labels and weights of `count` records; other data are returned unchanged.
    """
    if not isinstance(data, tuple | list) or len(data) != 3 or hasattr(data, "_fields"):
        return data
    kind: Any = type(data)
    x, y, weights = data
    ones = np.ones(count, np.float32)
    if isinstance(weights, dict):
        weights = {name: ones if value is None else value for name, value in weights.items()}
    elif isinstance(weights, list | tuple) and any(value is None for value in weights):
        weights = type(weights)(ones if value is None else value for value in weights)
    return kind((x, y, weights))


def is_leaf_list(value: Any) -> bool:
    """Whether `value` is a (nested) list of numbers or text: one array, not a list of arrays.

    A tuple never is one.
    """
    if not isinstance(value, list):
        return False
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float | complex | str | bytes | np.generic)
