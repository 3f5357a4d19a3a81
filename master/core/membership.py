# SPDX-License-Identifier: Apache-2.0
"""Membership of the job: create, drain, remove and charge workers."""

from __future__ import annotations

from collections.abc import Callable

from edl.contract.exit_codes import WorkerExit
from edl.contract.phases import Phase, WorkerState
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.failures import Failure, cause_unknown, own_fault
from edl.master.core.ring import CHANGE, LOSS, MEMBER_LOST
from edl.master.core.state import SUSPENDED_AT_ZERO, State, deadline
from edl.master.core.workers import AWAY, DRAINING, OUT, Kind, WorkerRecord

CUT_MARGIN = 1.25  # a watchdog finds a step that takes too long up to a quarter of its limit later


def expire_timeouts(job: State) -> None:
    """Remove the workers whose timeouts have passed."""
    for w in job.timeouts.passed(job.now):
        if w.kill_at is not None:
            job.do(ef.Delete(w.id, 0.0))
            lose(job, w, "it did not exit within its grace period", delete=False)
        else:
            waited = job.config.elastic.startup_timeout_seconds
            why = f"worker {w.id} was not ready after {waited:g} s (it was {w.state})"
            give_up(job, w, ef.FenceReason.StartupTimeout, why)
            charge(job, w, why)


@deadline
def cut_deadline(job: State) -> float | None:
    """When a member must have left the ring that was cut; None if no member is ordered to leave it at once.

    A member notices the cut in its next sum, so it may compute one step before. It ends itself if it then
    does not leave the ring. This deadline is for a member that cannot even do that.
    """
    if not (job.ring.broken and job.work.notices_cuts):
        return None
    return job.ring.cut_at + cut_seconds(job)


def cut_seconds(job: State) -> float:
    """Return how long a member that receives an order to leave its ring at once may take for it."""
    limits = job.config.elastic
    return CUT_MARGIN * (limits.step_timeout_seconds + limits.startup_timeout_seconds)


def expire_cut(job: State) -> None:
    """Remove members that have not left the ring in time after a cut."""
    if (due := cut_deadline(job)) is None or due > job.now:
        return
    for w in job.ring.inside:
        if w.kill_at is None and w.id not in job.silences:  # their own deadlines apply
            why = f"still inside a ring that was cut {job.now - job.ring.cut_at:.0f} s ago"
            give_up(job, w, ef.FenceReason.CutTimeout, why)


@deadline
def replacements_due(job: State) -> float | None:
    """Return when missing workers may be replaced, after several that were lost."""
    return job.backoff.until


def missing(job: State) -> int:
    """Return how many workers the job lacks; negative if it has more than the target."""
    if job.lifetime.began_at is None or job.exporter is not None or job.script_ended is not None:
        return 0
    lacks = job.target - job.pool.count(lambda kind: kind.stays)
    return min(lacks, 0) if job.suspended else lacks


def scale(job: State) -> None:
    """Create missing workers, or drain the newest ones if there are more than the target.

    While the workers of an earlier master reconnect, none is a surplus: they may hold the state, and some
    may be about to leave.
    """
    lacks = missing(job)
    if lacks < 0 and job.failover.until is None:
        for w in sorted(job.pool.staying, key=_seniority)[job.target :]:
            drain(job, w, f"scaled to {job.target}")
    if job.backoff.until <= job.now:
        for _ in range(lacks):
            job.do(ef.Create(job.pool.add(job.now).id))


def release(job: State) -> None:
    """Stop drained workers, except for the last one that holds the state.

    That one first writes the state to a checkpoint. A worker that is still in the ring does not count as a
    successor: it may be frozen, and then the drained worker holds the last copy.
    """
    out = job.pool.where(lambda kind: not (kind.stays or kind.stopped or kind.in_ring))
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
    """True if there is a worker of this kind that sends heartbeats."""
    if not job.silences:
        return job.pool.any(test)
    return any(w.id not in job.silences for w in job.pool.where(test))


def _keeper(job: State, out: list[WorkerRecord]) -> WorkerRecord | None:
    """The worker that keeps the state of a job suspended at 0 workers; None for other jobs."""
    if job.pause != SUSPENDED_AT_ZERO:
        return None
    holders = [w for w in out if w.has_state and w.id not in job.silences]
    return max(holders, key=lambda w: (w.progress, -w.id), default=None)


def drain(job: State, w: WorkerRecord, why: str) -> None:
    """Remove the worker from the job as soon as the state does not depend on it."""
    if w.state == DRAINING:
        return
    w.leaves = True
    job.notice(Reason.WorkerDraining, f"worker {w.id} is draining: {why}")
    if w.is_starting:
        stop(job, w, why)
        return
    if w.in_ring:
        job.next_ring.review(job.now)
    job.pool.change(w, "leave")


def stop(job: State, w: WorkerRecord, why: str) -> None:
    """Order the worker to exit within its grace period."""
    if w.state in (WorkerState.PENDING, WorkerState.STARTING):  # its process does not listen yet
        job.do(ef.Delete(w.id, job.config.elastic.grace_period_seconds))
    else:
        job.do(ef.Stop(w.id, why))
    job.pool.change(w, "" if w.state == DRAINING else "leave", stopped=True)
    w.kill_at = job.now + job.config.elastic.grace_period_seconds
    job.timeouts.watch(w)


def set_aside(job: State, w: WorkerRecord, what: str, why: str, seconds: float) -> None:
    """Go on without a member that is silent or busy, and wait `seconds` for it to come back to the job.

    It is not replaced meanwhile. Its ring is cut, and it does not count as a holder of the state.

    Args:
        what: what the worker does, for the notice.
        why: why its ring is cut.
    """
    job.notice(
        Reason.WorkerUnreachable,
        f"worker {w.id} {what}: the ring goes on without it. It is replaced if it does not come "
        f"back within {seconds:.1f} s",
    )
    job.close(f"worker {w.id} is {why}", LOSS)
    job.pool.change(w, place=AWAY, has_state=False)
    w.away_from, w.away_until = job.ring.generation, job.now + seconds


def give_up(job: State, w: WorkerRecord, reason: ef.FenceReason, why: str) -> None:
    """Fence and remove a worker that may still run: its later messages are refused."""
    job.do(ef.Fence(w.id, why, reason))
    w.failure_reason = why  # its later exit is not charged again
    lose(job, w, why)


def lose(job: State, w: WorkerRecord, why: str, delete: bool = True, told: bool = False) -> None:
    """Remove the worker from the job for good.

    Args:
        delete: delete its process, which may still run.
        told: the job ends for this reason, and says so.
    """
    if not w.stopped and w.is_starting:
        job.backoff.died_early(job.now)
    if not (w.stopped or told):
        job.notice(Reason.WorkerLost, f"worker {w.id} is lost: {why}")
    if delete:
        grace = job.config.elastic.grace_period_seconds
        exits = w.stopped and not w.failure_reason  # and its log is still of use
        job.do(ef.Delete(w.id, grace, grace if exits else 0.0))
    # Not BROKEN: the peers of a crashed worker often report a broken ring before its exit is seen.
    w.in_broken_ring = w.place == AWAY or (w.in_ring and job.ring.state is MEMBER_LOST)
    in_ring = w.in_ring
    ended = job.work.ends_by_itself and w.stopped  # its peers may still need this ring
    if job.script_ended is not None and w.has_state and not w.stopped:
        job.end(
            Phase.Failed,
            f"worker {w.id} was lost after the script of worker {job.script_ended} had ended: {why}",
        )
    job.pool.lose(w)
    job.silences.pop(w.id, None)
    job.failover.awaits_no_longer(w)
    if w.id == job.exporter:
        job.exporter, w.exported = None, True
        job.result.lost_exporters += 1
    if in_ring and ended:
        job.close(f"the script of worker {w.id} has ended", CHANGE)
    elif in_ring:
        job.close(f"worker {w.id} is lost ({why})", LOSS)


def charge(job: State, w: WorkerRecord, why: str, traceback: str = "") -> None:
    """Charge a failure to the job, once for each worker; more than elastic.maxFailures of them fail it."""
    if job.failures.charges(w.id):
        return  # under an earlier master, which it has told, too
    job.failures.charge(Failure(w.id, why, traceback, job.train.done if job.train else 0))
    most = job.config.elastic.max_failures
    job.notice(Reason.WorkerFailed, f"{why} (failure {job.failures.count}; elastic.maxFailures is {most})")
    if job.failures.count > most and not give_up_evaluation(job, why):
        job.failures.ends_with(traceback or job.failures.traceback)
        job.end(Phase.Failed, why)


def give_up_evaluation(job: State, why: str) -> bool:
    """Skip the evaluation of the trained model if it caused too many failures.

    The worker that saves the model evaluates it alone then. Returns False if no evaluation was due.
    """
    task = job.train
    holders = job.pool.any(lambda kind: kind.has_state and not kind.stopped)
    if task is None or not task.complete or not task.rounds or job.exporter is not None or not holders:
        return False
    task.evaluation = None
    job.notice(Reason.Degraded, f"the ring does not evaluate the trained model: {why}")
    return True


def charge_export(job: State, w: WorkerRecord, why: str) -> None:
    """Fail the job if its exporter failed and no other worker holds the final state.

    Training again would fail at the same point.
    """
    elsewhere = job.exporter is not None or job.pool.any(lambda kind: kind.has_state)
    if w.exported and job.ending is None and not elsewhere:
        part = "evaluation" if job.result.model else "saving"
        job.result.fail(part, why)
        kept = ", and no other worker holds the trained model"
        if job.result.model:
            kept = f"; the trained model is kept: {job.result.model}"
        job.end(Phase.Failed, f"{part} failed: {why}{kept}")


def failed(job: State, w: WorkerRecord, event: ev.Failed) -> None:
    """Handle a failure that a worker reports before it exits."""
    w.failure_reason = event.why
    # If no worker was ready yet, all workers would fail in the same way.
    everywhere = event.fatal or (event.mistake and (job.train is None or _repeats(job, event)))
    lose(job, w, event.why, told=everywhere and not (w.leaves or event.no_gpu_memory))
    if w.stopped or w.leaves:
        return  # its end is intended, however the user's code brings it about
    if event.no_gpu_memory:
        _lacked_gpu_memory(job, w, event)
    elif everywhere:
        job.failures.ends_with(event.traceback)
        job.end(Phase.Failed, event.why)
    else:
        charge(job, w, event.why, event.traceback)
        charge_export(job, w, event.why)


def _repeats(job: State, event: ev.Failed) -> bool:
    """True if the user's code has made this mistake before, and no step since, and would repeat it."""
    done = job.train.done if job.train else 0
    return job.work.repeats_mistakes and any(
        f.why == event.why and f.step == done for f in job.failures.charged
    )


def _lacked_gpu_memory(job: State, w: WorkerRecord, event: ev.Failed) -> None:
    """Back off if GPUs have too little memory again and again; fail the job if that does not end."""
    done, most = job.train.done if job.train else 0, job.config.elastic.max_failures
    times = job.backoff.lacked_gpu_memory(job.now, done)
    why = f"worker {w.id}: {event.why}"
    if times > most:
        if not give_up_evaluation(job, why):
            job.failures.ends_with(event.traceback)
            job.end(
                Phase.Failed, f"{times} workers in a row failed before the job made a step; the last: {why}"
            )
        return
    pause = job.backoff.until - job.now
    after = (
        f"the next one starts in {pause:.1f} s; the job fails when it happens {most + 1} times without a step"
    )
    job.notice(Reason.RestartBackOff, f"{why}; {after}")
    charge_export(job, w, why)


def leaving(job: State, w: WorkerRecord, event: ev.Leaving) -> None:
    """Drain a worker that asks to leave."""
    drain(job, w, event.why)


def terminating(job: State, event: ev.Terminating) -> None:
    """Drain a worker that will be killed, once its relation to the ring is known."""
    if (w := job.pool.get(event.worker)) is None:
        return
    w.terminating = event.why
    if not w.expected:
        drain(job, w, event.why)


def records_read(job: State, w: WorkerRecord, event: ev.RecordsRead) -> None:
    """Let a worker whose reads have returned join the ring."""
    w.reads = False
    job.next_ring.review(job.now)
    job.ring.read(job.now)


def closed(job: State, w: WorkerRecord, event: ev.Closed) -> None:
    """Remove a worker whose stream has ended. `gone` follows with the cause, if it did not come first."""
    lose(job, w, "exited as requested" if w.stopped else event.why)


def gone(job: State, event: ev.Gone) -> None:
    """Handle the exit of a worker's process, and decide whether to charge it to the job."""
    how = event.limit or ": ".join(filter(None, (event.signal, event.why))) or f"exit code {event.code}"
    if event.code == WorkerExit.PEER_BROKEN:
        how = "it ended itself, because its ring broke"
    if w := job.pool.get(event.worker):
        as_requested = w.stopped and not event.limit
        lose(job, w, "exited as requested" if as_requested else how, delete=False)
    elif (w := job.pool.lost.get(event.worker)) and not w.stopped:
        job.notice(Reason.WorkerExited, f"worker {w.id} exited: {how}")
        job.ring.name_cause(f"worker {w.id} is lost ({ev.STREAM_ENDED})", f"worker {w.id} is lost ({how})")
    lost = job.pool.lost.pop(event.worker, None)
    if lost is not None and (why := own_fault(lost, event)):
        charge(job, lost, why)
        charge_export(job, lost, why)
    elif lost is not None and cause_unknown(lost, event):
        _killed(job, lost, how)


def _killed(job: State, w: WorkerRecord, how: str) -> None:
    """Back off if workers are killed again and again, for example by a lack of memory."""
    times = job.backoff.was_killed(job.now)
    if times < 2:
        return
    why = f"workers were lost {times} times in a row before the ring made a step; the last: "
    why += f"worker {w.id}, {how}"
    most = job.work.kills_in_vain(job.config)
    if times >= most:
        job.end(Phase.Failed, why)
    else:
        pause = job.backoff.until - job.now
        after = f"the next ones start in {pause:.1f} s; the job fails when it happens {most} times"
        job.notice(Reason.RestartBackOff, f"{why}; {after}")


def _seniority(w: WorkerRecord) -> tuple[bool, bool, bool, int]:
    """Sort key when the pool shrinks: keep workers in sync first, then ready workers, then the oldest."""
    return (not w.has_state, not w.in_ring, not w.is_ready, w.id)
