"""CSV files with a header line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edl.data.in_memory import Arrays
from edl.errors import DataError


def csv(path: str | os.PathLike[str], names: Sequence[str] = (), delimiter: str = ",") -> Arrays:
    """A reader over a CSV file with a header line, as a dict of its columns (numbers or strings).

    Args:
        names: the columns to keep; all by default.

    Raises:
        DataError: the file or one of its lines cannot be read, or a column is missing.
    """
    import pyarrow
    from pyarrow import csv as pa_csv

    try:
        table = pa_csv.read_csv(
            Path(path),
            parse_options=pa_csv.ParseOptions(delimiter=delimiter),
            convert_options=pa_csv.ConvertOptions(include_columns=list(names) or None),
        )
    except (OSError, pyarrow.ArrowInvalid, pyarrow.ArrowKeyError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error}") from error
    columns = {}
    for name in table.column_names:
        column = table[name]
        if column.null_count:
            line = column.is_null().to_numpy().argmax() + 2
            raise DataError(f"{path}: line {line}: column {name!r} is empty; a value is needed")
        columns[name] = column.to_numpy()
    return Arrays(columns, source=str(path))
