# SPDX-License-Identifier: Apache-2.0
"""The interfaces of a learner that checkpoints use, and of weights that a different system has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from edl.trainer.embedding.interfaces import Table
from edl.trainer.model.variable_spec import VariableSpec


class StateOwner(Protocol):
    """The part of a learner that checkpoints use."""

    def variable_specs(self) -> list[VariableSpec]:
        """Describe the variables of `parts`."""
        ...

    def parts(self) -> list[np.ndarray]:
        """Snapshot the state, uint8 [bytes] for each variable. Later updates do not change the snapshot."""
        ...

    def prepared(self, parts: list[np.ndarray]) -> Any:
        """Convert `parts` for `take_over`, on any thread. Changes nothing."""
        ...

    def take_over(self, values: Any) -> None:
        """Replace the state by what `prepared` has returned."""
        ...

    def fingerprint(self) -> str:
        """Return a digest of the model's definition, which must be that of the checkpoint's model."""
        ...


class ForeignWeights(Protocol):
    """Weights that a different system has saved, for a warm start."""

    @property
    def name(self) -> str:
        """The version of the weights and their system, for messages.

        Raises:
            CheckpointError: they cannot be read.
        """
        ...

    def fitted(
        self, place: str, model: Any, learner: StateOwner, tables: Sequence[tuple[Table, Any]]
    ) -> tuple[list[np.ndarray], Mapping[int, tuple[np.ndarray, np.ndarray]]]:
        """Return the learner's parts with these weights, and the rows of the tables by their numbers.

        Args:
            place: what the weights are and where, for messages.
            tables: the tables whose rows are on servers, with their layers.

        Raises:
            ModelError: the weights do not fit the model.
            CheckpointError: they cannot be read.
        """
        ...
