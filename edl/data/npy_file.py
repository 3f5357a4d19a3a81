# SPDX-License-Identifier: Apache-2.0
"""Readers over files that are one array: NumPy's .npy, and IDX, the format of MNIST."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files import Addresses, File, find
from edl.data.record_array import RecordArray, joined
from edl.data.zipped import zipped
from edl.errors import DataError

NPY, IDX = (".npy",), ("ubyte", ".idx", "ubyte.gz", ".idx.gz")
MOST_UNPACKED = 1 << 30  # bytes of a compressed file, which are kept in memory
_HEADER = 1 << 16  # bytes: more than any header of .npy files that NumPy reads
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


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
            None if p is None else joined([_npy(file) for file in find(p, NPY, "npy")])
            for p in (path, label, weight)
        ],
        find(path, NPY, "npy")[0].name,
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


def idx(path: Addresses, label: Addresses | None = None, weight: Addresses | None = None) -> Reader:
    """A reader over IDX files, the format in which MNIST is published; also compressed (.gz).

    Args:
        path: the features, [records, ...], such as train-images-idx3-ubyte.gz: a file, a list of files, a
            glob, a directory, or an address such as s3://bucket/folder.
        label, weight: files of the labels and of the weights, likewise.

    Raises:
        DataError: a file is missing, torn, changes or has a different format; or the arrays differ in length.
    """
    return zipped(
        [
            None if p is None else joined([_idx(file) for file in find(p, IDX, "idx")])
            for p in (path, label, weight)
        ],
        find(path, IDX, "idx")[0].name,
    )


def _idx(file: File) -> Any:
    if file.name.lower().endswith(".gz"):
        try:
            with file.open() as opened, gzip.GzipFile(fileobj=opened) as unpacked:
                data = unpacked.read(MOST_UNPACKED + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{file.name}: cannot be unpacked: {error}") from error
        if len(data) > MOST_UNPACKED:
            raise DataError(
                f"{file.name}: has more than {MOST_UNPACKED >> 20} MiB when unpacked; unpack it first"
            )
        begin, dtype, shape = _idx_header(file, data[:1024], len(data))
        array = np.frombuffer(data, dtype, int(np.prod(shape)), begin).reshape(shape)
        return _Unpacked(file, array.astype(dtype.newbyteorder("=")))
    begin, dtype, shape = _idx_header(file, file.read(0, min(file.size, 1024)), file.size)
    return RecordArray(file, begin, dtype, shape)


def _idx_header(file: File, head: bytes, size: int) -> tuple[int, np.dtype, list[int]]:
    if len(head) < 8 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not head[3]:
        raise DataError(f"{file.name}: is not an IDX file: it begins with {head[:4].hex(' ') or 'nothing'}")
    begin = 4 + 4 * head[3]
    if len(head) < begin:
        raise DataError(f"{file.name}: is torn: its header has {begin} bytes, the file {len(head)}")
    dtype, shape = np.dtype(_IDX_TYPES[head[2]]), list(struct.unpack_from(f">{head[3]}I", head, 4))
    record = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    if (end := begin + shape[0] * record) != size:
        torn = f": record {(size - begin) // max(record, 1)} is torn" if size < end else ""
        raise DataError(f"{file.name}{torn}: has {size} bytes; expected {end} for {shape[0]} records")
    return begin, dtype, shape


class _Unpacked:
    """An array in memory, with the methods of `RecordArray`."""

    def __init__(self, file: File, array: np.ndarray):
        self.file, self._array = file, array
        self.records, self.kind = len(array), f"{array.dtype} {list(array.shape[1:])}"

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._array[start:stop]

    def take(self, indices: np.ndarray) -> np.ndarray:
        taken: np.ndarray = self._array[indices]
        return taken
