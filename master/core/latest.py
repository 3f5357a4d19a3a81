# SPDX-License-Identifier: Apache-2.0
"""The newest values of the training that users are shown. No decision depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edl.contract.heartbeats import Staleness
from edl.master.core import events as ev
from edl.master.core.facts import EpochLoss, Evaluation


@dataclass(slots=True)
class Latest:
    """The newest step of the job, its losses and its evaluations.

    Args:
        loss: of the last step.
        epoch_metrics: of the last whole epoch.
        staleness: in mode=ps, once steps were reported.
        evaluations: by split.
        evaluations_told: by split: the newest step whose evaluation was logged.
    """

    step: int = 0
    loss: float | None = None
    epoch_loss: EpochLoss | None = None
    epoch_metrics: dict[str, float | None] = field(default_factory=dict)
    staleness: Staleness | None = None
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    evaluations_told: dict[str, int] = field(default_factory=dict)

    def go_to(self, step: int) -> None:
        """Show this step: the training continues there, or has ended there."""
        self.step = step

    def progress(self, event: ev.Progress) -> None:
        """Take over the ring's progress."""
        self.step = max(self.step, event.step)
        self.loss = event.loss if event.loss is not None else self.loss
        self.epoch_loss = later_loss(self.epoch_loss, event.epoch_loss)
        self.staleness = event.staleness or self.staleness

    def epoch_ended(self, event: ev.EpochEnded, is_known: bool) -> None:
        """Take over the means of an epoch; its metrics only if the job's steps are known."""
        self.epoch_loss = later_loss(self.epoch_loss, event.loss)
        if is_known:
            self.epoch_metrics = event.metrics

    def epoch_again(self) -> None:
        """Drop the loss of an epoch that is trained again."""
        self.epoch_loss = None

    def evaluated(self, event: ev.Evaluated) -> bool:
        """Take over an evaluation. False if it is one repeated after a loss of state, and logged already."""
        self.evaluations[event.split] = Evaluation(event.step, event.records, event.metrics)
        before = self.evaluations_told.get(event.split, -1)
        self.evaluations_told[event.split] = max(event.step, before)
        return event.step > before

    def restore(self, evaluations: Mapping[str, Evaluation]) -> None:
        """Continue with the evaluations of an earlier master."""
        self.evaluations = dict(evaluations)
        self.evaluations_told = {split: found.step for split, found in evaluations.items()}


def later_loss(known: EpochLoss | None, told: EpochLoss | None) -> EpochLoss | None:
    """Return the loss of the later epoch; within one epoch, the one over more records."""
    if known is None or told is None:
        return told or known
    return told if (told.epoch, told.records) >= (known.epoch, known.records) else known
