# SPDX-License-Identifier: Apache-2.0
"""Silent workers, which send no heartbeats: removed at once, or awaited because their state would be lost.

A silent worker may answer again (its process was stopped, its machine was busy or moved) or never. If a
different worker can continue from its state, it is removed at once. Otherwise its removal would discard all
training since the newest state elsewhere. Then the job waits for it as long as its removal would cost, at
most MOST_SECONDS. If all workers with that state fall silent together, the job waits for any of them. So
whether it answers or not, the job loses at most twice the cost of the better choice, by the rule of
`join_policy`. The wait ends earlier if the worker sends a message, or its process or stream ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.reasons import Reason
from edl.formatting import how_many, numbered
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import membership
from edl.master.core.state import Silence, State
from edl.master.core.workers import UP, WorkerRecord

# Seconds of silence. In this time Kubernetes deletes the pods of a lost node, and a virtual machine is moved
# or restarted: a worker that is silent for longer will hardly answer again.
MOST_SECONDS = 600.0
MOST_NAMED = 8  # workers in a sentence


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of removing a worker."""

    step: int  # of its state
    records: int  # trained since the newest state elsewhere; 0: nothing would be lost
    seconds: float  # of training these records
    start_seconds: float  # until a different worker could continue


def begins(job: State, event: ev.Silent) -> None:
    """Handle workers that have sent nothing for the heartbeat timeout."""
    for worker in (event.worker, *event.also):
        w = job.pool.get(worker)
        if w is None or w.kill_at is not None or w.is_starting:  # a different timeout applies
            continue
        since = job.now - event.seconds
        known = worker in job.silences
        job.silences[worker] = Silence(since, job.useful_seconds(since))
        if known:  # noticed with a worker that is as silent
            return
    if (w := job.pool.get(event.worker)) is not None and w.id in job.silences:
        found = loss(job, w)
        if found.records and _until(job, w, found) > job.now:
            job.notice(Reason.WorkerUnreachable, _decision(job, w, found))


def ends(job: State, event: ev.Heard) -> None:
    """Handle a silent worker that sends messages again."""
    silence = job.silences.pop(event.worker, None)
    if silence is not None:
        seconds = job.now - silence.since
        job.notice(
            Reason.WorkerRecovered,
            f"worker {event.worker} is heard again after {seconds:.1f} s; its state is kept",
        )


def decide(job: State) -> None:
    """Remove the silent workers whose state is not worth a longer wait."""
    for worker, silence in list(job.silences.items()):
        w = job.pool.get(worker)
        if w is None or w.kill_at is not None:
            del job.silences[worker]
            continue
        found = loss(job, w)
        if not found.records or _until(job, w, found) <= job.now:
            why = f"no heartbeat for {job.now - silence.since:.1f} s"
            membership.give_up(job, w, ef.FenceReason.HeartbeatTimeout, why)


def next_deadline(job: State) -> float | None:
    """Return when the wait for a silent worker ends."""
    waits = [
        _until(job, w, loss(job, w)) for worker in job.silences if (w := job.pool.get(worker)) is not None
    ]
    return min(waits, default=None)


def waits(job: State) -> str:
    """Describe for which silent worker the job waits, why, and until when; empty if it does not wait."""
    found = [w for worker in job.silences if (w := job.pool.get(worker)) is not None and w.kill_at is None]
    return _decision(job, found[0], loss(job, found[0])) if found and job.ending is None else ""


def loss(job: State, w: WorkerRecord) -> Loss:
    """Compute what the job would lose with a silent worker.

    Records are counted since the newest of the checkpoint, the in-memory snapshots and the states of workers
    that send messages.
    """
    task, silence = job.train, job.silences[w.id]
    if task is None or not w.has_state or job.config.asynchronous:  # asynchronous: the state is on servers
        return Loss(0, 0, 0.0, 0.0)
    heard = job.pool.where(lambda kind: not kind.stopped)
    others = [o for o in heard if o.id != w.id and o.id not in job.silences]
    if w.in_ring and any(o.place == UP for o in others):  # at most a step behind
        return Loss(0, 0, 0.0, 0.0)
    step = max(w.step, task.done if w.in_ring else 0)
    outside = job.checkpoints.step if job.checkpoints.enabled else 0
    held = job.pool.snapshots.held
    copies = [held[o.id].step for o in others if o.id in held]
    best = max([outside, *copies, *(o.step for o in others if o.has_state)])
    if best >= step:
        return Loss(step, 0, 0.0, 0.0)
    records = task.steps.begins_at(step) - task.steps.begins_at(best)
    trained = max(silence.useful_seconds - job.kept_useful_seconds, 0.0)  # since `outside`
    seconds = trained * (step - best) / (step - outside)
    start = 0.0 if any(o.is_ready for o in others) else max(w.ready_at - w.since, 0.0)
    return Loss(step, records, seconds, start)


def _until(job: State, w: WorkerRecord, found: Loss) -> float:
    return job.silences[w.id].since + min(found.seconds + found.start_seconds, MOST_SECONDS)


def _decision(job: State, w: WorkerRecord, found: Loss) -> str:
    """Describe the decision in words that stay the same while the worker is silent."""
    start, until = found.start_seconds, _until(job, w, found) - job.silences[w.id].since
    silent = [o.id for o in job.pool if o.id in job.silences and o.has_state and o.progress >= w.progress]
    one = len(silent) < 2
    subject, them = numbered("worker", silent or [w.id], MOST_NAMED), "it" if one else "them"
    what = "commit" if job.config.runs_horovod else "record"
    starts = f", and another worker would take {start:.0f} s to start" if start else ""
    they_have, their = ("the worker has", "its") if one else ("they have", "their")
    goes_on = f"delete {'the worker' if one else 'them'} to go on without {their} state now"
    return (
        f"{subject} send{'s' if one else ''} no heartbeats, and no other worker holds the state of step "
        f"{found.step:,}. Removing {them} would lose {how_many(found.records, what)} "
        f"({found.seconds:.0f} s of training){starts}. The job waits until {they_have} been silent for "
        f"{until:.0f} s; {goes_on}"
    )
