"""Which workers belong to the job: created, drained, given up, and charged for failures of their own."""

from __future__ import annotations

from collections.abc import Callable

from edl.contract.phases import Phase, WorkerState
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.failures import MOST_IN_VAIN, Failure, nobody_knows_why, own_fault
from edl.master.core.state import SUSPENDED_AT_ZERO, State
from edl.master.core.workers import DRAINING, OUT, Kind, WorkerRecord

COPY_SECONDS = 10.0  # for the next process in a crashed worker's place to greet, with its copy of the state
HUNG_GRACE_SECONDS = 1.0  # for a silent process: its copy of the state is free when it has been killed


def drop_the_overdue(job: State) -> None:
    """Give up the workers whose timeouts have passed."""
    for w in job.timeouts.passed(job.now):
        if w.kill_at is not None:
            job.do(ef.Delete(w.id, 0.0))
            lose(job, w, "it did not exit within its grace period", delete=False)
        else:
            waited = job.config.elastic.startup_timeout_seconds
            why = f"worker {w.id} was not ready after {waited:g} s (it was {w.state})"
            give_up(job, w, ef.FenceReason.StartupTimeout, why)
            charge(job, w, why)


def scale(job: State) -> None:
    """Have as many workers as the target says: create the missing, drain the newest of too many."""
    if job.began_at is None or job.exporter is not None:
        return
    staying = job.pool.count(lambda kind: kind.stays)
    if staying > job.target:
        for w in sorted(job.pool.staying, key=_seniority)[job.target :]:
            drain(job, w, f"scaled to {job.target}")
    if job.backoff.until <= job.now and not job.suspended:
        for _ in range(job.target - staying):
            job.do(ef.Create(job.pool.add(job.now).id))


def release(job: State) -> None:
    """Let those go who were asked to leave, but never the last who holds the state: unless that is in a
    checkpoint, which it is asked to write.

    Who is still in the ring that the leaving one has left is no heir yet: it may be frozen,
    and then what the other takes away is the last copy.
    """
    out = job.pool.where(lambda kind: not (kind.stays or kind.stopped or kind.place != OUT))
    if not out:
        return
    heirs = _heard(job, lambda kind: kind.stays and kind.has_state)
    heirs_out = _heard(job, lambda kind: kind.stays and kind.has_state and kind.place == OUT)
    last = []
    keeper = _keeper(job, out)
    for w in out:
        spared = (
            not w.has_state or job.config.asynchronous or (heirs_out if w.id in job.ring.ranks else heirs)
        )
        spared = spared or (keeper is not None and w is not keeper and w.progress <= keeper.progress)
        if w.id == job.exporter:
            continue
        if spared or job.checkpoints.has(w.step):
            stop(job, w, "the worker is drained")
        elif not heirs:
            last.append(w)
    job.do(*job.checkpoints.write(last, job.now))


def _heard(job: State, test: Callable[[Kind], bool]) -> bool:
    """Whether there is a worker of this kind that is not silent."""
    if not job.silences:
        return job.pool.any(test)
    return any(w.id not in job.silences for w in job.pool.where(test))


def _keeper(job: State, out: list[WorkerRecord]) -> WorkerRecord | None:
    """Which worker of a job that is suspended at 0 workers keeps the state; None: the job is not."""
    if job.pause != SUSPENDED_AT_ZERO:
        return None
    holders = [w for w in out if w.has_state and w.id not in job.silences]
    return max(holders, key=lambda w: (w.progress, -w.id), default=None)


def drain(job: State, w: WorkerRecord, why: str) -> None:
    """Have the worker leave the job as soon as it can be spared."""
    if w.state == DRAINING:
        return
    job.notice(Reason.WorkerDraining, f"worker {w.id} is draining: {why}")
    if w.is_starting:
        stop(job, w, why)
        return
    if w.in_ring:
        job.regroup_at = job.now
    job.pool.change(w, "leave")


def stop(job: State, w: WorkerRecord, why: str) -> None:
    """Tell the worker to end now; it gets the grace to do so."""
    if w.state in (WorkerState.PENDING, WorkerState.STARTING):  # nobody is listening yet
        job.do(ef.Delete(w.id, job.config.elastic.grace_period_seconds))
    else:
        job.do(ef.Stop(w.id, why))
    job.pool.change(w, "" if w.state == DRAINING else "leave", stopped=True)
    w.kill_at = job.now + job.config.elastic.grace_period_seconds
    job.timeouts.watch(w)


def give_up(job: State, w: WorkerRecord, reason: ef.FenceReason, why: str) -> None:
    """Remove a worker that may still run: from now on, whatever it sends is refused."""
    job.do(ef.Fence(w.id, why, reason))
    w.failure_reason = why  # whatever ends it later, that is not its own doing
    lose(job, w, why, hung=reason is ef.FenceReason.HeartbeatTimeout)


def lose(job: State, w: WorkerRecord, why: str, delete: bool = True, hung: bool = False) -> None:
    """The worker is out of the job for good.

    Args:
        delete: its process may still run.
        hung: it does, and reacts to nothing: it is killed, and leaves a copy of its state like a crash.
    """
    if not w.stopped:
        if w.is_starting:
            job.backoff.died_early(job.now)
        job.notice(Reason.WorkerLost, f"worker {w.id} is lost: {why}")
    leaves_copy = job.copies_count and w.has_state and not w.stopped and (hung or not w.failure_reason)
    grace = job.config.elastic.grace_period_seconds
    if delete:
        job.do(ef.Delete(w.id, min(grace, HUNG_GRACE_SECONDS) if hung and leaves_copy else grace))
    # Not `closing`: the peers of one that crashes often say that the ring broke before its end is seen.
    w.in_broken_ring = w.in_ring and job.ring.lost_member
    in_ring = w.in_ring
    if leaves_copy:
        job.copies_awaited += 1
        job.copies_until = job.now + COPY_SECONDS
    job.pool.lose(w)
    job.silences.pop(w.id, None)
    job.failover.awaits_no_longer(w)
    if w.id == job.exporter:
        job.exporter, w.exported = None, True
        job.result.lost_exporters += 1
    if in_ring:
        job.ring.lost_member = True
        job.close(f"worker {w.id} is lost ({why})", planned=False)


def charge(job: State, w: WorkerRecord, why: str, traceback: str = "") -> None:
    """The job is to blame for this failure; too many of them end it."""
    job.failures.append(Failure(w.id, why, traceback))
    job.failure_count += 1
    most = job.config.elastic.max_failures
    job.notice(Reason.WorkerFailed, f"{why} (failure {job.failure_count}; elastic.maxFailures is {most})")
    if job.failure_count > most and not give_up_evaluation(job, why):
        job.traceback = traceback or job.traceback
        job.end(Phase.Failed, why)


def give_up_evaluation(job: State, why: str) -> bool:
    """Too many have failed. True: of evaluating what is trained, so it is saved without; the worker that
    saves it tries once more, alone."""
    task = job.train
    holders = job.pool.any(lambda kind: kind.has_state and not kind.stopped)
    if task is None or not task.complete or not task.rounds or job.exporter is not None or not holders:
        return False
    task.evaluation = None
    job.notice(Reason.Degraded, f"the ring does not evaluate the trained model: {why}")
    return True


def blame_export(job: State, w: WorkerRecord, why: str) -> None:
    """It failed by its own doing; if it was saving what nobody else holds, to train that again is in vain."""
    elsewhere = job.exporter is not None or job.pool.any(lambda kind: kind.has_state)
    if w.exported and job.ending is None and not elsewhere:
        part = "evaluation" if job.result.model else "saving"
        job.result.failed = (*job.result.failed, ev.PartFailed(part, why))
        kept = ", and no other worker holds the trained model"
        if job.result.model:
            kept = f"; the trained model is kept: {job.result.model}"
        job.end(Phase.Failed, f"{part} failed: {why}{kept}")


def failed(job: State, w: WorkerRecord, event: ev.Failed) -> None:
    """The worker has reported a failure that it cannot recover from."""
    w.failure_reason = event.why
    lose(job, w, event.why)
    if w.stopped:
        return  # it was ordered to stop: that its work broke off was intended
    # Where no worker has become ready yet, all would make the same mistake.
    if event.fatal or (event.mistake and job.train is None):
        job.traceback = event.traceback
        job.end(Phase.Failed, event.why)
    else:
        charge(job, w, event.why, event.traceback)
        blame_export(job, w, event.why)


def gone(job: State, event: ev.Gone) -> None:
    """The worker's process has ended; whether the job is to blame is judged now."""
    how = event.why or event.signal or f"exit code {event.code}"
    if w := job.pool.get(event.worker):
        lose(job, w, "exited as requested" if w.stopped else how, delete=False)
    elif (w := job.pool.lost.get(event.worker)) and not w.stopped:
        job.notice(Reason.WorkerExited, f"worker {w.id} exited: {how}")
    lost = job.pool.lost.pop(event.worker, None)
    if lost is not None and (why := own_fault(lost, event)):
        charge(job, lost, why)
        blame_export(job, lost, why)
    elif lost is not None and nobody_knows_why(lost, event):
        _killed(job, lost, how)


def _killed(job: State, w: WorkerRecord, how: str) -> None:
    """It may be bad luck, or the job's own doing (no memory, say): then it happens again and again."""
    times = job.backoff.was_killed(job.now)
    if times < 2:
        return
    why = f"workers were killed {times} times in a row before the ring made a step; the last: "
    why += f"worker {w.id}, {how}"
    if times >= MOST_IN_VAIN:
        job.end(Phase.Failed, why)
    else:
        pause = job.backoff.until - job.now
        after = f"the next ones start in {pause:.1f} s; the job fails when it happens {MOST_IN_VAIN} times"
        job.notice(Reason.RestartBackOff, f"{why}; {after}")


def _seniority(w: WorkerRecord) -> tuple[bool, bool, bool, int]:
    """Who is kept when the pool shrinks: holders of the state, then the initialized, then the oldest."""
    return (not w.has_state, not w.in_ring, not w.is_ready, w.id)
