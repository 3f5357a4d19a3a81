# SPDX-License-Identifier: Apache-2.0
"""What workers report of a checkpoint: its parts are written, it is complete, it failed."""

from __future__ import annotations

from edl.contract.reasons import Reason
from edl.master.core import consistency, reports, stopping
from edl.master.core import events as ev
from edl.master.core.state import State, deadline
from edl.master.core.workers import WorkerRecord

CHECKPOINTS = "writing checkpoints"  # a subsystem in the status, which may be degraded


@deadline
def checkpoint_due(job: State) -> float | None:
    """Return when the next checkpoint is due; None if the job writes none."""
    return job.checkpoints.next_deadline()


def parts_written(job: State, _w: WorkerRecord, event: ev.PartsWritten) -> None:
    """Order the manifest of a checkpoint whose parts are written and agree."""
    if consistency.at_checkpoint(job, event):
        job.do(*job.checkpoints.parts_written(event))


def complete(job: State, _w: WorkerRecord, event: ev.Checkpointed) -> None:
    """Record a complete checkpoint."""
    job.divergence.agree()
    taken_at = job.checkpoints.ordered_at
    job.goodput.keep(job.now if taken_at is None else taken_at)
    if job.checkpoints.is_whole(event, job.now):
        size = event.nbytes / (1 << 20)
        where = f"in {job.config.checkpoint.dir} ({size:,.1f} MiB)"
        job.notice(Reason.Checkpointed, f"the checkpoint of step {event.step:,} is {where}")
    reports.degraded(job, ev.Degraded(CHECKPOINTS, ""))


def failed(job: State, w: WorkerRecord, event: ev.CheckpointFailed) -> None:
    """Report a failed checkpoint; the next one comes later."""
    if job.checkpoints.fails(event, job.now):
        last = (
            f"the newest one is of step {job.checkpoints.step:,}"
            if job.checkpoints.step
            else "no checkpoint exists"
        )
        why = f"worker {w.id}: {event.why}; the training goes on, {last}"
        reports.degraded(job, ev.Degraded(CHECKPOINTS, why))
        stopping.failed(job, why)
