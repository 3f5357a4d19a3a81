# SPDX-License-Identifier: Apache-2.0
"""Silent workers, which send no heartbeats: the ring goes on without them, or waits for their state.

A silent worker may answer again (its process was stopped, its machine was busy or moved) or never. If a
different worker can continue from its state, the ring goes on at once, and the worker is *away*. When it
answers, it leaves its ring, which was cut, and joins the present one with what it has in memory, like a
survivor that is behind. If its removal would discard all training since the newest state elsewhere, the ring
waits for it instead. If all workers with that state fall silent together, the job waits for any of them.

Both waits are as long as they are worth: as starting a different worker takes (in all, if it is away several
times), or as training again takes, at most MAX_SECONDS. So whether it answers or not, the job loses at most
twice the cost of the better choice, by the rule of `join_policy`. A wait ends earlier if the worker sends a
message, or its process or stream ends.

A member that sends heartbeats may be *busy*: code of the user or a store holds it in a ring that has lost a
different member. Then it is away, too.

    silent ──▶ away: the ring goes on ──▶ heard ──▶ it has left its ring ──▶ it joins the present one
                      └──▶ too long: it is fenced and replaced
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edl.contract.reasons import Reason
from edl.formatting import how_many, numbered
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import membership
from edl.master.core.membership import cut_seconds
from edl.master.core.ring import MEMBER_LOST
from edl.master.core.state import Silence, State, deadline
from edl.master.core.workers import AWAY, MEMBER, OUT, UP, Kind, WorkerRecord

# Seconds of silence. In this time Kubernetes deletes the pods of a lost node, and a virtual machine is moved
# or restarted: a worker that is silent for longer will hardly answer again.
MAX_SECONDS = 600.0
# Seconds that a member may be away, at least. A forked worker is ready sooner, but takes cores of the others.
MIN_SECONDS = 5.0
# Seconds after a cut, and mean steps of the ring: a member that needs longer than both to leave it is busy.
# Not less: a different member may call the same callback then, and two calls may write the same file.
BUSY_SECONDS, BUSY_STEPS = 5.0, 2.0
MAX_NAMED = 8  # workers in a sentence


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
        if w.place == AWAY:  # it was busy
            w.away_until = min(w.away_until, job.now + _patience(w))
        since = job.now - event.seconds
        known = worker in job.silences
        job.silences[worker] = Silence(since, job.goodput.useful(since))
        if known:  # noticed with a worker that is as silent
            return
    if (w := job.pool.get(event.worker)) is not None and w.id in job.silences:
        found = loss(job, w)
        if found.records and _until(job, w, found) > job.now:
            job.notice(Reason.WorkerUnreachable, _decision(job, w, found))


def ends(job: State, event: ev.Heard) -> None:
    """Handle a silent worker that sends messages again."""
    silence, w = job.silences.pop(event.worker, None), job.pool.get(event.worker)
    if silence is None or w is None:
        return
    seconds = job.now - silence.since
    if w.place == AWAY:  # as any member of a ring that was cut, it may compute one more step
        w.patience = max(w.away_until - job.now, 0.0)
        w.away_until = job.now + cut_seconds(job)
    job.notice(
        Reason.WorkerRecovered, f"worker {w.id} is heard again after {seconds:.1f} s; its state is kept"
    )


def comes_back(job: State, w: WorkerRecord, event: ev.LeftRing) -> None:
    """Handle a worker that has left the ring that went on without it: it joins the present one."""
    if event.generation <= job.divergence.untrusted_up_to:
        event = replace(event, has_state=False)
    job.pool.left(w, event)
    job.next_ring.review(job.now)


def decide(job: State) -> None:
    """Go on without the silent workers whose state is not worth a longer wait."""
    for worker, silence in list(job.silences.items()):
        w = job.pool.get(worker)
        if w is None or w.kill_at is not None:
            del job.silences[worker]
            continue
        found, until = loss(job, w), w.away_until
        if w.place != AWAY:
            until = _until(job, w, found) if found.records else job.now
        if until > job.now:
            continue
        why = f"no heartbeat for {job.now - silence.since:.1f} s"
        patience = _patience(w)
        if patience > 0 and not found.records and _may_come_back(job, w):
            membership.set_aside(job, w, "sends no heartbeats", f"silent ({why})", patience)
        else:
            membership.give_up(job, w, ef.FenceReason.HeartbeatTimeout, why)
    for w in job.pool.where(lambda kind: kind.place == AWAY):
        if w.away_until <= job.now and w.kill_at is None:
            why = "it has not left its ring, which was cut"
            membership.give_up(job, w, ef.FenceReason.CutTimeout, why)
    if (at := _busy_at(job)) is not None and at <= job.now:
        for w in job.ring.inside:
            if w.state == MEMBER and w.has_state and w.kill_at is None and w.id not in job.silences:
                what = f"has not left its ring {job.now - job.ring.cut_at:.1f} s after the cut"
                membership.set_aside(job, w, what, "busy", job.ring.cut_at + cut_seconds(job) - job.now)


def _busy_at(job: State) -> float | None:
    """Return when the ring goes on without members that have not left it; None if it waits for them.

    A member that was cut computes its step first. What takes longer is code of the user or a slow store, that
    no cut ends. The others go on alone only if the ring has lost a member: else the return of the busy member
    would be a change in which a different one is busy, and so on.
    """
    ring = job.ring
    if ring.state is not MEMBER_LOST or job.failover.until is not None or not job.work.notices_cuts:
        return None
    out = [w for w in job.pool.where(_has_left) if w.id in ring.ranks]
    if len(out) < max(job.limits.min_size, 1):
        return None
    change, (step, round, _) = ring.changes[-1], max(w.progress for w in out)
    made = max(step - change.step or round - change.round, 1)
    return ring.cut_at + max(BUSY_SECONDS, BUSY_STEPS * (ring.cut_at - change.formed_at) / made)


def _has_left(kind: Kind) -> bool:
    return kind.place == OUT and kind.is_ready and kind.has_state and not kind.stopped


def _patience(w: WorkerRecord) -> float:
    """Return how long the job still waits for a silent worker that is away, in seconds."""
    return max(w.ready_at - w.since, MIN_SECONDS) if w.patience is None else w.patience


def excuse(job: State, now: float) -> None:
    """Extend the waits for workers that are away after a stall of the master: messages wait to be read."""
    for w in job.pool.where(lambda kind: kind.place == AWAY):
        w.away_until = max(w.away_until, now + job.config.elastic.heartbeat_timeout_seconds / 4)


def _may_come_back(job: State, w: WorkerRecord) -> bool:
    """True for a silent member in sync without which the ring can go on.

    While an earlier master's ring is not known, it cannot be cut. If only draining workers are left with the
    state, a replacement is urgent.
    """
    if job.failover.until is not None or not job.work.notices_cuts:
        return False
    others = job.pool.where(lambda kind: kind.has_state and kind.stays)
    goes_on = any(o.id != w.id and o.id not in job.silences for o in others)
    return goes_on and w.in_ring and w.has_state and w.state == MEMBER


@deadline
def next_deadline(job: State) -> float | None:
    """Return when the next wait for a worker that is silent or away ends."""
    silent = [w for worker in job.silences if (w := job.pool.get(worker)) is not None and w.place != AWAY]
    away = job.pool.where(lambda kind: kind.place == AWAY and not kind.stopped)
    until = [_until(job, w, loss(job, w)) for w in silent] + [w.away_until for w in away]
    if (at := _busy_at(job)) is not None and at > job.now:
        until.append(at)
    return min(until, default=None)


def waits(job: State) -> str:
    """Describe for which silent worker the job waits, why, and until when; empty if it does not wait."""
    found = [w for worker in job.silences if (w := job.pool.get(worker)) is not None and w.kill_at is None]
    if not found or job.ending is not None:
        return ""
    if (away := [w.id for w in found if w.place == AWAY]) and len(away) == len(found):
        who = numbered("worker", away, MAX_NAMED)
        return f"{job.reason}; without heartbeats of {who}, which is replaced if it does not come back soon"
    waited = next(w for w in found if w.place != AWAY)
    return _decision(job, waited, loss(job, waited))


def loss(job: State, w: WorkerRecord) -> Loss:
    """Compute what the job would lose with a silent worker.

    Records are counted since the newest of the checkpoint and the states of workers that send messages.
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
    best = max([outside, *(o.step for o in others if o.has_state)])
    if best >= step:
        return Loss(step, 0, 0.0, 0.0)
    records = task.steps.begins_at(step) - task.steps.begins_at(best)
    trained = max(silence.useful_seconds - job.goodput.kept, 0.0)  # since `outside`
    seconds = trained * (step - best) / (step - outside)
    start = 0.0 if any(o.is_ready for o in others) else max(w.ready_at - w.since, 0.0)
    return Loss(step, records, seconds, start)


def _until(job: State, w: WorkerRecord, found: Loss) -> float:
    return job.silences[w.id].since + min(found.seconds + found.start_seconds, MAX_SECONDS)


def _decision(job: State, w: WorkerRecord, found: Loss) -> str:
    """Describe the decision in words that stay the same while the worker is silent."""
    start, until = found.start_seconds, _until(job, w, found) - job.silences[w.id].since
    silent = [o.id for o in job.pool if o.id in job.silences and o.has_state and o.progress >= w.progress]
    one = len(silent) < 2
    subject, them = numbered("worker", silent or [w.id], MAX_NAMED), "it" if one else "them"
    what = job.work.unit
    starts = f", and another worker would take {start:.0f} s to start" if start else ""
    they_have, their = ("the worker has", "its") if one else ("they have", "their")
    goes_on = f"delete {'the worker' if one else 'them'} to go on without {their} state now"
    return (
        f"{subject} send{'s' if one else ''} no heartbeats, and no other worker holds the state of step "
        f"{found.step:,}. Removing {them} would lose {how_many(found.records, what)} "
        f"({found.seconds:.0f} s of training){starts}. The job waits until {they_have} been silent for "
        f"{until:.0f} s; {goes_on}"
    )
