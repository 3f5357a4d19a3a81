# SPDX-License-Identifier: Apache-2.0
"""The tables of a server as they are at one step, for a checkpoint shard or a snapshot.

A capture costs nothing: the tables are copied later, on any thread, before the first call that changes rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edl.checkpoints import tensors as files_of_tensors
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.errors import CheckpointError
from edl.ps.storage import checkpoint_shard
from edl.ps.table.table import Copy, Table


class Capture:
    """The tables at one step. They do not change until they are copied.

    Args:
        step: of the tables: their version.
        about: further metadata for a checkpoint shard.
    """

    def __init__(
        self,
        step: int,
        segment: int,
        declared: Sequence[pb.Table],
        tables: Sequence[Table],
        about: Mapping[str, Any],
        assignment: ShardAssignment,
    ):
        self.step, self.segment, self._assignment = step, segment, assignment
        self._declared, self._tables, self._about = declared, tables, about
        self._copying = threading.Lock()
        self._copies: list[Copy] = []
        self._failure: Exception | None = None
        self.is_copied = False

    def copy(self) -> None:
        """Copy the tables, if no thread has done so yet, and return when they are copied.

        Thread-safe. A copy that fails for lack of memory is reported by `tensors`: it must not fail a call
        that only changes rows.
        """
        with self._copying:
            if not self.is_copied:
                try:
                    self._copies = [table.copy(self.step) for table in self._tables]
                except Exception as error:
                    self._failure = error
                self.is_copied = True

    def tensors(self, index: int, all: bool = True) -> dict[str, Any]:
        """The captured tables as tensors of a checkpoint shard or snapshot.

        Args:
            index: of this server.
            all: include rows that another server serves and this one replicates.

        Raises:
            CheckpointError: the tables could not be copied.
        """
        self.copy()
        if self._failure is not None:
            raise CheckpointError(f"the tables of step {self.step} cannot be copied: {self._failure!r}")
        copies, of = self._copies, self._assignment
        if not all and of.copies > 1:
            copies = [copy.only(lambda ids: of.serves(index, ids)) for copy in copies]
        return checkpoint_shard.tensors(index, self.step, of.servers, self._declared, copies, self._about)


def write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors to a file and flush it to the disk.

    Raises:
        OSError: the disk is full; the file is removed then.
    """
    try:
        with open(path, "wb") as file:
            for piece in files_of_tensors.pieces(tensors):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
