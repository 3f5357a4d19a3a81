# SPDX-License-Identifier: Apache-2.0
"""Records of any source, written to an ArrayRecord file once, so that they can be read by index.

Promise: the file appears under its name only when it is whole and on the disk. A conversion that is killed
leaves a hidden file, which the next one to the same target overwrites. Two conversions never write one file.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edl.data.base import Reader
from edl.data.exact import TEXT, to_array
from edl.data.files.joined import span
from edl.data.formats.arrayrecord_file import SUFFIXES
from edl.data.nest import as_unpacked, leaves, map_leaves
from edl.data.objects.dataset import dataset, is_a, is_stream
from edl.data.objects.indexed import with_arrays
from edl.data.objects.structure import STRUCTURE, Structure, kind_of
from edl.errors import DataError

Elements = Literal["records", "batches"]
BLOCK = 256  # records that are read at once from a reader
REPORT_SECONDS = 10.0  # between two calls of `progress`


@dataclass(frozen=True)
class Converted:
    """A file that was written.

    Args:
        bytes: its size.
        columns: the type and the shape of one record, by name.
    """

    path: Path
    records: int
    bytes: int
    columns: dict[str, tuple[str, tuple[int, ...]]]


def convert(
    data: Any,
    target: Path,
    source: str,
    elements: Elements | None = None,
    replace: bool = False,
    progress: Callable[[int], None] = lambda records: None,
) -> Converted:
    """Write all records to one ArrayRecord file, which `arrayrecord` reads in the structure of the source.

    Args:
        data: what `dataset` takes, a `tf.data.Dataset`, or any iterable of records or batches. An iterable
            is read once, one element at a time.
        target: the file; it must end with .array_record or .arrayrecord.
        source: a name of the data, for messages.
        elements: whether an element of an iterable is a record or a batch; by default, those of a
            `tf.data.Dataset` and of PyTorch's `DataLoader` are batches, and all others records.
        replace: overwrite an existing file.
        progress: takes the number of records so far, every 10 seconds.

    Raises:
        DataError: the target exists, or cannot be written; the source has no records or no end; or a record
            differs from the first in structure, type or shape.
    """
    check_target(target, replace)
    blocks = _blocks(data, source, elements)
    try:
        with _new_file(target) as part:
            count, structure = _write(blocks, part, target, source, progress)
            size = part.stat().st_size
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror or error}") from error
    return Converted(target, count, size, structure.columns)


def check_target(target: Path, replace: bool) -> None:
    """Refuse a target that cannot be written.

    Raises:
        DataError: its name has another ending, its directory is missing, or it exists.
    """
    if not target.name.lower().endswith(SUFFIXES):
        raise DataError(f"{target}: the name of the file must end with {' or '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise DataError(
            f"{target}: there is no directory {target.parent}; files are written to local directories"
        )
    if target.exists() and not replace:
        raise DataError(f"{target}: exists; name a new file, or replace it with --force")


def _write(
    blocks: Iterator[Any], part: Path, target: Path, source: str, progress: Callable[[int], None]
) -> tuple[int, Structure]:
    writer_class, reader_class = _array_record()
    structure: Structure | None = None
    count, reported = 0, time.monotonic()
    # One record in each group, so that a record is read without others.
    writer = writer_class(str(part), "group_size:1")
    try:
        for block in blocks:
            found = _checked(block, structure, source, count)
            structure = structure or found
            arrays = dict(zip(structure.columns, (array for _, array in leaves(block)), strict=True))
            for serialized in _examples(arrays, structure, is_first=not count):
                writer.write(serialized)
                count += 1
            if time.monotonic() - reported >= REPORT_SECONDS:
                progress(count)
                reported = time.monotonic()
        if structure is None or not count:
            raise DataError(f"{source}: has no records")
        writer.close()
        reader = reader_class(str(part), options="readahead_buffer_size:0")
        whole = reader.num_records()
        reader.close()
    except RuntimeError as error:  # the library's, such as of a full disk
        raise DataError(f"{target}: cannot be written after {count:,} records: {error}") from error
    finally:
        if writer.is_open():
            with contextlib.suppress(RuntimeError):
                writer.close()
    if whole != count:
        raise DataError(f"{target}: has {whole:,} of {count:,} records after it was written")
    return count, structure


def _blocks(data: Any, source: str, elements: Elements | None) -> Iterator[Any]:
    """Return nests of arrays [n, ...], each with the next n records.

    Raises:
        DataError: the source has no records, or no end.
    """
    if is_a(data, "tensorflow", "DatasetV2"):
        if int(data.cardinality()) == -1:
            raise DataError(f"{source}: the dataset has no end (repeat()); give it without repeat")
        return _of_elements(data.as_numpy_iterator(), source, elements or "batches")
    if isinstance(data, Reader) or not is_stream(data):
        return _of_reader(dataset(data, source=source), source)
    loads = is_a(data, "torch", "DataLoader")
    return _of_elements(data, source, elements or ("batches" if loads else "records"))


def _of_reader(reader: Reader, source: str) -> Iterator[Any]:
    together = getattr(reader, "records_per_read", 1)
    size = max(BLOCK // together, 1) * together
    for start in range(0, len(reader), size):
        stop = min(start + size, len(reader))
        try:
            yield map_leaves(to_array, reader.read(start, stop))
        except ValueError as error:
            raise DataError(f"{source}: {span(start, stop)}: {error}") from error


def _of_elements(data: Iterable[Any], source: str, elements: Elements) -> Iterator[Any]:
    for number, element in enumerate(data):
        try:
            arrays = map_leaves(to_array, with_arrays(as_unpacked(element)))
        except ValueError as error:
            raise DataError(f"{source}: element {number}: {error}") from error
        if elements == "records":
            yield map_leaves(lambda array: array[None], arrays)
            continue
        lengths = {path: len(array) if array.ndim else None for path, array in leaves(arrays)}
        if None in lengths.values() or len(set(lengths.values())) > 1:
            found = ", ".join(f"{path or 'the batch'}: {length}" for path, length in lengths.items())
            raise DataError(
                f"{source}: batch {number} has arrays that differ in their number of records ({found}); if "
                "each element is a single record, use --elements records"
            )
        yield arrays


def _checked(block: Any, structure: Structure | None, source: str, start: int) -> Structure:
    """The structure of a block, which must be that of the first.

    Raises:
        DataError: the structure, or the type or shape of an array, is different or cannot be written.
    """
    arrays = [array for _, array in leaves(block)]
    where = f"{source}: {span(start, start + (len(arrays[0]) if arrays else 1))}"
    try:
        found = Structure.of(block)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    for name, array in zip(found.columns, arrays, strict=True):
        if array.dtype.kind not in TEXT and not _has_name(array.dtype):
            raise DataError(f"{where}: {name!r} is {array.dtype}; expected an array of a single type")
        if array.dtype.kind == "O" and not all(isinstance(value, str | bytes) for value in array.flat):
            odd = next(value for value in array.flat if not isinstance(value, str | bytes))
            raise DataError(
                f"{where}: {name!r} has a {type(odd).__name__}; expected numbers, text or arrays of one shape"
            )
    if structure is None or found == structure:
        return found
    if found.nest != structure.nest:
        raise DataError(f"{where}: has the arrays {list(found.columns)}; expected {list(structure.columns)}")
    name = next(name for name in found.columns if found.columns[name] != structure.columns[name])
    is_now, expected = _shown(*found.columns[name]), _shown(*structure.columns[name])
    raise DataError(
        f"{where}: {name!r} is {is_now}; expected {expected}, as in record 0: all records must have one type "
        "and shape (pad or crop them)"
    )


def _has_name(dtype: np.dtype) -> bool:
    """Whether the type can be read back by its name. A structured type cannot."""
    try:
        return np.dtype(dtype.name) == dtype.newbyteorder("=")
    except TypeError:
        return False


def _shown(kind: str, shape: tuple[int, ...]) -> str:
    return f"{kind} {list(shape)}"


def _examples(arrays: dict[str, np.ndarray], structure: Structure, is_first: bool) -> Iterator[bytes]:
    """Yield the records of a block as serialized examples; the first of a file has the structure."""
    train = importlib.import_module("tensorflow").train
    columns = {name: (kind_of(array)[0], array) for name, array in arrays.items()}
    for index in range(len(next(iter(arrays.values())))):
        features = {name: _feature(train, kind, array[index]) for name, (kind, array) in columns.items()}
        if is_first and not index:
            features[STRUCTURE] = train.Feature(bytes_list=train.BytesList(value=[structure.to_json()]))
        yield train.Example(features=train.Features(feature=features)).SerializeToString()


def _feature(train: Any, kind: str, value: Any) -> Any:
    if kind == "float32":
        return train.Feature(float_list=train.FloatList(value=np.ravel(value)))
    if kind == "int64":
        return train.Feature(int64_list=train.Int64List(value=np.ravel(value)))
    if kind == "string":
        texts = [text.encode() if isinstance(text, str) else bytes(text) for text in to_array(value).flat]
        return train.Feature(bytes_list=train.BytesList(value=texts))
    array = np.asarray(value)
    native = array.astype(array.dtype.newbyteorder("="))
    return train.Feature(bytes_list=train.BytesList(value=[native.tobytes()]))


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[Path]:
    """A hidden file beside the target, which gets the target's name at the end of the block.

    Raises:
        DataError: another process writes the same target.
        OSError: the file cannot be written.
    """
    part = target.with_name(f".{target.name}.part")
    lock = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{target}: another process writes this file") from None
        if not os.fstat(lock).st_nlink or not os.path.samestat(os.fstat(lock), os.stat(part)):
            raise DataError(f"{target}: another process has just written this file")
        try:
            yield part
            os.fsync(lock)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        os.close(lock)


def _array_record() -> tuple[Any, Any]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter
    except ImportError as error:
        raise DataError(
            "the package array-record is needed to write this format: pip install array-record"
        ) from error
    return ArrayRecordWriter, ArrayRecordReader
