"""The end of a job: one worker evaluates and saves the model, and then all are let go."""

from __future__ import annotations

from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from master.core import events as ev
from master.core import membership
from master.core.state import State
from master.core.workers import WorkerRecord


def export(job: State, root: WorkerRecord) -> None:
    """The state is complete: have one holder evaluate and save it. The others keep theirs."""
    job.ring.dissolve()
    for w in job.pool:
        w.leases = ()  # should the last step go with its one holder, it is handed out anew
    same = [w for w in job.pool if w.has_state and w.step == root.step and w.digest]
    digests = job.result.digests = {w.id: w.digest for w in same}
    if len(set(digests.values())) > 1:
        job.end(Phase.Failed, f"the weights differ between workers: {digests}")
        return
    job.exporter = root.id
    job.goodput.turn("useful", job.now)  # evaluating is not a price of elasticity
    job.reason = (
        f"all records are applied at step {root.step}; worker {root.id} evaluates and saves the model"
    )
    job.notice(Reason.Evaluating, job.reason)
    job.do(ev.Export(root.id))


def finished(job: State, w: WorkerRecord, event: ev.Finished) -> None:
    """The exporter has evaluated and saved the model: that is the end."""
    if w.id != job.exporter:
        job.stale += 1
        return
    job.result.metrics, job.result.model = dict(event.metrics), event.model
    job.result.skipped = w.skipped
    if event.metrics:
        found = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
        job.notice(Reason.Evaluated, f"Evaluation on the held-out records: {found}")
    assert job.leases is not None
    reason = f"every record of {job.leases.epochs} epochs is applied exactly once"
    if w.skipped:
        reason += f", except {len(w.skipped)} skipped records (non-finite)"
    job.end(Phase.Succeeded, reason)


def let_all_go(job: State) -> None:
    """Nobody is needed any more; when the last worker is gone, the job has ended."""
    assert job.ending is not None
    for w in job.pool:
        if not w.stopped:
            membership.stop(job, w, f"the job ends: {job.ending[0]}")
    if not job.ended and not any(True for _ in job.pool):
        job.ended, job.ended_at = True, job.now
        job.goodput.turn(job.goodput.kind, job.now)
        phase, reason = job.ending
        job.do(ev.End(str(phase), reason))
