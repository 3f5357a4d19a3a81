"""The rounds of an evaluation or prediction, on one worker: its contributions, and the result of all.

A round is an all-reduce between two steps. It changes the ledger and no weight: the ledger has the totals of
a
pass until the pass is over, and then its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from edl.config import Config
from edl.contract.evaluation import FINAL, Pass
from edl.contract.layout import Part
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.agreement.metric_values import Value, as_numbers
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.error_report import format_error
from edl.trainer.session.state import Session


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

    def take(self, part: Part) -> None:
        """Set the part of each round that this worker evaluates."""
        ...

    def nothing(self, split: str) -> np.ndarray:
        """The contribution of no records, float32 [values]."""
        ...

    def part(self, now: Pass, round: int) -> tuple[np.ndarray, int]:
        """This rank's contribution to a round, float32 [values], and its number of records. Changes nothing.

        Raises:
            anything: by the user's code, or by the data.
        """
        ...

    def results(self, split: str, totals: np.ndarray) -> dict[str, Value]:
        """The loss and the metrics, from the sums over all rounds, float64 [values]."""
        ...


class Rounds:
    """The rounds of one worker.

    Args:
        evaluation: the evaluation; None if the job does not evaluate.
    """

    def __init__(self, evaluation: Evaluation | None, config: Config, session: Session):
        self.evaluation, self._config, self._session = evaluation, config, session

    @property
    def sizes(self) -> Mapping[str, int]:
        """The records of each split that there is."""
        return self.evaluation.sizes if self.evaluation is not None else {}

    def take(self, part: Part) -> None:
        """Set the part of each round that this worker evaluates."""
        if self.evaluation is not None:
            self.evaluation.take(part)

    def due(self, step: int, round: int, epochs: int) -> Pass | None:
        """The pass of this round; None if a step is due."""
        if self.evaluation is None:
            return None
        return next((now for now in self.evaluation.after(step, epochs) if round < now.end), None)

    def part(self, now: Pass, round: int, contribution: np.ndarray, catching_up: bool) -> np.ndarray:
        """This rank's contribution to a round, float32 [n].

        A rank that cannot evaluate its part sets the non-finite field: the pass ends without a result, and
        the
        training goes on.

        Args:
            contribution: the control vector of this rank; its number of records is added here.
            catching_up: whether this rank has not the state yet: then it adds nothing.
        """
        assert self.evaluation is not None
        if catching_up:
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

    def put(self, ledger: Ledger, sums: control.StepResult, ends_epoch: bool) -> Ledger:
        """The ledger with a round more; with the last one of a pass, what the pass has found.

        Args:
            ends_epoch: whether the step before it does.
        """
        now, values = sums.given
        ledger = ledger.after_round(sums.round, values)
        if sums.round < now.end:
            return ledger
        found = {} if sums.agreed.nonfinite else self._results(now.split, np.frombuffer(ledger.totals))
        ledger = ledger.after_pass(sums.round, now.split, now.records, found)
        if now.split == self._config.evaluation.split and ends_epoch:
            return replace(ledger, epochs=ledger.epochs.evaluated(found))
        return ledger

    def _results(self, split: str, totals: np.ndarray) -> dict[str, Value]:
        """The results from the sums of all rounds, the same on all ranks; empty if the user's metrics
        fail."""
        assert self.evaluation is not None
        try:
            return self.evaluation.results(split, totals)
        except (Exception, SystemExit) as error:
            if not self._config.trains:
                raise
            self._session.warn(
                f"the metrics over data({split!r}) could not be computed: {format_error(error)}"
            )
            return {}

    def say(self, generation: int, ledger: Ledger, split: str) -> None:
        """Tell what the last pass over a split has found."""
        found = ledger.evaluated[split]
        numbers = as_numbers(found.metrics)
        message = pb.Evaluated(step=found.step, split=split, records=found.records, metrics=numbers)
        self._session.say(generation, evaluated=message)

    def worth(self, ledger: Ledger) -> Mapping[str, Value] | None:
        """The results for exactly this state; None if it was not evaluated, or only in part, or the
        evaluation failed."""
        found = ledger.evaluated.get(FINAL if self._config.trains else self._config.evaluation.split)
        if self.evaluation is None or not self.evaluation.is_whole or found is None:
            return None
        return found.metrics or None if found.step == ledger.step else None
