# SPDX-License-Identifier: Apache-2.0
"""The user's callbacks, as the training loop calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edl.trainer.agreement.epochs import CallbackUpdate, Epochs


class Callbacks(Protocol):
    """The user's callbacks."""

    def run(self, epochs: Epochs, whole: int, task: int, facts: Mapping[str, float]) -> CallbackUpdate:
        """Make the calls that are due when `whole` epochs are whole. Changes nothing in the learner.

        Args:
            task: the number of epochs to train.
            facts: about the ring, for callbacks that log them.

        Raises:
            EdlError: a callback raises an error, or changes what it must not change.
        """
        ...
