# SPDX-License-Identifier: Apache-2.0
"""A reader over HDF5 files, whose datasets are the columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files import Addresses, File, find
from edl.data.joined import Joined, same_columns, span
from edl.data.selected import columns_of, with_roles
from edl.errors import DataError

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_KINDS = "biufSU"  # of NumPy types that are numbers or text


class Hdf5:
    """The datasets of one file. The file is opened for each read.

    Args:
        names: the datasets, such as "x" or "group/x"; empty: all that are not single values.

    Raises:
        DataError: the file is not an HDF5 file, lacks a dataset, or its datasets differ in length.
    """

    def __init__(self, file: File, names: Sequence[str]):
        import h5py

        self.file = file
        self.shapes: dict[str, str] = {}
        lengths, chunks = {}, {}

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and item.shape and (not names or name in names):
                kind = "text" if h5py.check_string_dtype(item.dtype) else str(item.dtype)
                if kind != "text" and item.dtype.kind not in _KINDS:
                    if not names:
                        return
                    raise DataError(
                        f"{file.name}: dataset {name!r} is {item.dtype}; expected numbers or text"
                    )
                self.shapes[name] = f"{kind} {list(item.shape[1:])}"
                lengths[name], chunks[name] = int(item.shape[0]), item.chunks[0] if item.chunks else 1

        try:
            with file.open() as opened, h5py.File(opened, "r") as content:
                content.visititems(visit)
                there = list(content)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{file.name}: cannot be read as HDF5: {error}") from error
        for name in names:
            if name not in self.shapes:
                raise DataError(f"{file.name}: dataset {name!r} is missing; there are {', '.join(there)}")
        if not lengths:
            raise DataError(f"{file.name}: has no dataset with an entry for each record")
        if len(set(lengths.values())) > 1:
            named = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(
                f"{file.name}: the datasets differ in length ({named}); name some with names=[...]"
            )
        self.names = list(names) or list(self.shapes)
        self.records = next(iter(lengths.values()))
        self.chunk = max(chunks.values())  # records that are read together anyway

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        return self._read(slice(start, stop), span(start, stop))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        wanted, back = np.unique(indices, return_inverse=True)
        found = self._read(wanted, f"{len(wanted)} records from record {wanted[0]}")
        return {name: array[back] for name, array in found.items()}

    def _read(self, which: Any, what: str) -> dict[str, np.ndarray]:
        import h5py

        try:
            with self.file.open(what) as opened, h5py.File(opened, "r") as content:
                found = {}
                for name in self.names:
                    values = content[name]
                    found[name] = (
                        values.asstr()[which] if h5py.check_string_dtype(values.dtype) else values[which]
                    )
                return found
        except (OSError, RuntimeError, KeyError, UnicodeError) as error:
            raise DataError(f"{self.file.name}: {what} cannot be read: {error}") from error


def hdf5(
    path: Addresses,
    names: Sequence[str] = (),
    *,
    features: Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
) -> Reader:
    """A reader over HDF5 files. Records are read by range; a file is never loaded whole.

    Records are a dict of datasets, or (features, labels[, weights]) if `features`, `label` or `weight` name
    datasets. A dataset in a group has the name "group/dataset". If a dataset is stored in chunks, its records
    are read in blocks.

    Args:
        path: a file, a list of files, a glob, a directory, or an address such as s3://bucket/folder. All
            files must have the same datasets.
        names: the datasets to keep; by default all of numbers and text, but for single values.
        features, label, weight: the datasets' roles, as in `dataset`.

    Raises:
        DataError: a file is missing, changes, cannot be read or lacks a dataset, or datasets differ in
            length.
    """
    kept = list(names) or columns_of(features, label, weight)
    sources = [Hdf5(file, kept) for file in find(path, SUFFIXES, "hdf5")]
    for other in sources[1:]:
        same_columns(sources[0].shapes, other.shapes, other.file.name, sources[0].file.name)
    chunk = max(source.chunk for source in sources)
    is_near = chunk == 1 and all(source.file.is_local for source in sources)
    records = Joined(
        [source.records for source in sources],
        lambda nth, start, stop: sources[nth].read(start, stop),
        (lambda nth, indices: sources[nth].take(indices)) if is_near else None,
        records_per_read=chunk,
        names=[source.file.name for source in sources],
    )
    return with_roles(records, features, label, weight, sources[0].file.name)
