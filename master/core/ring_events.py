# SPDX-License-Identifier: Apache-2.0
"""What members report of the current ring: they joined it, make steps in it, and have left it."""

from __future__ import annotations

from dataclasses import replace

from edl.master.core import events as ev
from edl.master.core import ps, training
from edl.master.core.goodput import STALLS
from edl.master.core.ring import BREAK, CHANGE
from edl.master.core.state import State
from edl.master.core.workers import UP, WorkerRecord


def joined(job: State, w: WorkerRecord, event: ev.JoinedRing) -> None:
    """Record a member that is in the ring and holds its state."""
    change = job.ring.changes[-1]
    # The outage of a server is no cost of a change: new workers would wait for many times its length.
    since = change.formed_at if change.stopped_at is None else change.stopped_at
    if w.has_state and not ps.waited_since(job, since):
        job.ring.goes_on(job.now)
    job.pool.change(w, place=UP, has_state=True)
    w.step, w.round, w.callbacks_done = event.step, event.round, event.callbacks_done
    if job.checkpoints.restoring == event.generation:
        if job.config.asynchronous:
            training.found(job, event)
        else:
            training.restored(job, event.step)
    elif event.rolled_back and change.roll_back():
        training.rolled_back(job, event)
    if event.servers:
        ps.have_rows(job, event)
    if change.join(event.step, job.ring.up, job.now):
        training.all_have(job, change.step)
        job.checkpoints.ring_is_up(job.now)
        if job.ring.running:
            job.goodput.turn("useful", job.now)


def stepped(job: State, _w: WorkerRecord, event: ev.Stepped) -> None:
    """Record a member's first step in the ring, and the cost of the change."""
    job.backoff.stepped()
    change = job.ring.changes[-1]
    if change.note(event):
        job.goodput.redo(event.wasted_seconds / max(len(job.ring.members), 1))
        job.goodput.re_formed(change.stall_seconds, job.now)
        if len(change.stepped) == len(job.ring.members):
            job.do(*change.tell(job.work.divides_records))


def left(job: State, w: WorkerRecord, event: ev.LeftRing) -> None:
    """Record the state of a member that has left the ring, and let the others leave it, too."""
    if event.generation <= job.divergence.untrusted_up_to:
        event = replace(event, has_state=False)
    job.pool.left(w, event)
    job.ring.stops(job.now, event.broken)
    if event.broken:
        job.close(f"worker {w.id}: {event.broken}", BREAK)
    else:
        job.close("left together", CHANGE)


def progress(job: State, event: ev.Progress) -> None:
    """Record the progress of the ring."""
    if event.generation != job.ring.generation or not job.ring.members:
        return
    if event.generation <= job.divergence.untrusted_up_to:
        return
    for worker, speed in event.speeds.items():
        if w := job.pool.get(worker):
            w.speed = speed
            if job.config.training.load_balancing == "speed":
                job.next_ring.balance(job.now)
    job.latest.progress(event)
    training.progress(job, event.step)


def stalled(job: State, event: ev.Stalled) -> None:
    """Record that the ring makes no step, and what its members wait for."""
    if event.generation == job.ring.generation and job.ring.running:
        job.goodput.stall(event.kind, job.now - event.seconds)


def stall_ended(job: State, event: ev.StallEnded) -> None:
    """Record that the ring makes steps again."""
    if event.generation == job.ring.generation and job.goodput.kind in STALLS:
        job.goodput.turn("useful", job.now)
