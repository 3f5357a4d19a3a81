# SPDX-License-Identifier: Apache-2.0
"""A reader over files that are one array: NumPy's .npy."""

from __future__ import annotations

import io

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, File, find
from edl.data.files.record_array import RecordArray, joined
from edl.data.files.zipped import zipped
from edl.errors import DataError

SUFFIXES = (".npy",)
_HEADER = 1 << 16  # bytes: more than any header of .npy files that NumPy reads


def npy(path: Addresses, label: Addresses | None = None, weight: Addresses | None = None) -> Reader:
    """A reader over .npy files. Records are read by range; a file is never loaded whole.

    Args:
        path: the features, [records, ...]: a file, a list of files, a glob, a directory, or an address such
            as s3://bucket/folder. Several files are one array, one after the other.
        label, weight: files of the labels and of the weights, likewise.

    Raises:
        DataError: a file is missing, torn, changes, or has no array of numbers or text; or the arrays differ
            in length.
    """
    return zipped(
        [
            None if p is None else joined([_npy(file) for file in find(p, SUFFIXES, "npy")])
            for p in (path, label, weight)
        ],
        find(path, SUFFIXES, "npy")[0].name,
    )


def _npy(file: File) -> RecordArray:
    from numpy.lib import format as npy_format

    head = io.BytesIO(file.read(0, min(file.size, _HEADER)))
    try:
        version = npy_format.read_magic(head)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, is_fortran, dtype = read(head)
    except (ValueError, EOFError) as error:
        raise DataError(f"{file.name}: cannot be read as .npy: {error}") from error
    if dtype.hasobject or dtype.kind == "V":
        raise DataError(
            f"{file.name}: holds {dtype}; expected an array of numbers or of text of a fixed length"
        )
    if not shape:
        raise DataError(f"{file.name}: holds a single value; expected an array with an entry for each record")
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"{file.name}: is in Fortran order, in which a record is not in one place; save "
            "np.ascontiguousarray(array)"
        )
    end = head.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if file.size > end:
        raise DataError(
            f"{file.name}: has {file.size - end} bytes after its array; expected one array (np.save appends "
            "a second one to an open file): write one file for each"
        )
    return RecordArray(file, head.tell(), dtype, shape)
