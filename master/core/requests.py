# SPDX-License-Identifier: Apache-2.0
"""Requests of users: to begin, to change live values, to write a checkpoint. `stopping` has those to end."""

from __future__ import annotations

from edl.contract.reasons import Reason
from edl.master.core import events as ev
from edl.master.core import training
from edl.master.core.state import State

# True of a laptop and of a cluster: the core does not know where the job runs.
TURN_THEM_ON = (
    "Set checkpoint.dir to an address such as s3://bucket/prefix, or to a directory that all workers share "
    "(on Kubernetes with checkpoint.existingClaim)"
)
CHECKPOINTS_OFF_WITH_SERVERS = (
    "checkpoints are off; if a parameter server loses its log, training restarts from scratch. "
    + TURN_THEM_ON
)
CHECKPOINTS_OFF_WITH_COPIES = (
    "checkpoints are off; if both parameter servers with a row lose their logs, training restarts from "
    "scratch. " + TURN_THEM_ON
)
CHECKPOINTS_OFF = "checkpoints are off; if all workers die, training restarts from scratch. " + TURN_THEM_ON


def begin(job: State, event: ev.Begin) -> None:
    """Begin the job, and warn if it writes no checkpoints."""
    job.lifetime.begin(job.now)
    job.goodput.turn(job.goodput.kind, job.now)
    if job.checkpoints.enabled or not job.config.trains:
        return
    off = CHECKPOINTS_OFF
    if job.config.asynchronous:
        off = CHECKPOINTS_OFF_WITH_COPIES if job.config.ps.replicas > 1 else CHECKPOINTS_OFF_WITH_SERVERS
    job.notice(Reason.CheckpointsOff, off)


def scale(job: State, event: ev.Scale) -> None:
    """Change the number of workers."""
    job.notice(Reason.Scaled, f"workers {job.target} -> {event.workers}")
    job.target = event.workers


def live(job: State, event: ev.Live) -> None:
    """Apply changed live values."""
    if event.workers != job.target:
        job.notice(Reason.Scaled, f"workers {job.target} -> {event.workers}")
    if event.suspended != job.suspended:
        if event.suspended:
            job.notice(Reason.Suspended, "suspended: the workers leave the ring and keep their state")
        else:
            job.notice(Reason.Resumed, "resumed: the workers form a ring and train on")
    job.target, job.min_size, job.suspended = event.workers, event.min_workers, event.suspended
    job.next_ring.review(job.now)
    if event.active_deadline_seconds is not None:
        job.lifetime.limit(event.active_deadline_seconds)
    if job.config.trains:
        training.change_epochs(job, event.epochs)


def refused(job: State, event: ev.Refused) -> None:
    """Report a change of values that a running job must refuse."""
    job.notice(Reason.SpecRefused, event.why)


def checkpoint(job: State, event: ev.CheckpointAsked) -> None:
    """Make a checkpoint due now."""
    if job.checkpoints.enabled:
        job.checkpoints.ask(job.now)
    else:
        job.notice(Reason.SpecRefused, f"no checkpoint is written: {CHECKPOINTS_OFF}")
