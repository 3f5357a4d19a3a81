"""From one ring to the next: when the running one is left, and when the next is formed.

Nobody is in two rings. The next one is formed when everybody is out of the last, around a worker that
holds the state; when that state is complete, there is no next ring, and one of its holders saves it.
"""

from __future__ import annotations

from edl.contract.phases import WorkerState
from edl.ranges import RangeSet
from master.core import dealing, finish
from master.core import events as ev
from master.core.choice import Choice, Limits, choose, stayers
from master.core.state import State
from master.core.workers import Worker

PAUSED = "paused"


def regroup(job: State) -> None:
    """Ask a running ring to leave at a step boundary when another ring is wanted."""
    if not job.ring.running or job.leases is None:
        return
    if job.leases.complete:
        job.close("every record is applied", planned=True)
        return
    if job.paused:
        job.close(PAUSED, planned=True)
        return
    if job.regroup_at is None or job.regroup_at > job.now:
        return
    job.regroup_at = None
    wanted = {w.id for w in stayers(list(job.pool), job.ring.members, job.limits)}
    members = set(job.ring.members)
    if not wanted or wanted == members:
        return
    changes = [f"worker {w} joins" for w in sorted(wanted - members)]
    changes += [f"worker {w} leaves" for w in sorted(members - wanted)]
    job.close(", ".join(changes), planned=True)


def form(job: State) -> None:
    """Form the next ring as soon as nobody is in one, or have the finished state exported."""
    if job.leases is None or job.exporter is not None:
        return
    if job.ring.running or any(w.in_ring for w in job.pool):
        return
    out = [w for w in job.pool if not w.stopped]
    fresh = not any(w.holds for w in out)
    late = not all(w.warm for w in job.pool.staying)
    if fresh and late and job.regroup_at is not None and job.regroup_at > job.now:
        return  # nobody waits with the state: give those who are late for the start a moment
    limits, whole = job.limits, job.leases.size * job.leases.epochs
    if any(w.holds and w.applied.covers(0, whole) for w in out):
        limits = Limits(1, limits.most)  # nothing is left to train, and one can save it alone
    elif job.paused:
        _wait(job, PAUSED)
        return
    choice = choose(out, job.ring.members, limits)
    if job.ring.members:
        job.do(*job.ring.changes[-1].tell())
    if fresh and job.leases.applied and choice.members:
        job.restarts += 1
        job.say(
            "ring",
            f"every worker that held the state is gone: {len(job.leases.applied)} "
            "records of training are lost, the job starts again from its first record",
        )
    if choice.root is None:
        _wait(job, choice.reason)
        return
    root = job.pool[choice.root]
    dealing.go_on_from(job, root, choice)
    if job.leases.complete:
        finish.export(job, root)
    else:
        _publish(job, choice, root)


def _publish(job: State, choice: Choice, root: Worker) -> None:
    assert job.leases is not None
    first = job.ring.generation == 0
    cause = job.ring.closing or ("start" if first else job.waited or "start again")
    job.ring.form(choice.members, cause, job.now)
    job.waited, job.regroup_at = "", None
    job.step = root.step
    for w in job.pool:
        w.wants = False
        w.leases = RangeSet.of(w.leases).minus(job.leases.applied).ranges
    members = [job.pool[m] for m in choice.members]
    for w in members:
        if w.state == WorkerState.READY:
            w.goes("placed")
        w.in_ring = True
    job.reason = f"ring {job.ring.generation}: {choice.reason}"
    job.goodput.turn("starting" if first else "re-forming", job.now)
    leases = tuple(w.leases for w in members)
    job.do(ev.Form(job.ring.generation, choice.members, root.id, choice.sync, leases))
    if set(choice.members) != {w.id for w in stayers(list(job.pool), choice.members, job.limits)}:
        job.regroup_at = job.now  # a hand-over: change again as soon as it is done


def _wait(job: State, reason: str) -> None:
    job.ring.dissolve()
    job.reason = reason
    job.waited = "resumed" if job.paused else "workers are back"
    kind = "paused" if job.paused else "waiting for workers"
    if job.ring.generation > 0 and job.goodput.kind != kind:
        job.goodput.turn(kind, job.now)
        job.say("ring", f"no ring: {reason}")
