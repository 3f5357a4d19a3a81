# SPDX-License-Identifier: Apache-2.0
"""A reader over NumPy's .npz files."""

from __future__ import annotations

from collections.abc import Sequence
from zipfile import BadZipFile

import numpy as np

from edl.data.base import Reader
from edl.data.files import Addresses, find
from edl.data.in_memory import Arrays
from edl.data.joined import same_columns
from edl.data.selected import columns_of, with_roles
from edl.errors import DataError

SUFFIXES = (".npz",)


def npz(
    path: Addresses,
    names: Sequence[str] = (),
    *,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
) -> Reader:
    """A reader over .npz files, which are read into memory.

    Records are a dict of the arrays: all of them, or those in `names`. With `features`, `label` or `weight`,
    they are (features, labels[, weights]), as in `dataset`.

    Args:
        path: a file, a list of files, a glob, a directory, or an address such as s3://bucket/folder.

    Raises:
        DataError: a file is missing or cannot be read, lacks a name, or its arrays differ in length.
    """
    files = find(path, SUFFIXES, "npz")
    kept = list(names) or columns_of(features, label, weight)
    found: list[dict[str, np.ndarray]] = []
    for file in files:
        try:
            with file.open() as opened, np.load(opened, allow_pickle=False) as arrays:
                if not hasattr(arrays, "files"):
                    raise DataError(f"{file.name}: holds a single array; edl.npy reads it")
                missing = sorted({*names, *columns_of(features, label, weight)} - set(arrays.files))
                if missing:
                    raise DataError(
                        f"{file.name}: no array {missing[0]!r}; it has {', '.join(sorted(arrays.files))}"
                    )
                columns = {name: arrays[name] for name in kept or arrays.files}
        except (ValueError, EOFError, BadZipFile) as error:
            raise DataError(f"{file.name}: cannot be read as .npz: {error}") from error
        if not columns:
            raise DataError(f"{file.name}: holds no array")
        for name, array in columns.items():
            if not array.ndim or array.dtype.kind == "V":
                what = f"of {array.dtype}" if array.ndim else "a single value"
                raise DataError(
                    f"{file.name}: array {name!r} is {what}; expected numbers or text with an entry for each "
                    "record: leave it out with names=[...]"
                )
        Arrays(columns, source=file.name)  # refuses arrays of unlike length
        if found:
            same_columns(_kinds(found[0]), _kinds(columns), file.name, files[0].name)
        found.append(columns)
    whole = found[0]
    if len(found) > 1:
        whole = {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}
    return with_roles(Arrays(whole, source=files[0].name), features, label, weight, files[0].name)


def _kinds(columns: dict[str, np.ndarray]) -> dict[str, str]:
    """The type and the shape of a record of each array, as text."""
    return {name: f"{array.dtype} {list(array.shape[1:])}" for name, array in columns.items()}
