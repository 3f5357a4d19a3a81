"""A job that is to end before its training is complete, by people's will: at once, or with its state kept.

    asked ──▶ all leave the ring at a step boundary ──▶ the most advanced one writes the state ──▶ the end

So nothing that was trained is lost: who goes on from that checkpoint begins where this job has ended.
If it cannot be written, the job goes on, and says so; unless it was to end anyway.
"""

from __future__ import annotations

from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from master.core import events as ev
from master.core.checkpoints import Farewell
from master.core.state import State
from master.core.workers import OUT, Kind


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
    if job.farewell is None:
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
    if not holders:
        newest = job.checkpoints.step
        kept = f"the newest checkpoint is of step {newest:,}" if newest else "there is no checkpoint"
        job.end(farewell.phase, f"{farewell.reason}; no worker holds its state, {kept}")
        return
    last = max(holders, key=lambda w: (w.step, -w.id))
    if job.checkpoints.has(last.step):
        job.step = last.step
        job.end(farewell.phase, f"{farewell.reason}; its state is in the checkpoint of step {last.step:,}")
    elif job.exporter is None:  # who saves the model has written the state before
        job.do(*job.checkpoints.write([last], job.now))


def failed(job: State, why: str) -> None:
    """The state could not be written."""
    if (farewell := job.farewell) is None or job.ending is not None:
        return
    if farewell.force:
        job.end(farewell.phase, f"{farewell.reason}; its state could not be written: {why}")
    else:
        _give_up(job, why)


def next_deadline(job: State) -> float | None:
    """When time alone ends it."""
    return job.farewell.until if job.farewell is not None else None


def _give_up(job: State, why: str) -> None:
    job.farewell, job.not_stopped, job.regroup_at = None, why, job.now
    job.notice(Reason.NotStopped, f"the job is not stopped: {why}")


def _holds(kind: Kind) -> bool:
    return kind.has_state and not kind.stopped
