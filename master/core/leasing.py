"""Who may train on what, and how far the job is by what its ring has told."""

from __future__ import annotations

from edl.contract.batching import local_batch
from edl.contract.ids import WorkerId
from edl.contract.ranges import RangeSet
from edl.contract.reasons import Reason
from master.core import events as ev
from master.core.leases import LeaseBook
from master.core.quorum import RingPlan
from master.core.state import State
from master.core.workers import WorkerRecord


def go_on_from(job: State, root: WorkerRecord, plan: RingPlan) -> None:
    """The root's applied set is the truth; what is left to lease follows from it."""
    assert job.leases is not None
    for w in job.pool:
        if not _share(job, w.id, plan.members):  # who has no part in the batch could never use it up
            w.leases = ()
    epoch = job.leases.done_epochs
    applied = root.applied if root.has_state else RangeSet()
    job.leases.rebase(applied, (r for w in job.pool for r in w.leases))
    _tell_epoch(job, job.leases, epoch)


def progress(job: State, applied: RangeSet) -> None:
    """A running ring has safely applied so much."""
    if job.leases is None or job.ring.closing:
        return
    if len(applied) < len(job.leases.applied):
        return  # older than what the root said when the ring was formed
    epoch = job.leases.done_epochs
    job.leases.progress(applied)
    for w in job.ring.inside:
        w.leases = tuple(r for r in w.leases if not applied.covers(*r))
    _tell_epoch(job, job.leases, epoch)


def grant(job: State) -> None:
    """Lease positions to the members that ask for some, while there are any."""
    if job.leases is None or not job.ring.running:
        return
    members = job.ring.members
    for w in job.ring.inside:
        batch = _share(job, w.id, members)
        if w.needs_lease and w.up_in == job.ring.generation and batch:
            lease = job.leases.grant(len(members), batch, job.config.elastic.max_lease_batches)
            if lease is None:
                return
            w.leases, w.needs_lease = (*w.leases, lease), False
            job.do(ev.Grant(w.id, lease))


def _share(job: State, worker: WorkerId, members: tuple[WorkerId, ...]) -> int:
    """Records of each global batch that fall to the worker in a ring of these; 0 outside it."""
    if worker not in members:
        return 0
    return local_batch(job.config.training.batch_size, members.index(worker), len(members))


def _tell_epoch(job: State, leases: LeaseBook, before: int) -> None:
    if leases.done_epochs > before:
        loss = ""
        if job.epoch_loss is not None and job.loss is not None:
            loss = f", loss {job.epoch_loss.mean:.4f} (mean of the epoch), {job.loss:.4f} (last step)"
        job.notice(Reason.EpochApplied, f"epoch {leases.done_epochs} of {leases.epochs} is applied{loss}")
