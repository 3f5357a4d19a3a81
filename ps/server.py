"""One server: what it is told goes into its log first, and then into its rows.

Which way it takes steps, a ring's (`ring_order`) or any order (`any_order`), the workers say with the tables.

Promise: a call is refused, and has changed nothing, or is logged and has changed all. A server that is
started comes back where its log says that it was; when the log does not say so (it is lost, damaged, of
another machine), the server is empty and says so. One thread calls all of it; only `Capture.copy` may run
beside that: rows can be pulled meanwhile. The next step copies them itself, if no other thread does so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from edl.checkpoints.manifest import Part
from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import Arrangement
from edl.contract.rows.wire import Bytes
from edl.ps.asynchronous.server import AnyOrder
from edl.ps.errors import Invalid, Misplaced, Refused, Unavailable
from edl.ps.storage.storage import HEAD, SNAPSHOT_BYTES, TABLES, Capture, Records, Storage, ids_of, tables_of
from edl.ps.storage.wal import AnotherRun, Damaged, Log, NoLog
from edl.ps.sync.server import RingOrder
from edl.ps.sync.staging import Steps
from edl.ps.table.table import Table


class Way(Protocol):
    """How a server takes steps."""

    rows_staged: int

    @property
    def began(self) -> bool:
        """Its rows are those of a job; otherwise it has just been started, and knows nothing."""
        ...

    @property
    def clock(self) -> int:
        """Of the rows as they are: of those that were changed last, one more than what they say."""
        ...

    @property
    def line(self) -> str:
        """Of states that follow one another: another one after it has gone back to a checkpoint, or has
        begun anew."""
        ...

    @property
    def pending(self) -> int:
        """Bytes of gradients that wait to be in the rows."""
        ...

    @property
    def is_moving(self) -> bool:
        """Rows for another arrangement are on their way: it cannot be captured."""
        ...

    def position(self) -> pb.Position: ...
    def settle(self, request: pb.SettleRequest) -> pb.Position: ...
    def restore(self, request: pb.RestoreRequest) -> pb.Position: ...

    # Another arrangement of the servers.
    def fetch(self, request: pb.FetchRequest) -> list[int]: ...
    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows: ...
    def fetched(self, request: pb.FetchRequest) -> pb.Position: ...
    def page(self, request: pb.PageRequest) -> pb.PageOfRows: ...
    def arrange(self, request: pb.ArrangeRequest) -> pb.Position: ...

    def reach(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        """Be at the state that this speaks of. Raises: Refused."""
        ...

    def capture(self) -> Capture:
        """The state as it is."""
        ...

    @property
    def parts_are_whole(self) -> bool:
        """Whether the parts of a checkpoint have all that this server needs to begin with it."""
        ...

    def rebased(self) -> None:
        """The log begins elsewhere."""
        ...

    def beginning(self) -> Records:
        """How a log that goes on from here begins."""
        ...

    def load_base(self) -> None:
        """Have the rows that the log begins with."""
        ...

    def replay(self, kind: bytes, text: bytes) -> None:
        """Do again what a record of the log says. Raises: Damaged."""
        ...


class Server:
    """
    Args:
        index: of this one.
        servers: how many there are, as long as nobody has said otherwise; 0: that is not known.
        run_id: of the job; what is of another one is refused, and a log of it does not count.
        checkpoints: where the job writes them; empty: nowhere.
        memory_limit: bytes; 0: none.
        warn: takes a sentence about what is wrong and not somebody's request.
        snapshot_bytes: of a log, at the least, before a snapshot replaces it.
        logged: otherwise it writes no log, and one that ends has lost what it had.
        log: in place of the one in `log_dir`.
        clock: seconds, never going back.
    """

    def __init__(
        self, index: int, servers: int, run_id: str, log_dir: Path, checkpoints: str = "",
        memory_limit: int = 0, warn: Callable[[str], object] = str, snapshot_bytes: int = SNAPSHOT_BYTES,
        logged: bool = True, log: Log | None = None, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.index, self.run_id = index, run_id
        self._warn, self._clock = warn, clock
        self._log: Log | NoLog = log or (Log(log_dir) if logged else NoLog(log_dir))
        self._storage = Storage(
            index, servers, run_id, self._log, checkpoints, memory_limit, warn, snapshot_bytes
        )
        self._way: Way = RingOrder(self._storage)  # until the tables say otherwise
        self.rows_pulled = 0
        self._room = np.empty(0, np.float32)  # new memory costs as much as what is written there
        self._recover()

    @property
    def servers(self) -> int:
        """How many there are; 0: that is not known yet."""
        return self._storage.arrangement.servers

    # --- the calls of both ways

    def declare(self, request: pb.Tables) -> pb.Position:
        """
        Raises:
            Misplaced: other tables were declared.
            Invalid: a table is not one that a server can keep.
            Unavailable: it cannot be logged.
        """
        storage = self._storage
        storage.check_run(request.run_id)
        if storage.declared is None:
            _check_numbers(request.asynchronous)
            tables = tables_of(request)
            self._log.append(TABLES, request.SerializeToString())
            self._declare(request, tables)
        elif difference := _difference(storage.declared, request):
            raise Misplaced(
                f"the tables of this worker are not those that others have declared: {difference}"
            )
        return self.position()

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """
        Raises:
            Unreadable: the checkpoint cannot be read. The server is empty then.
        """
        return self._way.restore(request)

    def pull(self, request: pb.PullRequest) -> list[np.ndarray]:
        """The rows, float32 [n * dim] for each of the ids that were asked for: until the next call."""
        self._reach(request)
        wanted = [(self._storage.table(asked.table), ids_of(asked.ids)) for asked in request.ids]
        size = sum(len(ids) * table.dim for table, ids in wanted)
        if size > len(self._room):
            self._room = np.empty(size, np.float32)
        found, at = [], 0
        for table, ids in wanted:
            out = self._room[at : at + len(ids) * table.dim]
            table.pull(self._way.clock, ids, out)
            self.rows_pulled += len(ids)
            found.append(out)
            at += len(out)
        return found

    def listed(self, request: pb.ListRequest) -> pb.Listed:
        """A page of all rows of a table."""
        self._reach(request)
        if not 0 <= request.table < len(self.tables) or request.most < 1:
            raise Invalid(
                f"{request.most} rows of table {request.table}: there are {len(self.tables)} tables"
            )
        after = request.after if request.HasField("after") else None
        clock, of = self._way.clock, self._storage.arrangement
        if request.HasField("arrangement"):
            of = Arrangement.of(request.arrangement)
        mine = None if of.copies < 2 else lambda ids: of.serves(self.index, ids)
        ids, rows, more = self.tables[request.table].page(clock, after, request.most, request.since, mine)
        return pb.Listed(ids=ids.tobytes(), rows=rows.tobytes(), more=more, step=clock, line=self.line)

    def capture(self, request: pb.WritePartRequest) -> Capture:
        """The state at that step, for `write`. The next step copies it, unless another thread does."""
        self._storage.check_declared(request.run_id)
        if not self._storage.checkpoints:
            raise Misplaced("cannot write a checkpoint: this server was started without --checkpoint-dir")
        self._way.reach(request)
        self._check_arrangement(request)
        capture = self._way.capture()
        if self._way.parts_are_whole:
            self._storage.will_write(capture, request.step, request.attempt)
        return capture

    def write(self, capture: Capture, request: pb.WritePartRequest) -> Part:
        """Write what was copied. On any thread.

        Raises:
            CheckpointError: it cannot be written.
        """
        return self._storage.write(capture, request)

    def committed(self, request: pb.CommittedRequest) -> pb.Position:
        """That checkpoint is whole: the log goes on from it."""
        self._storage.check_declared(request.run_id)
        if self._storage.committed(request.step, request.attempt):
            self._way.rebased()
        return self.position()

    def snapshot(self) -> Capture | None:
        """The state as it is, if it is time for a snapshot: call `write_snapshot`, and whatever that does,
        `use_snapshot`."""
        way = self._way
        if way.began and not way.is_moving and self._storage.time_for_snapshot(way.pending):
            try:
                self._storage.snapshot = self._way.capture()
            except Unavailable as error:
                self._warn(str(error))
            return self._storage.snapshot
        return None

    def write_snapshot(self, capture: Capture) -> str:
        """On any thread; returns the file's name.

        Raises:
            OSError: there is no room.
        """
        return self._storage.write_snapshot(capture)

    def use_snapshot(self, capture: Capture, name: str) -> None:
        """The log goes on from it; an empty name: it could not be written."""
        if self._storage.use_snapshot(capture, name):
            self._way.rebased()

    def describe(self, busy_seconds: float) -> pb.Description:
        way, storage = self._way, self._storage
        found = pb.Description(
            position=self.position(),
            tables=[pb.TableState(name=table.name, rows=len(table), dim=table.dim) for table in self.tables],
            memory=storage.memory(way.pending), memory_limit=storage.limit, rows_pulled=self.rows_pulled,
            rows_staged=way.rows_staged, busy_seconds=busy_seconds, log_bytes=self._log.nbytes,
            run_id=self.run_id, index=self.index, servers=self.servers, line=self.line,
        )  # fmt: skip
        if way.began:
            found.arrangement.CopyFrom(storage.arrangement.told())
        if isinstance(way, AnyOrder):
            found.taken.CopyFrom(way.taken)
            found.reopened.CopyFrom(way.reopened)
            found.version, found.waiting = way.clock, len(way.taking.waiting)
        return found

    @property
    def tables(self) -> list[Table]:
        return self._storage.tables

    @property
    def is_copying(self) -> bool:
        """The next step waits until something is copied."""
        return self._storage.is_copying

    @property
    def line(self) -> str:
        return self._way.line

    @property
    def pending(self) -> int:
        """Bytes of gradients that wait to be in the rows."""
        return self._way.pending

    def position(self) -> pb.Position:
        return self._way.position()

    def close(self) -> None:
        """What was told is on the disk then."""
        self._log.close()

    def settle(self, request: pb.SettleRequest) -> pb.Position:
        return self._way.settle(request)

    def fetch(self, request: pb.FetchRequest) -> list[int]:
        return self._way.fetch(request)

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        return self._way.take_page(request, raw)

    def fetched(self, request: pb.FetchRequest) -> pb.Position:
        return self._way.fetched(request)

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        return self._way.page(request)

    def arrange(self, request: pb.ArrangeRequest) -> pb.Position:
        return self._way.arrange(request)

    # --- those of one way

    def stage(self, raw: Bytes) -> pb.Position:
        return self._ring.stage(raw)

    def load(self, raw: Bytes) -> pb.Position:
        return self._ring.load(raw)

    @property
    def steps(self) -> Steps:
        return self._ring.steps

    @property
    def arrangement(self) -> Arrangement:
        return self._storage.arrangement

    @property
    def _ring(self) -> RingOrder:
        if not isinstance(self._way, RingOrder):
            raise Misplaced(
                "this server's steps come in any order (mode=ps), and it was told of a ring's (mode=hybrid)"
            )
        return self._way

    @property
    def any_order(self) -> AnyOrder:
        """
        Raises:
            Misplaced: its steps are a ring's.
        """
        if not isinstance(self._way, AnyOrder):
            if self._storage.declared is None:
                self._storage.check_declared(self.run_id)
            raise Misplaced(
                "this server's steps are a ring's (mode=hybrid), and it was told of steps in any order "
                "(mode=ps)"
            )
        return self._way

    @property
    def version(self) -> int:
        """Updates that the rows have, where steps come in any order; else 0."""
        return self._way.clock if isinstance(self._way, AnyOrder) else 0

    # --- below

    def _declare(self, request: pb.Tables, tables: list[Table]) -> None:
        self._storage.declared, self._storage.tables = request, tables
        if request.HasField("asynchronous") and not isinstance(self._way, AnyOrder):
            self._way = AnyOrder(self._storage, clock=self._clock)

    def _reach(self, request: pb.PullRequest | pb.ListRequest) -> None:
        if request.generation:
            self._storage.check_declared(request.run_id)
            self._way.reach(request)
            self._check_arrangement(request)
            return
        # Of those who take no part in the job: an empty run is whichever it is.
        there, servers = self._storage.arrangement, request.servers
        if servers and self._way.began and there.servers and (there.servers != servers or there.out):
            raise Misplaced(f"there are {there} now, and one of {servers} was asked")
        if request.HasField("arrangement") and self._way.began:
            asked = Arrangement.of(request.arrangement)
            known = (asked.servers, asked.copies) == (there.servers, there.copies)
            if not known or self.index in asked.out or not {*there.out} <= {*asked.out}:
                raise Misplaced(f"there are {there} now, and one of {asked} was asked")
        if request.run_id:
            self._storage.check_run(request.run_id)
        if not self._way.began:
            raise Misplaced(
                f"parameter server {self.index} has no rows yet: it has just been started, or has lost its "
                "log; the job's workers say what it is to have"
            )

    def _check_arrangement(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        """Of who is in no ring: a move of rows may have begun, and not ended, since it was in one."""
        there = self._storage.arrangement
        if request.HasField("arrangement") and (asked := Arrangement.of(request.arrangement)) != there:
            raise Misplaced(
                f"there are {there} now, and one of {asked} was asked: the ring has to be formed anew, and "
                "says where the rows are"
            )

    def _recover(self) -> None:
        try:
            self._replay()
        except (Damaged, Refused, OSError, ValueError, LookupError, TypeError) as error:
            if not isinstance(error, AnotherRun):
                self._warn(f"the log in {self._log.directory} does not count: {error}")
            self._storage.forget()
            self._way = RingOrder(self._storage)
            self._log.base = None
        if self._log.base is None:
            self._storage.begin_log(self._way.beginning())

    def _replay(self) -> None:
        loaded = False
        for number, record in self._log.read(self._storage.owner):
            base = self._log.base
            assert base is not None
            kind, text = record[:1], record[1:]
            if kind == HEAD:
                if number == base.first:
                    head = json.loads(text)
                    self._storage.arranged(head)
                    if "any_order" in head:
                        self._way = AnyOrder(self._storage, head, self._clock)
                    else:
                        self._way = RingOrder(self._storage, head)
            elif kind == TABLES:
                if self._storage.declared is None:
                    request = pb.Tables.FromString(text)
                    self._declare(request, tables_of(request))
                if not loaded:
                    self._way.load_base()
                    loaded = True
            else:
                self._way.replay(kind, text)


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
