# SPDX-License-Identifier: Apache-2.0
"""The batches of an evaluation or prediction, as a part of the loop.

An evaluation batch is an all-reduce between two steps, over held-out records. Each rank evaluates its share
of the batch, which changes the ledger and no weight: the ledger has the totals of a pass until the pass is
over, and then its result. It makes a new state with the same weights: members with the same step and batch
have the same state, and members that are behind receive it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import numpy as np

from edl.config import Config
from edl.contract.evaluation import Pass, final_split
from edl.contract.layout import StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.agreement.checks import check
from edl.trainer.agreement.ledger import Ledger, RoundResult
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.parts.part import LoopPart
from edl.trainer.ring.base import Ring, RingBroken, RingSlot
from edl.trainer.runtime.error_report import format_error
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State


class Evaluation(Protocol):
    """The held-out data, and how the model is evaluated on them."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of records of each split with records."""
        ...

    def after(self, step: int, epochs: int) -> tuple[Pass, ...]:
        """The passes due after `step` steps, in a job that trains `epochs`."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the passes find all that there is to know of a trained model."""
        ...

    def take(self, part: StepSlice) -> None:
        """Set the part of each batch that this worker evaluates."""
        ...

    def idle(self) -> Sequence[Future[None]]:
        """Return futures that are done when all reads that have begun until now have returned."""
        ...

    def nothing(self, split: str) -> np.ndarray:
        """The contribution of no records, float32 [values]."""
        ...

    def part(self, now: Pass, round: int) -> tuple[np.ndarray, int]:
        """This rank's contribution to a batch, float32 [values], and its number of records. Changes nothing.

        Raises:
            anything: by the user's code, or by the data.
        """
        ...

    def results(self, split: str, totals: np.ndarray) -> dict[str, Value]:
        """The loss and the metrics, from the sums over all batches, float64 [values]."""
        ...


class EvaluationBatches(LoopPart):
    """The evaluation batches of one worker.

    Args:
        evaluation: the held-out data, and how the model is evaluated on them.
        keep: saves a copy of the trained model of this step before it is evaluated.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        config: Config,
        session: Session,
        state: State,
        ring: Ring,
        report: Telemetry,
        keep: Callable[[int], None] = lambda step: None,
    ):
        self.evaluation, self._config, self._session = evaluation, config, session
        self._state, self._ring, self._report, self._keep = state, ring, report, keep
        self._now: Pass | None = None  # of the last evaluation batch

    def ready(self, message: pb.Ready) -> None:
        message.held_out.update(self.evaluation.sizes)

    def take(self, share: StepSlice, since: int) -> None:
        self.evaluation.take(share)

    def idle(self) -> Sequence[Future[None]]:
        return self.evaluation.idle()

    def ring_up(self, here: RingSlot) -> None:
        if here.rank == 0 and not self._state.catching_up:
            for split in self._state.ledger.evaluated:
                # The worker that found it may have died before reporting it.
                self._say(here.generation, split)

    def due(self, step: int, round: int, epochs: int) -> Pass | None:
        """Return the pass of this evaluation batch; None if a step is due."""
        return next((now for now in self.evaluation.after(step, epochs) if round < now.end), None)

    def between_steps(self, here: RingSlot, vote: Callable[[], np.ndarray]) -> RoundResult | None:
        state, config = self._state, self._config
        if (now := self.due(state.step, state.round, state.epochs)) is None:
            return None
        self._now, round, ends_epoch = now, state.round, state.steps.ends_epoch(state.step)
        ended = config.trains and state.steps.ended(state.step, state.epochs)
        if ended and round == 0 and here.rank == here.speaker:
            self._keep(state.step)  # the trained model survives if its evaluation kills this worker
        contribution = vote()
        values = self._part(now, round, contribution)
        summed = np.asarray(self._ring.reduce(np.concatenate([values, contribution])))
        agreed, total = control.read(summed[len(values) :]), summed[: len(values)]
        failed, (start, stop) = agreed.nonfinite, now.positions(round)
        check(agreed, state.step, round, here.size, agreed.records if failed else stop - start)
        last = round + 1 == now.end
        return RoundResult(
            agreed,
            now.end if failed else round + 1,
            last and ends_epoch and now.split == config.evaluation.split,
            summed.nbytes,
            lambda ledger: self._put(ledger, now, now.end if failed else round + 1, total, failed),
        )

    def after(
        self,
        here: RingSlot,
        result: control.StepResult | RoundResult,
        metrics: Mapping[str, Value] | None,
    ) -> None:
        if not isinstance(result, RoundResult):
            return
        assert self._now is not None
        now = self._now
        self._report.round_done(here.generation, here.rank, self._state.step, now, result.round)
        if result.round == now.end and here.rank == 0 and not self._state.catching_up:
            self._say(here.generation, now.split)

    def final_metrics(self, ledger: Ledger) -> Mapping[str, Value] | None:
        """Return the results for exactly this state; None without results.

        No results exist if the state was not evaluated, or only in part, or the evaluation failed.
        """
        split = self._config.evaluation.split
        trained = final_split(split, self.evaluation.sizes) if self._config.trains else split
        found = ledger.evaluated.get(trained)
        if not self.evaluation.is_whole or found is None:
            return None
        return found.metrics or None if found.step == ledger.step else None

    def _part(self, now: Pass, round: int, contribution: np.ndarray) -> np.ndarray:
        """Return this rank's contribution to an evaluation batch, float32 [n].

        A rank that cannot evaluate its part sets the non-finite field: the pass ends without a result, and
        the training goes on. A rank without the state adds nothing.

        Args:
            contribution: the control vector of this rank; its number of records is added here.

        Raises:
            RingBroken: the ring was cut.
            Exception: any error, in a job that does not train.
            SystemExit: the user's code exits, in a job that does not train.
        """
        if self._state.catching_up:
            return self.evaluation.nothing(now.split)
        try:
            values, contribution[control.RECORDS] = self.evaluation.part(now, round)
        except (Exception, SystemExit) as error:
            if isinstance(error, RingBroken) or not self._config.trains:
                raise
            contribution[control.NONFINITE] = 1
            self._session.warn(
                f"the model could not be evaluated on data({now.split!r}): {format_error(error)}"
            )
            return self.evaluation.nothing(now.split)
        return values

    def _put(self, ledger: Ledger, now: Pass, round: int, values: np.ndarray, failed: bool) -> Ledger:
        """Return the ledger with one more batch; with the last one of a pass, also the result of the pass.

        Args:
            round: the number of the evaluation batch after it.
        """
        ledger = ledger.after_round(round, values)
        if round < now.end:
            return ledger
        found = {} if failed else self._results(now.split, np.frombuffer(ledger.totals))
        ledger = ledger.after_pass(round, now.split, now.records, found)
        if now.split == self._config.evaluation.split and self._state.steps.ends_epoch(ledger.step):
            return replace(ledger, epochs=ledger.epochs.evaluated(found))
        return ledger

    def _results(self, split: str, totals: np.ndarray) -> dict[str, Value]:
        """Compute the results from the sums of all evaluation batches, the same on all ranks.

        They are empty if the user's metrics fail.

        Raises:
            Exception: any error, in a job that does not train.
            SystemExit: the user's code exits, in a job that does not train.
        """
        try:
            return self.evaluation.results(split, totals)
        except (Exception, SystemExit) as error:
            if not self._config.trains:
                raise
            self._session.warn(
                f"the metrics over data({split!r}) could not be computed: {format_error(error)}"
            )
            return {}

    def _say(self, generation: int, split: str) -> None:
        """Report the results of the last pass over a split to the master."""
        found = self._state.ledger.evaluated[split]
        numbers = as_numbers(found.metrics)
        message = pb.Evaluated(step=found.step, split=split, records=found.records, metrics=numbers)
        self._session.say(generation, evaluated=message)
