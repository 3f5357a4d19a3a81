"""A job that is to end before its training is complete, by people's will or by its deadline: at once, or with
its state kept.

    asked ──▶ all leave the ring at a step boundary ──▶ the most advanced one writes the state ──▶ the end

So nothing that was trained is lost: who goes on from that checkpoint begins where this job has ended.
If it cannot be written, the job goes on, and says so; unless it was to end anyway.
"""

from __future__ import annotations

from dataclasses import replace

from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import events as ev
from edl.master.core import training
from edl.master.core.checkpoints import Farewell
from edl.master.core.state import State
from edl.master.core.workers import OUT, Kind

LAST_SECONDS = 60.0  # that a job whose deadline has passed may take to write its state


def asked(job: State, event: ev.StopAsked) -> None:
    """People want the job to end."""
    if not event.checkpoint:
        job.end(Phase.Stopped, event.why)
        return
    job.stop_asked, job.not_stopped = event.id, ""
    if job.checkpoints.enabled:
        begin(job, Farewell(Phase.Stopped, event.why, event.force))
    else:
        _give_up(job, "the job writes no checkpoints (checkpoint.dir is empty)")


def begin(job: State, farewell: Farewell) -> None:
    """End it like this, once its state is kept."""
    if job.ending is not None:
        return
    if job.farewell is None and farewell.phase is Phase.Stopped:
        job.notice(Reason.Stopping, f"{farewell.reason}: the state is written, and then the job ends")
    job.farewell = farewell
    job.checkpoints.write_now(job.now)


def proceed(job: State) -> None:
    """What is to be done for it now."""
    farewell = job.farewell
    if farewell is None or job.ending is not None:
        return
    if farewell.until is not None and farewell.until <= job.now:
        job.end(farewell.phase, f"{farewell.reason}; its state could not be written in time")
        return
    if job.ring.running:
        if job.ring.up:  # until then they are sent the state, or restore it
            job.close("the job is to end", planned=True)
        return
    if job.pool.any(lambda kind: kind.place != OUT):
        return
    holders = job.pool.where(_holds)
    if needs_a_ring(job):
        return
    if not holders:
        newest = job.checkpoints.step
        kept = f"the newest checkpoint is of step {newest:,}" if newest else "there is no checkpoint"
        job.end(farewell.phase, f"{farewell.reason}; no worker holds its state, {kept}")
        return
    last = max(holders, key=lambda w: (w.step, -w.id))
    if job.checkpoints.has(last.step):
        training.go_on_from(job, last.step)  # so far it is
        job.step = last.step
        job.end(farewell.phase, f"{farewell.reason}; its state is in the checkpoint of step {last.step:,}")
    elif job.exporter is None:  # who saves the model has written the state before
        job.do(*job.checkpoints.write([last], job.now))


def needs_a_ring(job: State) -> bool:
    """Nobody holds the state now, and workers come that bring copies: they take it up in a ring first."""
    if job.farewell is None or job.pool.any(_holds):
        return False
    copies = any(copy.step >= job.checkpoints.step for copy in job.pool.copies.values())
    awaited = job.copies_awaited > 0 and job.copies_until > job.now
    return copies or bool(job.pool.bringing) or awaited


def failed(job: State, why: str) -> None:
    """The state could not be written."""
    if (farewell := job.farewell) is None or job.ending is not None:
        return
    if farewell.force:
        job.end(farewell.phase, f"{farewell.reason}; its state could not be written: {why}")
    else:
        _give_up(job, why)


def meet_the_deadline(job: State) -> None:
    """End the job if it has been active for as long as is allowed."""
    at, farewell = _deadline(job), job.farewell
    if at is None or at > job.now or job.ending is not None:
        return
    until = job.now + LAST_SECONDS
    if farewell is not None:
        if farewell.until is None:  # people have asked for its end already
            job.farewell = replace(farewell, force=True, until=until)
        return
    why = f"DeadlineExceeded: the job has been active for {job.active_deadline:,} s (activeDeadlineSeconds)"
    job.notice(Reason.DeadlineExceeded, why)
    if job.checkpoints.enabled:
        begin(job, Farewell(Phase.Failed, why, force=True, until=until))
    else:
        job.end(Phase.Failed, why)


def deadlines(job: State) -> tuple[float | None, float | None]:
    """When time alone ends it."""
    return _deadline(job), job.farewell.until if job.farewell is not None else None


def _deadline(job: State) -> float | None:
    if not job.active_deadline or job.began_at is None:
        return None
    return job.began_at - job.active_before + job.active_deadline


def _give_up(job: State, why: str) -> None:
    job.farewell, job.not_stopped, job.regroup_at = None, why, job.now
    job.notice(Reason.StopFailed, f"the job is not stopped: {why}")


def _holds(kind: Kind) -> bool:
    return kind.has_state and not kind.stopped
