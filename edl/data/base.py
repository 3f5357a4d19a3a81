"""What a reader is: any object with these methods.

A reader gives raw records by index range; the trainer asks for one block at a time, in the
order of the epoch, and picks the records of batches out of it. So a reader over a file reads
consecutive records and needs no index for shuffling. Where any record is as near as the next one, in memory
or in a file with an index, a reader has `take` too, and is asked for just the records of a batch.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Reader(Protocol):
    """Raw records by index.

    A reader whose records are read several at a time anyway (batches of a fixed size) may have an attribute
    `records_per_read`: then the job reads multiples of it, each once in an epoch.
    """

    def __len__(self) -> int:
        """How many records there are. Must not change while a job runs."""
        ...

    def read(self, start: int, stop: int) -> Any:
        """The records [start, stop): an array, or a tuple, list or dict of arrays (nested as you
        like), each with stop - start entries along its first axis."""
        ...


@runtime_checkable
class RandomAccess(Reader, Protocol):
    """A reader that gives any records."""

    def take(self, indices: np.ndarray) -> Any:
        """The records at `indices`, int64 [n], in that order: as `read`, with n entries."""
        ...
