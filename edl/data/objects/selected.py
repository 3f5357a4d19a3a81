# SPDX-License-Identifier: Apache-2.0
"""Selection of columns by role: features, label, weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.data.base import RandomAccess, Reader
from edl.data.objects.tables import is_numeric, matrix
from edl.data.place import place
from edl.errors import DataError


def with_roles(
    records: Reader, features: Sequence[str] | str | None, label: str | None, weight: str | None, source: str
) -> Reader:
    """The reader itself, or a `Selected` over it if a column has a role."""
    if features is None and label is None and weight is None:
        return records
    return Selected(records, features, label, weight, source)


def columns_of(features: Sequence[str] | str | None, label: str | None, weight: str | None) -> list[str]:
    """The columns that must be read from a file; empty: all."""
    if features is None:
        return []
    chosen = [features] if isinstance(features, str) else list(features)
    return list(dict.fromkeys([*chosen, *(name for name in (label, weight) if name is not None)]))


def columns_in(reader: Any) -> tuple[str, ...]:
    """The names of the columns of a matrix of features, below a split of its records; otherwise empty."""
    while reader is not None and not isinstance(reader, Selected):
        reader = getattr(reader, "underlying", None)
    return () if reader is None else reader.columns


class Selected:
    """A reader that selects columns by their roles from records that are dicts.

    Its records are (features,), (features, labels) or (features, labels, weights).

    It has `take` if the underlying reader has it.

    Args:
        records: the underlying reader; its records are a dict of columns.
        features: one column, which is returned unchanged, or several: one matrix [records, columns] if all
            are vectors of numbers, otherwise a dict. None: all columns but the label and the weight.
        label, weight: columns; None: no labels, no weights.

    Raises:
        DataError: the records are not dicts, or a column is missing.
    """

    def __init__(
        self,
        records: Reader,
        features: Sequence[str] | str | None,
        label: str | None,
        weight: str | None,
        source: str,
    ):
        self.underlying = self._records = records
        self._source = source
        self._label, self._weight = label, weight
        self._one = features if isinstance(features, str) else None
        self._features = (
            None if features is None else [features] if isinstance(features, str) else list(features)
        )
        self._is_matrix: bool | None = None
        self.columns: tuple[str, ...] = ()  # of the matrix
        self.records_per_read = getattr(records, "records_per_read", 1)
        if isinstance(records, RandomAccess):
            self.take = lambda indices: self._roles(records.take(indices))
        if len(records):
            self._roles(records.read(0, 1))

    def __len__(self) -> int:
        return len(self._records)

    def place(self, index: int) -> str:
        return place(self._records, index)

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop) as (features, labels[, weights])."""
        return self._roles(self._records.read(start, stop))

    def _roles(self, columns: Any) -> tuple[Any, ...]:
        if not isinstance(columns, dict):
            raise DataError(
                f"{self._source}: features, label and weight name columns, but a record is a "
                f"{type(columns).__name__}; leave them out, or give records that are dicts"
            )
        chosen = [name for name in (self._label, self._weight) if name is not None]
        names = self._features if self._features is not None else [n for n in columns if n not in chosen]
        for name in (*names, *chosen):
            if name not in columns:
                raise DataError(
                    f"{self._source}: column {name!r} is missing; there are {', '.join(map(str, columns))}"
                )
        if not names:
            raise DataError(f"{self._source}: no column is left for the features")
        given = {name: np.asarray(columns[name]) for name in names}
        if self._is_matrix is None:  # decided by the first records, for all
            self._is_matrix = self._one is None and is_numeric(given)
            self.columns = tuple(given) if self._is_matrix else ()
        x = (
            given[self._one]
            if self._one is not None
            else matrix(given, self._source)
            if self._is_matrix
            else given
        )
        label = columns[self._label] if self._label is not None else None
        if self._weight is None:
            return (x,) if label is None else (x, label)
        return x, label, columns[self._weight]
