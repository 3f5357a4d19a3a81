# SPDX-License-Identifier: Apache-2.0
"""The structure of records that `edl data convert` has written, so that readers restore it.

The records are examples of TensorFlow, which have flat features only. So the first example of a file has one
more feature, `STRUCTURE`: the type and shape of each array, and the nest that the arrays form. Other programs
ignore it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.data.nest import leaves, map_leaves
from edl.errors import DataError

STRUCTURE = "edl.structure"
_ROLES = ("features", "label", "weight")  # entries of a record that is a tuple, as in `fit`
_COLUMN = "column"


@dataclass(frozen=True)
class Structure:
    """The arrays of a record.

    Args:
        nest: the structure of a record, with the name of a column in place of each array.
        columns: NumPy's name of the type, or "string", and the shape of one record, by column.
    """

    nest: Any
    columns: dict[str, tuple[str, tuple[int, ...]]]

    @staticmethod
    def of(block: Any) -> Structure:
        """The structure of a block of records, a nest of arrays [records, ...].

        Raises:
            DataError: a key is not text, or the records have no arrays.
        """
        found = dict(leaves(block))
        if not found:
            raise DataError("a record without arrays; expected features, (features, label), or a dict")
        names = _names(block)
        columns = {name: kind_of(array) for name, array in zip(names, found.values(), strict=True)}
        if STRUCTURE in columns:
            raise DataError(f"the key {STRUCTURE!r} is reserved")
        remaining = iter(names)
        return Structure(map_leaves(lambda _: next(remaining), block), columns)

    @staticmethod
    def from_json(text: bytes) -> Structure:
        """The structure that `to_json` has written.

        Raises:
            ValueError: the text is damaged.
        """
        try:
            given = json.loads(text)
            columns = {name: (str(kind), tuple(shape)) for name, (kind, shape) in given["columns"].items()}
            return Structure(_decoded(given["nest"]), columns)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged structure: {error!r}") from error

    def to_json(self) -> bytes:
        """The structure as text."""
        return json.dumps({"nest": _encoded(self.nest), "columns": self.columns}).encode()

    def restore(self, columns: dict[str, np.ndarray]) -> Any:
        """The nest of these arrays."""
        return map_leaves(lambda name: columns[name], self.nest)


def kind_of(array: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """The type and the shape of one record of an array [records, ...]."""
    name = "string" if array.dtype.kind in "SUO" else array.dtype.name
    return name, tuple(array.shape[1:])


def _names(block: Any) -> list[str]:
    """A name for each array: its key where this is unique, otherwise its whole path.

    Raises:
        DataError: a key is not text.
    """
    paths = list(_paths(block, ()))
    has_roles = isinstance(block, tuple) and len(block) <= len(_ROLES)
    whole, short = [], []
    for path in paths:
        if not path:
            return ["features"]
        given = [str(part) for part in path]
        if has_roles:
            given[0] = _ROLES[path[0]]
        whole.append(".".join(given))
        short.append(".".join(given[1:]) if has_roles and path[0] == 0 and len(path) > 1 else whole[-1])
    return short if len(set(short)) == len(short) else whole


def _paths(nest: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(nest, dict):
        for key, value in nest.items():
            if not isinstance(key, str):
                raise DataError(f"the key {key!r} of a record is not text")
            yield from _paths(value, (*path, key))
    elif isinstance(nest, tuple | list):
        for index, value in enumerate(nest):
            yield from _paths(value, (*path, index))
    else:
        yield path


def _encoded(nest: Any) -> Any:
    """A nest as JSON, which has no tuples."""
    if isinstance(nest, dict):
        return {"dict": {key: _encoded(value) for key, value in nest.items()}}
    if isinstance(nest, tuple | list):
        return {"tuple" if isinstance(nest, tuple) else "list": list(map(_encoded, nest))}
    return {_COLUMN: nest}


def _decoded(value: Any) -> Any:
    ((kind, given),) = value.items()
    if kind == "dict":
        return {key: _decoded(entry) for key, entry in given.items()}
    if kind in ("tuple", "list"):
        entries = map(_decoded, given)
        return tuple(entries) if kind == "tuple" else list(entries)
    return given
