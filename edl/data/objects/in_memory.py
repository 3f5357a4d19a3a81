# SPDX-License-Identifier: Apache-2.0
"""Readers over records in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edl.data.exact import EXACT as EXACT
from edl.data.exact import to_array
from edl.data.nest import as_unpacked, is_leaf_list, leaves, map_leaves, with_ones
from edl.data.objects.tables import column, is_column, is_table, table
from edl.errors import DataError


class Arrays:
    """A reader over arrays in memory. Records are returned in the nested structure of `columns`.

    Args:
        columns: an array, or a tuple, list or dict of arrays (nested to any depth), all of one length.
        source: their name, for messages.
        digest: a digest of all records, if each worker computes them by itself (see `edl.data.same`).

    Raises:
        DataError: the arrays differ in length, or `columns` has no arrays.
    """

    def __init__(self, columns: Any, source: str = "arrays", digest: str = ""):
        lengths = {path: len(array) for path, array in leaves(columns)}
        if not lengths:
            raise DataError(f"{source}: at least one array is needed")
        if len(set(lengths.values())) != 1:
            named = ", ".join(f"{path.removeprefix('[0]') or path} has {n}" for path, n in lengths.items())
            raise DataError(
                f"{source}: the columns differ in length: {sorted(set(lengths.values()))} ({named})"
            )
        self.place: Callable[[int], str] = lambda index: ""  # see `edl.data.place`
        self._columns, self.digest = columns, digest
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Any:
        """Return a view of the records [start, stop)."""
        return map_leaves(lambda array: array[start:stop], self._columns)

    def take(self, indices: np.ndarray) -> Any:
        """Return a copy of the records at `indices`."""
        return map_leaves(lambda array: array[indices], self._columns)


def arrays(*columns: Any) -> Arrays:
    """A reader over arrays of one length, usually (features, labels).

    Args:
        columns: NumPy arrays, tensors, lists of numbers, columns and tables of pandas, Polars or Arrow, or
            dicts, tuples and lists of these.

    Raises:
        DataError: the arrays differ in length, or no array is given; a column cannot be an array; or NumPy
            would change a value.
    """
    return Arrays(in_memory(columns, "arrays"))


def as_in_fit(data: Any, source: str) -> Any:
    """Convert what Keras' `fit` takes to NumPy arrays: features, (features, labels[, weights]).

    Raises:
        DataError: a leaf cannot be converted to an array.
    """
    data = as_unpacked(data)
    if isinstance(data, tuple) and len(data) == 3 and not hasattr(data, "_fields"):
        x = in_memory(data[0], f"{source}[0]")
        data = with_ones((x, *data[1:]), next((len(array) for _, array in leaves(x) if array.shape), 0))
    return in_memory(data, source)


def in_memory(nest: Any, source: str) -> Any:
    """Convert each array, tensor, list of numbers, column or table of the nest to NumPy arrays.

    Raises:
        DataError: a leaf cannot be converted to an array.
    """
    if isinstance(nest, dict):
        return {key: in_memory(value, f"{source}[{key!r}]") for key, value in nest.items()}
    if isinstance(nest, tuple | list) and not is_leaf_list(nest):
        entries = [in_memory(value, f"{source}[{index}]") for index, value in enumerate(nest)]
        return type(nest)(*entries) if hasattr(nest, "_fields") else type(nest)(entries)
    if is_table(nest):
        return table(nest, source)
    if is_column(nest):
        return column(nest, source)
    return _array(nest, source)


def _array(values: Any, source: str) -> np.ndarray:
    if hasattr(values, "toarray") and hasattr(values, "nnz"):
        raise DataError(f"{source}: a sparse matrix cannot be cut into records; give its toarray()")
    try:
        array = to_array(values)
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error
    if not array.shape:
        raise DataError(
            f"{source} is a {type(values).__name__}; expected an array with an entry for each record"
        )
    return array
