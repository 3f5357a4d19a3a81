# SPDX-License-Identifier: Apache-2.0
"""TFRecord files: their framing, an index of it, and checksums.

A record is its length (uint64), a CRC-32C of the length, the data and a CRC-32C of the data, all
little-endian (tensorflow.org/tutorials/load_data/tfrecord). The index is the offset of each record and the
end of the last.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, File, Opened, find
from edl.data.files.index_file import cached
from edl.data.files.joined import span
from edl.data.files.partitions import refuse_partitions
from edl.data.formats.examples import feature_names, serialized
from edl.errors import DataError

SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
CHUNK = 1 << 20  # bytes that a scan reads at once
SMALL = 4096  # bytes that a scan reads if most of them would be data that it skips
HEAD, FOOT = 12, 4  # bytes around the data of a record
_HEAD = struct.Struct("<QI")


class TfRecords:
    """The records of one TFRecord file, as bytes.

    Raises:
        DataError: the file is torn, or is not a TFRecord file.
    """

    def __init__(self, file: File):
        self._file = file
        self._places = cached(file, "tfrecord 1", lambda: _scan(file)).view(np.int64)
        self.name = file.name

    def __len__(self) -> int:
        return max(len(self._places) - 1, 0)

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return the data of the records [start, stop), in one read of the file.

        Raises:
            DataError: the file has changed, or a record has a wrong checksum.
        """
        if start >= stop:
            return []
        with self._file.open(span(start, stop)) as opened:
            return self._run(opened, start, stop)

    def take(self, indices: np.ndarray) -> list[bytes]:
        """Return the data of the records at `indices`; neighbours are read together.

        Raises:
            DataError: as for `read`.
        """
        found: dict[int, bytes] = {}
        wanted = np.unique(indices)
        cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
        with self._file.open(f"{len(wanted)} records from record {wanted[0]}") as opened:
            for run in np.split(wanted, cuts):
                start, stop = int(run[0]), int(run[-1]) + 1
                found.update(zip(range(start, stop), self._run(opened, start, stop), strict=True))
        return [found[index] for index in indices.tolist()]

    def _run(self, opened: Opened, start: int, stop: int) -> list[bytes]:
        places = self._places[start : stop + 1] - self._places[start]
        data = opened.read_at(int(self._places[start]), int(self._places[stop]))
        records = []
        for nth, (begin, end) in enumerate(zip(places[:-1].tolist(), places[1:].tolist(), strict=True)):
            record = data[begin + HEAD : end - FOOT]
            length, crc = _HEAD.unpack_from(data, begin)
            if length != len(record) or crc != checksum(data[begin : begin + 8]):
                raise DataError(
                    f"{self.name}: record {start + nth} is damaged: its length has a wrong checksum"
                )
            if checksum(record) != int.from_bytes(data[end - FOOT : end], "little"):
                raise DataError(
                    f"{self.name}: record {start + nth} is damaged: its data have a wrong checksum"
                )
            records.append(record)
        return records


def checksum(data: bytes) -> int:
    """The masked CRC-32C of TFRecord files."""
    import google_crc32c

    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _scan(file: File) -> bytes:
    """Find the offset of each record. Only headers are read where records are large.

    Raises:
        DataError: a record is torn, or its length has a wrong checksum.
    """
    places, at, chunk, begin = array("q"), 0, b"", 0
    size = CHUNK
    with file.open() as opened:
        while at < file.size:
            if at + HEAD > begin + len(chunk) or at < begin:
                chunk, begin = opened.read_at(at, min(at + size, file.size)), at
            here = at - begin
            if len(chunk) - here < HEAD:
                raise DataError(_torn(file, len(places), at))
            length, crc = _HEAD.unpack_from(chunk, here)
            if crc != checksum(chunk[here : here + 8]):
                raise DataError(_not_one(file, len(places), at, chunk[here : here + 2]))
            end = at + HEAD + length + FOOT
            if end > file.size:
                raise DataError(_torn(file, len(places), at))
            places.append(at)
            size = SMALL if file.is_local and length > SMALL else CHUNK
            at = end
    places.append(at)
    return places.tobytes()


def _torn(file: File, record: int, at: int) -> str:
    return (
        f"{file.name}: record {record}, at byte {at}, is torn: the file ends at byte {file.size}; was its "
        "writer stopped, or a copy cut off? Write the file again"
    )


def _not_one(file: File, record: int, at: int, magic: bytes) -> str:
    if record:
        return f"{file.name}: record {record}, at byte {at}, is damaged: its length has a wrong checksum"
    if magic == b"\x1f\x8b" or magic[:1] == b"\x78":
        return (
            f"{file.name}: is compressed, so its records cannot be read from anywhere; write it without "
            "compression, e.g. by gunzip"
        )
    return f"{file.name}: is not a TFRecord file: the length of record 0 has a wrong checksum"


def tfrecord(
    path: Addresses,
    features: Mapping[str, Any] | Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
    raw: bool = False,
) -> Reader:
    """A reader over TFRecord files of `tf.train.Example`, which TensorFlow's own parser reads.

    Records are a dict of features, or (features, labels[, weights]) if names are given. An index is built
    once. Each record's checksum is verified.

    Args:
        path: a file, a list of files, a glob, a directory (all files in it), or an address such as
            s3://bucket/folder.
        features: the features of an example. Names, or one name: their types and sizes are those of the first
            record. A dict has the type of each: `"int64"` for one value, `("float32", (28, 28))` for an array
            of this shape, or a `tf.io.FixedLenFeature`. An array of a different type, such as `("uint8",
            (28, 28))`, is read from the bytes of one value. By default all features of the first record.
        label, weight: names of the labels and weights.
        raw: return the records as bytes, an object array [n], for `feed`.

    Raises:
        DataError: a file is missing, torn, damaged, changes or has no examples, or a feature differs.
    """
    files = find(path, reader="tfrecord")
    sources = [TfRecords(file) for file in files]
    if not raw:
        given = [features] if isinstance(features, str) else list(features or ())
        named = given and [*given, *filter(None, (label, weight))]
        refuse_partitions(path, files, named, lambda: feature_names(sources))
    is_near = all(file.is_local for file in files)
    return serialized(sources, features, label, weight, raw, is_near)
