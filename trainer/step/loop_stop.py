# SPDX-License-Identifier: Apache-2.0
"""`job.stop()` of an own loop: the training ends with an epoch on all workers, as a callback ends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from edl.trainer.agreement.epochs import CallbackUpdate, Epochs


class LoopStop:
    """The one callback of an own loop (trainer/callbacks/interfaces.py).

    Args:
        asked: whether a worker's loop has called `job.stop()`.
    """

    def __init__(self, asked: Callable[[], bool]):
        self._asked = asked

    def run(self, epochs: Epochs, whole: int, task: int, facts: Mapping[str, float]) -> CallbackUpdate:
        after = replace(epochs, ended=whole, begun=max(epochs.begun, min(whole + 1, task)))
        if whole and not after.stop and self._asked():
            after = replace(after, stop=whole, stopped_by="job.stop()", stop_of=task)
        return CallbackUpdate(after, {})
