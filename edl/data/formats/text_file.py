# SPDX-License-Identifier: Apache-2.0
"""A reader over files of text; each line is a record."""

from __future__ import annotations

import codecs

import numpy as np

from edl.data.base import Reader
from edl.data.files.addresses import Addresses, find
from edl.data.files.joined import Joined
from edl.data.files.lines import Lines
from edl.errors import DataError

SUFFIXES = (".txt", ".text")
EVERY = 64  # lines per stored offset
PACKED = (".gz", ".zst", ".bz2", ".zip", ".xz")


def text(path: Addresses, encoding: str = "utf-8") -> Reader:
    """A reader over the lines of text files, without their line ends: str, an object array [n].

    An empty line is a record, too. An index of offsets is built once; the files are never loaded whole.

    Args:
        path: a file, a list of files, a glob, a directory, or an address such as s3://bucket/folder.
        encoding: Python's name of the text's encoding.

    Raises:
        DataError: a file is missing, compressed, changes, or a line has a different encoding.
    """
    files = find(path, SUFFIXES, "text")
    try:
        if "\n".encode(encoding) != b"\n":
            raise DataError(
                f"{files[0].name}: is {encoding}, in which lines cannot be found; write it in UTF-8"
            )
        codecs.lookup(encoding)
    except LookupError:
        raise DataError(
            f"{files[0].name}: Python knows no encoding {encoding!r} (expected e.g. 'latin-1')"
        ) from None
    for file in files:
        if file.name.lower().endswith(PACKED):
            raise DataError(
                f"{file.name}: is compressed; lines are read from anywhere in it. Unpack it first"
            )
    sources = [Lines(file, EVERY) for file in files]

    def read(nth: int, start: int, stop: int) -> np.ndarray:
        return _lines(sources[nth], start, stop, encoding)

    def take(nth: int, indices: np.ndarray) -> np.ndarray:
        wanted, back = np.unique(indices, return_inverse=True)
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        found = [read(nth, int(run[0]), int(run[-1]) + 1) for run in runs]
        taken: np.ndarray = np.concatenate(found)[back]
        return taken

    is_near = all(file.is_local for file in files)
    counts, names = [len(source) for source in sources], [file.name for file in files]
    return Joined(counts, read, take if is_near else None, names=names)


def _lines(source: Lines, start: int, stop: int, encoding: str) -> np.ndarray:
    found = np.empty(max(stop - start, 0), object)
    data = source.read(start, stop)
    if data.endswith(b"\n"):
        data = data[:-1]
    for nth, line in enumerate(data.split(b"\n") if len(found) else ()):
        try:
            found[nth] = line.removesuffix(b"\r").decode(encoding)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{source.path}: line {start + nth + 1}: is not {encoding}, at byte {error.start} of it; "
                "name the file's encoding, e.g. encoding='latin-1'"
            ) from error
    return found
