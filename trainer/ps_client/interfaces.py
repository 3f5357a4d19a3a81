"""The parameter servers, as the training loop and checkpoints use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edl.checkpoints import Part as FilePart
from edl.contract.rows.placement import Arrangement
from edl.errors import CheckpointError
from edl.trainer.embedding.interfaces import Commit, Rows, Table
from edl.trainer.ring.base import RingBroken


@dataclass(frozen=True, slots=True)
class StepGradients:
    """What a step has to teach, where all weights are on servers (ps.proto, PushRequest)."""

    step: int
    gradients: Sequence[tuple[np.ndarray, np.ndarray]]  # of each table: ids int64 [n], float32 [n, dim]
    loss: float  # mean over its records
    records: int
    learning_rate: float  # of the model's optimizer in this step
    skipped: bool = False  # it was not finite: it counts as made, and changes nothing


@dataclass(frozen=True, slots=True)
class Whole:
    """How far the job is, as the coordinator of its servers has it."""

    step: int = 0  # all steps below it are in all weights
    loss: float = 0.0  # of the steps since something was kept: the sum over their records
    records: int = 0
    version: int = 0  # updates
    repeated: int = 0  # steps that came again after they were taken


@dataclass(frozen=True, slots=True)
class Pulled:
    """Rows, and how many updates they have on each server."""

    rows: list[np.ndarray]  # of each table, float32 [n, dim]
    versions: Mapping[int, int]  # by the server's index


class Servers(Rows, Protocol):
    """The same, as the loop sees them."""

    def follow(self, tables: Sequence[Table], last: Callable[[], Commit | None]) -> None:
        """Whose rows they have, and what tells with each call which step has led to this worker's state."""
        ...

    def enter(self, addresses: Sequence[str] = (), servers: int = 0) -> None:
        """This worker is to be in a new ring: from now on it may be cut.

        Args:
            addresses: of the servers, host:port by index; none: those that are known.
            servers: how many of them are to have the rows; 0: all.
        """
        ...

    @property
    def generation(self) -> int:
        """Of which all calls are."""
        ...

    def claim(self, worker: int) -> int:
        """The root of a new ring asks all servers for a generation of theirs that is newer than all before.

        The master's will not do: a master that finds no worker begins to count anew.

        Raises:
            RingBroken: the ring was cut before all of them had answered.
        """
        ...

    def speak_of(self, generation: int) -> None:
        """The generation that the root has claimed: all calls are of it from now on."""
        ...

    def leave(self) -> None:
        """It has left it. What was cut is over: calls for the state that it has are possible again."""
        ...

    def settle(self, step: int) -> str:
        """The root of a new ring tells all servers where the ring is.

        Returns:
            why the ring has to go back, and the servers with it; empty: they are there too.

        Raises:
            RingBroken: the ring was cut before all of them had answered.
        """
        ...

    def restore(self, step: int, attempt: str) -> None:
        """All servers go back to the checkpoint of this step, or on to it; 0: they begin anew.

        Raises:
            RingBroken: as above.
        """
        ...

    @property
    def arrangement(self) -> Arrangement:
        """In which the servers have the rows."""
        ...

    @property
    def moves(self) -> bool:
        """Whether rows are elsewhere than where they are to be, as the root knows after `settle`."""
        ...

    def move(self, step: int) -> str:
        """The root has the rows moved to where they are to be. All who hold the state have that of this step.

        Returns:
            why they stay where they are; empty: they do not.

        Raises:
            RingBroken: as above. One arrangement is whole then, and the next root finds it.
        """
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where they listen, host:port by index, as far as is known."""
        ...

    def adopt(self, arrangement: Arrangement, addresses: Sequence[str] = ()) -> None:
        """All calls go to the servers of this arrangement from now on, at these addresses."""
        ...

    def cut(self) -> None:
        """The ring is called off, from any thread: no call waits any more."""
        ...


class TrainedOn(RingBroken):
    """The servers have taken steps of another epoch, which is to be trained to its end."""


class PartNotWritten(CheckpointError):
    """A server went away before its part of a checkpoint was written: it may write it when it is back."""


class PartsOfServers(Protocol):
    """What of the servers is in a checkpoint."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def take_parts(
        self, step: int, attempt: str, first: int
    ) -> AbstractContextManager[Callable[[], Sequence[FilePart]]]:
        """Have each server take its part of a checkpoint of this step, and write it beside the training. When
        this returns, all of them have taken it.

        Args:
            first: how many parts there are before theirs.

        Returns:
            a block to be entered once. Inside, call its value to wait until all parts are written. When the
            block ends, parts that are not written are given up.

        Raises:
            CheckpointError: one of them could not. The value of the block raises it, too.
            PartNotWritten: one of them went away before it had. The value of the block raises it, too.
        """
        ...

    def answer_within(self, seconds: float) -> bool:
        """Whether all of them answer, also one that is away now and is back within so many seconds.

        Raises:
            RingBroken: it is called off.
        """
        ...

    def committed(self, step: int, attempt: str) -> None:
        """That checkpoint is whole. Fails silently: the next one says more."""
        ...
