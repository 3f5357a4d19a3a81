# SPDX-License-Identifier: Apache-2.0
"""Steps by arithmetic: all ranks make each step together, in an all-reduce.

Which records make up a step, and which of them are this rank's, follows from the step's number alone
(edl/contract/steps.py). So no rank asks for a step, and the records of the next steps are read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from edl.config import Config
from edl.contract.layout import Layout, StepSlice
from edl.trainer.agreement.checks import check, refuse_nonfinite, refuse_too_many_bad
from edl.trainer.agreement.control import StepResult
from edl.trainer.agreement.ledger import RoundResult
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.model import digests
from edl.trainer.parts.part import StepSource
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.base import RingSlot
from edl.trainer.session.orders import FormRing
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State


class RingSteps(StepSource):
    """Makes one step at a time: this rank's gradients and an all-reduce, then the update with the result.

    Args:
        batches: this rank's part of each step.
        report: receives what each step took and found.
    """

    def __init__(self, config: Config, session: Session, state: State, batches: Batches, report: Telemetry):
        super().__init__(batches)
        self._stops, self._most_bad = config.training.on_non_finite == "stop", config.data.max_bad_records
        self._deterministic = config.training.deterministic
        self._session, self._state, self._report = session, state, report
        self._layout = Layout(0)  # of the data in the present ring
        self._batch: Batch | None = None  # this rank's part of the last step
        self._ended: list[tuple[int, float | None, dict[str, float], str]] = []  # epochs, to be reported
        state.epoch_ended = self._epoch_ended

    def entering(self, form: FormRing) -> None:
        """Read this worker's records of the next step while the ring is formed.

        Only if this worker holds a state already: the state of a different member may be at a different step.
        """
        state, self._layout = self._state, form.layout
        if state.has_state and form.layout == self._batches.layout and state.step < state.end:
            self._batches.take(form.layout, form.first_share(self._session.worker))
            self._batches.begin(state.step)

    def take(self, share: StepSlice, since: int) -> None:
        if since > self._state.step:
            self._batches.take_from(since, share)
        else:
            self._batches.take(self._layout, share)

    def compute(self, here: RingSlot, begin: Callable[[Batch | None], np.ndarray]) -> StepResult:
        state = self._state
        step, epoch, end, records = state.step, state.steps.epoch(state.step), state.end, state.records
        if here.rank == 0:
            self._report.to_go(end - step)
        self._batch = batch = self._batches.of(step, end) if step < end else None
        bad = batch.bad if batch is not None else ()
        mine = batch or None  # without records, a rank takes part with weight zero
        following = partial(self._batches.following, step)
        # Gradients and the all-reduce; nothing changes.
        result = state.compute(mine, begin(batch), here.rank, following)
        # From here on the step has happened for this rank, and all ranks have the step before it.
        self._report.step_summed(result.waited)
        agreed = result.agreed
        check(agreed, step, state.round, here.size, records)
        if agreed.nonfinite and self._stops:
            refuse_nonfinite(batch, result, step, self._session.worker)
        refuse_too_many_bad(agreed, bad, epoch, state.ledger.bad.get(epoch, 0), self._most_bad)
        return result

    def apply(self, result: StepResult) -> Mapping[str, Value] | None:
        return self._state.apply(result, self._batch or None)  # the model and the ledger, together

    def after(
        self, here: RingSlot, result: StepResult | RoundResult, metrics: Mapping[str, Value] | None
    ) -> None:
        if isinstance(result, RoundResult):
            return
        state, batch, report = self._state, self._batch, self._report
        if batch is not None and batch.bad:
            report.left_out(here.generation, state.steps.epoch(state.step - 1), batch.bad)
        report.step_done(here.generation, here.rank, state.step, len(batch or ()), result.agreed)
        for ended in self._ended:
            report.epoch_ends(*ended)
        self._ended.clear()

    def _epoch_ended(self, metrics: Mapping[str, Value]) -> None:
        """Note how an epoch has ended, while the state is the one after its last step."""
        state = self._state
        epochs, loss = state.steps.epoch(state.ledger.step), state.ledger.epochs.last_loss
        sha256 = digests.sha256(state.learner.parts()) if self._deterministic else ""
        self._ended.append((epochs, loss, as_numbers(metrics), sha256))
