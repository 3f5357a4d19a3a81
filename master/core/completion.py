# SPDX-License-Identifier: Apache-2.0
"""The end of a job: one worker saves and evaluates the model, and then all workers are stopped.

Promise: a failure here never causes training to be repeated, unless parameter servers have lost rows of the
model. The model is saved before it is evaluated. If one of the two fails, the job ends, the model is kept,
and the reason names its file.
"""

from __future__ import annotations

from edl.contract.evaluation import FINAL, final_split
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.formatting import how_many
from edl.master.core import consistency, membership
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.quorum import is_state_of
from edl.master.core.state import State
from edl.master.core.training import in_words, reach
from edl.master.core.workers import WorkerRecord

SAVING = "saving"  # the part of the end in `PartFailed`


def export(job: State, root: WorkerRecord) -> None:
    """Order one worker in sync to evaluate and save the complete state. The others keep theirs."""
    job.ring.dissolve()
    same = [w for w in job.pool if is_state_of(w, root) and w.digest]
    digests = {w.id: w.digest for w in same}
    job.result.agree(digests)
    if not consistency.at_the_end(job, root.step, digests):
        return
    same = [w for w in same if job.pool.get(w.id) is not None]  # without the workers that differed
    job.result.agree({w.id: w.digest for w in same})
    root = root if root in same or not same else same[0]
    job.exporter = root.id
    job.latest.go_to(root.step)
    job.goodput.turn("finishing", job.now)
    job.reason = f"all records are applied at step {root.step}; worker {root.id} saves the model"
    if not job.config.trains:
        job.reason = f"{_done(job)}; worker {root.id} ends the job"
    job.notice(Reason.Saving, job.reason)
    job.do(ef.Export(root.id))


def saved(job: State, w: WorkerRecord, event: ev.Saved) -> None:
    """Record that the exporter has saved the model; from now on only its evaluation can be lost."""
    if event.variables:
        if w.has_state:
            job.result.keep_variables(event.variables)
        return
    if event.step:
        _kept_before(job, w, event)
        return
    if w.id != job.exporter and not _was_exporting(job, w):
        job.stale += 1
        return
    _keep(job, w, event)
    where = _where(w, event)
    verifies = job.config.export.verify and bool(event.model)
    rest = [*(["evaluates it"] * (not _is_evaluated(job))), *(["loads it again in a new process"] * verifies)]
    then = f"; worker {w.id} {' and '.join(rest)}" if rest else ""
    job.reason = f"the model is saved: {where}{then}" if where else job.reason
    job.notice(Reason.Evaluating, job.reason)


def _kept_before(job: State, w: WorkerRecord, event: ev.Saved) -> None:
    """Record a copy of the trained model, saved before the ring evaluates it, in case workers then crash."""
    if job.exporter is not None or not w.in_ring or not event.model:
        job.stale += 1
        return
    job.result.keep(event.model, event.note, event.step)
    job.notice(Reason.Evaluating, f"the model is saved: {_where(w, event)}; the ring evaluates it")


def _done(job: State) -> str:
    """Describe the completed work."""
    assert job.train is not None
    if job.config.trains:
        return f"every record of {how_many(job.train.last_epoch, 'epoch')} is applied exactly once"
    what = "predicted" if job.config.mode == "predict" else "evaluated"
    ((split, records),) = job.reference.held_out.items()
    return f"each of the {records:,} records of data({split!r}) is {what} exactly once"


def _is_evaluated(job: State) -> bool:
    """True if the ring has reported the final evaluation of the trained model."""
    found = job.latest.evaluations.get(final_split(job.config.evaluation.split, job.reference.held_out))
    return found is not None and found.step == job.latest.step and bool(found.metrics)


def _was_exporting(job: State, w: WorkerRecord) -> bool:
    """True if an earlier master may have ordered this worker to save the model before the failover."""
    task = job.train
    return job.exporter is None and task is not None and w.has_state and task.steps.ended(w.step, job.epochs)


def finished(job: State, w: WorkerRecord, event: ev.Finished) -> None:
    """End the job with the results of the exporter."""
    if job.work.ends_by_itself:
        _script_ended(job, w)
        return
    if w.id != job.exporter:
        job.stale += 1
        return
    _keep(job, w, event)
    job.result.metrics, job.result.exports = dict(event.metrics), dict(event.exports)
    if event.metrics:
        where = (
            f"the records of data({FINAL!r})" if job.reference.held_out.get(FINAL) else "the held-out records"
        )
        job.notice(Reason.Evaluated, f"Evaluation on {where}: {in_words(event.metrics)}")
    if event.note:
        job.notice(Reason.ModelWarning, event.note)
    assert job.train is not None
    reason = _done(job)
    if w.skipped:
        reason += f", except {job.train.steps.records_of(w.skipped)} skipped records (non-finite)"
    if job.result.bad and job.config.asynchronous:  # of whole steps: servers report how many, but not which
        reason += f", except {job.result.bad} skipped records (non-finite)"
    elif job.result.bad:
        reason += f", except {job.result.bad} bad records that were left out"
    if job.notes.forced:
        reason += f"; forced: {'; '.join(job.notes.forced)}"
    if not event.failed:
        job.end(Phase.Succeeded, reason)
        return
    where = _where(w, event)
    kept = f"the trained model is kept: {where}" if where else "the trained model could not be kept"
    failed = "; ".join(f"{f.part} failed: {f.why}" for f in event.failed)
    job.failures.ends_with(next((f.traceback for f in event.failed if f.traceback), ""))
    job.end(Phase.Failed, f"{reason}, but {failed}; {kept}")


def _script_ended(job: State, w: WorkerRecord) -> None:
    """Record that a worker's script has ended by itself; its process exits now, and is not replaced."""
    if not w.stopped:
        membership.stop(job, w, "its script has ended")
    if job.script_ended is None:
        job.script_ended = w.id
        job.reason = f"the script of worker {w.id} has ended"


def end_script(job: State) -> None:
    """End the job once the scripts of all workers that were in a ring have ended."""
    if job.script_ended is not None and not job.pool.any(lambda kind: kind.has_state and not kind.stopped):
        job.end(Phase.Succeeded, "the script has ended on all workers")


def rows_lost(job: State, w: WorkerRecord, event: ev.RowsLost) -> None:
    """Form a ring again, because servers lack rows of the exporter's model, or have trained further.

    The ring rolls back together with its servers, or continues with them, and completes the training.
    """
    saves = w.id == job.exporter or (not job.ring.members and _was_exporting(job, w))
    if not saves or job.ending is not None:
        job.stale += 1
        return
    why = f"the model cannot be saved: {event.why}"
    job.exporter = None
    job.servers.lose_rows()
    job.result.rows_lost += not event.trained_on
    if job.result.rows_lost > (most := job.config.elastic.max_failures):
        times = f"{how_many(job.result.rows_lost, 'time')} (elastic.maxFailures is {most})"
        job.result.fail(SAVING, event.why)
        job.end(Phase.Failed, f"{why}; parameter servers have lost rows while it was saved {times}")
        return
    job.reason = f"{why}; a ring is formed, and trains what is missing"
    job.notice(Reason.SaveFailed, job.reason)


def ends_without_holders(job: State) -> bool:
    """End the job if no worker holds the state and it must not be trained again; True if the job ends.

    Either the model is in a file but no checkpoint has its state, so that it cannot be evaluated, or too many
    workers were lost while they saved it.
    """
    kept_at, task, lost = job.result.kept_at, job.train, job.result.lost_exporters
    too_many = lost > job.config.elastic.max_failures
    if job.result.model and (kept_at is None or task is None or kept_at >= task.end):
        if not too_many and task is not None and 0 < task.end <= job.checkpoints.step:
            return False  # a ring restores the checkpoint, trains nothing and evaluates
        why = "every worker that held the state was lost before the evaluation was done"
        if kept_at is not None and task is not None:
            reach(job, task, max(kept_at, task.done))
            job.latest.go_to(task.done)
        job.result.fail("evaluation", why)
        job.end(Phase.Failed, f"evaluation failed: {why}; the trained model is kept: {job.result.model}")
    elif too_many:
        why = f"{lost} workers were lost while they saved the model (elastic.maxFailures is {lost - 1})"
        job.result.fail(SAVING, why, alone=True)
        job.end(Phase.Failed, f"saving failed: {why}")
    return job.ending is not None


def _keep(job: State, w: WorkerRecord, event: ev.Saved | ev.Finished) -> None:
    """Record what was saved where, and notify users while it is not in its proper place."""
    result = job.result
    result.keep(event.model, event.note)
    result.failed = event.failed
    result.skipped, result.bad = w.skipped, sum(w.bad.values())
    trouble = next((f.why for f in event.failed if f.part == SAVING), "")
    if trouble and SAVING not in job.notes.degraded:
        job.notes.degrade(SAVING, trouble)
        where = _where(w, event) or "nowhere"
        job.notice(Reason.Degraded, f"saving the model: {trouble}; it is kept: {where}")
    elif not trouble and job.notes.degrade(SAVING, ""):
        job.notice(Reason.Recovered, f"the model is saved: {_where(w, event)}")


def _where(w: WorkerRecord, event: ev.Saved | ev.Finished) -> str:
    """Describe the file for users: an absolute path is on the machine or in the pod of the worker."""
    return f"{event.model} (written by worker {w.id})" if event.model.startswith("/") else event.model


def shut_down_workers(job: State) -> None:
    """Stop all workers; the job has ended once the last worker is gone."""
    assert job.ending is not None
    for w in job.pool.where(lambda kind: not kind.stopped):
        membership.stop(job, w, f"the job ends: {job.ending[0]}")
    if not job.ended and not job.pool:
        job.ended = True
        job.lifetime.end(job.now)
        job.goodput.turn(job.goodput.kind, job.now)
        phase, reason = job.ending
        job.do(ef.End(str(phase), reason))
