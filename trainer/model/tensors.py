# SPDX-License-Identifier: Apache-2.0
"""Tensors of any framework as NumPy arrays, and back, in trees of any depth.

No framework is imported here: a tensor exists only if the script has imported its framework.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edl.errors import ModelError
from edl.trainer.model.adapter import Adapter, Children, Spec

MODULES = {name: f"edl.trainer.model.of_{name}" for name in ("tensorflow", "keras", "torch", "jax")}
LEAVES = np.ndarray | np.generic | str | bytes | int | float | complex
_adapters: dict[str, Adapter] = {}


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that this process has imported."""
    for name, module in MODULES.items():
        if name in sys.modules and name not in _adapters:
            _adapters[name] = importlib.import_module(module).ADAPTER
    return list(_adapters.values())


def first(found: Callable[[Adapter], Any]) -> Any:
    """What the first adapter finds that knows the value; None if none does."""
    return next((it for adapter in adapters() if (it := found(adapter)) is not None), None)


def flatten(tree: Any) -> list[Any]:
    """The leaves of a tree, in order. None is a leaf."""
    return [leaf for _, leaf in with_paths(tree)]


def pack(like: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree with the structure of `like` and these leaves."""
    return _packed(like, iter(leaves))


def with_paths(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, such as `[0]['bias']`."""
    if (node := children(tree)) is None:
        return [(path, tree)]
    return [found for key, child in node[0] for found in with_paths(child, path + key)]


def _packed(like: Any, leaves: Any) -> Any:
    if (node := children(like)) is None:
        return next(leaves)
    return node[1]([_packed(child, leaves) for _, child in node[0]])


def children(node: Any) -> Children | None:
    """The entries of a container; None for a leaf."""
    if node is None or isinstance(node, LEAVES):
        return None
    is_plain = type(node) in (dict, list, tuple)
    if not is_plain and (found := first(lambda adapter: adapter.children(node))) is not None:
        return found
    if isinstance(node, Mapping):
        keys = sorted(node, key=str)
        return [(f"[{key!r}]", node[key]) for key in keys], lambda found: dict(zip(keys, found, strict=True))
    if not isinstance(node, list | tuple):
        return None
    kind: Any = type(node)
    make = (lambda found: kind(*found)) if hasattr(node, "_fields") else kind
    return [(f"[{i}]", child) for i, child in enumerate(node)], make


def array(tensor: Any) -> np.ndarray:
    """A tensor's values in host memory, without a copy if they are there.

    Raises:
        TypeError: it is no tensor of a known kind.
    """
    if isinstance(tensor, np.ndarray | np.generic):
        return np.asarray(tensor)
    found = first(lambda adapter: adapter.array(tensor))
    if found is None and hasattr(tensor, "__array__"):
        found = np.asarray(tensor)
    if found is None:
        raise TypeError(f"a {type(tensor).__name__} is no tensor")
    return found


def spec(tensor: Any) -> Spec | None:
    """The type of a tensor; None if it is no tensor of a known kind."""
    if not isinstance(tensor, np.ndarray | np.generic):
        if (found := first(lambda adapter: adapter.spec(tensor))) is not None:
            return found
        if not hasattr(tensor, "__array__"):
            return None
    values = np.asarray(tensor)
    dtype = values.dtype
    return Spec(values.shape, dtype.name, is_float(dtype), lambda mean: mean.astype(dtype, copy=False))


def number(value: Any) -> float:
    """A scalar of any kind as a number."""
    return float(value if isinstance(value, int | float) else array(value))


def is_float(dtype: np.dtype) -> bool:
    """Whether it is a type of real floating-point numbers; those of ml_dtypes have no kind of their own."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name.startswith(("bfloat", "float")))


def is_symbolic(tensor: Any) -> bool:
    """Whether it belongs to a function that is being traced, and has no values."""
    return any(adapter.is_symbolic(tensor) for adapter in adapters())


def records(data: Any) -> Callable[[np.ndarray], Any]:
    """How a loop is given the arrays of its records: as tensors if the data are of a framework's own kind."""
    return first(lambda adapter: adapter.records(data)) or (lambda array: array)


def taken(tree: Any) -> Children | None:
    """The gradients of the modules in a tree, if it has any, which `backward` has left in their parameters.

    The gradients are removed from the modules. The function puts means in their place, and returns the tree.

    Raises:
        ModelError: there is no gradient.
    """
    leaves = flatten(tree)
    nodes = [_taken(leaf) for leaf in leaves]
    if not any(nodes):
        return None
    names = [node[0] if node else [("", leaf)] for leaf, node in zip(leaves, nodes, strict=True)]
    if all(gradient is None for of_leaf in names for _, gradient in of_leaf):
        raise ModelError("step.mean() was given modules without gradients; call loss.backward() before")

    def put(means: Sequence[Any]) -> Any:
        rest, found = list(means), []
        for node, of_leaf in zip(nodes, names, strict=True):
            ours, rest = rest[: len(of_leaf)], rest[len(of_leaf) :]
            found.append(node[1](ours) if node else ours[0])
        return pack(tree, found)

    return [each for of_leaf in names for each in of_leaf], put


def _taken(leaf: Any) -> Children | None:
    return first(lambda adapter: adapter.taken(leaf))
