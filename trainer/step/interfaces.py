"""The model, as the training loop uses it: two halves of a step, and a state that can be copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edl.trainer.agreement import control
from edl.trainer.agreement.metric_values import Value
from edl.trainer.embedding.interfaces import Commit, Table
from edl.trainer.model.data import Batch
from edl.trainer.model.variable_spec import Described


@dataclass(frozen=True, slots=True)
class SampleLoss:
    """The loss of the first records with fixed weights (trainer/step/sample_loss.py)."""

    loss: float
    tolerance: float  # the relative difference that rounding can explain


class Learner(Protocol):
    """A model, as two halves of a step: its sums over the ring, and what they change."""

    def sums(
        self, batch: Batch | None, contribution: np.ndarray, step: int, rank: int, records: int
    ) -> control.Sums:
        """Take part in all sums of a step. Changes nothing.

        Args:
            batch: this rank's part; None: it has none, and takes part with weight zero.
            contribution: the control vector of this rank; what depends on the batch is added here.
            records: of the whole step, on all ranks, bad ones included.

        Raises:
            RingBroken: one of the sums did not come back here.
        """
        ...

    def apply(self, sums: control.Sums) -> None:
        """Apply what the sums have given to the model."""
        ...

    @property
    def tables(self) -> tuple[Table, ...]:
        """Whose rows are on servers."""
        ...

    def commit(self, step: int, sums: control.Sums) -> Commit:
        """What the servers have to know of the step that was taken at `step`, before it is applied."""
        ...

    def take_metrics(self) -> dict[str, Value]:
        """The compiled metrics over the epoch that has ended; the next one begins with none."""
        ...

    @property
    def has_loss(self) -> bool:
        """Whether the mean loss of an epoch is in its history, if it is not among these metrics."""
        ...

    @property
    def follows(self) -> bool:
        """Whether sums can be applied later than they are made, in another state."""
        ...

    @property
    def nbytes(self) -> int:
        """How large the state is."""
        ...

    def parts(self) -> list[np.ndarray]:
        """Everything that `apply` changes, uint8 [bytes] for each variable: as it is now, whatever is applied
        later."""
        ...

    def prepared(self, parts: list[np.ndarray]) -> Any:
        """Another worker's `parts`, for `take_over`: what takes time, on any thread. Changes nothing; each
        part is dropped from the list as soon as it is used."""
        ...

    def take_over(self, values: Any) -> None:
        """Take over what was prepared."""
        ...

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Give some of the variables of `parts` other values."""
        ...

    def described(self) -> list[Described]:
        """The variables of `parts`."""
        ...

    def fingerprint(self) -> str:
        """Of how the model is made: equal on two workers that can share a ring."""
        ...

    def digest(self) -> str:
        """Of the state: equal on two workers when their models are equal, bit for bit."""
        ...
