# SPDX-License-Identifier: Apache-2.0
"""The model, as the training loop uses it: the two halves of a step, and a state that can be copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.model.state_owner import StateOwner
from edl.trainer.records.batches import Batch, Following, nothing_follows


@dataclass(frozen=True, slots=True)
class SampleLoss:
    """The loss of the first records with fixed weights (trainer/step/sample_loss.py)."""

    loss: float
    tolerance: float  # the relative difference that rounding can explain


class Learner(StateOwner, Protocol):
    """A model, as two halves of a step: an all-reduce, and the update with its result."""

    def allreduce_step(
        self,
        batch: Batch | None,
        contribution: np.ndarray,
        step: int,
        rank: int,
        records: int,
        following: Following = nothing_follows,
    ) -> control.StepResult:
        """Compute this rank's gradients, and take part in all sums of a step. Changes nothing.

        Args:
            batch: this rank's part; None if it has none: it takes part with weight zero.
            contribution: the control vector of this rank; fields that depend on the batch are added here.
            records: the number of records of the whole step, on all ranks, bad ones included.
            following: returns this rank's part of the next step, if it has been read.

        Raises:
            RingBroken: one of the sums did not come back here.
        """
        ...

    def apply(self, result: control.StepResult) -> None:
        """Apply the result to the model."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables whose rows are on servers."""
        ...

    def commit(self, step: int, result: control.StepResult) -> Commit:
        """What the servers need to know of the step made at `step`, before it is applied."""
        ...

    def take_metrics(self) -> dict[str, Value]:
        """Return the compiled metrics of the epoch that has ended, and reset them."""
        ...

    @property
    def has_loss(self) -> bool:
        """Whether the mean loss of an epoch is in its history, if it is not among these metrics."""
        ...

    @property
    def can_catch_up(self) -> bool:
        """Whether a result can be applied later, to a state that was received meanwhile."""
        ...

    @property
    def nbytes(self) -> int:
        """The size of the state."""
        ...

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Set some of the variables of `parts`, by index."""
        ...

    def digest(self) -> str:
        """A digest of the state: equal on two workers if their models are equal, bit for bit."""
        ...


@runtime_checkable
class PullsAhead(Protocol):
    """A learner that knows the rows of the next step while this one is made."""

    def begin_pull(self, step: int, last: Commit) -> None:
        """Request the rows of this rank's part of `step`, if `allreduce_step` has found them out.

        Args:
            last: the commit of the step before, which the request carries to the servers.
        """
        ...
