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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edl.checkpoints import Store
from edl.checkpoints import tensors as files_of_tensors
from edl.checkpoints.manifest import Part
from edl.contract.proto import ps_pb2 as pb
from edl.errors import CheckpointError
from ps import parts
from ps.errors import Invalid, Misplaced, OutOfMemory, Refused, Unavailable, Unreadable
from ps.log import Base, Damaged, Log
from ps.staging import Apply, Commit, Effect, Steps, TakeBack
from ps.table import Copy, Table

SNAPSHOT_BYTES = 256 << 20  # of a log, at the least, before a snapshot replaces it
SNAPSHOT_TIMES = 2  # so often the memory of the tables, too
# What a record is, by its first byte.
HEAD, TABLES, SETTLE, COMMIT, STAGE, LOAD = b"H", b"T", b"S", b"C", b"G", b"L"


@dataclass(frozen=True)
class Staged:
    """One rank's gradients, and the request that they came in."""

    raw: bytes
    of: dict[int, tuple[np.ndarray, np.ndarray]]  # by table


class Capture:
    """The tables at one step. They stay as they are until `copy` has returned."""

    def __init__(self, step: int, segment: int, described: Sequence[pb.Table], tables: Sequence[Table]):
        self.step, self.segment = step, segment
        self._described, self._tables = described, tables
        self.done = threading.Event()
        self._copies: list[Copy] = []

    def copy(self) -> None:
        """Once, from any thread."""
        try:
            self._copies = [table.copy(self.step) for table in self._tables]
        finally:
            self.done.set()

    def tensors(self, index: int, servers: int) -> dict[str, Any]:
        return parts.tensors(index, self.step, servers, self._described, self._copies)


class Server:
    """
    Args:
        index, servers: which of how many.
        run_id: of the job; what is of another one is refused, and a log of it does not count.
        checkpoints: where the job writes them; empty: nowhere.
        memory_limit: bytes; 0: none.
        warn: takes a sentence about what is wrong and not somebody's request.
    """

    def __init__(
        self, index: int, servers: int, run_id: str, log_dir: Path, checkpoints: str = "",
        memory_limit: int = 0, warn: Callable[[str], object] = str, snapshot_bytes: int = SNAPSHOT_BYTES,
    ):  # fmt: skip
        self.index, self.servers, self.run_id = index, servers, run_id
        self._checkpoints, self._limit, self._warn = checkpoints, memory_limit, warn
        self._snapshot_bytes = snapshot_bytes
        self._owner = f"{run_id}/{index}/{servers}"
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
        self._check_run(request.run_id)
        steps, effects = self.steps.settle(request.generation, request.step, _commit(request))
        if steps is not self.steps:
            self._log.append(SETTLE, request.SerializeToString())
            self._take(steps, effects)
        return self.position()

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """
        Raises:
            Unreadable: the checkpoint cannot be read. The server is empty then.
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
        self._snapshot = None
        try:
            if not request.step and request.HasField("start"):
                base = self._begin_with(request)
            else:
                self._load_checkpoint(request.step, request.attempt)
                kind = "checkpoint" if request.step else ""
                base = Base(self._owner, 0, kind, request.step, request.attempt)
            self._log.begin(base, self._beginning(steps))
        except BaseException:
            self._lose()
            raise
        self.steps = steps
        return self.position()

    def load(self, raw: bytes) -> pb.Position:
        request = pb.LoadRequest.FromString(raw)
        self._check_declared(request.run_id)
        self._reach(request.generation, 0, None)
        rows = self._staged(raw, request.values)
        for number, (ids, _) in rows.of.items():
            self._check_room(self.tables[number], len(ids))
        self._wait_for_copy()
        self._log.append(LOAD, raw)
        self._have(rows)
        return self.position()

    def pull(self, request: pb.PullRequest) -> list[np.ndarray]:
        """The rows, float32 [n * dim] for each of the ids that were asked for: until the next call."""
        if request.generation:
            self._check_declared(request.run_id)
            self._reach(request.generation, request.step, _commit(request))
        else:
            self._check_readable(request.run_id)
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
            self._check_readable(request.run_id)
        if not 0 <= request.table < len(self.tables) or request.most < 1:
            raise Invalid(
                f"{request.most} rows of table {request.table}: there are {len(self.tables)} tables"
            )
        after = request.after if request.HasField("after") else None
        step = self.steps.step
        ids, rows, more = self.tables[request.table].page(step, after, request.most, request.since)
        return pb.Listed(ids=ids.tobytes(), rows=rows.tobytes(), more=more, step=step, line=self.line)

    def stage(self, raw: bytes) -> pb.Position:
        request = pb.StageRequest.FromString(raw)
        self._check_declared(request.run_id)
        staged = self._staged(raw, request.gradients)
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
        tensors = capture.tensors(self.index, self.servers)
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
        return f"{self.run_id}/{generation or self.steps.begun_in}/{step}/{attempt}"

    def position(self) -> pb.Position:
        steps = self.steps
        return pb.Position(generation=steps.generation, step=steps.step, empty=not steps.began)

    def describe(self, busy_seconds: float) -> pb.Description:
        return pb.Description(
            position=self.position(),
            tables=[pb.TableState(name=table.name, rows=len(table), dim=table.dim) for table in self.tables],
            memory=self._memory(), memory_limit=self._limit, rows_pulled=self.rows_pulled,
            rows_staged=self.rows_staged, busy_seconds=busy_seconds, log_bytes=self._log.nbytes,
            run_id=self.run_id, index=self.index, servers=self.servers, line=self.line,
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
        _write_tensors(path, capture.tensors(self.index, self.servers))
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
        staged = [[STAGE, self.steps.staged[rank].raw] for rank in sorted(self.steps.staged)]
        segment = self._log.another([*self._beginning(self.steps), *staged])
        self._capture = Capture(self.steps.step, segment, self._declared.tables, self.tables)
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
                    self._checkpoints, step, attempt, self.tables, self.index, self.servers, self._check_room
                )
            except CheckpointError as error:
                raise Unreadable(str(error)) from error
            except OSError as error:
                raise Unreadable(f"{self._checkpoints}: {error}") from error

    def _begin_with(self, request: pb.RestoreRequest) -> Base:
        """Have another job's rows: they are kept here, for that job may remove what they were read from."""
        assert self._declared is not None
        for table in self.tables:
            table.clear()
        try:
            parts.read_start(request.start, self.tables, self.index, self.servers, self._check_room)
        except CheckpointError as error:
            raise Unreadable(f"checkpoint.from: {error}") from error
        except OSError as error:
            raise Unreadable(f"checkpoint.from: {request.start.directory}: {error}") from error
        copies = [table.copy(0) for table in self.tables]
        path = self._log.directory / f"snapshot-of-generation-{request.generation}"
        try:
            _write_tensors(path, parts.tensors(self.index, 0, self.servers, self._declared.tables, copies))
        except OSError as error:
            raise Unavailable(
                f"the rows of {request.start.directory} cannot be kept in {self._log.directory}: {error}"
            ) from error
        return Base(self._owner, 0, "snapshot", 0, snapshot=path.name)

    def _have(self, rows: Staged) -> None:
        for number, (ids, values) in rows.of.items():
            table = self.tables[number]
            table.begin_with(ids, values.reshape(len(ids), table.dim))

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
                    self.steps = _steps(json.loads(text))
            elif kind == TABLES:
                if self._declared is None:
                    self._declared = pb.Tables.FromString(text)
                    self.tables = _tables(self._declared)
                if not loaded:
                    self._load_base(base)
                    loaded = True
            elif kind == SETTLE:
                settle = pb.SettleRequest.FromString(text)
                self._take(*self.steps.settle(settle.generation, settle.step, _commit(settle)))
            elif kind == COMMIT:
                pull = pb.PullRequest.FromString(text)
                self._take(*self.steps.reach(pull.generation, pull.step, _commit(pull)))
            elif kind == STAGE:
                request = pb.StageRequest.FromString(text)
                staged = self._staged(text, request.gradients)
                self.steps = self.steps.stage(request.generation, request.step, request.rank, staged)
            elif kind == LOAD:
                self._have(self._staged(text, pb.LoadRequest.FromString(text).values))
            else:
                raise Damaged(f"a record of unknown kind {kind!r}")

    def _load_base(self, base: Base) -> None:
        if base.kind == "checkpoint":
            self._load_checkpoint(base.step, base.attempt)
        elif base.kind == "snapshot":
            where = self._log.directory / base.snapshot
            with open(where, "rb") as file:
                try:
                    parts.read(file, str(where), self.tables, self.index, self.servers, self._check_room)
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

    def _check_readable(self, run_id: str) -> None:
        """For those who take no part in the job.

        Args:
            run_id: of the job that they mean; empty: whichever it is.
        """
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

    def _staged(self, raw: bytes, values_of: Iterable[pb.Gradients]) -> Staged:
        of: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for given in values_of:
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
        return sum(table.nbytes() for table in self.tables) + staged

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


def _write_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """
    Raises:
        OSError: there is no room; no file is left then.
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


def _commit(request: pb.PullRequest | pb.SettleRequest | pb.WritePartRequest) -> Commit | None:
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
