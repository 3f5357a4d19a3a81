# SPDX-License-Identifier: Apache-2.0
"""How a server applies steps: what both update modes share, and what each of them defines.

The modes are `edl.ps.sync.server` (steps of a ring; the last one can be undone) and
`edl.ps.asynchronous.server` (asynchronous SGD).

Promise: a call is rejected and changes nothing, or is logged and takes full effect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.wire import Bytes
from edl.ps.errors import Misplaced
from edl.ps.phase import Phase
from edl.ps.reshard.reshard import Resharding
from edl.ps.reshard.transfer import ReshardTarget
from edl.ps.storage.capture import Capture
from edl.ps.storage.records import FETCH, FETCHED, PAGE, Record
from edl.ps.storage.storage import Records, Storage


class ServerState(Protocol):
    """The steps of one server, as a value."""

    @property
    def phase(self) -> Phase:
        """Whether the server has the rows of a job, and accepts steps."""

    def lost(self: S) -> S:
        """Drop the steps: their rows are gone. Generations are kept."""


S = TypeVar("S", bound=ServerState)


class UpdateMode(ABC, Generic[S]):
    """The steps of one server, and the calls that change them."""

    one_step = True  # the rows of all servers, and all shards of a checkpoint, are of one step

    def __init__(self, storage: Storage, state: S):
        self._storage, self.state = storage, state
        self._resharding = Resharding(storage)
        self.rows_staged = 0

    # --- the state

    @property
    def phase(self) -> Phase:
        """Whether the server has the rows of a job, and accepts steps."""
        return self.state.phase

    @property
    @abstractmethod
    def clock(self) -> int:
        """Version of the tables: one more than the newest step stamped on a row."""

    @property
    @abstractmethod
    def incarnation(self) -> str:
        """Id of this history of states. It changes when the server rolls back or starts again."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Bytes of gradients that are not in the rows yet, and of fetched rows."""

    @property
    def is_resharding(self) -> bool:
        """True while rows for another shard assignment are fetched; the state cannot be captured then."""
        return self._resharding.is_active

    def position(self) -> pb.Position:
        """Return the server's step, generation and assignment, as a new ring's root needs them."""
        told, there = self._position(), self._storage.assignment
        told.empty = not self.phase.has_rows
        if self.phase.has_rows and there.servers:
            told.assignment.CopyFrom(there.to_proto())
        if (ready := self._resharding.ready) is not None:
            self._tell_fetched(told, ready)
        return told

    @abstractmethod
    def progress(self) -> pb.Progress:
        """Return the server's progress, for the answers to pushes."""

    def describe(self, description: pb.Description, kept: bool) -> None:
        """Add the state of asynchronous steps, and with `kept` the workers' state that the server stores."""

    # --- the calls

    @abstractmethod
    def start_generation(self, request: pb.StartGenerationRequest) -> pb.Position:
        """Start a generation, so that calls of earlier ones are rejected."""

    @abstractmethod
    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """Roll back to the checkpoint of a step; 0: to the initial state. A repeated call changes nothing.

        Raises:
            Unreadable: the checkpoint cannot be read; the server is empty then.
        """

    @abstractmethod
    def begin(self, raw: Bytes) -> pb.Progress:
        """Insert initial rows, before the first step."""

    @abstractmethod
    def push(self, raw: Bytes) -> pb.Progress:
        """Accept the gradients of a step. A repeated call changes nothing."""

    def fetch(self, request: pb.FetchRequest) -> list[int]:
        """Begin to fetch rows for another assignment.

        Returns:
            the servers that send pages of rows, for `take_page` and then `fetched`; empty: no row is missing.
        """
        self._storage.check_declared(request.run_id)
        of = ShardAssignment.from_proto(request.of)
        if not self._lacks(request, ShardAssignment.from_proto(request.to), of):
            return []
        self._storage.finish_copy()
        self._storage.append(FETCH, request.SerializeToString())
        self._begin_fetch(request)
        return list(of.members)

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        """Log and keep a page of rows that `fetch` has requested."""
        return self._resharding.take_page(request, raw)

    def fetched(self, request: pb.FetchRequest) -> pb.Position:
        """All pages of the fetch have arrived: the server can switch to the new assignment."""
        self._resharding.complete(request)
        return self.position()

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        """Return one page of rows for another server.

        Raises:
            Stale: a newer generation has started.
            Misplaced: the rows are of a different assignment or step, or may still change.
        """
        self._storage.check_declared(request.run_id)
        self._check_can_send(request)
        return self._resharding.page(request, self.clock)

    @abstractmethod
    def assign(self, request: pb.AssignRequest) -> pb.Position:
        """Switch to a shard assignment whose rows are here, or keep the present one."""

    @abstractmethod
    def advance_to(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        """Apply the pending step if `request` is the first to need the state after it.

        Raises:
            Refused: the server cannot reach the requested state.
        """

    # --- captures and the log

    def capture(self) -> Capture:
        """Capture the present state, to be copied later.

        Raises:
            Misplaced: rows for another assignment are being fetched.
        """
        if self.is_resharding:
            raise Misplaced("rows are being moved to another shard assignment")
        return self._storage.begin_capture(self.clock, self.beginning(), self._about())

    @property
    def shards_suffice(self) -> bool:
        """Whether the shards of a checkpoint have all that this server needs to resume from it.

        A row's second replica is in no shard. It equals the first one only if all shards are of one step.
        """
        return self.one_step or self._storage.assignment.copies < 2

    @abstractmethod
    def rebased(self) -> None:
        """The log now starts at a newer base."""

    def beginning(self) -> Records:
        """The first records of a log segment that starts at the present state."""
        return self._beginning(self.state)

    def load_base(self) -> None:
        """Load the rows of the log's base."""
        self._storage.load_base(alone=not self.one_step)

    def lost(self) -> None:
        """Drop all rows: they are outdated, or are only partly here."""
        self._forget()
        self._storage.lose(self.beginning())

    def replay(self, record: Record) -> None:
        """Apply a log record again.

        Raises:
            Damaged: the record is of an unknown kind.
        """
        if record.kind == FETCH:
            self._begin_fetch(pb.FetchRequest.FromString(record.raw))
        elif record.kind in (PAGE, FETCHED):
            self._resharding.replay(record.kind, record.raw)
        else:
            self._replay(record)

    # --- for the modes

    def _begin_fetch(self, request: pb.FetchRequest) -> None:
        self._resharding.begin(request)
        if self._storage.index not in ShardAssignment.from_proto(request.of).members:  # its rows are outdated
            self._storage.drop_rows()
            self._forget()

    @abstractmethod
    def _position(self) -> pb.Position:
        """The parts of the position that depend on the mode."""

    @abstractmethod
    def _tell_fetched(self, position: pb.Position, ready: ReshardTarget) -> None:
        """Add to the position the assignment to which the server can switch."""

    @abstractmethod
    def _about(self) -> Mapping[str, Any]:
        """Further metadata of this server's shard of a checkpoint."""

    def _forget(self) -> None:
        """Drop the steps: their rows are gone. Generations are kept."""
        self.state = self.state.lost()

    def _roll_back(
        self, request: pb.RestoreRequest, after: Callable[[Sequence[Mapping[str, Any]]], S]
    ) -> None:
        """Load the rows of a checkpoint, or another job's rows, and start a new log.

        Args:
            after: returns the state for the metadata of the shards that were read.

        Raises:
            Unreadable: the checkpoint cannot be read; the server is empty then.
        """
        storage = self._storage
        storage.check_checkpoint(request.step)
        self._resharding.drop()
        if request.HasField("assignment"):
            storage.assignment = ShardAssignment.from_proto(request.assignment)
        try:
            if not request.step and request.HasField("start"):
                state = after([])
                storage.read_start(request.start)
                name = f"snapshot-of-generation-{request.generation}"
                storage.keep_beginning(name, self._beginning(state))
            else:
                state = after(storage.go_back(request.step, request.attempt, alone=not self.one_step))
                storage.gone_back(request.step, request.attempt, self._beginning(state))
        except BaseException:
            self.lost()
            raise
        self.state = state

    @abstractmethod
    def _beginning(self, state: S) -> Records:
        """The first records of a log segment that starts at this state."""

    @abstractmethod
    def _lacks(self, request: pb.FetchRequest, to: ShardAssignment, of: ShardAssignment) -> bool:
        """Whether the server lacks rows of `to` that the servers of `of` have.

        Raises:
            Stale: a newer generation has started.
        """

    @abstractmethod
    def _check_can_send(self, request: pb.PageRequest) -> None:
        """Check that the rows are of the requested state and do not change now."""

    @abstractmethod
    def _replay(self, record: Record) -> None:
        """Apply a log record again that changes steps."""
