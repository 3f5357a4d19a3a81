# SPDX-License-Identifier: Apache-2.0
"""Conversion of tables and columns of pandas, Polars and Arrow to NumPy arrays.

All three implement Arrow's PyCapsule interface
(arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html), so pyarrow reads them without knowing
the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from edl.data.exact import EXACT
from edl.data.objects.columns import Wanted, index_columns
from edl.errors import DataError

_INDEX = re.compile(r"__index_level_[0-9]+__$")  # pandas' row numbers in a table that Arrow has read
NUMBERS = "biuf"  # kinds of NumPy types that go into one matrix


def is_table(value: Any) -> bool:
    """True for a data frame: named columns and Arrow's C stream interface (pandas, polars, pyarrow)."""
    return hasattr(value, "__arrow_c_stream__") and (
        hasattr(value, "columns") or hasattr(value, "column_names")
    )


def is_column(value: Any) -> bool:
    """True for one column: a pandas Series or Index, or an object with one of Arrow's C interfaces."""
    if type(value).__module__.partition(".")[0] == "pandas":
        return hasattr(value, "to_numpy")  # a Series or an Index; these lack the interface before pandas 3
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")


def is_polars(value: Any) -> bool:
    """True for an object of Polars; the library need not be imported for that."""
    return type(value).__module__.partition(".")[0] == "polars"


def table(value: Any, source: str) -> Any:
    """Convert a table for Keras' `fit`.

    If all columns are numbers, the result is one matrix [records, columns], in their order; otherwise a dict
    of arrays by column, for a model with one input per column.

    Raises:
        DataError: a value is missing in a column that is not of floats, a column has no NumPy type, or the
            matrix would round whole numbers.
    """
    columns = by_column(value, source)
    return matrix(columns, source) if is_numeric(columns) else columns


def by_column(value: Any, source: str) -> dict[str, np.ndarray]:
    """Convert a table's columns, each to an array [records, ...].

    Raises:
        DataError: as for `table`, or two columns have the same name.
    """
    import pyarrow

    try:
        arrow = pyarrow.table(value)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{source}: pyarrow cannot read the {type(value).__name__}: {error}") from error
    for name, kind in getattr(value, "schema", {}).items() if is_polars(value) else ():
        if str(kind) == "Object":  # pyarrow gets their addresses
            raise DataError(f"{source}: column {name!r} has objects of Python; convert it to another type")
    if hasattr(value, "columns") and len(value.columns) < len(arrow.column_names):
        arrow = arrow.select(list(map(str, value.columns)))  # without the index of pandas
    names = [
        name
        for name in arrow.column_names
        if not (_INDEX.match(name) and name in index_columns(arrow.schema))
    ]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{source}: {names.count(name)} columns have the name {name!r}; rename one")
    return {name: _array(arrow[name], name, source) for name in names}


def column(value: Any, source: str) -> np.ndarray:
    """Convert a column to an array [records, ...].

    Raises:
        DataError: a value is missing and the column is not of floats, or the column has no NumPy type.
    """
    import pyarrow

    try:
        if hasattr(value, "__arrow_c_stream__"):
            arrow = pyarrow.chunked_array(value)
        elif hasattr(value, "__arrow_c_array__"):
            arrow = pyarrow.array(value)
        else:
            arrow = pyarrow.Array.from_pandas(value)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"{source}: pyarrow cannot read the {type(value).__name__}: {error}") from error
    return _array(arrow, str(getattr(value, "name", None) or ""), source)


def is_numeric(columns: Mapping[str, np.ndarray]) -> bool:
    """Whether all columns are vectors of numbers or truth values."""
    return all(array.ndim == 1 and array.dtype.kind in NUMBERS for array in columns.values())


def matrix(columns: Mapping[str, np.ndarray], source: str) -> np.ndarray:
    """Stack the columns side by side, [records, columns], in NumPy's common type of all columns.

    Raises:
        DataError: this type would round whole numbers, or there is no column.
    """
    if not columns:
        raise DataError(f"{source}: the table has no columns")
    found = np.stack(list(columns.values()), axis=1)
    for name, array in columns.items() if found.dtype.kind == "f" else ():
        is_long = array.dtype.kind in "iu" and array.dtype.itemsize == 8 and len(array)
        if is_long and max(abs(int(array.min())), abs(int(array.max()))) > EXACT:
            raise DataError(
                f"{source}: column {name!r} has whole numbers beyond 2**53, which a matrix with the other "
                f"columns ({found.dtype}) would round; leave it out (features), or give features as a dict"
            )
    return found


def _array(arrow: Any, name: str, source: str) -> np.ndarray:
    import pyarrow
    import pyarrow.compute as pc

    named = f"{source}: column {name!r}" if name else source
    if arrow.null_count:
        if not pyarrow.types.is_floating(arrow.type):
            record = int(np.asarray(arrow.is_null()).argmax())
            raise DataError(
                f"{named}: record {record} has no value; fill it (fillna in pandas, fill_null in Polars and "
                "Arrow) or leave the record out"
            )
        arrow = pc.fill_null(arrow, pyarrow.scalar(float("nan"), arrow.type))  # as in pandas and Polars
    return Wanted(source, in_memory=True).array(name, arrow, lambda record: f"{source}: record {record}")
