# SPDX-License-Identifier: Apache-2.0
"""Stop a job before its training is complete, on request or at its deadline: at once, or after a checkpoint.

    request ──▶ all leave the ring at a step boundary ──▶ the most advanced worker writes a checkpoint ──▶ end

A job that resumes from this checkpoint continues at the step where this job ended. If the checkpoint cannot
be written, the job continues and reports `StopFailed`, unless the stop is forced.
"""

from __future__ import annotations

from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import events as ev
from edl.master.core import training
from edl.master.core.ring import CHANGE
from edl.master.core.state import State, deadline
from edl.master.core.stop_request import PendingStop
from edl.master.core.workers import Kind

LAST_SECONDS = 60.0  # for the last checkpoint after the deadline


def asked(job: State, event: ev.StopAsked) -> None:
    """Handle a request to stop the job."""
    if not event.checkpoint:
        job.end(Phase.Stopped, event.why)
        return
    job.stop_request.ask(event.id)
    if job.checkpoints.enabled:
        begin(job, PendingStop(Phase.Stopped, event.why, event.force))
    else:
        _give_up(job, "the job writes no checkpoints (checkpoint.dir is empty)")


def begin(job: State, pending_stop: PendingStop) -> None:
    """End the job as `pending_stop` says, once its state is in a checkpoint."""
    if job.ending is not None:
        return
    if job.stop_request.pending is None and pending_stop.phase is Phase.Stopped:
        job.notice(Reason.Stopping, f"{pending_stop.reason}: the state is written, and then the job ends")
    job.stop_request.begin(pending_stop)
    job.checkpoints.write_now(job.now)


def proceed(job: State) -> None:
    """Take the next action of a pending stop."""
    pending_stop = job.stop_request.pending
    if pending_stop is None or job.ending is not None:
        return
    if pending_stop.until is not None and pending_stop.until <= job.now:
        job.end(pending_stop.phase, f"{pending_stop.reason}; its state could not be written in time")
        return
    if job.ring.running:
        if job.ring.up:  # until then members receive the state, or restore it
            job.close("the job is to end", CHANGE)
        return
    if job.pool.any(lambda kind: kind.in_ring):
        return
    holders = job.pool.where(_holds)
    if not holders:
        newest = job.checkpoints.step
        kept = f"the newest checkpoint is of step {newest:,}" if newest else "there is no checkpoint"
        job.end(pending_stop.phase, f"{pending_stop.reason}; no worker holds its state, {kept}")
        return
    last = max(holders, key=lambda w: (w.step, -w.id))
    if job.checkpoints.has(last.step):
        training.go_on_from(job, last.step)  # which records this step as the progress
        job.latest.go_to(last.step)
        kept = f"; its state is in the checkpoint of step {last.step:,}" if last.step else ""
        job.end(pending_stop.phase, f"{pending_stop.reason}{kept}")
    elif job.exporter is None:  # an exporter has written the state already
        job.do(*job.checkpoints.write([last], job.now))


def failed(job: State, why: str) -> None:
    """Handle a checkpoint of a pending stop that could not be written."""
    if (pending_stop := job.stop_request.pending) is None or job.ending is not None:
        return
    if pending_stop.force:
        job.end(pending_stop.phase, f"{pending_stop.reason}; its state could not be written: {why}")
    else:
        _give_up(job, why)


def enforce_deadline(job: State) -> None:
    """End the job if it has been active for activeDeadlineSeconds."""
    at, pending_stop = _deadline(job), job.stop_request.pending
    if at is None or at > job.now or job.ending is not None:
        return
    until = job.now + LAST_SECONDS
    if pending_stop is not None:
        if pending_stop.until is None:  # a stop was requested already
            job.stop_request.force(pending_stop, until)
        return
    seconds = job.lifetime.max_seconds
    why = f"DeadlineExceeded: the job has been active for {seconds:,} s (activeDeadlineSeconds)"
    job.notice(Reason.DeadlineExceeded, why)
    if job.checkpoints.enabled:
        begin(job, PendingStop(Phase.Failed, why, force=True, until=until))
    else:
        job.end(Phase.Failed, why)


@deadline
def stop_forced_at(job: State) -> float | None:
    """Return when a pending stop ends the wait for its checkpoint; None without one."""
    return job.stop_request.pending.until if job.stop_request.pending is not None else None


@deadline
def _deadline(job: State) -> float | None:
    return job.lifetime.ends_at


def _give_up(job: State, why: str) -> None:
    job.stop_request.give_up(why)
    job.next_ring.review(job.now)
    job.notice(Reason.StopFailed, f"the job is not stopped: {why}")


def _holds(kind: Kind) -> bool:
    return kind.has_state and not kind.stopped
