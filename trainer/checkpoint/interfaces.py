# SPDX-License-Identifier: Apache-2.0
"""The interface of weights that a different system has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from edl.trainer.embedding.interfaces import Table
from edl.trainer.model.state_owner import StateOwner


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
