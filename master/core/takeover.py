# SPDX-License-Identifier: Apache-2.0
"""The ring of an earlier master: kept if it is whole, closed and formed again otherwise.

`failover` collects the reports of its members.
"""

from __future__ import annotations

from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import facts, membership, past, training
from edl.master.core.ring import CHANGE, LOSS
from edl.master.core.state import State, deadline


def adopted(job: State, event: ev.Adopted) -> None:
    """Continue the job of an earlier master with its workers and its accounts."""
    job.notes.begin_with(event.began_with)
    # What is unknown is not nothing: its workers may have trained, and then a start without them is a loss.
    known = event.past or facts.Past({}, "useful")
    past.restore(job, known, event.active_seconds)
    if known.ending is not None:  # its workers may be gone already, and the job must not be trained again
        phase, reason = known.ending
        job.ending, job.reason = (Phase(phase), reason), reason
        job.lifetime.begin(job.now)
        job.mode = known.mode
        if known.layout is not None:
            training.open_task(job, known.layout, {})
            assert job.train is not None
            job.train.done = known.done
            job.latest.go_to(known.done)
    for w in job.failover.begin(event, job.now):
        job.timeouts.watch(w)
    if event.workers:
        count = len(event.workers)
        job.notice(Reason.FailedOver, f"this master took over from an earlier one: {count} workers")


@deadline
def reports_due(job: State) -> float | None:
    """Return until when workers of an earlier master may reconnect."""
    return job.failover.until


def adopt_ring(job: State) -> bool:
    """Adopt the ring of an earlier master if it is whole, else close it. False if it is still unknown."""
    if job.failover.until is None:
        return True
    missing = job.failover.missing(job.now)
    if missing is None:
        return False
    for w in missing:
        why = "it did not reconnect to the new master"
        membership.give_up(job, w, ef.FenceReason.ReconnectTimeout, why)
    if job.ring.members:
        whole = len(job.ring.inside) == len(job.ring.members) and job.ring.up
        if whole and job.ring.running:
            job.goodput.ring_was_kept(job.now)
        # Workers do not report their shares, so loadBalancing=speed needs a new ring.
        if whole and job.ring.running and job.config.training.load_balancing == "none":
            _keep(job)
            return True
        job.close("a new master took over", CHANGE if whole else LOSS)
        job.do(*job.ring.ask_the_rest(job.now))
    return True


def _keep(job: State) -> None:
    """Keep the ring of an earlier master: its members continue to train."""
    ring = job.ring
    ring.keep()
    job.reason = f"a new master took over, and the ring of {len(ring.members)} trains on"
    job.unseen = False
    if job.train is not None:  # so that epochs that an earlier master has reported are not reported again
        job.train.done = max(job.train.done, job.train.safe)
    job.notice(Reason.FailedOver, job.reason)
    job.checkpoints.ring_is_up(job.now)
    job.do(ef.Train(ring.generation, ring.members, job.epochs))  # it may not know the last change
