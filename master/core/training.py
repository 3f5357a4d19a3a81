# SPDX-License-Identifier: Apache-2.0
"""The ring's task, which is to train up to a number of epochs, and its progress.

Progress is one number, the step. A worker that has made step k proves that every member of its ring has step
k - 1. When a ring is formed, only the step of its root counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from edl.contract.evaluation import final_split
from edl.contract.ids import NO_RING
from edl.contract.layout import Layout
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.formatting import how_many, measured
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core.state import State, TrainTask
from edl.master.core.workers import WorkerRecord

BAD_TOLD = 20  # bad records that are reported one by one


def open_task(job: State, layout: Layout, held_out: Mapping[str, int]) -> None:
    """Create the task, once the first worker has counted the records."""
    steps = Steps(layout.records, job.work.records_per_step(job.config))
    job.train = TrainTask(layout, steps, job.epochs, safe=job.safe_before)
    if held_out:
        job.train.evaluation = job.config.evaluation_plan(steps, held_out)


def change_epochs(job: State, epochs: int) -> None:
    """Change the number of epochs. An epoch that has begun is trained to its end."""
    epochs = min(epochs, job.stopped or epochs)
    if epochs == job.epochs:
        return
    if job.exporter is not None or (job.result.model and job.result.kept_at is None):
        why = "training has ended, and the model is being saved"
        job.notice(Reason.SpecRefused, f"training.epochs {job.epochs} -> {epochs}: {why}")
        return
    job.notice(Reason.EpochsChanged, f"training.epochs {job.epochs} -> {epochs}")
    job.epochs = epochs
    if job.train is None:
        return
    job.train.epochs = epochs
    if job.ring.running and (inside := tuple(w.id for w in job.ring.inside)):
        job.do(ef.Train(job.ring.generation, inside, epochs))


def stopped(job: State, event: ev.LeftRing) -> None:
    """Handle a training that was stopped by a callback, as reported by a worker that has left its ring."""
    if not event.stop or 0 < job.stopped <= event.stop:
        return
    job.stopped = event.stop
    if event.stop < job.epochs:
        why = f"{event.stopped_by} has stopped the training"
        job.notice(Reason.EpochsChanged, f"training.epochs {job.epochs} -> {event.stop}: {why}")
        job.epochs = event.stop
        if job.train is not None:
            job.train.epochs = event.stop


def progress(job: State, step: int) -> None:
    """Record the step of the ring's most advanced member."""
    all_have(job, step - 1)
    if job.train is not None and not job.ring.closing:
        reach(job, job.train, max(step - 1, job.train.done))


def epoch_ended(job: State, _w: WorkerRecord, event: ev.EpochEnded) -> None:
    """Record that every member has all steps of an epoch."""
    job.latest.epoch_ended(event, job.train is not None)
    if job.train is not None:
        means = ({"loss": event.loss.mean} if event.loss else {}) | event.metrics
        told = f": {in_words(means)}" if means else ""
        step = event.epochs * job.train.steps.per_epoch
        all_have(job, step)
        reach(job, job.train, max(step, job.train.done), told)


def evaluated(job: State, _w: WorkerRecord, event: ev.Evaluated) -> None:
    """Record an evaluation by the ring. The final one is reported at the end of the job."""
    known = job.latest.evaluations.get(event.split)
    if job.train is None or (known is not None and known.step == event.step):
        return
    is_new = job.latest.evaluated(event)
    split = final_split(job.config.evaluation.split, job.reference.held_out)
    final = event.split == split and event.step >= job.train.end
    if event.metrics and not final and is_new and job.config.trains:
        told = in_words(event.metrics)
        where = f"{event.records:,} records of data({event.split!r})"
        job.notice(Reason.Evaluated, f"Evaluation at step {event.step:,} on {where}: {told}")


def left_out(job: State, _w: WorkerRecord, event: ev.BadRecords) -> None:
    """Report bad records that were left out of a step."""
    for index, why in event.records.items():
        if (count := job.notes.bad_record()) <= BAD_TOLD:
            more = "; further ones are only in the journal" if count == BAD_TOLD else ""
            text = f"record {index} of epoch {event.epoch + 1} is left out: {why}{more}"
            job.notice(Reason.BadRecord, text)


def all_have(job: State, step: int) -> None:
    """Record that every member of a ring that is in sync has this step."""
    if job.train is not None:
        job.train.safe = max(job.train.safe, step)


def go_on_from(job: State, step: int, checkpoint: bool = False) -> None:
    """Continue from the root's step, even if lost workers had a later one; then report `StateLost`.

    Args:
        checkpoint: the step is that of a checkpoint, which the root reads.
    """
    assert job.train is not None
    steps, had = job.train.steps, max(job.train.done, job.train.safe)
    if job.unseen and job.work.in_lockstep and not checkpoint:
        # An earlier master knew it: a worker has a step once all members of its ring have the one before.
        job.train.safe = max(job.train.safe, step - 1)
    unseen, job.unseen = job.unseen and checkpoint and step < job.train.end, False
    if step < job.train.safe or (had and not step) or unseen:
        records = max(steps.begins_at(had) - steps.begins_at(step), 0)
        place = f"the checkpoint of step {step:,}" if checkpoint else f"step {step}"
        what = job.work.lost_units
        last = f"goes on from {place}" if step else f"starts again from {job.work.start}"
        _begins_anew(job)
        lost = f"{records} {what}"
        if unseen:
            lost = f"at least {lost}" if records else f"an unknown number of {what}"
        job.notice(
            Reason.StateLost, f"every worker that held the state is gone: {lost} are lost, the job {last}"
        )
    job.train.safe = min(job.train.safe, step)
    reach(job, job.train, step)


def _begins_anew(job: State) -> None:
    """Account for the loss of all training since an earlier state."""
    job.restarts += 1
    job.latest.epoch_again()
    job.goodput.keep(job.now)


def go_back(job: State, why: str, step: int) -> None:
    """Void all members' states, and roll back to the newest checkpoint.

    Args:
        step: the step of that checkpoint; 0 if unknown.
    """
    _begins_anew(job)
    task, again = job.train, ""
    if task is not None and step:
        records = task.steps.begins_at(max(task.done, step)) - task.steps.begins_at(step)
        are = "is" if records == 1 else "are"
        again = f" of step {step:,}; {how_many(records, 'record')} {are} trained again"
    job.notice(Reason.ReplicaDivergence, f"{why}: all go back to the newest checkpoint{again}")
    if task is not None:
        _begins_at(job, task, step)


def restored(job: State, step: int) -> None:
    """Record the step of the checkpoint that the root has read; 0 if it found no checkpoint."""
    assert job.train is not None
    job.checkpoints.restore(NO_RING)
    # If it is lower than the one that the ring was formed with, the later ones are damaged. But members of
    # the ring before may have completed a later one while the root read.
    if job.checkpoints.step <= job.train.done:
        job.checkpoints.go_back(step)
    job.latest.go_to(step)
    if step != job.train.done:
        go_on_from(job, step, checkpoint=True)
    if step:
        job.notice(
            Reason.Restored, f"the state of step {step:,} is restored from {job.config.checkpoint.dir}"
        )


def found(job: State, event: ev.JoinedRing) -> None:
    """Record the step of the state on the servers (mode=ps)."""
    assert job.train is not None
    job.checkpoints.restore(NO_RING)
    if event.rolled_back:
        job.ring.changes[-1].roll_back()
        rolled_back(job, event)
        return
    all_have(job, event.step)
    job.latest.go_to(max(event.step, job.train.done))
    reach(job, job.train, job.latest.step)


def rolled_back(job: State, event: ev.JoinedRing) -> None:
    """Roll back: the ring and its servers begin with an earlier state than the ring was formed with."""
    assert job.train is not None
    task, step = job.train, event.step
    records = task.steps.begins_at(max(task.done, step)) - task.steps.begins_at(step)
    place = f"the checkpoint of step {step:,}" if step else "the first record"
    _begins_anew(job)
    if not job.config.asynchronous:
        job.checkpoints.go_back(step)
    again = "no record is trained again"
    if records:
        are = "is" if records == 1 else "are"
        again = f"{how_many(records, 'record')} {are} trained again, from {place}"
    if job.config.asynchronous:  # only one server lacks them
        again = f"up to {how_many(records, 'record')} are trained again, and count where they are missing"
    job.notice(Reason.RolledBack, f"rolled back to step {step:,}: {event.rolled_back}; {again}")
    _begins_at(job, task, step)


def _begins_at(job: State, task: TrainTask, step: int) -> None:
    """Continue at the step of a checkpoint."""
    task.safe = min(task.safe, step)
    job.latest.go_to(step)
    reach(job, task, step)


def in_words(metrics: Mapping[str, float | None]) -> str:
    """Format metrics for a message: the loss first, then the others by name, since messages have no order."""
    ordered = sorted(metrics.items(), key=lambda metric: (metric[0] != "loss", metric[0]))
    return ", ".join(f"{name} {measured(value)}" for name, value in ordered)


def reach(job: State, task: TrainTask, step: int, told: str = "") -> None:
    """Set the number of steps in the model, and report a completed epoch."""
    before, task.done = task.epochs_done, step
    if task.epochs_done > before:
        job.notice(Reason.EpochApplied, f"epoch {task.epochs_done} of {task.last_epoch} is applied{told}")
