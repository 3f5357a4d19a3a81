# SPDX-License-Identifier: Apache-2.0
"""Comparison of readers by their records."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from edl.data.base import Reader
from edl.data.nest import leaves
from edl.errors import DataError


def same_records(one: Reader, other: Reader) -> bool:
    """Whether two readers hold the same records, as far as their number and the first and last ones show.

    The last ones are read only if the first ones are equal, so different data cost one read each.
    """
    if one is other:
        return True
    count = len(one)
    if count != len(other) or not count:
        return False
    return all(_equal(one.read(at, at + 1), other.read(at, at + 1)) for at in dict.fromkeys((0, count - 1)))


def _equal(one: Any, other: Any) -> bool:
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    if ours.keys() != theirs.keys():
        return False
    return all(_equal_arrays(np.asarray(array), np.asarray(theirs[path])) for path, array in ours.items())


def _equal_arrays(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))


def digest_of(records: Any) -> bytes:
    """A digest of a nest of arrays: their places, types, shapes and values."""
    found = hashlib.blake2b(digest_size=16)
    for path, array in leaves(records):
        found.update(f"{path} {array.dtype} {array.shape} ".encode())
        if array.dtype.hasobject:
            for value in array.flat:
                text = value.encode() if isinstance(value, str) else bytes(value)
                found.update(len(text).to_bytes(8, "little") + text)
        else:
            found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.digest()


def digest_of_reader(reader: Any) -> str:
    """The digest of all records of a reader, or of the one it selects from; empty if it has none.

    A reader over records that each worker computes by itself has an attribute `digest`.
    """
    return _attribute(reader, "digest", str) or ""


class KnownSplits:
    """What is known of the splits that were opened, to compare those that are opened later.

    Args:
        digests: by split, of readers that have one.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._classes: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {}

    def check(self, split: str, reader: Reader, source: str) -> None:
        """Compare the reader of a split with earlier ones.

        Args:
            source: the name of its records, for messages.

        Raises:
            DataError: the split had other records, or another split has other numbers for the same classes.
        """
        digest = digest_of_reader(reader)
        if digest and self.digests.setdefault(split, digest) != digest:
            raise DataError(
                f"{source} has other records than when it was called before; it must return the same ones"
            )
        classes: dict[str, tuple[str, ...]] = _attribute(reader, "classes_by_column", dict) or {}
        for other, known in self._classes.values():
            for column, names in classes.items():
                if known.get(column, names) != names:
                    raise DataError(
                        f"{source}: the classes of {column!r} are {', '.join(names)}, and those of {other} "
                        f"{', '.join(known[column])}: a number would mean different classes; give "
                        "all splits the classes of the training"
                    )
        self._classes[split] = source, classes


def _attribute(reader: Any, name: str, kind: type) -> Any:
    """An attribute of a reader, or of the one that it selects from; None if neither has one of this type."""
    while not hasattr(reader, name) and hasattr(reader, "underlying"):
        reader = reader.underlying
    found = getattr(reader, name, None)
    return found if isinstance(found, kind) else None
