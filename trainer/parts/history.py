# SPDX-License-Identifier: Apache-2.0
"""The history of the training, written while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edl.trainer.agreement.metric_values import Value
from edl.trainer.parts.part import LoopPart
from edl.trainer.records.batches import Batch
from edl.trainer.ring.base import RingSlot
from edl.trainer.state import State


class HistoryWriting(LoopPart):
    """Gives the history of all whole epochs to a writer, again and again.

    Args:
        write: returns at once if it has written this history already.
    """

    def __init__(self, state: State, write: Callable[[Sequence[Mapping[str, Value]]], None]):
        self._state, self._write = state, write

    def before_step(self, here: RingSlot, batch: Batch | None) -> None:
        if here.rank == 0 and not self._state.catching_up:
            self._write(self._state.ledger.epochs.history)
