# SPDX-License-Identifier: Apache-2.0
"""A reader over ArrayRecord files, the format that Grain and TensorFlow Datasets write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, File, find
from edl.data.files.joined import span
from edl.data.formats.examples import serialized
from edl.errors import DataError

SUFFIXES = (".array_record", ".arrayrecord")


class ArrayRecords:
    """The records of one ArrayRecord file, as bytes. The file is opened for each read.

    Raises:
        DataError: the file is not local, or is not an ArrayRecord file.
    """

    def __init__(self, file: File):
        self.name, self._file = file.name, file
        if not file.is_local:
            raise DataError(
                f"{file.name}: the library array-record reads local files only; mount the store, or "
                "copy the files"
            )
        self._records = int(self._call("", lambda reader: reader.num_records()))

    def __len__(self) -> int:
        return self._records

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return the records [start, stop).

        Raises:
            DataError: the file has changed, or a record is damaged.
        """
        if start >= stop:
            return []
        return list(self._call(span(start, stop), lambda reader: reader.read(start, stop)))

    def take(self, indices: np.ndarray) -> list[bytes]:
        """Return the records at `indices`.

        Raises:
            DataError: as for `read`.
        """
        what = f"{len(indices)} records from record {indices.min()}"
        return list(self._call(what, lambda reader: reader.read(indices.tolist())))

    def _call(self, what: str, call: Any) -> Any:
        try:
            from array_record.python.array_record_module import ArrayRecordReader
        except ImportError as error:
            raise DataError(
                f"{self.name}: the package array-record is needed for this format: pip install array-record"
            ) from error
        with self._file.open(what):  # compares the version afterwards
            try:
                reader = ArrayRecordReader(self.name, options="readahead_buffer_size:0")
                try:
                    return call(reader)
                finally:
                    reader.close()
            except (RuntimeError, ValueError, IndexError) as error:
                where = f"{what} cannot be read" if what else "cannot be read as ArrayRecord"
                raise DataError(f"{self.name}: {where}: {error}") from error


def arrayrecord(
    path: Addresses,
    features: Mapping[str, Any] | Sequence[str] | str | None = None,
    label: str | None = None,
    weight: str | None = None,
    raw: bool = False,
) -> Reader:
    """A reader over ArrayRecord files of `tf.train.Example`. The format has an index.

    Args:
        path: a file, a list of files, a glob or a directory.
        features, label, weight, raw: see `tfrecord`.

    Raises:
        DataError: a file is missing, damaged, changes, is not local or has no examples, or a feature differs.
    """
    sources = [ArrayRecords(file) for file in find(path, SUFFIXES, "arrayrecord")]
    return serialized(sources, features, label, weight, raw, is_near=True)
