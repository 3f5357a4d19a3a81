# SPDX-License-Identifier: Apache-2.0
"""The parameter servers, as the training loop and checkpoints use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from edl.checkpoints import Part as FilePart
from edl.contract.rows.placement import ShardAssignment
from edl.errors import CheckpointError
from edl.trainer.embedding.interfaces import Table
from edl.trainer.ring.base import RingBroken

Values: TypeAlias = Sequence[tuple[np.ndarray, np.ndarray]]  # of each table: ids int64 [n], float32 [n, dim]


@dataclass(frozen=True, slots=True)
class StepGradients:
    """The gradients of one step, if all weights are on servers (ps.proto, PushRequest)."""

    step: int
    gradients: Sequence[tuple[np.ndarray, np.ndarray]]  # of each table: ids int64 [n], float32 [n, dim]
    loss: float  # mean over its records
    records: int
    learning_rate: float  # of the model's optimizer in this step
    skipped: bool = False  # it was not finite: it counts as made, and changes nothing


@dataclass(frozen=True, slots=True)
class Whole:
    """The job's progress, as the coordinator of its servers reports it."""

    step: int = 0  # all steps below it are in all weights
    loss: float = 0.0  # of the steps since something was kept: the sum over their records
    records: int = 0
    version: int = 0  # updates
    repeated: int = 0  # steps that came again after they were taken


@dataclass(frozen=True, slots=True)
class Pulled:
    """Rows, and the number of updates in them on each server."""

    rows: list[np.ndarray]  # of each table, float32 [n, dim]
    versions: Mapping[int, int]  # by the server's index


class AsyncServers(Protocol):
    """The servers of a job in mode=ps, as `async_loop` uses them."""

    @property
    def progress(self) -> Whole:
        """The coordinator's last report."""
        ...

    @property
    def count(self) -> int:
        """The number of servers that hold rows."""
        ...

    @property
    def furthest(self) -> int:
        """One more than the last step that a server has accepted."""
        ...

    @property
    def assignment(self) -> ShardAssignment:
        """The assignment of rows to servers."""
        ...

    def enter(self, addresses: Sequence[str] = (), servers: int = 0, released_from: int = 0) -> None:
        """Prepare for a ring: from now on, calls end when the ring is cut.

        Args:
            addresses: the servers' addresses, host:port by index; empty if unchanged.
            servers: the number of servers that shall hold the rows; 0: all.
            released_from: servers from this index on are released and have no rows; 0: unknown.
        """
        ...

    def leave(self) -> None:
        """The ring was left: calls for this worker's own state are possible again."""
        ...

    def declare(self, tables: Sequence[Table]) -> None:
        """Set the tables of this job."""
        ...

    def look(self, wait_forever: bool = False) -> dict[int, Any]:
        """Refresh the servers' states and incarnations, which later calls use; return the states by index.

        Args:
            wait_forever: wait for every server, even if others hold its rows.
        """
        ...

    def begin(self, values: Values, only: Iterable[int] | None = None) -> None:
        """Start the job with these initial rows.

        Args:
            values: the values of each table: ids int64 [n], rows float32 [n, dim].
            only: the servers concerned; None for all servers.
        """
        ...

    @property
    def coordinator(self) -> int:
        """The index of the server that leases steps."""
        ...

    def take_charge(self, worker: int, step: int = 0) -> bool:
        """Act as the root of a new ring: reject calls of earlier roots, and resume all servers.

        Args:
            step: reached by all servers in the previous ring.

        Returns:
            whether rows are lost on both servers that held them.
        """
        ...

    def moves_at(self) -> int:
        """Return the step at which rows can move; NOWHERE if no rows need to move."""
        ...

    def move_rows(self, worker: int) -> tuple[int, str]:
        """Move the rows to the wanted assignment, while no worker computes a step.

        Returns:
            the step at which rows can move later, or NOWHERE; and why the rows stay, "" if they do not.
        """
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """The known addresses of the servers, host:port by index."""
        ...

    def adopt(self, assignment: ShardAssignment, addresses: Sequence[str] = ()) -> None:
        """Use this assignment of rows, and these addresses, for all calls from now on."""
        ...

    def restart_as(self, servers: int) -> None:
        """Assign shards to as many servers as wrote the checkpoint to restore, if there are as many."""
        ...

    def go_back(self, step: int, attempt: str) -> None:
        """Roll all servers back to the checkpoint of this step; 0: to no rows."""
        ...

    def bring_back(self, lost: Sequence[int], step: int, attempt: str) -> None:
        """Restore servers that have lost their rows from their shards of that checkpoint."""
        ...

    def introduce(self) -> None:
        """Report the incarnations of the other servers to the coordinator, and the steps that they lack."""
        ...

    def keep(self, step: int, order: int, ledger: bytes) -> None:
        """Store the ledger on all servers, unless they hold one of the same or a greater `order`."""
        ...

    def kept(self) -> bytes:
        """Return the stored ledger; empty if the servers have stored no ledger."""
        ...

    def lease_steps(self, worker: int, most: int, limit: int) -> list[int]:
        """Lease at most `most` steps below `limit`. Empty if other workers have leased all that remain."""
        ...

    def rows_now(self, ids: Sequence[np.ndarray]) -> Pulled:
        """Pull current rows, float32 [n, dim], of the unique ids of each table, int64 [n]."""
        ...

    def push(self, made: StepGradients, worker: int, versions: Mapping[int, int]) -> bool:
        """Push a step's gradients to all servers.

        Args:
            versions: the versions of the weights that the step used, by server.

        Returns:
            False if the weights were too old: the step must be computed again.
        """
        ...

    def drain(self, step: int) -> None:
        """Make all servers apply the waiting steps below `step`, which they have accepted."""
        ...

    def find(self) -> None:
        """Update `progress` from the coordinator."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            RingBroken: the ring was cut.
        """
        ...

    def all_rows(self, table: int, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Read all rows of a table: ids int64 [n], rows float32 [n, dim].

        Args:
            step: require exactly the steps below it to be in the rows; 0: any.
        """
        ...


class TrainedOn(RingBroken):
    """The servers have applied steps of a further epoch, which must be trained to its end."""


class PartNotWritten(CheckpointError):
    """A server became unreachable before its part of a checkpoint was written.

    It may write the part once it is back.
    """


class PartsOfServers(Protocol):
    """The servers' parts of a checkpoint."""

    @property
    def count(self) -> int:
        """The number of servers."""
        ...

    def take_parts(
        self, step: int, attempt: str, first: int
    ) -> AbstractContextManager[Callable[[], Sequence[FilePart]]]:
        """Have each server snapshot its part of a checkpoint of this step, and write it in the background.

        When this returns, all servers have made their snapshots.

        Args:
            first: the number of parts before theirs.

        Returns:
            a context manager, to be entered once. Inside, call its value to wait until all parts are written.
            On exit, unwritten parts are given up.

        Raises:
            CheckpointError: a server could not. The context's value raises it, too.
            PartNotWritten: a server went away before. The context's value raises it, too.
        """
        ...

    def answer_within(self, seconds: float) -> bool:
        """Whether all servers answer within the time limit, including servers that return meanwhile.

        Raises:
            RingBroken: the call was called off.
        """
        ...

    def committed(self, step: int, attempt: str) -> None:
        """Report that the checkpoint is complete. Fails silently: the next checkpoint reports more."""
        ...
