"""From one ring to the next: when the running one is left, and when the next is formed.

Nobody is in two rings. The next one is formed when everybody is out of the last, around a worker that
holds the state; when that state is complete, there is no next ring, and one of its holders saves it.
"""

from __future__ import annotations

from edl.contract.phases import WorkerState
from edl.contract.reasons import Reason
from master.core import balance, completion, training
from master.core import events as ev
from master.core.quorum import Limits, RingPlan, candidates, plan_ring
from master.core.state import State
from master.core.workers import WorkerRecord

SUSPENDED = "suspended"


def regroup(job: State) -> None:
    """Ask a running ring to leave at a step boundary when another ring is due."""
    if not job.ring.running or job.train is None:
        return
    if job.suspended:
        job.close(SUSPENDED, planned=True)
        return
    if job.regroup_at is None or job.regroup_at > job.now:
        _balance(job)
        return
    job.regroup_at = None
    wanted = {w.id for w in candidates(list(job.pool), job.ring.members, job.limits)}
    members = set(job.ring.members)
    if not wanted or wanted == members:
        return
    changes = [f"worker {w} joins" for w in sorted(wanted - members)]
    changes += [f"worker {w} leaves" for w in sorted(members - wanted)]
    job.close(", ".join(changes), planned=True)


def _balance(job: State) -> None:
    """Have the ring formed anew if the parts of a step fit its members badly."""
    if job.config.training.balance != "speed" or not job.ring.up:
        return
    settled = job.ring.changes[-1].formed_at + balance.SETTLE_SECONDS <= job.now
    if settled and (gain := balance.gain(job.ring.inside, job.ring.shares)) >= balance.GAIN:
        job.close(f"parts by speed: {gain:.2f} times as fast", planned=True)


def form(job: State) -> None:
    """Form the next ring as soon as nobody is in one, or have the finished state exported."""
    if job.train is None or job.exporter is not None:
        return
    if job.ring.running or any(w.in_ring for w in job.pool):
        return
    out = [w for w in job.pool if not w.stopped]
    fresh = not any(w.has_state for w in out)
    late = not all(w.is_ready for w in job.pool.staying)
    if fresh and late and job.regroup_at is not None and job.regroup_at > job.now:
        return  # nobody waits with the state: give those who are late for the start a moment
    limits, task = job.limits, job.train
    if fresh and task.end and completion.ends_without_holders(job):
        return  # never by training again what has been trained and saved
    furthest = max((w.step for w in out if w.has_state), default=0)
    if not fresh and task.steps.ended(furthest, task.epochs):
        limits = Limits(1, limits.max_size)  # nothing is left to train, and one can save it alone
    elif job.suspended:
        _wait(job, SUSPENDED)
        return
    plan = plan_ring(out, job.ring.members, limits)
    if job.ring.members:
        job.do(*job.ring.changes[-1].tell())
    if plan.root is None:
        _wait(job, plan.reason)
        return
    root = job.pool[plan.root]
    training.go_on_from(job, root.step if root.has_state else 0)
    if task.complete:
        completion.export(job, root)
    else:
        _publish(job, plan, root)


def _publish(job: State, plan: RingPlan, root: WorkerRecord) -> None:
    assert job.train is not None
    first = job.ring.generation == 0
    cause = job.ring.closing or ("start" if first else job.waited or "start again")
    job.ring.form(plan.members, cause, job.now)
    job.waited, job.regroup_at = "", None
    job.step = root.step
    members = [job.pool[m] for m in plan.members]
    for w in members:
        if w.state == WorkerState.READY:
            w.transition("placed")
        w.in_ring = True
    job.reason = f"ring {job.ring.generation}: {plan.reason}"
    job.goodput.turn("starting" if first else "re-forming", job.now)
    job.ring.shares = balance.shares(members, job.config.training.balance == "speed")
    job.do(
        ev.Form(
            job.ring.generation, plan.members, root.id, plan.sync,
            job.train.epochs, job.ring.shares, job.train.layout,
        )
    )  # fmt: skip
    if set(plan.members) != {w.id for w in candidates(list(job.pool), plan.members, job.limits)}:
        job.regroup_at = job.now  # a hand-over: change again as soon as it is done


def _wait(job: State, reason: str) -> None:
    job.ring.dissolve()
    job.reason = reason
    job.waited = "resumed" if job.suspended else "enough workers are ready again"
    kind = "suspended" if job.suspended else "waiting for workers"
    if job.ring.generation > 0 and job.goodput.kind != kind:
        job.goodput.turn(kind, job.now)
        if job.suspended:
            job.notice(Reason.Suspended, "every worker has left the ring; the job is suspended")
        else:
            job.notice(Reason.RingPending, f"the ring is pending: {reason}")
