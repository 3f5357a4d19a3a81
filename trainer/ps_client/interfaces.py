# SPDX-License-Identifier: Apache-2.0
"""What the training loop and checkpoints exchange with the client of the parameter servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

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
