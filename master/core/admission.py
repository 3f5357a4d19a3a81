# SPDX-License-Identifier: Apache-2.0
"""Workers that are ready, and whether each may train with the others.

The first worker that becomes ready determines the job's model, its data and the mode (mode=auto). A worker
with a different model or with different data fails: the ring would apply the gradients of one model to
another, or train some records twice and others never.
"""

from __future__ import annotations

from collections.abc import Mapping

from edl.contract.phases import WorkerState
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import membership, ps, sample_loss, training
from edl.master.core.state import State
from edl.master.core.workers import WorkerRecord


def seen(job: State, event: ev.Seen) -> None:
    """Record that a worker's process runs."""
    if w := job.pool.get(event.worker):
        w.handle = event.handle
        job.pool.delay(w, "")
        if w.state == WorkerState.PENDING:
            _runs(job, w, "seen")


def delayed(job: State, event: ev.Delayed) -> None:
    """Record why a worker does not run yet."""
    w = job.pool.get(event.worker)
    if w is None or w.delay == event.why:
        return
    if job.pool.delay(w, event.why):  # once for all workers with the same reason
        job.notice(Reason.WorkerPending, f"worker {w.id} is pending: {event.why}")


def hello(job: State, w: WorkerRecord, event: ev.Hello) -> None:
    """Record that a worker is connected, and initializes."""
    if w.state == WorkerState.PENDING:
        _runs(job, w, "hello")
    elif w.state == WorkerState.STARTING:
        job.pool.change(w, "hello")
    if event.pid and not w.handle:  # its backend does not observe processes, as with `edl mpi`
        w.handle = str(event.pid)
    if not event.resumes:
        told_its_state(job, w)
    if w.stopped:  # it was not connected then, and process 1 of a container ignores SIGTERM
        job.do(ef.Stop(w.id, f"worker {w.id} is not needed any more"))
    elif w.terminating and not event.resumes:
        membership.drain(job, w, w.terminating)


def _runs(job: State, w: WorkerRecord, event: str) -> None:
    """Start the startup timeout of a worker."""
    job.pool.change(w, event)
    w.since = job.now
    job.timeouts.watch(w)


def built(job: State, w: WorkerRecord, event: ev.Built) -> None:
    """Decide the mode, or check the worker's model against it."""
    if why := ps.decide(job, w, event.tables):
        membership.failed(job, w, ev.Failed(w.id, why))


def ready(job: State, w: WorkerRecord, event: ev.Ready) -> None:
    """Handle a worker whose model is built and whose data are open."""
    if not w.is_starting:
        return
    if w.state != WorkerState.INITIALIZING:
        job.pool.change(w, "hello")
    job.checkpoints.know(event.checkpoint)
    if _admit(job, w, event):
        job.notice(Reason.WorkerReady, f"worker {w.id} is ready after {job.now - w.since:.1f} s")


def resume(job: State, w: WorkerRecord, event: ev.Resume) -> None:
    """Handle an initialized worker of an earlier master, which reports its state."""
    if w.state != WorkerState.INITIALIZING:
        job.stale += 1
        return
    told_its_state(job, w)
    if event.left_ring is not None:
        training.stopped(job, event.left_ring)
    if _admit(job, w, event):
        known = job.ring.generation
        outdated_ones = job.failover.place(w, event, job.now)
        if job.ring.generation != known:
            job.servers.step("learn")
        for outdated in outdated_ones:
            why = "it was in a ring that the others have left"
            membership.give_up(job, outdated, ef.FenceReason.OutdatedRing, why)
    if (why := w.terminating or event.leaving) and job.pool.get(w.id) is w:
        membership.drain(job, w, why)


def told_its_state(job: State, w: WorkerRecord) -> None:
    """Record that the worker has reported its state to this master, which need not await it any more."""
    w.expected = False
    job.failover.awaits_no_longer(w)


def _admit(job: State, w: WorkerRecord, event: ev.Ready | ev.Resume) -> bool:
    """Check a ready worker. Returns False if its model or data differ from the job's."""
    layout = event.layout
    for words in event.forced:
        if job.notes.force(words):
            job.notice(Reason.IncompatibleResume, f"forced: {words}")
    job.pool.change(w, "ready")
    w.ready_at = job.now
    job.backoff.got_ready()
    if job.train is None:
        training.open_task(job, layout, event.held_out)
        job.reference.hold_out(event.held_out)
    if why := _why_refused(job, w, event):
        membership.failed(job, w, ev.Failed(w.id, why))
        return False
    job.next_ring.changes(job.now + job.config.elastic.join_delay_seconds)
    return True


def _why_refused(job: State, w: WorkerRecord, event: ev.Ready | ev.Resume) -> str:
    """Describe why the worker's data or model do not fit those of the job; "" if they fit."""
    assert job.train is not None
    has, found = job.train.layout.records, event.layout.records
    if found != has:
        return f"worker {w.id} found {found} records in the data; the job has {has}"
    if job.reference.held_out != event.held_out:
        expected, held_out = _in_words(job.reference.held_out), _in_words(event.held_out)
        return f"worker {w.id} found {held_out} in the held-out data; the job has {expected}"
    for split, digest in event.digests.items():
        if not job.reference.has_records(split, digest):
            return (
                f"worker {w.id} holds other records of {split!r} than the workers before it, or the same in "
                "another order: the pipeline that edl.from_tf reads must return the same on each worker. "
                "Leave out shuffle, random operations and deterministic=False, and compare its files"
            )
    if why := ps.decide(job, w, event.tables):
        return why
    if not job.reference.is_model(event.model):
        return (
            f"worker {w.id} made another model than the workers before it: its layers, variables, loss "
            "or optimizer differ. model() must return the same in each process; does it depend on a "
            "random number, the time, or the machine?"
        )
    return sample_loss.why_refused(job, w, event.sample_loss)


def _in_words(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"{records} records of {split!r}" for split, records in sizes.items()) or "no records"
