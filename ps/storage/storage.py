# SPDX-License-Identifier: Apache-2.0
"""A server's state on its machine: the rows in memory, and the log and base they are recovered from.

A log starts from a base: no rows, the rows of a checkpoint, or a snapshot, which is written when the log has
become large. Base and log give the state, bit for bit.

Knows nothing of steps: the update mode (`edl.ps.sync`, `edl.ps.asynchronous`) decides which calls count and
how they change rows. All methods run on one thread, except that `Capture.copy` may run on another, so that
rows can be read meanwhile. A call that changes rows copies captured tables first, unless another thread is
doing so. So it depends on no other call, and a capture whose caller has gone costs one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from edl.checkpoints import Store
from edl.checkpoints.manifest import CheckpointFile
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.wire import Bytes
from edl.errors import CheckpointError
from edl.ps.errors import Invalid, Misplaced, OutOfMemory, Unavailable, Unreadable
from edl.ps.storage import checkpoint_shard
from edl.ps.storage.capture import Capture, write_tensors
from edl.ps.storage.records import HEAD, TABLES, Pieces, record
from edl.ps.storage.requests import Gradients, gradient_fields, ids_of
from edl.ps.storage.wal import Base, Damaged, Log, NoLog
from edl.ps.table.table import Table

SNAPSHOT_BYTES = 512 << 20  # smallest size of a log that a snapshot replaces
SNAPSHOT_TIMES = 2  # and its smallest ratio to the memory of the tables

Records: TypeAlias = list[Pieces]


class Storage:
    """The tables, the log and the base of one server.

    Args:
        index: of this server.
        servers: number of servers, until a shard assignment names it; 0: unknown.
        run_id: of the job.
        checkpoints: path or URL of the job's checkpoints; empty: none.
        memory_limit: bytes; 0: unlimited.
        warn: called with a message about a problem that no request has caused.
        snapshot_bytes: smallest size of a log that a snapshot replaces.
    """

    def __init__(
        self,
        index: int,
        servers: int,
        run_id: str,
        log: Log | NoLog,
        checkpoints: str,
        memory_limit: int,
        warn: Callable[[str], object],
        snapshot_bytes: int,
    ):
        self.index, self.run_id = index, run_id
        self._alone = self.assignment = ShardAssignment(servers)
        self.checkpoints, self.limit, self._warn = checkpoints, memory_limit, warn
        self._snapshot_bytes = snapshot_bytes
        self.owner = f"{run_id}/{index}"
        self.log = log
        self.declared: pb.Tables | None = None
        self.tables: list[Table] = []
        self._capture: Capture | None = None  # the newest one, which may not be copied yet
        self._written: dict[tuple[int, str], int] = {}  # log segments of checkpoints that may become complete
        self.snapshot: Capture | None = None

    # --- tables

    def begin_log(self, beginning: Records) -> None:
        """Start a new log; an old one is ignored."""
        self.log.begin(Base(self.owner, 0), beginning)

    def forget(self) -> None:
        """Reset to the state of a new server without tables."""
        self.declared, self.tables, self.assignment = None, [], self._alone
        self._written.clear()

    def drop_rows(self) -> None:
        """Drop all rows and their snapshots."""
        for table in self.tables:
            table.clear()
        self._written.clear()
        self.snapshot = None

    def head(self, about: Mapping[str, Any]) -> Records:
        """The first records of a log segment: all that recovery from it needs."""
        of = self.assignment
        told = {**about, "assignment": [of.servers, of.replicas, *of.out]}
        records: Records = [record(HEAD, **told)]
        if self.declared is not None:
            records.append(record(TABLES, self.declared.SerializeToString()))
        return records

    def append(self, kind: bytes, raw: Bytes = b"", **said: Any) -> None:
        """Log a request before it takes effect.

        Args:
            said: what the server has decided about it.

        Raises:
            Unavailable: the log cannot be written.
        """
        self.log.append(*record(kind, raw, **said))

    def read_assignment(self, about: Mapping[str, Any]) -> None:
        """Set the shard assignment from a log head. Raises: LookupError, TypeError, ValueError."""
        servers, replicas, *out = about["assignment"]
        self.assignment = ShardAssignment(servers, replicas, tuple(out))

    def has(self, ids: np.ndarray) -> np.ndarray:
        """Which of these ids are on this server, bool [n]."""
        return self.assignment.has(self.index, ids)

    def table(self, number: int) -> Table:
        if not 0 <= number < len(self.tables):
            raise Invalid(f"table {number}: expected 0 to {len(self.tables) - 1}")
        return self.tables[number]

    def gradients(self, raw: Bytes, given: Iterable[memoryview]) -> Gradients:
        """The gradients of one request, as views of its bytes.

        Args:
            raw: the request.
            given: its pb.Gradients messages.

        Raises:
            Invalid: the values do not fit the ids, or a table occurs twice.
        """
        of: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for one in given:
            number, its_ids, values = gradient_fields(one)
            table, ids = self.table(number), ids_of(its_ids)
            if len(values) != 4 * len(ids) * table.dim or number in of:
                raise Invalid(
                    f"table {table.name!r}: {len(values)} bytes of gradients for {len(ids)} ids: expected "
                    f"{4 * len(ids) * table.dim}, of each table once"
                )
            of[number] = ids, np.frombuffer(values, np.float32)
        return Gradients(raw, of)

    # --- copies: for checkpoints, and for snapshots, without which a log would grow forever

    def begin_capture(self, clock: int, beginning: Records, about: Mapping[str, Any]) -> Capture:
        """Capture the present state and start a new log segment.

        Args:
            clock: version of the tables.
            beginning: first records of the new segment.

        Raises:
            Unavailable: the log cannot be written.
        """
        assert self.declared is not None
        self.finish_copy()
        segment = self.log.another(beginning)
        tables = self.declared.tables
        self._capture = Capture(clock, segment, tables, self.tables, about, self.assignment)
        return self._capture

    @property
    def is_copying(self) -> bool:
        """True while captured tables are not copied; calls that change rows must wait for the copy."""
        return self._capture is not None and not self._capture.is_copied

    def finish_copy(self) -> None:
        """Copy captured tables, so that rows may change."""
        if self._capture is not None:
            self._capture.copy()
            self._capture = None

    def will_write(self, capture: Capture, step: int, attempt: str) -> None:
        """Remember the capture's log segment, for `committed`."""
        self._written[step, attempt] = capture.segment
        while len(self._written) > 4:
            del self._written[next(iter(self._written))]

    def write(self, capture: Capture, request: pb.WritePartRequest) -> CheckpointFile:
        """Write the capture as this server's shard of the checkpoint. On any thread.

        Raises:
            CheckpointError: the shard cannot be written.
        """
        tensors = capture.tensors(self.index, all=False)
        writing = Store.open(self.checkpoints).begin(request.step, request.attempt)
        return writing.write_part(request.index, request.of, tensors, checkpoint_shard.rows(tensors))

    def committed(self, step: int, attempt: str) -> bool:
        """Make that checkpoint, which is complete, the base of the log; returns whether it now is."""
        segment = self._written.pop((step, attempt), 0)
        base = self.log.base
        if not segment or base is None or segment <= base.first:
            return False
        self._rebase(Base(self.owner, segment, "checkpoint", step, attempt))
        return True

    def time_for_snapshot(self, pending: int) -> bool:
        """Whether the log is large enough for a snapshot.

        Args:
            pending: bytes of gradients that are not in the rows yet.
        """
        most = max(self._snapshot_bytes, SNAPSHOT_TIMES * self.memory(pending))
        return self.snapshot is None and bool(self.tables) and self.log.nbytes >= most

    def write_snapshot(self, capture: Capture) -> str:
        """Write a snapshot and return the file's name. On any thread.

        Raises:
            OSError: the disk is full.
        """
        path = self.log.directory / f"snapshot-{capture.segment:012d}"
        write_tensors(path, capture.tensors(self.index))
        return path.name

    def use_snapshot(self, capture: Capture, name: str) -> bool:
        """Make the snapshot the base of the log; return whether it now is.

        Args:
            name: the snapshot's file; empty if it was not written.
        """
        if self.snapshot is not capture:
            return False  # the server has rolled back meanwhile
        self.snapshot = None
        base = self.log.base
        if not name or base is None or capture.segment <= base.first:
            return False
        self._rebase(Base(self.owner, capture.segment, "snapshot", capture.step, snapshot=name))
        return True

    def _rebase(self, base: Base) -> None:
        self.log.rebase(base)
        self._written = {key: at for key, at in self._written.items() if at > base.first}

    def undone(self, step: int) -> None:
        """Forget captures after that step: the step was undone."""
        self._written = {key: at for key, at in self._written.items() if key[0] <= step}
        if self.snapshot is not None and self.snapshot.step > step:
            self.snapshot = None

    # --- rollback and recovery

    def go_back(self, step: int, attempt: str, alone: bool = False) -> list[Mapping[str, Any]]:
        """Load the rows of that checkpoint; step 0: none. The caller must start a new log afterwards.

        Args:
            alone: read only this server's shard, if the checkpoint has as many shards as there are servers.

        Returns:
            the metadata of the shards read.

        Raises:
            Unreadable: the checkpoint cannot be read.
        """
        self.finish_copy()
        self._written.clear()
        self.snapshot = None
        return self._load_checkpoint(step, attempt, alone)

    def read_start(self, start: pb.Start) -> None:
        """Replace all rows by another job's rows of the tables that `start` names.

        Raises:
            Unreadable: the checkpoint cannot be read.
        """
        self.finish_copy()
        self.drop_rows()
        if not start.tables:
            return
        try:
            checkpoint_shard.read_start(start, self.tables, self.has, self.check_room)
        except CheckpointError as error:
            raise Unreadable(f"initFrom.path: {error}") from error
        except OSError as error:
            raise Unreadable(f"initFrom.path: {start.directory}: {error}") from error

    def keep_beginning(self, name: str, beginning: Records) -> None:
        """Write the present rows to a file of this name and make it the base of the log, atomically.

        The job whose rows they are may delete its checkpoint, so that cannot be the base.

        Raises:
            Unavailable: the file or the log cannot be written.
        """
        assert self.declared is not None
        copies = [table.copy(0) for table in self.tables]
        servers, path = self.assignment.servers, self.log.directory / name
        try:
            write_tensors(
                path, checkpoint_shard.tensors(self.index, 0, servers, self.declared.tables, copies)
            )
        except OSError as error:
            raise Unavailable(
                f"the rows of initFrom.path cannot be kept in {self.log.directory}: {error}"
            ) from error
        self.log.begin(Base(self.owner, 0, "snapshot", 0, snapshot=path.name), beginning)

    def begin_with_rows(self, rows: Gradients) -> None:
        """Insert these rows; ids that have a row keep it."""
        for number, (ids, values) in rows.of.items():
            table = self.tables[number]
            table.begin_with(ids, values.reshape(len(ids), table.dim))

    def gone_back(self, step: int, attempt: str, beginning: Records) -> None:
        """Start a new log from that checkpoint.

        Raises:
            Unavailable: the log cannot be written.
        """
        kind = "checkpoint" if step else ""
        self.log.begin(Base(self.owner, 0, kind, step, attempt), beginning)

    def lose(self, beginning: Records) -> None:
        """Drop all rows and start a new log, as a new server does."""
        for table in self.tables:
            table.clear()
        self._written.clear()
        try:
            self.begin_log(beginning)
        except Unavailable as error:
            # The old log describes a state that is gone: without a base it is ignored on restart.
            self._warn(str(error))
            self.log.disown()

    def load_base(self, alone: bool = False) -> None:
        """Load the rows of the log's base.

        Raises:
            Damaged: the base cannot be loaded.
        """
        base = self.log.base
        assert base is not None
        if base.kind == "checkpoint":
            self._load_checkpoint(base.step, base.attempt, alone)
        elif base.kind == "snapshot":
            where = self.log.directory / base.snapshot
            with open(where, "rb") as file:
                try:
                    checkpoint_shard.read(file, str(where), self.tables, self.has, self.check_room)
                except CheckpointError as error:
                    raise Damaged(str(error)) from error

    def _load_checkpoint(self, step: int, attempt: str, alone: bool) -> list[Mapping[str, Any]]:
        for table in self.tables:
            table.clear()
        if not step:
            return []
        try:
            return checkpoint_shard.read_checkpoint(
                self.checkpoints,
                step,
                attempt,
                self.tables,
                self.has,
                self.check_room,
                (self.index, self.assignment.servers) if alone else None,
            )
        except CheckpointError as error:
            raise Unreadable(str(error)) from error
        except OSError as error:
            raise Unreadable(f"{self.checkpoints}: {error}") from error

    # --- checks

    def check_run(self, run_id: str) -> None:
        if run_id != self.run_id:
            raise Misplaced(f"this server belongs to run {self.run_id!r}: the request is of run {run_id!r}")

    def check_declared(self, run_id: str) -> None:
        self.check_run(run_id)
        if self.declared is None:
            raise Misplaced(
                "no tables are declared: the server is new, or has lost its log; call Declare, and check the "
                "position that it returns"
            )

    def check_checkpoint(self, step: int) -> None:
        """Check that a checkpoint of this step could be read; step 0 needs none.

        Raises:
            Misplaced: the server was started without a checkpoint directory.
        """
        if step and not self.checkpoints:
            raise Misplaced(f"cannot restore step {step}: this server was started without --checkpoint-dir")

    def memory(self, pending: int) -> int:
        """Bytes of tables and pending gradients.

        Args:
            pending: bytes of gradients that are not in the rows yet.
        """
        return sum(table.nbytes() for table in self.tables) + pending

    def check_memory(self, together: Sequence[Gradients]) -> None:
        """Check that an update with these gradients fits the memory limit.

        Raises:
            OutOfMemory: it does not.
        """
        if not self.limit:
            return
        # Memory of a step while it is applied: its gradients, their sums, and the data to undo it.
        step = sum(4 * len(one.raw) for one in together)

        def needed(count: Callable[[Table, np.ndarray], int]) -> int:
            total = step
            for number, table in enumerate(self.tables):
                ids = (one.of[number][0] for one in together if number in one.of)
                total += table.nbytes(sum(count(table, some) for some in ids))
            return total

        if needed(lambda _, ids: len(ids)) > self.limit and (most := needed(Table.new_rows)) > self.limit:
            raise OutOfMemory(self._too_large(most))

    def check_room(self, table: Table, rows: int) -> None:
        """Check that `rows` more rows of a table fit the memory limit.

        Raises:
            OutOfMemory: they do not.
        """
        others = sum(other.nbytes() for other in self.tables if other is not table)
        if self.limit and (needed := others + table.nbytes(rows)) > self.limit:
            raise OutOfMemory(self._too_large(needed))

    def _too_large(self, needed: int) -> str:
        rows = sum(len(table) for table in self.tables)
        return (
            f"parameter server {self.index} has {rows:,} rows and would need {needed / 2**20:,.0f} MiB, its "
            f"limit is {self.limit / 2**20:,.0f} MiB: use more servers (ps.servers), give each more memory "
            "(ps.resources), or keep fewer rows (min_count, ttl_steps)"
        )
