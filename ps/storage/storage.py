"""A server's state on its machine: the rows in memory, and the log and base they are recovered from.

A log starts from a base: no rows, the rows of a checkpoint, or a snapshot, which is written when the log has
become large. Base and log give the state, bit for bit.

Knows nothing of steps: the update mode (`edl.ps.sync`, `edl.ps.asynchronous`) decides which calls count and
how they change rows. All methods run on one thread, except that `Capture.copy` may run on another, so that
rows can be read meanwhile. A call that changes rows copies captured tables first, unless another thread is
doing so. So it depends on no other call, and a capture whose caller has gone costs one copy.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from edl.checkpoints import Store
from edl.checkpoints import tensors as files_of_tensors
from edl.checkpoints.manifest import Part
from edl.contract.bounds import violation
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows import wire
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.wire import Bytes
from edl.errors import CheckpointError
from edl.ps.errors import Invalid, Misplaced, OutOfMemory, Unavailable, Unreadable
from edl.ps.storage import checkpoint_shard
from edl.ps.storage.wal import Base, Damaged, Log, NoLog
from edl.ps.table.table import Copy, Table

SNAPSHOT_BYTES = 512 << 20  # smallest size of a log that a snapshot replaces
SNAPSHOT_TIMES = 2  # and its smallest ratio to the memory of the tables

HEAD, TABLES = b"H", b"T"  # the kind of a log record: its first byte; update modes add further kinds

Records: TypeAlias = list[list[Bytes]]  # log records, each as a list of pieces
Message = TypeVar("Message")


@dataclass(frozen=True)
class Gradients:
    """The gradients or rows of one request, as views of its bytes."""

    raw: Bytes
    of: Mapping[int, tuple[np.ndarray, np.ndarray]]  # ids and values, by table


class Capture:
    """The tables at one step. They do not change until they are copied.

    Args:
        clock: version of the tables at that step.
        about: further metadata for a checkpoint shard.
    """

    def __init__(
        self, step: int, clock: int, segment: int, described: Sequence[pb.Table], tables: Sequence[Table],
        about: Mapping[str, Any], assignment: ShardAssignment,
    ):  # fmt: skip
        self.step, self.segment, self._assignment = step, segment, assignment
        self._clock, self._described, self._tables, self._about = clock, described, tables, about
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
                    self._copies = [table.copy(self._clock) for table in self._tables]
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
        return checkpoint_shard.tensors(index, self.step, of.servers, self._described, copies, self._about)


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
        self, index: int, servers: int, run_id: str, log: Log | NoLog, checkpoints: str, memory_limit: int,
        warn: Callable[[str], object], snapshot_bytes: int,
    ):  # fmt: skip
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
        records: Records = [[HEAD, json.dumps(told).encode()]]
        if self.declared is not None:
            records.append([TABLES, self.declared.SerializeToString()])
        return records

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
        """
        of: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for one in given:
            number, its_ids, values = _gradients(one)
            table, ids = self.table(number), ids_of(its_ids)
            if len(values) != 4 * len(ids) * table.dim or number in of:
                raise Invalid(
                    f"table {table.name!r}: {len(values)} bytes of gradients for {len(ids)} ids: expected "
                    f"{4 * len(ids) * table.dim}, of each table once"
                )
            of[number] = ids, np.frombuffer(values, np.float32)
        return Gradients(raw, of)

    # --- copies: for checkpoints, and for snapshots, without which a log would grow forever

    def begin_capture(self, step: int, clock: int, beginning: Records, about: Mapping[str, Any]) -> Capture:
        """Capture the present state and start a new log segment.

        Args:
            beginning: first records of the new segment.

        Raises:
            Unavailable: the log cannot be written.
        """
        assert self.declared is not None
        self.finish_copy()
        segment = self.log.another(beginning)
        tables = self.declared.tables
        self._capture = Capture(step, clock, segment, tables, self.tables, about, self.assignment)
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

    def write(self, capture: Capture, request: pb.WritePartRequest) -> Part:
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
        _write_tensors(path, capture.tensors(self.index))
        return path.name

    def use_snapshot(self, capture: Capture, name: str) -> bool:
        """Make the snapshot the base of the log; returns whether it now is. An empty name: it was not
        written."""
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

    def begin_with(self, start: pb.Start, generation: int, beginning: Records) -> None:
        """Load another job's rows and make a local copy of them the base of the log.

        The copy is needed because the other job may delete its checkpoint.

        Raises:
            Unreadable: the checkpoint cannot be read.
            Unavailable: the copy cannot be written.
        """
        self.read_start(start)
        self.keep_beginning(f"snapshot-of-generation-{generation}", beginning)

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

        Raises:
            Unavailable: the file or the log cannot be written.
        """
        assert self.declared is not None
        copies = [table.copy(0) for table in self.tables]
        servers, path = self.assignment.servers, self.log.directory / name
        try:
            _write_tensors(
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
        """Load the rows of the log's base."""
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
                self.checkpoints, step, attempt, self.tables, self.has, self.check_room,
                (self.index, self.assignment.servers) if alone else None,
            )  # fmt: skip
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
        """Raise Misplaced if checkpoints cannot be read because the server has no checkpoint directory."""
        if step and not self.checkpoints:
            raise Misplaced(f"cannot restore step {step}: this server was started without --checkpoint-dir")

    def memory(self, pending: int) -> int:
        """Bytes of tables and pending gradients.

        Args:
            pending: bytes of gradients that are not in the rows yet.
        """
        return sum(table.nbytes() for table in self.tables) + pending

    def check_memory(self, together: Sequence[Gradients]) -> None:
        """Raise OutOfMemory if an update with these gradients would exceed the memory limit."""
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
        """Raise OutOfMemory if `rows` more rows would exceed the memory limit."""
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


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
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


def tables_of(request: pb.Tables) -> list[Table]:
    names = [table.name for table in request.tables]
    if len(set(names)) != len(names):
        raise Invalid(f"tables {names}: expected each name once")
    return [Table(table, request.seed) for table in request.tables]


def read(parse: Callable[[bytes], Message], raw: Bytes, large: int) -> tuple[Message, list[memoryview]]:
    """Parse a request without its fields of number `large`, which are returned as views.

    Raises:
        Invalid: it is not a valid request.
    """
    try:
        rest, found = wire.without(raw, large)
        request = parse(rest)
    except (wire.NotAMessage, DecodeError) as error:
        raise Invalid(f"the request cannot be read: {error}") from error
    if outside := violation(request):
        raise Invalid(outside)
    return request, found


def _gradients(one: memoryview) -> tuple[int, Bytes, Bytes]:
    """The table, ids and values of a pb.Gradients message, without copies."""
    try:
        found: dict[int, Any] = {number: held for number, held, _, _ in wire.fields(one)}
    except wire.NotAMessage as error:
        raise Invalid(f"gradients cannot be read: {error}") from error
    table, ids, values = found.get(_TABLE, 0), found.get(_IDS, b""), found.get(_VALUES, b"")
    if not isinstance(table, int) or isinstance(ids, int) or isinstance(values, int):
        raise Invalid("gradients: expected a table's number, ids and values")
    return table, ids, values


_TABLE, _IDS, _VALUES = (
    pb.Gradients.TABLE_FIELD_NUMBER, pb.Gradients.IDS_FIELD_NUMBER, pb.Gradients.VALUES_FIELD_NUMBER,
)  # fmt: skip


def ids_of(raw: Bytes) -> np.ndarray:
    if len(raw) % 8:
        raise Invalid(f"{len(raw)} bytes of ids: expected a multiple of 8")
    return np.frombuffer(raw, np.int64)
