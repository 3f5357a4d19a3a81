# SPDX-License-Identifier: Apache-2.0
"""A second copy of the state, in memory that this process does not own: it outlives a crash.

The memory is a file without a name. A different process holds it (a pod's supervisor, or the master of
`edl run`), and passes it to each worker process that runs in the same pod, one after the other. After each
step the state is copied there, before the next step begins. So the copy is never behind a step that all
members have.

    a page: what the file is of, and two entries     a copy     a second copy
             each: sequence number, step, bytes      -----------------------
                                                     ledger | variable | variable | ...

A copy overwrites the older of the two, and its number is written last: whenever the process dies, the copy
with the greatest number is whole. The kernel keeps a dead process's writes, in their order, so no digest is
needed; a digest of all bytes would cost more than the copy.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence

import numpy as np

from edl.trainer.agreement.ledger import Ledger

PAGE = 4096
OF_WHAT = slice(0, 32)  # SHA-256 of run, model and sizes
# Bytes for a ledger, in addition to the size of the state: EarlyStopping remembers weights. They take no
# memory before they are written.
LEDGER = 1 << 22
# Positions of the two entries, and of the fields of an entry (uint64), in units of 8 bytes.
ENTRIES = (8, 16)
SEQUENCE, LEDGER_BYTES = 0, 1


class InMemorySnapshot:
    """The copies of one worker's state.

    Args:
        path: the path of the memory as a file.
    """

    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._bytes = np.zeros(0, np.uint8)  # the whole memory, once it is laid out
        self._sizes: list[int] = []
        self.full = ""  # why no copy is made any more

    @property
    def is_there(self) -> bool:
        """Whether the memory has a copy, of any model."""
        head = self._head if len(self._bytes) else np.frombuffer(os.pread(self._file, PAGE, 0), np.uint64)
        return len(head) == PAGE // 8 and any(head[at + SEQUENCE] for at in ENTRIES)

    def open(self, run_id: str, model: str, sizes: Sequence[int]) -> None:
        """Lay the memory out, unless an earlier process has.

        Args:
            model: its fingerprint.
            sizes: the sizes of its variables, in bytes.
        """
        self._sizes = list(sizes)
        of_what = hashlib.sha256(f"{run_id} {model} {self._sizes}".encode()).digest()
        length = PAGE + 2 * self._copy_size
        if os.pread(self._file, 32, 0) != of_what or os.fstat(self._file).st_size != length:
            os.ftruncate(self._file, 0)  # drop the old copies, their numbers first
            os.ftruncate(self._file, length)
            os.pwrite(self._file, of_what, 0)
        self._bytes = np.frombuffer(mmap.mmap(self._file, length), np.uint8)
        os.close(self._file)

    def newest(self) -> tuple[Ledger, list[np.ndarray]] | None:
        """The last whole copy: the ledger, and each variable, uint8 [bytes]; None without a whole copy."""
        entry = self._entry(max(ENTRIES, key=lambda at: int(self._head[at + SEQUENCE])))
        if not int(entry[SEQUENCE]):
            return None
        copy = self._copy(int(entry[SEQUENCE]))
        ledger = Ledger.unpack(copy[: int(entry[LEDGER_BYTES])].copy())
        parts = np.split(copy[self._ledger :], np.cumsum(self._sizes)[:-1]) if self._sizes else []
        return ledger, [part.copy() for part in parts]  # the next copies are written over it

    def put(self, ledger: Ledger, parts: Sequence[np.ndarray]) -> None:
        """Copy this state."""
        if self.full:
            return
        pieces = [np.frombuffer(piece, np.uint8) for piece in ledger.pieces()]
        length = sum(map(len, pieces))
        if length > self._ledger:
            self.full = (
                f"what the training and its callbacks remember beside the weights does not fit into "
                f"{self._ledger:,} bytes"
            )
            self.forget()
            return
        sequence = 1 + max(int(self._head[at + SEQUENCE]) for at in ENTRIES)
        entry, copy = self._entry(ENTRIES[sequence % 2]), self._copy(sequence)
        entry[SEQUENCE] = 0
        entry[LEDGER_BYTES] = length
        for begin, all_ in ((0, pieces), (self._ledger, parts)):
            for piece in all_:
                np.copyto(copy[begin : begin + len(piece)], piece)
                begin += len(piece)
        entry[SEQUENCE] = sequence

    def forget(self) -> None:
        """Mark all copies as invalid."""
        self._head[[at + SEQUENCE for at in ENTRIES]] = 0

    @property
    def _ledger(self) -> int:
        """Bytes for a ledger."""
        return LEDGER + sum(self._sizes)

    @property
    def _copy_size(self) -> int:
        """The size of one copy in whole pages."""
        return -(-(self._ledger + sum(self._sizes)) // PAGE) * PAGE

    @property
    def _head(self) -> np.ndarray:
        return self._bytes[:PAGE].view(np.uint64)

    def _entry(self, at: int) -> np.ndarray:
        return self._head[at : at + 8]

    def _copy(self, sequence: int) -> np.ndarray:
        begin = PAGE + (sequence % 2) * self._copy_size
        return self._bytes[begin : begin + self._ledger + sum(self._sizes)]
