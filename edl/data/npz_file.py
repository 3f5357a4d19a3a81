"""NumPy's .npz files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edl.data.in_memory import Arrays
from edl.errors import DataError


def npz(path: str | os.PathLike[str], names: Sequence[str] = ()) -> Arrays:
    """A reader over an .npz file, as a dict of its arrays: all of them, or those in `names`.

    Raises:
        DataError: the file cannot be read, lacks a name, or its arrays differ in length.
    """
    try:
        with np.load(Path(path), allow_pickle=False) as file:
            missing = sorted(set(names) - set(file.files))
            if missing:
                raise DataError(f"{path}: no array {missing[0]!r}; it has {', '.join(sorted(file.files))}")
            columns = {name: file[name] for name in names or file.files}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as .npz: {error}") from error
    if not columns:
        raise DataError(f"{path}: holds no array")
    return Arrays(columns, source=str(path))
