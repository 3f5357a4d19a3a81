"""What the root of a ring begins with when no worker holds the job's state: the newest checkpoint. Without a
checkpoint it is what another training has learned, and without that the model's first weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edl.trainer.agreement.ledger import Ledger
from edl.trainer.checkpoint.checkpointing import Checkpointing
from edl.trainer.state import State


class Beginning:
    """
    Args:
        state: which is to begin.
        checkpoints: None: the job writes none.
        warm_start: has the model begin with what another training has learned, and returns what of the job is
            done already; None: with its own weights.
        first: the parts of the learner that it was built with, to begin again; none: it never has to.
        trains: whether the job does; else the state of a beginning may be the one that is there.
    """

    def __init__(
        self,
        state: State,
        checkpoints: Checkpointing | None,
        warm_start: Callable[[], Ledger | None] | None,
        first: list[np.ndarray],
        trains: bool,
    ):
        self.checkpoints, self.warm_start, self.first = checkpoints, warm_start, first
        self._state, self._trains = state, trains

    @property
    def known(self) -> int:
        """The step of the newest checkpoint, or 0 if there is none."""
        return self.checkpoints.known if self.checkpoints is not None else 0

    def restore(self, expected: int) -> bool:
        """Begin with the newest checkpoint, ledger and model together, or with a warm start if there is none.

        Returns:
            whether there is either.
        """
        if self.restore_checkpoint(expected):
            return True
        if self.warm_start is not None:
            if (begun := self.warm_start()) is not None:
                self._state.begin_with(begun)
            return True
        return False

    def restore_checkpoint(self, expected: int) -> bool:
        """Begin with the newest checkpoint. Returns False if there is none."""
        if self.checkpoints is None or (found := self.checkpoints.restore(expected)) is None:
            return False
        self._state.begin_with(found)
        return True

    def take_first(self) -> None:
        """The model has its first weights again; the ledger is as it was."""
        learner = self._state.learner
        learner.take_over(learner.prepared(list(self.first)))

    def go_back(self) -> bool:
        """To the newest checkpoint; where there is none, to the beginning.

        Returns:
            whether the state is another one then: not where nothing is trained, and the same rows and weights
            are there again.
        """
        state = self._state
        before, digest = state.ledger, "" if self._trains else state.learner.digest()
        self.take_first()
        state.begin_with(Ledger())
        self.restore(self.known)
        if digest and state.learner.digest() == digest:
            state.begin_with(before)
            return False
        return True
