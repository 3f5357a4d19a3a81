# SPDX-License-Identifier: Apache-2.0
"""A reader over the RecordIO files that ElasticDL reads.

Two libraries write such files, and both are called pyrecordio: the one in Go of the package index
(github.com/wangkuiyi/recordio) and the one in Python (github.com/elasticdl/pyrecordio). Neither installs on a
current Python. A file is a list of chunks. A chunk is five little-endian uint32 and then its records, each
with its length before it, compressed together. The libraries differ in the order of the five, in the checksum
and in the form of Snappy. The checksum of the first chunk says which of them has written a file.
"""

from __future__ import annotations

import gzip
import struct
import threading
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, File, Opened, find
from edl.data.files.index_file import cached
from edl.data.files.joined import span
from edl.data.formats.examples import serialized
from edl.data.formats.opening import Format
from edl.errors import DataError

MAGIC = 0x01020304
HEAD = 20  # bytes before the data of a chunk
_WORD, _WORDS = struct.Struct("<I"), struct.Struct("<5I")
_LONGEST_LENGTH = 5  # bytes of the length before Snappy's data


@dataclass(frozen=True)
class _Layout:
    """The form of chunks that one library writes.

    Args:
        order: places of the checksum, the compressor, the size and the number of records among the words.
        compressors: by number, functions that decompress.
    """

    order: tuple[int, int, int, int]
    checksum: Callable[[bytes], int]
    compressors: Mapping[int, Callable[[bytes], bytes]]

    def parse(self, words: tuple[int, ...]) -> _Chunk | None:
        """The chunk that the words describe; None if no chunk of this layout has them."""
        checksum, compressor, size, records = (words[place] for place in self.order)
        if words[0] != MAGIC or compressor not in self.compressors:
            return None
        return _Chunk(size, records, checksum, self.compressors[compressor])


@dataclass(frozen=True)
class _Chunk:
    """The header of a chunk; `size` is that of its data in bytes."""

    size: int
    records: int
    checksum: int
    decompress: Callable[[bytes], bytes]


def _plain(data: bytes) -> bytes:
    return data


def _snappy(data: bytes) -> bytes:
    """Decompress one block of Snappy, which begins with its length as a varint."""
    import pyarrow

    size = 0
    for place, byte in enumerate(data[:_LONGEST_LENGTH]):
        size |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            break
    return bytes(pyarrow.Codec("snappy").decompress(data, size, asbytes=True))


def _snappy_frames(data: bytes) -> bytes:
    """Decompress a stream in Snappy's framing format (google/snappy, framing_format.txt).

    Raises:
        ValueError: a frame is of a kind that must not be skipped.
    """
    found, at = [], 0
    while at < len(data):
        kind, size = data[at], int.from_bytes(data[at + 1 : at + 4], "little")
        frame = data[at + 8 : at + 4 + size]  # after its checksum; the chunk's covers all of them
        at += 4 + size
        if kind == 0:
            found.append(_snappy(frame))
        elif kind == 1:
            found.append(frame)
        elif kind < 0x80:
            raise ValueError(f"a frame of Snappy has the unknown kind {kind}")
    return b"".join(found)


def _crc32c(data: bytes) -> int:
    import google_crc32c

    return int(google_crc32c.value(data))


_LAYOUTS = (
    _Layout((1, 2, 3, 4), zlib.crc32, {0: _plain, 1: _snappy_frames, 2: gzip.decompress}),  # in Go
    _Layout((2, 3, 4, 1), _crc32c, {1: _plain, 2: _snappy, 3: gzip.decompress}),  # in Python
)


class RecordIo:
    """The records of one RecordIO file, as bytes. The last chunk that was read stays in memory.

    Raises:
        DataError: the file is torn, or is not such a file.
    """

    def __init__(self, file: File):
        self.name, self._file = file.name, file
        index = cached(file, "recordio 1", lambda: _scan(file)).view(np.int64)
        self._layout, self._places, self._starts = _LAYOUTS[int(index[0])], index[1::2], index[2::2]
        self._lock = threading.Lock()
        self._last: tuple[int, list[bytes] | DataError] = -1, []

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def largest(self) -> int:
        """The number of records of the largest chunk."""
        return int(np.diff(self._starts).max(initial=1))

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return the records [start, stop).

        Raises:
            DataError: the file has changed, or a chunk is damaged.
        """
        records: list[bytes] = []
        chunk = int(np.searchsorted(self._starts, start, "right")) - 1
        while start < stop:
            first, last = int(self._starts[chunk]), min(stop, int(self._starts[chunk + 1]))
            if start < last:
                records += self._chunk(chunk)[start - first : last - first]
                start = last
            chunk += 1
        return records

    def take(self, indices: np.ndarray) -> list[bytes]:
        """Return the records at `indices`.

        Raises:
            DataError: as for `read`.
        """
        return [self.read(index, index + 1)[0] for index in indices.tolist()]

    def _chunk(self, number: int) -> list[bytes]:
        with self._lock:
            if self._last[0] != number:
                try:
                    self._last = number, self._records(number)
                except DataError as error:  # raised again for each record that is read by itself
                    self._last = number, error
            found = self._last[1]
        if isinstance(found, DataError):
            raise found
        return found

    def _records(self, number: int) -> list[bytes]:
        what = f"{span(*self._starts[number : number + 2].tolist())} (chunk {number})"
        begin, end = self._places[number : number + 2].tolist()
        data = self._file.read(begin, end, what)
        chunk, data = self._layout.parse(_WORDS.unpack_from(data)), data[HEAD:]
        if chunk is None or self._layout.checksum(data) != chunk.checksum:
            raise DataError(f"{self.name}: {what}: the chunk is damaged: it has a wrong checksum")
        try:
            return _split(chunk.decompress(data), chunk.records)
        except (ValueError, OSError, EOFError, zlib.error, struct.error) as error:
            raise DataError(f"{self.name}: {what}: the chunk cannot be read: {error}") from error


def _split(data: bytes, count: int) -> list[bytes]:
    """Cut a chunk into its records.

    Raises:
        ValueError: the chunk has more or fewer bytes than its records.
    """
    records, at = [], 0
    for _ in range(count):
        (length,) = _WORD.unpack_from(data, at)
        at += _WORD.size + length
        records.append(data[at - length : at])
    if at != len(data):
        raise ValueError(f"its {count} records have {at} bytes, and the chunk has {len(data)}")
    return records


def _scan(file: File) -> bytes:
    """The layout's number, and then for each chunk where it begins and its first record, as int64.

    Raises:
        DataError: a chunk is torn or damaged.
    """
    places, at, records, number = array("q"), 0, 0, 0
    with file.open() as opened:
        while at < file.size:
            if at + HEAD > file.size:
                raise DataError(_torn(file, records, at))
            words = _WORDS.unpack(opened.read_at(at, at + HEAD))
            if not at:
                number = _written_by(file, opened, words)
            chunk = _LAYOUTS[number].parse(words)
            if chunk is None:
                raise DataError(
                    f"{file.name}: the chunk of record {records}, at byte {at}, is damaged: it does not "
                    "begin as a chunk"
                )
            places.extend((at, records))
            at, records = at + HEAD + chunk.size, records + chunk.records
            if at > file.size:
                raise DataError(_torn(file, places[-1], places[-2]))
    places.extend((at, records))
    return array("q", [number]).tobytes() + places.tobytes()


def _written_by(file: File, opened: Opened, words: tuple[int, ...]) -> int:
    """The number of the layout whose checksum is that of the first chunk.

    Raises:
        DataError: no layout does.
    """
    if words[0] != MAGIC:
        raise DataError(
            f"{file.name}: is not a RecordIO file of ElasticDL: it begins with {words[0]:#010x}; expected "
            f"{MAGIC:#010x}"
        )
    found = [(number, layout.parse(words)) for number, layout in enumerate(_LAYOUTS)]
    whole = [(number, chunk) for number, chunk in found if chunk and HEAD + chunk.size <= file.size]
    if not whole:
        raise DataError(_torn(file, 0, 0))
    for number, chunk in whole:
        if _LAYOUTS[number].checksum(opened.read_at(HEAD, HEAD + chunk.size)) == chunk.checksum:
            return number
    raise DataError(f"{file.name}: the chunk of record 0 is damaged: it has a wrong checksum")


def _torn(file: File, record: int, at: int) -> str:
    return (
        f"{file.name}: the chunk of record {record}, at byte {at}, is torn: the file ends at byte "
        f"{file.size}; was its writer stopped, or a copy cut off? Write the file again"
    )


def recordio(
    path: Addresses,
    features: Mapping[str, Any] | Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
    raw: bool = False,
) -> Reader:
    """A reader over ElasticDL's RecordIO files of `tf.train.Example`, or of any bytes (`raw`).

    Chunks are compressed by Snappy, by gzip or not at all. An index of chunks is built once. A chunk is read
    as a whole, and its checksum is verified.

    Args:
        path: a file, a list of files, a glob, a directory (all files in it), or an address such as
            s3://bucket/folder.
        features, label, weight, raw: see `tfrecord`.

    Raises:
        DataError: a file is missing, torn, damaged, changes or has no examples, or a feature differs.
    """
    sources = [RecordIo(file) for file in find(path, reader="recordio")]
    largest = max(source.largest for source in sources)
    return serialized(sources, features, label, weight, raw, is_near=False, records_per_read=largest)


FORMAT = Format("recordio", recordio, (".recordio",))
