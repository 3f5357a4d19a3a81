# SPDX-License-Identifier: Apache-2.0
"""Many small CSV files as one text: parsing even a tiny one by itself costs a millisecond."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

from edl.data.files.addresses import File
from edl.data.formats.csv_text import CsvFile

SMALL = 1 << 20  # bytes: the mean size up to which files are parsed together


@dataclass(frozen=True)
class _Text(File):
    """A file whose content is in memory."""

    content: bytes

    @contextmanager
    def open(self, what: str = "") -> Iterator[Any]:
        with BytesIO(self.content) as opened:
            yield opened


def together(files: Sequence[CsvFile]) -> tuple[CsvFile, list[int]] | None:
    """The text of all files as one file, under one header, and the number of lines of each.

    Returns:
        None if the files must be parsed one by one: they are few, large, packed or quoted, or their first
        lines differ.

    Raises:
        DataError: a file has changed, or cannot be read.
    """
    first = files[0]
    if len(files) < 2 or sum(file.file.size for file in files) > SMALL * len(files):
        return None
    if any(file.compression for file in files) or first.is_wide:
        return None
    header, texts = b"", []
    for file in files:
        text = file.file.read(0, file.file.size)
        if b'"' in text or (b"\r" in text and b"\r\n" not in text):
            return None
        if first.names is None:
            end = text.find(b"\n") + 1
            header = header or text[:end]
            if not end or text[:end] != header:
                return None
            text = text[end:]
        texts.append(text if not text or text.endswith(b"\n") else text + b"\n")
    whole = b"".join((header, *texts))
    joint = _Text(first.file.name, len(whole), first.file.version, whole)
    return replace(first, file=joint), [text.count(b"\n") for text in texts]
