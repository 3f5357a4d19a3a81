# SPDX-License-Identifier: Apache-2.0
"""JAX in own loops: arrays, keys of random numbers, and containers that are registered as pytrees."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from edl.errors import ModelError
from edl.trainer.model.adapter import Adapter, Children, Spec


class Jax(Adapter):
    """JAX, and what registers its containers there: Optax, Flax, Equinox."""

    def array(self, value: Any) -> np.ndarray | None:
        if not isinstance(value, jax.Array):
            return None
        _refuse(value)
        return np.asarray(jax.random.key_data(value) if _is_key(value) else value)

    def spec(self, value: Any) -> Spec | None:
        if not isinstance(value, jax.Array):
            return None
        _refuse(value)
        if _is_key(value):
            wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(value))
            data = jax.random.key_data(value)
            return Spec(data.shape, data.dtype.name, False, lambda array: wrap(np.array(array)))
        # An array that is not bound to its device can be added to those of other devices, and stays so.
        sharding = value.sharding if value.committed else None
        dtype = value.dtype
        put = lambda array: jax.device_put(np.asarray(array, dtype), sharding)  # noqa: E731
        return Spec(
            tuple(value.shape), dtype.name, bool(jax.numpy.issubdtype(dtype, jax.numpy.floating)), put
        )

    def children(self, node: Any) -> Children | None:
        if isinstance(node, jax.Array):
            return None
        found, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda entry: entry is None)
        if jax.tree_util.treedef_is_leaf(structure):
            return None
        entries = [(jax.tree_util.keystr(path), leaf) for path, leaf in found]
        return entries, partial(jax.tree_util.tree_unflatten, structure)

    def is_symbolic(self, value: Any) -> bool:
        return isinstance(value, jax.core.Tracer)


def _is_key(value: jax.Array) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


def _refuse(value: jax.Array) -> None:
    """Refuse an array that this process cannot copy.

    Raises:
        ModelError: it was deleted, or has parts in other processes.
    """
    if value.is_deleted():
        raise ModelError("an array of JAX was deleted, as jax.jit deletes arguments that are donated to it")
    if not value.is_fully_addressable:
        raise ModelError(
            "an array of JAX is divided over processes; edl holds the whole state in each worker"
        )


ADAPTER = Jax()
