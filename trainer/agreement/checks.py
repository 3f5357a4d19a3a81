# SPDX-License-Identifier: Apache-2.0
"""Checks that end a step on all ranks before any rank has changed its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from edl.errors import DataError, EdlError
from edl.trainer.agreement.control import Agreed, StepResult
from edl.trainer.agreement.ledger import LedgerBroken
from edl.trainer.records.batches import BadRecord, Batch
from edl.trainer.ring.base import RingBroken


class NonFinite(EdlError):
    """A gradient or loss is not finite, and the job is to stop then."""

    def __init__(self, batch: Batch, step: int, worker: int):
        value = batch.not_finite()
        super().__init__(
            f"the loss or a gradient is not finite at step {step + 1}, on worker {worker}, in the {batch}"
            + (f": {value}" if value else "")
        )


def check(agreed: Agreed, step: int, round: int, size: int, records: int) -> None:
    """Check that all ranks made the same step or evaluation batch, and that no record is missing.

    Raises:
        LedgerBroken: the ranks are at different steps, or the records are not as many as expected.
    """
    if not agreed.all_at(step, round, size):
        raise LedgerBroken(f"the ranks are at different steps (this one at step {step + 1})")
    if (found := agreed.records + agreed.bad) != records:
        raise LedgerBroken(f"step {step + 1} has {found} records of {size} ranks, expected {records}")


def refuse_nonfinite(batch: Batch | None, result: StepResult, step: int, worker: int) -> NoReturn:
    """End the step because a loss or gradient is not finite.

    Args:
        batch: this rank's part.

    Raises:
        NonFinite: this rank's contribution is not finite; the job ends.
        RingBroken: a different rank's is not, which reports it; this rank waits for the master's order.
    """
    if batch is None or not result.at_fault:
        raise RingBroken("the loss or a gradient of another worker is not finite")
    raise NonFinite(batch, step, worker)


def refuse_too_many_bad(
    agreed: Agreed, mine: Sequence[BadRecord], epoch: int, before: int, most: int
) -> None:
    """End the step if an epoch has more bad records than the job allows.

    Args:
        mine: the bad records in this rank's part.
        before: the number of records left out of the epoch's earlier steps.
        most: the number of records that may be left out of an epoch.

    Raises:
        DataError: there are too many, and some are this rank's: the job ends.
        RingBroken: there are too many, all on other ranks, which report it; this rank waits for the master's
            order.
    """
    total = before + agreed.bad
    if not agreed.bad or total <= most:
        return
    if not mine:
        raise RingBroken("another worker has found more bad records than data.maxBadRecords allows")
    raise DataError(
        f"record {mine[-1].index} is bad: {mine[-1].why}. With it, {total} records of epoch {epoch + 1} "
        f"are; data.maxBadRecords is {most}"
    )
