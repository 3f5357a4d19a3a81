"""The parameter servers, as the training loop and checkpoints use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edl.checkpoints import Part as FilePart
from edl.contract.rows.placement import ShardAssignment
from edl.errors import CheckpointError
from edl.trainer.embedding.interfaces import Commit, Rows, Table
from edl.trainer.ring.base import RingBroken


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


class Servers(Rows, Protocol):
    """Servers of embedding rows, as the training loop uses them."""

    def follow(self, tables: Sequence[Table], last: Callable[[], Commit | None]) -> None:
        """Set the tables whose rows they have, and the function that returns the last step's outcome, sent
        with each call."""
        ...

    def enter(self, addresses: Sequence[str] = (), servers: int = 0) -> None:
        """This worker is about to enter a ring: from now on calls end when it is cut.

        Args:
            addresses: the servers' addresses, host:port by index; empty if unchanged.
            servers: the number of servers that shall hold the rows; 0: all.
        """
        ...

    @property
    def generation(self) -> int:
        """The generation that all calls carry."""
        ...

    def claim(self, worker: int) -> int:
        """As the root of a new ring, get a generation from the servers that is newer than all before.

        The master's generation would not do: a master that starts without workers may count from 1 again.

        Raises:
            RingBroken: the ring was cut before all servers had answered.
        """
        ...

    def speak_of(self, generation: int) -> None:
        """Set the generation that the root has claimed: all calls carry it from now on."""
        ...

    def leave(self) -> None:
        """This worker has left the ring: calls for its own state are possible again."""
        ...

    def start_generation(self, step: int) -> str:
        """As the root of a new ring, report the ring's step to all servers.

        Returns:
            why ring and servers must roll back; "" if all servers are at this step.

        Raises:
            RingBroken: the ring was cut before all servers had answered.
        """
        ...

    def restore(self, step: int, attempt: str) -> None:
        """Have all servers restore the checkpoint of this step; 0: they begin again.

        Raises:
            RingBroken: as above.
        """
        ...

    @property
    def assignment(self) -> ShardAssignment:
        """The assignment of rows to servers."""
        ...

    @property
    def moves(self) -> bool:
        """Whether rows must move to different servers, as the root knows after `start_generation`."""
        ...

    def move(self, step: int) -> str:
        """As the root, have the rows moved. All members in sync hold the state of this step.

        Returns:
            why the rows stay where they are; "" if they moved.

        Raises:
            RingBroken: as above. One assignment is complete then, and the next root finds it.
        """
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """The known addresses of the servers, host:port by index."""
        ...

    def adopt(self, assignment: ShardAssignment, addresses: Sequence[str] = ()) -> None:
        """Use this assignment of rows, and these addresses, for all calls from now on."""
        ...

    def cut(self) -> None:
        """End all calls at once, from any thread: the ring is called off."""
        ...


class TrainedOn(RingBroken):
    """The servers have applied steps of a further epoch, which must be trained to its end."""


class PartNotWritten(CheckpointError):
    """A server went away before its part of a checkpoint was written; it may write the part when it is
    back."""


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
