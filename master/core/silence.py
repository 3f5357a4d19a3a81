"""Silent workers, which send no heartbeats: removed at once, or awaited because their state would be lost.

A silent worker may answer again (its process was stopped, its machine was busy or moved) or never. If a
different worker can continue from its state, it is removed at once. Otherwise its removal would discard all
training since the newest state elsewhere. Then the job waits for it as long as its removal would cost, at
most MOST_SECONDS. So whether it answers or not, the job loses at most twice the cost of the better choice,
by the rule of `join_policy`. The wait ends earlier if the worker sends a message, or its process or stream
ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import membership
from edl.master.core.state import Silence, State
from edl.master.core.workers import UP, WorkerRecord
from edl.text import how_many

# Seconds of silence. In this time Kubernetes deletes the pods of a lost node, and a virtual machine is moved
# or restarted: a worker that is silent for longer will hardly answer again.
MOST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of removing a worker."""

    step: int  # of its state
    records: int  # trained since the newest state elsewhere; 0: nothing would be lost
    seconds: float  # of training these records
    start_seconds: float  # until a different worker could continue


def begins(job: State, w: WorkerRecord, seconds: float) -> None:
    """Handle a worker that has sent nothing for the heartbeat timeout."""
    if w.kill_at is not None or w.is_starting:  # a different timeout applies
        return
    since = job.now - seconds
    job.silences[w.id] = Silence(since, job.useful_seconds(since))
    found = loss(job, w)
    if found.records and _until(job, w, found) > job.now:
        job.notice(Reason.WorkerUnreachable, _decision(job, w, found))


def ends(job: State, w: WorkerRecord) -> None:
    """Handle a silent worker that sends messages again."""
    silence = job.silences.pop(w.id, None)
    if silence is not None:
        seconds = job.now - silence.since
        job.notice(
            Reason.WorkerRecovered, f"worker {w.id} is heard again after {seconds:.1f} s; its state is kept"
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
    copies = [job.pool.copies[o.id].step for o in others if o.id in job.pool.copies]
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
    starts = f", and another worker would take {start:.0f} s to start" if start else ""
    return (
        f"worker {w.id} sends no heartbeats, and no other worker holds the state of step {found.step:,}. "
        f"Removing it would lose {how_many(found.records, 'record')} ({found.seconds:.0f} s of training)"
        f"{starts}. The job waits until the worker has been silent for {until:.0f} s; delete the worker to "
        "go on without its state now"
    )
