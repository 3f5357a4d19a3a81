# SPDX-License-Identifier: Apache-2.0
"""Views of a job for users and programs: plain dictionaries, ready for JSON.

`status` is the present status, with data from the workers' heartbeats. `summary` is kept after the end. It is
derived from the job's state alone, so a replayed journal gives the same summary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from edl.contract.heartbeats import Staleness, WorkerRow
from edl.contract.ids import WorkerId
from edl.contract.phases import Phase, WorkerState
from edl.formatting import how_many, numbered
from edl.master.core import events as ev
from edl.master.core import facts, membership, ps, silence
from edl.master.core.job import Job
from edl.master.core.latest import later_loss
from edl.master.core.ring import Change
from edl.master.core.state import TrainTask
from edl.master.core.workers import AWAY, OUT, UP, WorkerRecord

MAX_NAMED = 5  # workers in a sentence
BEGINNING = "starting"  # the reason of a job until its first ring, or what it waits for, is known
BEFORE_READY = {  # what workers do in their states
    WorkerState.PENDING: "not running yet",
    WorkerState.STARTING: "importing its packages",
    WorkerState.INITIALIZING: "importing and building the model, and trying a step",
}
# A time that a step waits is shown as the greatest of these that it exceeds, so that the words change seldom.
SHOWN_SECONDS = (3, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


def status(
    job: Job,
    now: float,
    beats: Mapping[WorkerId, facts.Heartbeat] = MappingProxyType({}),
    ahead: ev.Progress | None = None,
) -> dict[str, Any]:
    """Return the present status: phase, progress, workers, the last change of the ring, cost of elasticity.

    Args:
        beats: the last heartbeat of each worker.
        ahead: progress of the ring that is not reported to the core yet.
    """
    ring, task = job.ring, job.train
    if ahead is None or ahead.generation != ring.generation or not ring.steps_whole:
        ahead = ev.Progress(ring.generation, 0)
    if task is not None:
        task = replace(task, done=max(task.done, ahead.step - 1))
    total = task.steps.begins_at(task.end) if task else 0
    applied = task.steps.begins_at(task.done) if task else 0
    here = {
        w.id: b for w in job.pool if (b := beats.get(w.id)) and w.in_ring and b.generation == ring.generation
    }
    inside = {w.id: beats[w.id] for w in ring.inside if w.id in beats}
    rates = [beat.rate for beat in here.values()]
    rate = job.work.rate(rates)
    loss = later_loss(job.latest.epoch_loss, ahead.epoch_loss)
    now_on = _pass(job, ahead)
    return {
        "phase": job.phase,
        "reason": silence.waits(job)
        or _between_rings(job, inside)
        or _stalled(job, inside)
        or _newcomers(job, now)
        or _readers(job, beats)
        or _replacements(job, now)
        or _beginning(job)
        or (job.suspension if job.phase is Phase.Suspended else job.reason),
        "traceback": job.failures.traceback,
        "seconds": job.lifetime.seconds(now),
        "records": {
            "size": _records(job),
            "total": total if job.work.divides_records else 0,
            "applied": applied,
        },
        "task": _task(job, task),
        "rate": rate,
        "eta_seconds": (total - applied) / rate if rate > 0 and job.work.divides_records else None,
        "step": max(job.latest.step, ahead.step),
        "loss": job.latest.loss if ahead.loss is None else ahead.loss,
        "epoch_loss": loss.mean if loss else None,
        "epoch_metrics": job.latest.epoch_metrics,
        "pass": now_on,
        "evaluations": _evaluations(job),
        "metrics": job.result.metrics,
        "generation": ring.generation,
        "target": job.target,
        "workers": [_worker(job, worker, beats.get(worker.id), here.get(worker.id)) for worker in job.pool],
        "exporter": job.exporter,
        "began_with": job.notes.began_with,
        "predictions": job.config.prediction.dir if job.config.mode == "predict" else "",
        "checkpoint": _checkpoint(job, now),
        "stop": {"id": job.stop_request.id, "failed": job.stop_request.failure}
        if job.stop_request.id
        else None,
        "failures": job.failures.count,
        "degraded": dict(job.notes.degraded),
        "waits": ps.waits(job, now) or _waits(here),
        "staleness": _staleness(ahead.staleness or job.latest.staleness),
        "servers_stay": job.servers.stay,
        "warnings": list(job.notes.warnings),
        "last_change": _change(ring.changes[-1]) if ring.changes else None,
        "goodput": job.goodput.at(now),
    }


def summary(job: Job) -> dict[str, Any]:
    """Return the summary of a job that has ended."""
    task = job.train
    return {
        "phase": job.phase,
        "reason": job.reason,
        "traceback": job.failures.traceback,
        "seconds": job.lifetime.seconds(0.0),
        "records": {
            "size": _records(job),
            "applied": task.steps.begins_at(task.done) if task else 0,
            "skipped": task.steps.records_of(job.result.skipped) if task else 0,
            "bad": job.result.bad,
        },
        "task": {
            "kind": job.config.task,
            "mode": job.mode,
            "epochs_done": task.epochs_done if task else 0,
            "epochs": task.last_epoch if task else job.epochs,
            "steps_done": task.done if task else 0,
            "steps": task.end if task and job.work.divides_records else None,
            "skipped": [list(r) for r in job.result.skipped],
        },
        "step": job.latest.step,
        "loss": job.latest.loss,
        "epoch_loss": job.latest.epoch_loss.mean if job.latest.epoch_loss else None,
        "epoch_metrics": job.latest.epoch_metrics,
        "evaluations": _evaluations(job),
        "metrics": job.result.metrics,
        "history": {name: list(values) for name, values in job.result.history.items()},
        "model": job.result.model,
        "model_note": job.result.note,
        "exports": dict(job.result.exports),
        "failed_parts": [{"part": f.part, "why": f.why} for f in job.result.failed],
        "warnings": list(job.notes.warnings),
        "forced": list(job.notes.forced),
        "began_with": job.notes.began_with,
        "digests": {str(w): d for w, d in job.result.digests.items()},
        "goodput_seconds": job.goodput.at(job.lifetime.ended_at or 0.0),
        "longest_wait": _longest_wait(job),
        "generations": [_change(change) for change in job.ring.changes],
        "earlier_generations": asdict(job.ring.earlier),
        "failures": [
            {"worker": f.worker, "why": f.why, "traceback": f.traceback} for f in job.failures.charged
        ],
        "state_losses": job.restarts,
        "staleness": _staleness(job.latest.staleness),
        "checkpoint": _checkpoint(job, job.lifetime.ended_at or 0.0),
        "stale_messages": job.stale,
        "workers_created": job.pool.next_id,
    }


def _records(job: Job) -> int | None:
    """The number of records in an epoch; None if it is unknown, or if a script reads its own."""
    return job.train.steps.records if job.train is not None and job.work.divides_records else None


def _task(job: Job, task: TrainTask | None) -> dict[str, Any]:
    """Describe the training as of now; `task` has the steps that the core does not know of yet."""
    return {
        "kind": job.config.task,
        "mode": job.mode,
        "epoch": min(task.epochs_done + 1, task.last_epoch) if task else 0,
        "epochs": task.last_epoch if task else job.epochs,
        "step": task.done if task else 0,
        "steps": task.end if task and job.work.divides_records else None,
    }


def _worker(
    job: Job, worker: WorkerRecord, beat: facts.Heartbeat | None, in_ring: facts.Heartbeat | None
) -> dict[str, Any]:
    """Describe a worker.

    Args:
        beat: its last heartbeat.
        in_ring: the same, if the worker is in the present ring and sent it there.
    """
    row = WorkerRow(
        id=worker.id,
        handle=worker.handle,
        rank=job.ring.ranks.get(worker.id) if worker.in_ring else None,
        state="silent" if worker.place == AWAY and worker.id in job.silences else worker.state,
        delay=worker.delay,
        step=in_ring.step if in_ring else worker.step,
        rate=in_ring.rate if in_ring else 0.0,
        **(vars(beat.usage) if beat else {}),
    )
    return asdict(row)


def _stalled(job: Job, beats: Mapping[WorkerId, facts.Heartbeat]) -> str:
    """Describe which member the ring's next step waits for, and what that does; empty if steps are made.

    With all weights on servers, members make steps alone: the ring waits only if all of them wait.
    """
    if job.ending is not None or not job.ring.members:
        return ""
    busy = _busy(beats)
    if not busy or (job.config.asynchronous and len(busy) < len(job.ring.inside)):
        return ""
    said = "; ".join(f"worker {worker}, which {what}" for worker, what in busy[:MAX_NAMED])
    return f"no step is made: waiting for {said}"


def _busy(beats: Mapping[WorkerId, facts.Heartbeat]) -> list[tuple[WorkerId, str]]:
    """Return the workers that have done one thing for a while, the longest first, and what they do."""
    found = sorted(
        (-beat.activity.seconds, worker, beat.activity.what)
        for worker, beat in beats.items()
        if beat.activity is not None and beat.activity.seconds >= SHOWN_SECONDS[0]
    )
    return [(worker, f"{what}, for {_lasting(-seconds)}") for seconds, worker, what in found]


def _lasting(seconds: float) -> str:
    return f"more than {max(shown for shown in SHOWN_SECONDS if shown <= seconds)} s"


def _readers(job: Job, beats: Mapping[WorkerId, facts.Heartbeat]) -> str:
    """Describe which workers join the ring when their calls have returned; empty without such a worker."""
    busy = [
        w.id
        for w in job.pool
        if (w.reads and w.place == OUT) or (w.place == AWAY and w.id not in job.silences)
    ]
    found = {w: beats[w] for w in busy if w in beats}
    if not found or job.ending is not None:
        return ""
    doing = dict(_busy(found))
    said = "; ".join(f"worker {w}{f' {doing[w]}' if w in doing else ''}" for w in list(found)[:MAX_NAMED])
    return f"{job.reason}; when its call has returned, this worker will join the ring: {said}"


def _between_rings(job: Job, beats: Mapping[WorkerId, facts.Heartbeat]) -> str:
    """Describe which workers the next step waits for while a ring is left or formed; empty otherwise."""
    ring = job.ring
    inside = ring.inside
    # A ring trains once one member is up; the others receive the state at the same time.
    if not inside or job.ending is not None or (not ring.closing and any(w.place == UP for w in inside)):
        return ""
    said = numbered("worker", [w.id for w in inside], MAX_NAMED)
    name = f"the ring of generation {ring.generation}"
    doing = "".join(f"; worker {worker} {what}" for worker, what in _busy(beats)[:MAX_NAMED])
    if ring.closing:
        return f"{name} is being left by {said}: {ring.cause}{doing}"
    return f"{name} is being formed and waits for {said} ({ring.changes[-1].cause}){doing}"


def _beginning(job: Job) -> str:
    """Describe what the workers do before the first one is ready; empty from then on."""
    if job.reason != BEGINNING or job.ending is not None:
        return ""
    found = [(what, [w.id for w in job.pool if w.state == state]) for state, what in BEFORE_READY.items()]
    return "; ".join(f"{numbered('worker', ids, MAX_NAMED)}: {what}" for what, ids in found if ids)


def _newcomers(job: Job, now: float) -> str:
    """Describe which ready workers wait to join the ring, and for how long; empty if it does not matter."""
    ready = job.pool.where(lambda kind: kind.is_ready and kind.place == OUT)
    if not ready or job.next_ring.join_at is None or job.next_ring.join_at <= now or not job.ring.up:
        return ""
    names = numbered("worker", [w.id for w in ready], MAX_NAMED)
    within = _within(job.next_ring.join_at - now)
    return f"{job.reason}; {names} will join {within}, or when the ring changes before"


def _replacements(job: Job, now: float) -> str:
    """Describe how long lost workers are not replaced, and why; empty if no replacement is delayed."""
    lacks = membership.missing(job)
    if lacks <= 0 or job.backoff.until <= now or job.ending is not None:
        return ""
    start = f"{how_many(lacks, 'worker')} will start {_within(job.backoff.until - now)}"
    return f"{job.reason}; {start}, because {job.backoff.why}"


def _within(seconds: float) -> str:
    """Describe a time to wait, in words that stay the same for a while."""
    return f"within {5 * math.ceil(seconds / 5)} s"


def _checkpoint(job: Job, now: float) -> dict[str, Any] | None:
    """Describe the newest checkpoint; None if checkpoints are off."""
    found = job.checkpoints
    if not found.enabled:
        return None
    age = None if found.written_at is None else now - found.written_at
    return {"dir": job.config.checkpoint.dir, "step": found.step, "seconds_ago": age, "bytes": found.nbytes}


def _longest_wait(job: Job) -> dict[str, Any] | None:
    """The longest time in which a ring made no step, and what it waited for; None if it never did."""
    seconds, kind = job.goodput.longest
    return {"seconds": seconds, "kind": kind} if kind else None


def _waits(beats: Mapping[WorkerId, facts.Heartbeat]) -> str:
    """Describe which worker waits for a server that does answer the master; empty if no worker does."""
    found = [(beat.waits, worker) for worker, beat in beats.items() if beat.waits is not None]
    if not found:
        return ""
    waits, worker = max(found, key=lambda each: each[0].seconds)
    what = f"worker {worker} waits for parameter server {waits.server}"
    if waits.why:
        return f"{what} ({waits.call}: tried again for {waits.seconds:.1f} s): {waits.why}"
    return (
        f"{what} ({waits.call}: no answer for {waits.seconds:.1f} s), which answers the master: it is busy, "
        "or cut off from that worker"
    )


def _staleness(found: Staleness | None) -> dict[str, Any] | None:
    return asdict(found) if found is not None else None


def _pass(job: Job, ahead: ev.Progress) -> dict[str, Any] | None:
    """Describe the records that the ring now evaluates or predicts; None if it does neither."""
    task, step = job.train, max(job.latest.step, ahead.step)
    if task is None or task.evaluation is None or not job.ring.members:
        return None
    began = max((w.progress[:2] for w in job.ring.inside), default=(0, 0))
    at, round = max(began, (ahead.step, ahead.round))
    now = next((p for p in task.evaluation.after(step, task.epochs) if round < p.end), None)
    if now is None or at != step:
        return None
    done = now.positions(max(round, now.first))[0]
    return {"split": now.split, "done": done, "records": now.records}


def _evaluations(job: Job) -> dict[str, Any]:
    """Return the last evaluation on each split."""
    return {split: asdict(found) for split, found in job.latest.evaluations.items()}


def _change(change: Change) -> dict[str, Any]:
    return {
        "generation": change.generation,
        "members": list(change.members),
        "from_size": change.from_size,
        "cause": change.cause,
        "planned": change.planned,
        "formed_at": change.formed_at,
        "step": change.step,
        "up_seconds": change.up_seconds,
        "stall_seconds": change.stall_seconds,
        "redone_records": change.redone_records,
    }
