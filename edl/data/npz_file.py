"""A reader over NumPy's .npz files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edl.data.base import Reader
from edl.data.in_memory import Arrays
from edl.data.selected import columns_of, with_roles
from edl.errors import DataError


def npz(
    path: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
) -> Reader:
    """A reader over an .npz file.

    Records are a dict of its arrays: all of them, or those in `names`. With `features`, `label` or `weight`,
    they are (features, labels[, weights]), as in `dataset`.

    Raises:
        DataError: the file cannot be read, lacks a name, or its arrays differ in length.
    """
    try:
        with np.load(Path(path), allow_pickle=False) as file:
            missing = sorted({*names, *columns_of(features, label, weight)} - set(file.files))
            if missing:
                raise DataError(f"{path}: no array {missing[0]!r}; it has {', '.join(sorted(file.files))}")
            kept = names or columns_of(features, label, weight) or file.files
            columns = {name: file[name] for name in kept}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as .npz: {error}") from error
    if not columns:
        raise DataError(f"{path}: holds no array")
    return with_roles(Arrays(columns, source=str(path)), features, label, weight, str(path))
