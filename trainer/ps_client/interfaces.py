# SPDX-License-Identifier: Apache-2.0
"""What the training loop and checkpoints exchange with the client of the parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from edl.checkpoints import Part as FilePart
from edl.errors import CheckpointError
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
