# SPDX-License-Identifier: Apache-2.0
"""A state that can be copied: between the workers of a ring, and from and to checkpoints."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from edl.trainer.model.variable_spec import VariableSpec


class StateOwner(Protocol):
    """The part of a learner that rings and checkpoints use."""

    def variable_specs(self) -> list[VariableSpec]:
        """Describe the variables of `parts`."""
        ...

    def parts(self) -> list[np.ndarray]:
        """Snapshot the state: all that a step changes, uint8 [bytes] for each variable.

        Later updates do not change the snapshot.
        """
        ...

    def prepared(self, parts: list[np.ndarray]) -> Any:
        """Convert the `parts` of a worker or a checkpoint for `take_over`, on any thread. Changes nothing.

        Each part is removed from the list as soon as it is converted, to save memory.
        """
        ...

    def take_over(self, values: Any) -> None:
        """Replace the state by what `prepared` has returned."""
        ...

    def fingerprint(self) -> str:
        """Return a digest of the model's definition: equal on workers of a ring, and in their checkpoints."""
        ...
