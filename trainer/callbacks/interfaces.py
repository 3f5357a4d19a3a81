"""The user's callbacks, as the training loop calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from edl.trainer.agreement.epochs import Epochs, Turn


class Callbacks(Protocol):
    """The user's callbacks."""

    def turn(self, epochs: Epochs, whole: int, task: int, facts: Mapping[str, float]) -> Turn:
        """Call what is due when so many epochs are whole. Changes nothing.

        Args:
            task: epochs to be trained.
            facts: of the ring.

        Raises:
            EdlError: one of them raises, or changes what it must not.
        """
        ...
