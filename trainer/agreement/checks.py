"""What ends a step for all ranks before any of them has changed anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from edl.errors import DataError, EdlError
from edl.trainer.agreement.control import Agreed, Sums
from edl.trainer.agreement.ledger import LedgerBroken
from edl.trainer.model.data import BadRecord, Batch
from edl.trainer.ring.base import RingBroken


class NonFinite(EdlError):
    """A gradient or loss is not finite, and the job does not go on after one."""


def check(agreed: Agreed, step: int, round: int, size: int, records: int) -> None:
    """All ranks took one step, or one round after it, and all of its records are in it.

    Raises:
        LedgerBroken: it is not so.
    """
    if not agreed.all_at(step, round, size):
        raise LedgerBroken(f"the ranks take different steps (this one step {step + 1})")
    if (found := agreed.records + agreed.bad) != records:
        raise LedgerBroken(f"step {step + 1} has {found} records of {size} ranks, expected {records}")


def refuse_nonfinite(batch: Batch | None, sums: Sums, step: int, worker: int) -> NoReturn:
    """A part of the step is not finite.

    Args:
        batch: this rank's part.

    Raises:
        NonFinite: it is this rank's, and the job ends.
        RingBroken: it is another's, which says so; this one waits for what follows.
    """
    if batch is None or not sums.at_fault:
        raise RingBroken("the loss or a gradient of another worker is not finite")
    raise NonFinite(
        f"the loss or a gradient is not finite at step {step + 1}, on worker {worker}, in the {batch}"
    )


def refuse_too_many_bad(
    agreed: Agreed, mine: Sequence[BadRecord], epoch: int, before: int, most: int
) -> None:
    """Bad records are left out of the step, if the job allows as many in an epoch.

    Args:
        mine: those in this rank's part.
        before: so many were left out of the epoch's earlier steps.
        most: so many may be, in all.

    Raises:
        DataError: some are this rank's, and they are too many: the job ends.
        RingBroken: they are others', who say so; this one waits for what follows.
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
