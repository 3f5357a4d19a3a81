# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, as a part of the loop.

All ranks write a checkpoint, each a part, in the background. It holds the state after the step at which all
ranks have reported, in the same all-reduce, that they can write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np

from edl.contract.evaluation import Pass
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.agreement.ledger import RoundResult
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.checkpoint.checkpointing import Checkpointing
from edl.trainer.parts.part import LoopPart
from edl.trainer.records.batches import Batches
from edl.trainer.ring.base import RingSlot
from edl.trainer.session.orders import Export, WriteCheckpoint
from edl.trainer.state import State

Due = Callable[[int, int, int], Pass | None]  # see EvaluationBatches.due


def never(step: int, round: int, epochs: int) -> None:
    """Return None: the job does not evaluate."""


class CheckpointWriting(LoopPart):
    """Has checkpoints written.

    Args:
        split: the records that the model is evaluated with after each epoch.
        due: returns the evaluation that is due; a checkpoint may need its metrics.
        pull_newest: loads the newest weights, if servers have newer ones than those of the given step, and
            returns their step.
    """

    def __init__(
        self,
        checkpoints: Checkpointing,
        state: State,
        batches: Batches,
        split: str,
        due: Due = never,
        pull_newest: Callable[[int], int] = lambda step: step,
    ):
        self.checkpoints, self.due, self._pull_newest = checkpoints, due, pull_newest
        self._state, self._batches, self._split = state, batches, split

    def ready(self, message: pb.Ready) -> None:
        message.checkpoint, layout = self.checkpoints.newest(self._batches.layout)
        if layout is not None:
            message.layout.CopyFrom(pb.Layout(**asdict(layout)))
        message.forced.extend(self.checkpoints.forced)

    def carry_out(self, order: Export | WriteCheckpoint) -> None:
        """Write a whole checkpoint of the state that this worker holds, without other workers."""
        ledger = self._state.ledger
        step = self._pull_newest(ledger.step)
        self.checkpoints.save(ledger, self._state.steps, self._batches.layout, step)

    def vote(self, here: RingSlot, vector: np.ndarray) -> None:
        state = self._state
        now = self.due(state.step, state.round, state.epochs)
        if now is None:  # the vector is that of a step
            vector[control.CHECKPOINT] = state.step < state.end and self.can_write(here, state.step + 1)
        else:
            last = state.round + 1 == now.end and now.split == self._split
            can = last and state.steps.ends_epoch(state.step)
            vector[control.CHECKPOINT] = can and self.can_write(here, state.step, evaluated=True)

    def can_write(self, here: RingSlot, step: int, evaluated: bool = False) -> bool:
        """Whether this rank can write its part of a checkpoint after `step`; for rank 0: and one is due.

        Args:
            evaluated: the checkpoint is that of an epoch's end, after its evaluation.
        """
        state = self._state
        if state.catching_up:
            return False
        waits = self.checkpoints.waits_for_evaluation and state.steps.ends_epoch(step)
        if evaluated != (waits and self.due(step, 0, state.epochs) is not None):
            return False
        return self.checkpoints.ready(here, step, state.steps, state.epochs, evaluated)

    def after(
        self,
        here: RingSlot,
        result: control.StepResult | RoundResult,
        metrics: Mapping[str, Value] | None,
    ) -> None:
        evaluated = isinstance(result, RoundResult) and result.ends_epoch and not self._state.catching_up
        if metrics is not None or evaluated:
            self.epoch_ended(evaluated)
        if result.agreed.writers == here.size and not result.agreed.nonfinite:
            self.begin(here)

    def epoch_ended(self, evaluated: bool = False) -> None:
        """Record the metrics of the last whole epoch for its checkpoint."""
        found = as_numbers(self._state.ledger.epochs.history[-1])
        self.checkpoints.epoch_ended(self._state.step, found, evaluated)

    def begin(self, here: RingSlot) -> None:
        """Begin to write the present state: the all-reduce has shown that all ranks can."""
        self.checkpoints.begin(here, self._state.ledger, self._state.steps, self._batches.layout)
