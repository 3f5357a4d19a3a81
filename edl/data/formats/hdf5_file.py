# SPDX-License-Identifier: Apache-2.0
"""A reader over HDF5 files, whose datasets are the columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, File, find
from edl.data.files.joined import Joined, same_columns, span
from edl.data.objects.selected import columns_of, with_roles
from edl.errors import DataError

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
_KINDS = "biuf"  # of NumPy types that are numbers or text


class Hdf5:
    """The datasets of one file. The file is opened for each read.

    Args:
        names: the datasets, such as "x" or "group/x"; empty: all by each of their names, but for single
            values.

    Raises:
        DataError: the file is not an HDF5 file, lacks a dataset, its datasets differ in length, or one of
            them is in a different file or neither of numbers nor of text.
    """

    def __init__(self, file: File, names: Sequence[str]):
        import h5py

        self.file = file
        self.shapes: dict[str, str] = {}
        lengths, chunks = {}, {}
        try:
            with file.open() as opened, h5py.File(opened, "r") as content:
                found = _named(content, names, file.name) if names else _all(content, file.name)
                for name, item in found.items():
                    self.shapes[name] = f"{_kind(item, name, file.name)} {list(item.shape[1:])}"
                    lengths[name] = int(item.shape[0])
                    chunks[name] = item.chunks[0] if item.chunks else 1
        except (OSError, RuntimeError) as error:
            raise DataError(f"{file.name}: cannot be read as HDF5: {error}") from error
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
                    if h5py.check_string_dtype(values.dtype):
                        found[name] = values.asstr()[which]
                    else:
                        array = values[which]
                        found[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
                return found
        except (OSError, RuntimeError, KeyError, UnicodeError) as error:
            raise DataError(f"{self.file.name}: {what} cannot be read: {error}") from error


def _named(content: Any, names: Sequence[str], file: str) -> dict[str, Any]:
    """The datasets of these names.

    Raises:
        DataError: a name is no dataset with an entry for each record.
    """
    import h5py

    found = {}
    for name in names:
        item = content
        for nth, part in enumerate(parts := name.strip("/").split("/")):
            item = (
                _entry(item, part, "/".join(parts[: nth + 1]), file) if isinstance(item, h5py.Group) else None
            )
        if not isinstance(item, h5py.Dataset) or not item.shape:
            what = "is missing" if item is None else "has no entry for each record"
            raise DataError(f"{file}: dataset {name!r} {what}; there are {', '.join(content)}")
        found[name] = item
    return found


def _all(content: Any, file: str) -> dict[str, Any]:
    """The datasets below a group by all of their paths, without single values.

    Raises:
        DataError: a link leads out of the file or nowhere.
    """
    import h5py

    found: dict[str, Any] = {}

    def visit(group: Any, before: str, above: tuple[Any, ...]) -> None:
        for part in group:
            name = f"{before}{part}"
            item = _entry(group, part, name, file)
            if isinstance(item, h5py.Dataset) and item.shape:
                found[name] = item
            elif isinstance(item, h5py.Group) and item not in above:  # a link may lead to a group above it
                visit(item, f"{name}/", (*above, item))

    visit(content, "", (content,))
    return found


def _entry(group: Any, part: str, name: str, file: str) -> Any:
    """An entry of a group, also through a hard or soft link; None if it is missing.

    Raises:
        DataError: it is in a different file, whose changes would not be noticed, or a link leads nowhere.
    """
    import h5py

    link = group.get(part, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        raise DataError(
            f"{file}: {name!r} is a link to {link.path!r} in the file {link.filename}; name that file, or "
            "copy the dataset into this one"
        )
    item = group.get(part)
    if item is None and isinstance(link, h5py.SoftLink):
        raise DataError(
            f"{file}: {name!r} is a link to {link.path!r}, which is missing or in a different file"
        )
    # h5py cannot read the sources of a virtual dataset of an open file, and crashes.
    if isinstance(item, h5py.Dataset) and (item.is_virtual or item.external):
        kind = "a virtual dataset" if item.is_virtual else "stored in another file"
        raise DataError(
            f"{file}: dataset {name!r} is {kind}; copy its values into a dataset of one file: "
            "new.create_dataset(name, data=old[name])"
        )
    return item


def _kind(item: Any, name: str, file: str) -> str:
    """The type of a dataset's values, for comparison.

    Raises:
        DataError: they are neither numbers nor text.
    """
    import h5py

    try:
        kind = item.dtype
    except (TypeError, ValueError) as error:  # NumPy has no such type
        kind = error
    if isinstance(kind, np.dtype) and h5py.check_string_dtype(kind):
        return "text"
    if not isinstance(kind, np.dtype) or kind.kind not in _KINDS:
        raise DataError(
            f"{file}: dataset {name!r} is {kind}; expected numbers or text: leave it out by naming the "
            "datasets that are wanted"
        )
    return str(kind.newbyteorder("="))


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
        names: the datasets to keep; by default all, but for single values.
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
