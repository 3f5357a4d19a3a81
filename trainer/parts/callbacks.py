# SPDX-License-Identifier: Apache-2.0
"""The user's callbacks, as a part of the loop.

They are called at the boundaries of epochs, after the evaluation, by one rank for all. Their changes and
their memory are broadcast, and all ranks apply them together. After the last epoch only the worker that saves
the model calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edl.trainer.agreement.epochs import CallbackUpdate
from edl.trainer.callbacks.interfaces import Callbacks
from edl.trainer.parts.part import LoopPart
from edl.trainer.ring.base import Ring, RingSlot, broadcast_bytes
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State


class CallbackCalls(LoopPart):
    """Calls the callbacks.

    Args:
        report: knows goodput and stalls, for callbacks that log them.
        refuse: raises ModelError if callbacks have changed what they must not change in a ring, by index in
            the learner's `parts`.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        state: State,
        ring: Ring,
        report: Telemetry,
        refuse: Callable[[Mapping[int, np.ndarray]], None] = lambda changed: None,
    ):
        self._callbacks, self._state, self._ring, self._report = callbacks, state, ring, report
        self._refuse = refuse
        self._size = 1  # of the last ring

    def between_steps(self, here: RingSlot, vote: Callable[[], np.ndarray]) -> CallbackUpdate | None:
        state, self._size = self._state, here.size
        begins_epoch = state.step == 0 or state.steps.ends_epoch(state.step)
        if not begins_epoch or state.step >= state.end or state.callbacks_done:
            return None
        if here.rank != here.speaker:
            packed = broadcast_bytes(self._ring, b"", here.speaker)
            return CallbackUpdate.unpack(np.frombuffer(packed, np.uint8))
        mine = self._run(state.steps.epoch(state.step), state.task)
        self._refuse(mine.changed)
        broadcast_bytes(self._ring, mine.pack().tobytes(), here.speaker)
        return mine

    def finish(self) -> None:
        """Call the callbacks for the end of the last epoch."""
        ledger = self._state.ledger
        whole = self._state.steps.epoch(ledger.step)
        if ledger.epochs.due(whole, more=False):
            self._state.change(self._run(whole, whole))

    def _run(self, whole: int, task: int) -> CallbackUpdate:
        facts = {
            "ring_size": float(self._size),
            "ring_changes": float(self._report.ring_changes),
            "stall_seconds": self._report.stall_seconds,
            "goodput": self._report.goodput,
        }
        return self._callbacks.run(self._state.ledger.epochs, whole, task, facts)
