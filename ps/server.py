# SPDX-License-Identifier: Apache-2.0
"""One parameter server: it logs each request before it applies it to its rows.

The workers choose the update mode when they declare the tables: steps of a ring (`edl.ps.sync.server`) or
asynchronous SGD (`edl.ps.asynchronous.server`).

In a ring, `stage` keeps a rank's gradients, and the first call that carries the step's outcome applies them:
mostly a `pull` for the next step. When a new ring forms, `start_generation` brings the server to the step of
its root: staged gradients are applied or dropped, or the last step is undone.

Promise: a call is rejected and changes nothing, or is logged and takes full effect. (A `restore` that fails
leaves the server empty.) A call that is repeated after a lost answer changes no row. A server that restarts
resumes from its log, which outlives the process but not a reboot. If the log is lost, damaged or of another
machine, the server is empty and reports that.
All methods run on one thread, except that `Capture.copy` may run on another, so that rows can be pulled
meanwhile. The next step copies captured tables itself if no other thread has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edl.checkpoints.manifest import CheckpointFile
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.state_tables import ImpossibleStep
from edl.ps.asynchronous.server import AsyncServer
from edl.ps.errors import Invalid, Misplaced, Refused, Unavailable
from edl.ps.storage.capture import Capture
from edl.ps.storage.records import HEAD, TABLES, read_record
from edl.ps.storage.requests import ids_of, tables_of
from edl.ps.storage.storage import SNAPSHOT_BYTES, Storage
from edl.ps.storage.wal import AnotherRun, Damaged, Log, NoLog
from edl.ps.sync.server import SyncServer
from edl.ps.table.table import Table
from edl.ps.update_mode import UpdateMode


class ParameterServer:
    """One server: its tables, its log and its update mode.

    `mode` has the calls that change steps or move rows. `declare` may replace it.

    Args:
        index: of this server.
        servers: number of servers, until a shard assignment names it; 0: unknown.
        run_id: of the job; requests of other runs are rejected, and a log of another run is ignored.
        checkpoints: path or URL of the job's checkpoints; empty: none.
        memory_limit: bytes; 0: unlimited.
        warn: called with a message about a problem that no request has caused.
        snapshot_bytes: smallest size of a log that a snapshot replaces.
        logged: whether to write a log; without a log, a server that ends loses its rows.
        log: used in place of the one in `log_dir`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        index: int,
        servers: int,
        run_id: str,
        log_dir: Path,
        checkpoints: str = "",
        memory_limit: int = 0,
        warn: Callable[[str], object] = str,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        logged: bool = True,
        log: Log | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.index, self.run_id = index, run_id
        self._warn, self._clock = warn, clock
        self._log: Log | NoLog = log or (Log(log_dir) if logged else NoLog(log_dir))
        self._storage = Storage(
            index, servers, run_id, self._log, checkpoints, memory_limit, warn, snapshot_bytes
        )
        self.mode: UpdateMode[Any] = SyncServer(self._storage)  # until `declare` names another mode
        self.rows_pulled = 0
        self._room = np.empty(0, np.float32)  # reused: page faults of new memory cost as much as the copy
        self._recover()

    @property
    def servers(self) -> int:
        """Number of servers; 0: unknown yet."""
        return self._storage.assignment.servers

    def declare(self, request: pb.Tables) -> pb.Position:
        """Declare the job's tables and its update mode.

        Raises:
            Misplaced: different tables were declared before.
            Invalid: the definition of a table is invalid.
            Unavailable: the log cannot be written.
        """
        storage = self._storage
        storage.check_run(request.run_id)
        if storage.declared is None:
            _check_numbers(request.asynchronous)
            tables = tables_of(request)
            storage.append(TABLES, request.SerializeToString())
            self._declare(request, tables)
        elif difference := _difference(storage.declared, request):
            raise Misplaced(
                f"this worker's tables differ from those that other workers declared: {difference}"
            )
        return self.position()

    def pull(self, request: pb.PullRequest) -> list[np.ndarray]:
        """The rows of the requested ids, float32 [n * dim] per table; valid until the next call."""
        self._make_readable(request)
        wanted = [(self._storage.table(asked.table), ids_of(asked.ids)) for asked in request.ids]
        size = sum(len(ids) * table.dim for table, ids in wanted)
        if size > len(self._room):
            self._room = np.empty(size, np.float32)
        found, at = [], 0
        for table, ids in wanted:
            out = self._room[at : at + len(ids) * table.dim]
            table.pull(self.mode.clock, ids, out)
            self.rows_pulled += len(ids)
            found.append(out)
            at += len(out)
        return found

    def listed(self, request: pb.ListRequest) -> pb.Listed:
        """One page of all rows of a table.

        Raises:
            Invalid: there is no such table, or the page would have no rows.
        """
        self._make_readable(request)
        if not 0 <= request.table < len(self.tables) or request.most < 1:
            raise Invalid(
                f"a page of {request.most} rows of table {request.table}: expected at least 1 row, of one of "
                f"{len(self.tables)} tables"
            )
        after = request.after if request.HasField("after") else None
        clock, of = self.mode.clock, self._storage.assignment
        if request.HasField("assignment"):
            of = ShardAssignment.from_proto(request.assignment)
        mine = None if of.copies < 2 else lambda ids: of.serves(self.index, ids)
        ids, rows, more = self.tables[request.table].page(clock, after, request.most, request.since, mine)
        return pb.Listed(
            ids=ids.tobytes(), rows=rows.tobytes(), more=more, step=clock, incarnation=self.incarnation
        )

    def capture(self, request: pb.WritePartRequest) -> Capture:
        """Capture the state at that step, for `write`. The next step copies it, unless another thread has.

        Raises:
            Misplaced: the server was started without a checkpoint directory, or has a different shard
                assignment.
        """
        self._storage.check_declared(request.run_id)
        if not self._storage.checkpoints:
            raise Misplaced("cannot write a checkpoint: this server was started without --checkpoint-dir")
        self.mode.advance_to(request)
        self._check_assignment(request)
        capture = self.mode.capture()
        if self.mode.shards_suffice:
            self._storage.will_write(capture, request.step, request.attempt)
        return capture

    def write(self, capture: Capture, request: pb.WritePartRequest) -> CheckpointFile:
        """Write the captured state as this server's shard of the checkpoint. On any thread.

        Raises:
            CheckpointError: the shard cannot be written.
        """
        return self._storage.write(capture, request)

    def committed(self, request: pb.CommittedRequest) -> pb.Position:
        """Make that checkpoint, which is complete, the base of the log."""
        self._storage.check_declared(request.run_id)
        if self._storage.committed(request.step, request.attempt):
            self.mode.rebased()
        return self.position()

    def snapshot(self) -> Capture | None:
        """Capture the state if a snapshot is due.

        The caller must then call `write_snapshot`, and `use_snapshot` whether or not that has failed.
        """
        mode = self.mode
        if mode.phase.has_rows and not mode.is_resharding and self._storage.time_for_snapshot(mode.pending):
            try:
                self._storage.snapshot = mode.capture()
            except Unavailable as error:
                self._warn(str(error))
            return self._storage.snapshot
        return None

    def write_snapshot(self, capture: Capture) -> str:
        """Write the snapshot and return the file's name. On any thread.

        Raises:
            OSError: the disk is full.
        """
        return self._storage.write_snapshot(capture)

    def use_snapshot(self, capture: Capture, name: str) -> None:
        """Make the snapshot the base of the log; an empty name: it could not be written."""
        if self._storage.use_snapshot(capture, name):
            self.mode.rebased()

    def describe(self, busy_seconds: float, kept: bool = False) -> pb.Description:
        """Return the server's state; with `kept`, including the workers' state that it stores."""
        mode, storage = self.mode, self._storage
        found = pb.Description(
            position=self.position(),
            tables=[pb.TableState(name=table.name, rows=len(table), dim=table.dim) for table in self.tables],
            memory=storage.memory(mode.pending),
            memory_limit=storage.limit,
            rows_pulled=self.rows_pulled,
            rows_staged=mode.rows_staged,
            busy_seconds=busy_seconds,
            log_bytes=self._log.nbytes,
            run_id=self.run_id,
            index=self.index,
            servers=self.servers,
            incarnation=self.incarnation,
        )
        if mode.phase.has_rows:
            found.assignment.CopyFrom(storage.assignment.to_proto())
        mode.describe(found, kept)
        return found

    @property
    def tables(self) -> list[Table]:
        return self._storage.tables

    @property
    def is_copying(self) -> bool:
        """True while a capture is not copied; the next step must wait for the copy."""
        return self._storage.is_copying

    @property
    def incarnation(self) -> str:
        return self.mode.incarnation

    def position(self) -> pb.Position:
        return self.mode.position()

    def close(self) -> None:
        """Flush the log to the disk and close it."""
        self._log.close()

    @property
    def assignment(self) -> ShardAssignment:
        return self._storage.assignment

    @property
    def async_server(self) -> AsyncServer:
        """The server of mode=ps.

        Raises:
            Misplaced: the update mode is synchronous.
        """
        if not isinstance(self.mode, AsyncServer):
            if self._storage.declared is None:
                self._storage.check_declared(self.run_id)
            raise Misplaced(
                "this server is synchronous (mode=hybrid); the call is for asynchronous steps (mode=ps)"
            )
        return self.mode

    @property
    def version(self) -> int:
        """Number of updates in the rows in mode=ps, otherwise 0."""
        return self.mode.clock if isinstance(self.mode, AsyncServer) else 0

    # --- private

    def _declare(self, request: pb.Tables, tables: list[Table]) -> None:
        self._storage.declared, self._storage.tables = request, tables
        if request.HasField("asynchronous") and not isinstance(self.mode, AsyncServer):
            self.mode = AsyncServer(self._storage, clock=self._clock)

    def _make_readable(self, request: pb.PullRequest | pb.ListRequest) -> None:
        """Apply the last step if this request is the first to need it, and check that the rows are here.

        Raises:
            Misplaced: the rows are elsewhere, or the server has none yet.
        """
        if request.generation:
            self._storage.check_declared(request.run_id)
            self.mode.advance_to(request)
            self._check_assignment(request)
            return
        # A reader, not a worker of the job. An empty run id stands for any run.
        there, servers, has_rows = self._storage.assignment, request.servers, self.mode.phase.has_rows
        if servers and has_rows and there.servers and (there.servers != servers or there.out):
            raise Misplaced(f"the rows are on {there} now; expected by the caller: {servers}")
        if request.HasField("assignment") and has_rows:
            asked = ShardAssignment.from_proto(request.assignment)
            known = (asked.servers, asked.copies) == (there.servers, there.copies)
            if not known or self.index in asked.out or not {*there.out} <= {*asked.out}:
                raise Misplaced(f"the rows are on {there} now; expected by the caller: {asked}")
        if request.run_id:
            self._storage.check_run(request.run_id)
        self.mode.phase.check_can("read rows")

    def _check_assignment(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        """Reject a caller outside the ring whose assignment is outdated: resharding may have begun since.

        Raises:
            Misplaced: the caller expects a different assignment.
        """
        there = self._storage.assignment
        if (
            request.HasField("assignment")
            and (asked := ShardAssignment.from_proto(request.assignment)) != there
        ):
            raise Misplaced(
                f"the rows are on {there} now; expected by the caller: {asked}: a new ring must be formed, "
                "which finds the rows"
            )

    def _recover(self) -> None:
        try:
            self._replay()
        except (Damaged, Refused, ImpossibleStep, OSError, ValueError, LookupError, TypeError) as error:
            if not isinstance(error, AnotherRun):
                self._warn(f"the log in {self._log.directory} is ignored: {error}")
            self._storage.forget()
            self.mode = SyncServer(self._storage)
            self._log.base = None
        if self._log.base is None:
            self._storage.begin_log(self.mode.beginning())

    def _replay(self) -> None:
        loaded = False
        for number, data in self._log.read(self._storage.owner):
            base = self._log.base
            assert base is not None
            record = read_record(data)
            if record.kind == HEAD:
                if number == base.first:
                    head = record.said
                    self._storage.read_assignment(head)
                    if "asynchronous" in head:
                        self.mode = AsyncServer(self._storage, head, self._clock)
                    else:
                        self.mode = SyncServer(self._storage, head)
            elif record.kind == TABLES:
                if self._storage.declared is None:
                    request = pb.Tables.FromString(record.raw)
                    self._declare(request, tables_of(request))
                if not loaded:
                    self.mode.load_base()
                    loaded = True
            else:
                self.mode.replay(record)


def _check_numbers(asynchronous: pb.Asynchronous) -> None:
    for name in ("grads_to_wait", "max_staleness"):
        if (value := getattr(asynchronous, name)) < 0:
            raise Invalid(f"{name} {value}: expected 0 or more")


def _difference(ours: pb.Tables, theirs: pb.Tables) -> str:
    if ours.seed != theirs.seed:
        return f"the seed is {theirs.seed}, not {ours.seed}"
    if ours.HasField("asynchronous") != theirs.HasField("asynchronous"):
        modes = [("ps" if one.HasField("asynchronous") else "hybrid") for one in (theirs, ours)]
        return f"they are of mode={modes[0]}, not of mode={modes[1]}"
    for field in ours.asynchronous.DESCRIPTOR.fields:
        a, b = (getattr(one.asynchronous, field.name) for one in (ours, theirs))
        if a != b:
            return f"{field.name} is {b!r}, not {a!r}"
    if len(ours.tables) != len(theirs.tables):
        return f"{len(theirs.tables)} tables, not {len(ours.tables)}"
    for one, other in zip(ours.tables, theirs.tables, strict=True):
        for field in one.DESCRIPTOR.fields:
            if (a := getattr(one, field.name)) != (b := getattr(other, field.name)):
                return f"table {one.name!r}: {field.name} is {b!r}, not {a!r}"
    return ""
