# SPDX-License-Identifier: Apache-2.0
"""Interface of readers: any object with these methods is a reader.

A reader returns raw records by index range. The trainer requests one block at a time, in the order of the
epoch, and picks the records of batches out of it. So a reader over a file reads consecutive records and needs
no index for shuffling. If random access is cheap (in memory, or in a file with an index), a reader has `take`
too, which is called for just the records of a batch.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

DOCS = "docs/data.md"
CONVERT = "edl data convert FILE.py train.array_record"  # for messages: the way on for data without an index


@runtime_checkable
class Reader(Protocol):
    """Raw records by index.

    A reader that reads several records at a time anyway (batches of a fixed size) may have an attribute
    `records_per_read`. The job then reads multiples of this number, each once per epoch.
    """

    def __len__(self) -> int:
        """The number of records. It must not change while a job runs."""
        ...

    def read(self, start: int, stop: int) -> Any:
        """Return the records [start, stop): an array, or a (nested) tuple, list or dict of arrays.

        Each array has stop - start entries along its first axis.
        """
        ...


@runtime_checkable
class RandomAccess(Reader, Protocol):
    """A reader with random access to records."""

    def take(self, indices: np.ndarray) -> Any:
        """Return the records at `indices`, int64 [n], in that order, in the structure of `read`."""
        ...
