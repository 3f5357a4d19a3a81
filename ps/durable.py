"""One server's state: what it is told goes into its log first, and then into its tables.

A log begins with a base: nothing, the rows of a checkpoint, or a snapshot of its own, which is written when
the log has become large. Base and log give the state, bit for bit; when they do not (lost, damaged, of
another machine), the server is empty and says so.

Promise: a call is refused, and has changed nothing, or is logged and has changed all. One thread calls all of
it; only `Capture.copy` runs beside that: rows can be pulled meanwhile, and the next step waits until it is
done.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edl.checkpoints import Store
from edl.checkpoints import tensors as files_of_tensors
from edl.checkpoints.manifest import Part
from edl.contract.arrangement import Arrangement
from edl.contract.proto import ps_pb2 as pb
from edl.errors import CheckpointError
from ps import parts
from ps.errors import Invalid, Misplaced, OutOfMemory, Refused, Stale, Unavailable
from ps.log import Base, Damaged, Log
from ps.moving import Incoming, Outgoing
from ps.staging import Apply, Commit, Effect, Steps, TakeBack
from ps.table import Copy, Table

SNAPSHOT_BYTES = 256 << 20  # of a log, at the least, before a snapshot replaces it
SNAPSHOT_TIMES = 2  # so often the memory of the tables, too
# What a record is, by its first byte.
HEAD, TABLES, SETTLE, COMMIT, STAGE = b"H", b"T", b"S", b"C", b"G"
FETCH, PAGE, FETCHED, ARRANGE = b"F", b"P", b"W", b"A"


@dataclass(frozen=True)
class Staged:
    """One rank's gradients, and the request that they came in."""

    raw: bytes
    of: dict[int, tuple[np.ndarray, np.ndarray]]  # by table


class Capture:
    """The tables at one step. They stay as they are until `copy` has returned."""

    def __init__(
        self, step: int, segment: int, described: Sequence[pb.Table], tables: Sequence[Table],
        arrangement: Arrangement,
    ):  # fmt: skip
        self.step, self.segment, self.arrangement = step, segment, arrangement
        self._described, self._tables = described, tables
        self.done = threading.Event()
        self._copies: list[Copy] = []

    def copy(self) -> None:
        """Once, from any thread."""
        try:
            self._copies = [table.copy(self.step) for table in self._tables]
        finally:
            self.done.set()

    def tensors(self, index: int, all: bool = True) -> dict[str, Any]:
        """
        Args:
            all: also what is here for another server, which has it, too.
        """
        copies, of = self._copies, self.arrangement
        if not all and of.copies > 1:
            copies = [copy.only(lambda ids: of.serves(index, ids)) for copy in copies]
        return parts.tensors(index, self.step, of.servers, self._described, copies)


class Server:
    """
    Args:
        index: of this one.
        servers: how many there are, as long as nobody has said otherwise; 0: that is not known.
        run_id: of the job; what is of another one is refused, and a log of it does not count.
        checkpoints: where the job writes them; empty: nowhere.
        memory_limit: bytes; 0: none.
        warn: takes a sentence about what is wrong and not somebody's request.
    """

    def __init__(
        self, index: int, servers: int, run_id: str, log_dir: Path, checkpoints: str = "",
        memory_limit: int = 0, warn: Callable[[str], object] = str, snapshot_bytes: int = SNAPSHOT_BYTES,
    ):  # fmt: skip
        self.index, self.run_id = index, run_id
        self._alone = self.arrangement = Arrangement(servers)
        self._incoming: Incoming | None = None
        self._outgoing: Outgoing | None = None
        self._checkpoints, self._limit, self._warn = checkpoints, memory_limit, warn
        self._snapshot_bytes = snapshot_bytes
        self._owner = f"{run_id}/{index}"
        self._log = Log(log_dir)
        self.steps = Steps()
        self._declared: pb.Tables | None = None
        self.tables: list[Table] = []
        self._capture: Capture | None = None  # that may not be copied yet
        self._written: dict[
            tuple[int, str], int
        ] = {}  # checkpoints that may become whole, and their segments
        self._snapshot: Capture | None = None
        self.rows_pulled = self.rows_staged = 0
        self._room = np.empty(0, np.float32)  # new memory costs as much as what is written there
        self._recover()

    @property
    def servers(self) -> int:
        """How many there are."""
        return self.arrangement.servers

    # --- the calls

    def declare(self, request: pb.Tables) -> pb.Position:
        """
        Raises:
            Misplaced: other tables were declared.
            Invalid: a table is not one that a server can keep.
            Unavailable: it cannot be logged.
        """
        self._check_run(request.run_id)
        if self._declared is None:
            tables = _tables(request)
            self._log.append(TABLES, request.SerializeToString())
            self._declared, self.tables = request, tables
        elif difference := _difference(self._declared, request):
            raise Misplaced(
                f"the tables of this worker are not those that others have declared: {difference}"
            )
        return self.position()

    def settle(self, request: pb.SettleRequest) -> pb.Position:
        """
        Raises:
            Misplaced: it has not what that arrangement gives it.
        """
        self._check_run(request.run_id)
        steps, effects = self.steps.settle(request.generation, request.step, _commit(request))
        if steps is not self.steps:
            if request.HasField("arrangement") and self.steps.began:
                self._check_can_go_over(Arrangement.of(request.arrangement), request.step)
            self._log.append(SETTLE, request.SerializeToString())
            self._settle(request, steps, effects)
        return self.position()

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """
        Raises:
            Unavailable: the checkpoint cannot be read. The server is empty then.
        """
        self._check_declared(request.run_id)
        steps, effects = self.steps.restore(request.generation, request.step, request.attempt)
        if not effects:
            return self.position()
        if request.step and not self._checkpoints:
            raise Misplaced(
                f"cannot go back to step {request.step}: this server was started without --checkpoint-dir"
            )
        self._wait_for_copy()
        self._written.clear()
        self._snapshot = self._incoming = self._outgoing = None
        if request.HasField("arrangement"):
            self.arrangement = Arrangement.of(request.arrangement)
        try:
            self._load_checkpoint(request.step, request.attempt)
            kind = "checkpoint" if request.step else ""
            base = Base(self._owner, 0, kind, request.step, request.attempt)
            self._log.begin(base, self._beginning(steps))
        except BaseException:
            self._lose()
            raise
        self.steps = steps
        return self.position()

    def pull(self, request: pb.PullRequest) -> list[np.ndarray]:
        """The rows, float32 [n * dim] for each of the ids that were asked for: until the next call."""
        if request.generation:
            self._check_declared(request.run_id)
            self._reach(request.generation, request.step, _commit(request))
        else:
            self._check_readable(request.run_id, request.servers)
        wanted = [(self._table(asked.table), _ids(asked.ids)) for asked in request.ids]
        size = sum(len(ids) * table.dim for table, ids in wanted)
        if size > len(self._room):
            self._room = np.empty(size, np.float32)
        found, at = [], 0
        for table, ids in wanted:
            out = self._room[at : at + len(ids) * table.dim]
            table.pull(self.steps.step, ids, out)
            self.rows_pulled += len(ids)
            found.append(out)
            at += len(out)
        return found

    def listed(self, request: pb.ListRequest) -> pb.Listed:
        """A page of all rows of a table."""
        if request.generation:
            self._check_declared(request.run_id)
            self._reach(request.generation, request.step, _commit(request))
        else:
            self._check_readable(request.run_id, request.servers)
        if not 0 <= request.table < len(self.tables) or request.most < 1:
            raise Invalid(
                f"{request.most} rows of table {request.table}: there are {len(self.tables)} tables"
            )
        after = request.after if request.HasField("after") else None
        step, of = self.steps.step, self.arrangement
        mine = None if of.copies < 2 else lambda ids: of.serves(self.index, ids)
        ids, rows, more = self.tables[request.table].page(step, after, request.most, request.since, mine)
        return pb.Listed(ids=ids.tobytes(), rows=rows.tobytes(), more=more, step=step, line=self.line)

    def fetch(self, request: pb.FetchRequest) -> list[int]:
        """What it is to have in another arrangement will come: of these servers, by `take_page`, and then
        `fetched`. None: it is here already."""
        self._check_declared(request.run_id)
        to, of = Arrangement.of(request.to), Arrangement.of(request.of)
        if self.steps.generation > request.generation:
            raise Stale(f"generation {request.generation} has passed")
        if not self.misses(to, of, request.step):
            return []
        self._wait_for_copy()
        self._log.append(FETCH, request.SerializeToString())
        self._begin_fetch(request)
        return list(of.members)

    def _begin_fetch(self, request: pb.FetchRequest) -> None:
        self._incoming, self._outgoing = Incoming(request), None
        if self.index not in Arrangement.of(request.of).members:  # what it has is not of this step
            for table in self.tables:
                table.clear()
            self.steps = self.steps.lost()
            self._written.clear()
            self._snapshot = None

    def misses(self, to: Arrangement, of: Arrangement, step: int) -> bool:
        """Whether it has not what that arrangement gives it."""
        if self._incoming is not None and self._incoming.gives(self.index, to, step):
            return False
        mine = self.arrangement if self.steps.began and self.index in of.members else of
        return bool((to.held(self.index) & ~mine.held(self.index)).any())

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        """A page of what was begun with this request, as another server has given it."""
        page: pb.PageOfRows = pb.PageOfRows.FromString(raw)
        incoming = self._comes(request)
        table = self._table(page.table)
        others = sum(one.nbytes() for one in self.tables if one is not table)
        rows = incoming.rows(page.table) + len(page.ids) // 8
        if self._limit and (needed := others + table.nbytes(rows)) > self._limit:
            self._incoming = None
            raise OutOfMemory(self._too_large(needed))
        self._log.append(PAGE, raw)
        incoming.add(page, table)
        return page

    def fetched(self, request: pb.FetchRequest) -> pb.Position:
        incoming = self._comes(request)
        self._log.append(FETCHED)
        incoming.whole = True
        return self.position()

    def _comes(self, request: pb.FetchRequest) -> Incoming:
        if self._incoming is None or self._incoming.request is not request:
            raise Stale(f"generation {request.generation}: what was fetched for it is not wanted any more")
        return self._incoming

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        """Some of the rows that another server is to have."""
        self._check_declared(request.run_id)
        self.steps.reach(request.generation, request.step, None)
        if Arrangement.of(request.of) != self.arrangement:
            raise Misplaced(
                f"rows of {request.of} are asked for, and the server is one of {self.arrangement}"
            )
        if self._outgoing is None:
            self._wait_for_copy()
            self._outgoing = Outgoing(self.index, self.tables, self.steps.step)
        return self._outgoing.page(request)

    def arrange(self, request: pb.ArrangeRequest) -> pb.Position:
        """Go over to that arrangement, between two steps; or stay in it, and drop what was fetched."""
        self._check_declared(request.run_id)
        to = Arrangement.of(request.to)
        if request.generation < self.steps.generation:
            raise Stale(f"generation {request.generation} has passed")
        if to != self.arrangement or self._incoming is not None or not self.steps.began:
            if self.index in to.members:
                self._check_can_go_over(to, request.step)
            self._log.append(ARRANGE, request.SerializeToString())
            self._go_over(to, request.generation, request.step, _commit(request))
        return self.position()

    def stage(self, raw: bytes) -> pb.Position:
        request = pb.StageRequest.FromString(raw)
        self._check_declared(request.run_id)
        staged = self._staged(raw, request)
        steps = self.steps.stage(request.generation, request.step, request.rank, staged)
        if steps is not self.steps:
            self._check_memory(staged)
            self._log.append(STAGE, raw)
            self.steps = steps
            self.rows_staged += sum(len(ids) for ids, _ in staged.of.values())
        return self.position()

    def capture(self, request: pb.WritePartRequest) -> Capture:
        """The state at that step, for `write`; its `copy` must be called."""
        self._check_declared(request.run_id)
        if not self._checkpoints:
            raise Misplaced("cannot write a checkpoint: this server was started without --checkpoint-dir")
        self._reach(request.generation, request.step, _commit(request))
        capture = self._begin_capture()
        self._written[request.step, request.attempt] = capture.segment
        while len(self._written) > 4:
            del self._written[next(iter(self._written))]
        return capture

    def write(self, capture: Capture, request: pb.WritePartRequest) -> Part:
        """Write what was copied. On any thread.

        Raises:
            CheckpointError: it cannot be written.
        """
        tensors = capture.tensors(self.index, all=False)
        writing = Store.open(self._checkpoints).begin(request.step, request.attempt)
        return writing.write_part(request.index, request.of, tensors, parts.rows(tensors))

    def committed(self, request: pb.CommittedRequest) -> pb.Position:
        """That checkpoint is whole: the log goes on from it."""
        self._check_declared(request.run_id)
        segment = self._written.pop((request.step, request.attempt), 0)
        base = self._log.base
        if segment and base is not None and segment > base.first:
            self._rebase(Base(self._owner, segment, "checkpoint", request.step, request.attempt))
            self._written = {key: at for key, at in self._written.items() if at > segment}
        return self.position()

    @property
    def is_copying(self) -> bool:
        """The next step waits until something is copied."""
        return self._capture is not None and not self._capture.done.is_set()

    @property
    def line(self) -> str:
        """Of states that follow one another: another one after it has gone back to a checkpoint, or has begun
        anew."""
        generation, step, attempt = self.steps.restored
        out = "".join(f"/{index}" for index in self.arrangement.out)
        return f"{self.run_id}/{generation or self.steps.begun_in}/{step}/{attempt}{out}"

    def position(self) -> pb.Position:
        steps, ready = self.steps, self._incoming
        told = pb.Position(generation=steps.generation, step=steps.step, empty=not steps.began)
        if steps.began and self.arrangement.servers:
            told.arrangement.CopyFrom(self.arrangement.told())
        if ready is not None and ready.whole:
            told.ready.CopyFrom(ready.to.told())
            told.ready_step = ready.request.step
        return told

    def describe(self, busy_seconds: float) -> pb.Description:
        return pb.Description(
            position=self.position(),
            tables=[pb.TableState(name=table.name, rows=len(table), dim=table.dim) for table in self.tables],
            memory=self._memory(), memory_limit=self._limit, rows_pulled=self.rows_pulled,
            rows_staged=self.rows_staged, busy_seconds=busy_seconds, log_bytes=self._log.nbytes,
            run_id=self.run_id, index=self.index, servers=self.servers, line=self.line,
            arrangement=self.arrangement.told() if self.steps.began else None,
        )  # fmt: skip

    def close(self) -> None:
        """What was told is on the disk then."""
        self._log.close()

    # --- snapshots: where there is no checkpoint, the log would grow for ever

    def snapshot(self) -> Capture | None:
        """The state as it is, if it is time for a snapshot: call its `copy`, then `write_snapshot`, then
        `use_snapshot`."""
        most = max(self._snapshot_bytes, SNAPSHOT_TIMES * self._memory())
        if self._snapshot is not None or not self.tables or not self.steps.began or self._log.nbytes < most:
            return None
        if self._incoming is not None:
            return None
        try:
            self._snapshot = self._begin_capture()
        except Unavailable as error:
            self._warn(str(error))
        return self._snapshot

    def write_snapshot(self, capture: Capture) -> str:
        """On any thread; returns the file's name.

        Raises:
            OSError: there is no room.
        """
        path = self._log.directory / f"snapshot-{capture.segment:012d}"
        try:
            with open(path, "wb") as file:
                for piece in files_of_tensors.pieces(capture.tensors(self.index)):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path.name

    def use_snapshot(self, capture: Capture, name: str) -> None:
        """The log goes on from it; an empty name: it could not be written."""
        if self._snapshot is not capture:
            return  # the server has gone back meanwhile
        self._snapshot = None
        base = self._log.base
        if name and base is not None and capture.segment > base.first:
            self._rebase(Base(self._owner, capture.segment, "snapshot", capture.step, snapshot=name))
            self._written = {key: at for key, at in self._written.items() if at > capture.segment}

    # --- state

    def _settle(self, request: pb.SettleRequest, steps: Steps, effects: Sequence[Effect]) -> None:
        self._take(steps, effects)
        if request.HasField("arrangement"):
            to = Arrangement.of(request.arrangement)
            self._go_over(to, request.generation, request.step, _commit(request))

    def _check_can_go_over(self, to: Arrangement, step: int) -> None:
        if self.index in to.members and self.misses(to, self.arrangement, step):
            raise Misplaced(f"the server is one of {self.arrangement}, and has not what {to} would give it")

    def _go_over(self, to: Arrangement, generation: int, step: int, last: Commit | None) -> None:
        """To an arrangement of which it has all that is its own."""
        self._wait_for_copy()
        incoming, self._incoming, self._outgoing = self._incoming, None, None
        before, self.arrangement = self.arrangement, to
        if incoming is not None and not incoming.gives(self.index, to, step):
            incoming = None
        if self.index not in to.members:
            for table in self.tables:
                table.clear()
            self.steps = Steps(generation)
        elif incoming is not None:
            of = Arrangement.of(incoming.request.of)
            stays = self.steps.began and self.index in of.members
            for table in self.tables:
                if stays:
                    table.keep(lambda ids: to.has(self.index, ids))
                else:
                    table.clear()
            incoming.load(self.tables)
            self.steps = self.steps.for_good() if stays else Steps.joining(generation, step, last)
        elif self.steps.began and (before.held(self.index) & ~to.held(self.index)).any():
            for table in self.tables:
                table.keep(lambda ids: to.has(self.index, ids))
            self.steps = self.steps.for_good()

    def _reach(self, generation: int, step: int, last: Commit | None) -> None:
        steps, effects = self.steps.reach(generation, step, last)
        if steps is not self.steps:
            assert last is not None
            request = pb.PullRequest(generation=generation, step=step, last=_described(last))
            self._log.append(COMMIT, request.SerializeToString())
            self._take(steps, effects)

    def _take(self, steps: Steps, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._wait_for_copy()
            self._incoming = self._outgoing = None
            if isinstance(effect, Apply):
                self._apply(effect)
            elif isinstance(effect, TakeBack):
                for table in self.tables:
                    table.take_back()
                # What was captured after the step that is undone is of no state of this job any more.
                self._written = {key: at for key, at in self._written.items() if key[0] <= steps.step}
                if self._snapshot is not None and self._snapshot.step > steps.step:
                    self._snapshot = None
        self.steps = steps

    def _apply(self, effect: Apply) -> None:
        commit = effect.commit
        for number, table in enumerate(self.tables):
            if commit.skipped:
                table.forget_undo()
                continue
            gradients = [staged.of[number] for staged in effect.staged if number in staged.of]
            table.apply(commit.step, gradients, commit.scale, commit.learning_rate, commit.iteration)

    def _begin_capture(self) -> Capture:
        assert self._declared is not None
        self._wait_for_copy()
        if self._incoming is not None:
            raise Misplaced("rows are on their way to another arrangement of the servers")
        staged = [[STAGE, self.steps.staged[rank].raw] for rank in sorted(self.steps.staged)]
        segment = self._log.another([*self._beginning(self.steps), *staged])
        declared = self._declared.tables
        self._capture = Capture(self.steps.step, segment, declared, self.tables, self.arrangement)
        return self._capture

    def _wait_for_copy(self) -> None:
        if self._capture is not None:
            self._capture.done.wait()
            self._capture = None

    def _rebase(self, base: Base) -> None:
        self._log.rebase(base)
        if self.steps.step == base.step:
            # Who reads the log from here on cannot take the step before back.
            self.steps = self.steps.for_good()
            for table in self.tables:
                table.forget_undo()

    def _beginning(self, steps: Steps) -> list[list[bytes]]:
        """How a segment begins: what must be known to go on from it."""
        last = None if steps.last is None else list(steps.last.__dict__.values())
        about = {
            "generation": steps.generation, "step": steps.step, "began": steps.began,
            "last": last, "restored": list(steps.restored), "begun_in": steps.begun_in,
            "arrangement": [self.arrangement.servers, self.arrangement.replicas, *self.arrangement.out],
        }  # fmt: skip
        records = [[HEAD, json.dumps(about).encode()]]
        if self._declared is not None:
            records.append([TABLES, self._declared.SerializeToString()])
        return records

    def _load_checkpoint(self, step: int, attempt: str) -> None:
        for table in self.tables:
            table.clear()
        if step:
            try:
                parts.read_checkpoint(
                    self._checkpoints, step, attempt, self.tables, self._has, self._check_room
                )
            except CheckpointError as error:
                raise Unavailable(str(error)) from error
            except OSError as error:
                raise Unavailable(f"{self._checkpoints}: {error}") from error

    def _has(self, ids: np.ndarray) -> np.ndarray:
        """Which of these ids are this server's, bool [n]."""
        return self.arrangement.has(self.index, ids)

    def _lose(self) -> None:
        """The rows are gone: be as one that has just been started, but for the generation."""
        for table in self.tables:
            table.clear()
        self.steps = self.steps.lost()
        self._written.clear()
        try:
            self._log.begin(Base(self._owner, 0), self._beginning(self.steps))
        except Unavailable as error:
            # The old log does not say where this server is: without a base, it counts for nothing.
            self._warn(str(error))
            self._log.disown()

    # --- coming back

    def _recover(self) -> None:
        try:
            self._replay()
        except (Damaged, Refused, OSError, ValueError, LookupError) as error:
            self._warn(f"the log in {self._log.directory} does not count: {error}")
            self.steps, self._declared, self.tables = Steps(), None, []
            self.arrangement, self._incoming = self._alone, None
            self._written.clear()
            self._log.base = None
        if self._log.base is None:
            self._log.begin(Base(self._owner, 0), self._beginning(self.steps))

    def _replay(self) -> None:
        loaded = False
        for number, record in self._log.read(self._owner):
            base = self._log.base
            assert base is not None
            kind, text = record[:1], record[1:]
            if kind == HEAD:
                if number == base.first:
                    about = json.loads(text)
                    servers, replicas, *out = about["arrangement"]
                    self.steps, self.arrangement = _steps(about), Arrangement(servers, replicas, tuple(out))
            elif kind == TABLES:
                if self._declared is None:
                    self._declared = pb.Tables.FromString(text)
                    self.tables = _tables(self._declared)
                if not loaded:
                    self._load_base(base)
                    loaded = True
            elif kind == SETTLE:
                settle = pb.SettleRequest.FromString(text)
                last = _commit(settle)
                self._settle(settle, *self.steps.settle(settle.generation, settle.step, last))
            elif kind == COMMIT:
                pull = pb.PullRequest.FromString(text)
                self._take(*self.steps.reach(pull.generation, pull.step, _commit(pull)))
            elif kind == STAGE:
                request = pb.StageRequest.FromString(text)
                staged = self._staged(text, request)
                self.steps = self.steps.stage(request.generation, request.step, request.rank, staged)
            elif kind == FETCH:
                self._begin_fetch(pb.FetchRequest.FromString(text))
            elif kind == PAGE and self._incoming is not None:
                page = pb.PageOfRows.FromString(text)
                self._incoming.add(page, self._table(page.table))
            elif kind == FETCHED and self._incoming is not None:
                self._incoming.whole = True
            elif kind == ARRANGE:
                arrange = pb.ArrangeRequest.FromString(text)
                to = Arrangement.of(arrange.to)
                self._go_over(to, arrange.generation, arrange.step, _commit(arrange))
            else:
                raise Damaged(f"a record of unknown kind {kind!r}")

    def _load_base(self, base: Base) -> None:
        if base.kind == "checkpoint":
            self._load_checkpoint(base.step, base.attempt)
        elif base.kind == "snapshot":
            where = self._log.directory / base.snapshot
            with open(where, "rb") as file:
                try:
                    parts.read(file, str(where), self.tables, self._has, self._check_room)
                except CheckpointError as error:
                    raise Damaged(str(error)) from error

    # --- checks

    def _check_run(self, run_id: str) -> None:
        if run_id != self.run_id:
            raise Misplaced(f"this server belongs to the run {self.run_id!r}, not to {run_id!r}")

    def _check_declared(self, run_id: str) -> None:
        self._check_run(run_id)
        if self._declared is None:
            raise Misplaced(
                "no tables are declared: the server has lost its log, or has just been started; "
                "call Declare, and look at the position that it returns"
            )

    def _check_readable(self, run_id: str, servers: int = 0) -> None:
        """For those who take no part in the job.

        Args:
            run_id: of the job that they mean; empty: whichever it is.
            servers: that they take it there are, all of them in; 0: they do not say.
        """
        if servers and self.steps.began and self.arrangement.servers and (
            self.arrangement.servers != servers or self.arrangement.out
        ):  # fmt: skip
            raise Misplaced(f"there are {self.arrangement} now, and {servers} were asked")
        if run_id:
            self._check_run(run_id)
        if not self.steps.began:
            raise Misplaced(
                f"parameter server {self.index} has no rows yet: it has just been started, or has lost its "
                "log; the job's workers say what it is to have"
            )

    def _table(self, number: int) -> Table:
        if not 0 <= number < len(self.tables):
            raise Invalid(f"table {number}: expected one of {len(self.tables)}")
        return self.tables[number]

    def _staged(self, raw: bytes, request: pb.StageRequest) -> Staged:
        of: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for given in request.gradients:
            table = self._table(given.table)
            ids, values = _ids(given.ids), given.values
            if len(values) != 4 * len(ids) * table.dim or given.table in of:
                raise Invalid(
                    f"table {table.name!r}: {len(values)} bytes of gradients for {len(ids)} ids: expected "
                    f"{4 * len(ids) * table.dim}, of each table once"
                )
            of[given.table] = ids, np.frombuffer(values, np.float32)
        return Staged(raw, of)

    def _memory(self) -> int:
        staged = sum(len(staged.raw) for staged in self.steps.staged.values())
        incoming = self._incoming.nbytes if self._incoming is not None else 0
        return sum(table.nbytes() for table in self.tables) + staged + incoming

    def _check_memory(self, more: Staged) -> None:
        """Raises OutOfMemory if the step could not be applied any more with these gradients."""
        if not self._limit:
            return
        together = [*self.steps.staged.values(), more]
        # What a step takes while it is applied: its gradients, their sums, and what it takes to undo it.
        step = sum(4 * len(staged.raw) for staged in together)

        def needed(count: Callable[[Table, np.ndarray], int]) -> int:
            total = step
            for number, table in enumerate(self.tables):
                ids = (staged.of[number][0] for staged in together if number in staged.of)
                total += table.nbytes(sum(count(table, some) for some in ids))
            return total

        if needed(lambda _, ids: len(ids)) > self._limit and (most := needed(Table.new_rows)) > self._limit:
            raise OutOfMemory(self._too_large(most))

    def _check_room(self, table: Table, rows: int) -> None:
        others = sum(other.nbytes() for other in self.tables if other is not table)
        if self._limit and (needed := others + table.nbytes(rows)) > self._limit:
            raise OutOfMemory(self._too_large(needed))

    def _too_large(self, needed: int) -> str:
        rows = sum(len(table) for table in self.tables)
        return (
            f"parameter server {self.index} has {rows:,} rows and would need {needed / 2**20:,.0f} MiB, its "
            f"limit is {self._limit / 2**20:,.0f} MiB: use more servers (ps.servers), give each more memory "
            "(ps.resources), or keep fewer rows (min_count, ttl_steps)"
        )


def _tables(request: pb.Tables) -> list[Table]:
    names = [table.name for table in request.tables]
    if len(set(names)) != len(names):
        raise Invalid(f"tables {names}: expected each name once")
    return [Table(table, request.seed) for table in request.tables]


def _difference(ours: pb.Tables, theirs: pb.Tables) -> str:
    if ours.seed != theirs.seed:
        return f"the seed is {theirs.seed}, not {ours.seed}"
    if len(ours.tables) != len(theirs.tables):
        return f"{len(theirs.tables)} tables, not {len(ours.tables)}"
    for one, other in zip(ours.tables, theirs.tables, strict=True):
        for field in one.DESCRIPTOR.fields:
            if (a := getattr(one, field.name)) != (b := getattr(other, field.name)):
                return f"table {one.name!r}: {field.name} is {b!r}, not {a!r}"
    return ""


def _ids(raw: bytes) -> np.ndarray:
    if len(raw) % 8:
        raise Invalid(f"{len(raw)} bytes of ids: expected 8 for each")
    return np.frombuffer(raw, np.int64)


def _commit(
    request: pb.PullRequest | pb.SettleRequest | pb.WritePartRequest | pb.ArrangeRequest,
) -> Commit | None:
    if not request.HasField("last"):
        return None
    c = request.last
    return Commit(c.step, c.skipped, c.scale, c.learning_rate, c.iteration)


def _described(commit: Commit) -> pb.Commit:
    return pb.Commit(
        step=commit.step, skipped=commit.skipped, scale=commit.scale,
        learning_rate=commit.learning_rate, iteration=commit.iteration,
    )  # fmt: skip


def _steps(about: dict[str, Any]) -> Steps:
    last = None if about["last"] is None else Commit(*about["last"])
    generation, step, attempt = about["restored"]
    return Steps(
        about["generation"], about["step"], about["began"], last, restored=(generation, step, attempt),
        begun_in=about.get("begun_in", 0),
    )  # fmt: skip
