# SPDX-License-Identifier: Apache-2.0
"""The initial state of a ring's root, if no worker holds the job's state.

It is the newest checkpoint. Without a checkpoint it is what another training has learned (a warm start), and
without that the model's first weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edl.trainer.agreement.ledger import Ledger
from edl.trainer.checkpoint.checkpointing import Checkpointing
from edl.trainer.state import State


class Restore:
    """Restores the initial state of one worker.

    Args:
        state: the state to set.
        checkpoints: None if the job writes none.
        warm_start: loads what another training has learned into the model, and returns the ledger of the work
            that is already done; None: the model begins with its own weights.
        initial_weights: the learner's parts as they were built, uint8 [bytes] each, for beginning again;
            empty if the job never has to.
        trains: whether the job trains. If it does not, restoring may lead to the present state again.
    """

    def __init__(
        self,
        state: State,
        checkpoints: Checkpointing | None = None,
        warm_start: Callable[[], Ledger | None] | None = None,
        initial_weights: Sequence[np.ndarray] = (),
        trains: bool = True,
    ):
        self.checkpoints, self.warm_start, self.initial_weights = checkpoints, warm_start, initial_weights
        self._state, self._trains = state, trains

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 without a checkpoint."""
        return self.checkpoints.known if self.checkpoints is not None else 0

    def initial_state(self, expected: int) -> bool:
        """Restore the newest checkpoint, ledger and model together; without a checkpoint, do a warm start.

        Args:
            expected: the step of a checkpoint that is known to exist; 0 if none is.

        Returns:
            True if there was a checkpoint or a warm start.
        """
        if self.load_checkpoint(expected):
            return True
        if self.warm_start is not None:
            if (begun := self.warm_start()) is not None:
                self._state.set_ledger(begun)
            return True
        return False

    def load_checkpoint(self, expected: int) -> bool:
        """Restore the newest checkpoint. Returns False if no checkpoint exists."""
        if self.checkpoints is None or (found := self.checkpoints.restore(expected)) is None:
            return False
        self._state.set_ledger(found)
        return True

    def reset_weights(self) -> None:
        """Give the model its first weights again; the ledger is unchanged."""
        learner = self._state.learner
        learner.take_over(learner.prepared(list(self.initial_weights)))

    def roll_back(self) -> bool:
        """Restore the newest checkpoint; without a checkpoint, begin again.

        Returns:
            whether the state has changed. It has not if nothing is trained and the same weights were loaded
            again.
        """
        state = self._state
        before, digest = state.ledger, "" if self._trains else state.learner.digest()
        self.reset_weights()
        state.set_ledger(Ledger())
        self.initial_state(self.newest_step)
        if digest and state.learner.digest() == digest:
            state.set_ledger(before)
            return False
        return True
