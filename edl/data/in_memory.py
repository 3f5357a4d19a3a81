"""Records that lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from edl.errors import DataError

EXACT = 2**53  # whole numbers up to this are exact as float64


class Arrays:
    """Records that lie in memory: a tuple or a dict of arrays of one length."""

    def __init__(self, columns: tuple[np.ndarray, ...] | dict[str, np.ndarray], source: str = "arrays"):
        values = columns.values() if isinstance(columns, dict) else columns
        lengths = {len(column) for column in values}
        if len(lengths) != 1:
            raise DataError(f"{source}: the columns differ in length: {sorted(lengths)}")
        self._columns = columns
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Any:
        """A view of the records [start, stop)."""
        if isinstance(self._columns, dict):
            return {name: column[start:stop] for name, column in self._columns.items()}
        return tuple(column[start:stop] for column in self._columns)

    def take(self, indices: np.ndarray) -> Any:
        """A copy of the records at `indices`."""
        if isinstance(self._columns, dict):
            return {name: column[indices] for name, column in self._columns.items()}
        return tuple(column[indices] for column in self._columns)


def arrays(*columns: np.ndarray) -> Arrays:
    """A reader over NumPy arrays of one length, usually (features, labels).

    Raises:
        DataError: the arrays differ in length, or there are none; or a list has whole numbers that NumPy
            would round.
    """
    if not columns:
        raise DataError("arrays: at least one array is needed")
    return Arrays(tuple(map(_exact, columns)))


def _exact(column: Any) -> np.ndarray:
    """The column as an array."""
    array = np.asarray(column)
    if isinstance(column, list | tuple) and array.dtype == np.float64:  # as NumPy makes it of [2**63, 1]
        values = zip(np.asarray(column, object).flat, array.flat, strict=True)
        for value, rounded in values if (np.abs(array) >= EXACT).any() else ():
            if isinstance(value, int | np.integer) and value != int(rounded):
                raise DataError(
                    f"arrays: NumPy makes floats of a list with {value}, which rounds it to {int(rounded)}; "
                    "give an array with a type, e.g. np.array(values, np.uint64)"
                )
    return array
