# SPDX-License-Identifier: Apache-2.0
"""Rendezvous: when the running ring is left, and when the next ring is formed.

No worker is in two rings. The next ring is formed when all members have left the previous one, around a
worker in sync. If the state is complete, no further ring is formed, and one worker in sync saves it.
"""

from __future__ import annotations

from dataclasses import replace

from edl.contract.ids import NO_RING, WorkerId
from edl.contract.phases import Phase, WorkerState
from edl.contract.reasons import Reason
from edl.master.core import balance, completion, join_policy, membership, ps, training
from edl.master.core import effects as ef
from edl.master.core.quorum import Limits, RingPlan, candidates, plan_ring, too_few
from edl.master.core.ring import CHANGE, MEMBER_LOST
from edl.master.core.servers import STARTING
from edl.master.core.state import State, deadline
from edl.master.core.workers import AWAY, DRAINING, IN, Kind, WorkerRecord

MAX_NAMED = 8  # workers in the cause of a change
# Seconds after a cut, or after the read of a different member, in which a read may return. The others then go
# on without slower ones.
READ_SECONDS = 0.3


@deadline
def review_due(job: State) -> float | None:
    """Return when the membership is reviewed."""
    return job.next_ring.review_at


@deadline
def join_due(job: State) -> float | None:
    """Return when a change of the ring for new workers pays off."""
    return job.next_ring.join_at


@deadline
def balance_due(job: State) -> float | None:
    """Return when the shares of a step are reviewed."""
    return job.next_ring.balance_at


@deadline
def pause_ends(job: State) -> float | None:
    """Return when the next ring may be formed, after rings that broke before their first step."""
    return job.backoff.ring_until


def regroup(job: State) -> None:
    """Order the running ring to leave at a step boundary if a different ring is due."""
    if not job.ring.running or job.train is None:
        return
    if pause := job.pause:
        job.close(pause, CHANGE)
        return
    ps.regroup(job)
    if job.next_ring.join_at is not None and job.next_ring.join_at <= job.now:
        job.next_ring.join(job.now)
    if job.next_ring.review_at is None or (job.next_ring.review_at > job.now and _late(job)):
        _balance(job)
        return
    # While members receive the state, new workers wait, and a draining member hands the state over first.
    if not job.ring.up and not job.pool.any(lambda kind: kind.state == DRAINING and kind.place == IN):
        return
    wanted = {w.id for w in candidates(list(job.pool), job.ring.members, job.limits)}
    members = set(job.ring.members)
    if not job.ring.up and not any(job.pool[w].has_state for w in wanted):
        return
    job.next_ring.reviewed()
    if wanted == members or not (wanted or job.limits.may_empty):
        return
    if wanted > members and _wait_to_join(job, wanted - members):
        return
    changes = [f"worker {w} joins" for w in sorted(wanted - members)]
    changes += [f"worker {w} leaves" for w in sorted(members - wanted)]
    if more := changes[MAX_NAMED:]:
        changes[MAX_NAMED:] = [f"and {len(more)} more changes"]
    job.close(", ".join(changes), CHANGE)


def _wait_to_join(job: State, newcomers: set[WorkerId]) -> bool:
    """True if changing the ring for these new workers does not pay off yet."""
    found = [job.pool[w] for w in newcomers]
    if any(w.has_state for w in found):  # it may be ahead of the ring
        return False
    at = join_policy.until([w.ready_at for w in found], len(job.ring.members), job.ring.stop_seconds)
    return job.next_ring.join_later(at, job.now)


def _late(job: State) -> bool:
    """True if a worker is starting, so that a change may wait for it."""
    return job.pool.any(lambda kind: kind.stays and not kind.is_ready)


def _balance(job: State) -> None:
    """Start a re-rendezvous if the shares of a step do not match the speeds of the members."""
    at = job.next_ring.balance_at
    if at is None or not job.ring.up:
        return
    at = max(at, job.ring.changes[-1].formed_at + balance.SETTLE_SECONDS)
    if at > job.now:
        job.next_ring.balance(at)
        return
    job.next_ring.balanced()
    if (gain := balance.gain(job.ring.inside, job.ring.shares)) >= balance.GAIN:
        job.close(f"parts by speed: {gain:.2f} times as fast", CHANGE)


def form(job: State) -> None:
    """Form the next ring once all workers have left the previous one, or export the complete state."""
    if job.train is None or job.exporter is not None:
        return
    if job.ring.running or job.pool.any(lambda kind: kind.in_ring):
        return
    _excuse_readers(job)
    ready = job.pool.where(lambda kind: kind.is_ready and not kind.stopped)
    if job.ring.state is MEMBER_LOST and (reading := [w for w in ready if w.reads]):
        if len(reading) == len(ready):
            job.reason = "each worker waits for its records"
            return
        if job.now < job.ring.quiet_since + READ_SECONDS:
            return  # a ring of all is better than one that changes again at once
    # With all weights on servers, no worker needs to hold the state, and the servers send it to each.
    at_servers, limits, task = job.config.asynchronous, job.limits, job.train
    fresh = not job.pool.any(_holds)
    if not at_servers and (awaited := _awaited(job, fresh)):
        _wait(job, awaited)
        return
    at = job.next_ring.review_at
    if fresh and at is not None and at > job.now and _late(job):
        return  # no worker in sync waits, so wait for the workers that are still starting
    if fresh and task.end and completion.ends_without_holders(job):
        completion.shut_down_workers(job)  # now, because no further event may follow soon
        return  # what was trained and saved is never trained again
    furthest = max((w.step for w in job.pool.where(_holds)), default=0)
    if not (fresh or job.servers.lost) and task.steps.ended(furthest, task.epochs):
        limits = Limits(1, limits.max_size)  # nothing is left to train, and one worker can save it alone
    elif pause := job.pause:
        _wait(job, pause)
        return
    plan = _plan_or_wait(job, limits)
    if plan.root is None:
        return
    root = job.pool[plan.root]
    ended = root.has_state and task.steps.ended(root.step, task.epochs)
    if not at_servers:
        step = root.step if root.has_state else job.checkpoints.step
        training.go_on_from(job, step, checkpoint=not root.has_state)
    elif ended:
        training.reach(job, task, root.step)
    # Only a ring restores a checkpoint, or gives servers their first state.
    nothing_to_do = not (root.has_state or at_servers or task.end or task.rounds)
    if ((ended and root.round >= task.rounds) or nothing_to_do) and not job.servers.lost:
        completion.export(job, root)
        return
    if at_servers:
        root = job.pool[plan.members[0]]
        plan = replace(plan, root=root.id, sync=False, joining=())
    _publish(job, plan, root)


def _awaited(job: State, fresh: bool) -> str:
    """Describe what a ring that holds the state waits for; empty if it can be formed.

    Args:
        fresh: no worker holds the state.
    """
    if job.servers.state is STARTING:
        return "parameter servers are starting"
    if fresh and job.failover.may_hold(job.now):
        return "workers of the earlier master have not come back, and may hold the state"
    if fresh and job.pool.any(lambda kind: kind.place == AWAY):
        return "a silent worker may come back with the state"
    return ""


@deadline
def reads_deadline(job: State) -> float | None:
    """Return when the next ring is formed without members whose reads have not returned."""
    return job.ring.quiet_since + READ_SECONDS if job.ring.state is MEMBER_LOST else None


def _excuse_readers(job: State) -> None:
    """Forget the reads of members of a ring that lost no member: the others waited for them already.

    Each of them is read in the next ring. If such a member were left out, its return would be a change in
    which the reads of others have not returned, and so on.
    """
    if job.ring.state is MEMBER_LOST:
        return
    for worker in job.ring.members:
        if w := job.pool.get(worker):
            w.reads = False


def _holds(kind: Kind) -> bool:
    return kind.has_state and not kind.stopped


def _plan_or_wait(job: State, limits: Limits) -> RingPlan:
    """Plan the next ring, and report the end of the last one. Wait if the plan has no root."""
    plan = _plan(job, limits)
    if job.ring.members:
        job.do(*job.ring.changes[-1].tell(job.work.divides_records))
    if plan.root is None:
        _wait(job, plan.reason)
    return plan


def _plan(job: State, limits: Limits) -> RingPlan:
    """Plan the next ring. With too few ready workers, return a plan without members and without a search."""
    here = job.pool.count(lambda kind: kind.is_ready) + job.pool.count(
        lambda kind: kind.state == DRAINING and _holds(kind)
    )
    if here < max(limits.min_size, 1):
        return RingPlan((), None, False, (), too_few(here, limits) + _on_their_way(job))
    plan = plan_ring(job.pool.where(lambda kind: not kind.stopped), job.ring.members, limits)
    if job.work.root_is_rank_0 and plan.root is not None:
        others = (worker for worker in plan.members if worker != plan.root)
        plan = replace(plan, members=(plan.root, *others))
    return plan


def _on_their_way(job: State) -> str:
    """Describe how many workers are starting or pending; empty if none are."""
    counts = {
        "starting": job.pool.count(lambda kind: kind.is_starting and kind.state != WorkerState.PENDING),
        "pending": job.pool.count(lambda kind: kind.state == WorkerState.PENDING),
    }
    said = [f"{count} {'is' if count == 1 else 'are'} {state}" for state, count in counts.items() if count]
    return f": {', '.join(said)}" if said else ""


def _held_back(job: State) -> bool:
    """Delay the next ring, or fail the job, after rings that broke before their first step. True if so.

    The cause persists, for example two ranks on one GPU or a closed port. Rings with lost members do not
    count, nor do rings of a job with parameter servers: a ring may break several times while a server
    restarts or rows move.
    """
    if job.ring.broke_by_itself and not job.config.servers:
        times, most = job.backoff.ring_broke(job.now), job.config.elastic.max_failures
        rings = "the ring" if times == 1 else f"{times} rings in a row"
        why = f"{rings} broke before the first step, and no worker was lost: {job.ring.error}"
        if times > most and not membership.give_up_evaluation(job, why):
            job.end(Phase.Failed, why)
            return True
        pause = job.backoff.ring_until - job.now
        after = f"the next one is formed {pause:g} s later; the job fails when {most + 1} in a row break"
        job.next_ring.hold_back(f"{why}; {after}")
    if job.backoff.ring_until <= job.now:
        return False
    _wait(job, job.next_ring.held_back)
    job.next_ring.wait("the last one broke before its first step")
    return True


def _publish(job: State, plan: RingPlan, root: WorkerRecord) -> None:
    assert job.train is not None
    if _held_back(job):
        return
    first = job.ring.generation == 0
    cause = job.ring.cause or ("start" if first else job.next_ring.waited or "start again")
    members = [job.pool[m] for m in plan.members]
    shares = balance.shares(members, job.config.training.load_balancing == "speed")
    job.ring.form(plan.members, cause, job.now, shares, root.round)
    job.next_ring.formed()
    job.latest.go_to(job.train.done)
    # Otherwise the members report where the ring starts.
    known = root.has_state and not job.config.asynchronous
    job.checkpoints.restore(NO_RING if known else job.ring.generation)
    job.divergence.begin(job.ring.generation, known, plan.sync or bool(plan.joining))
    for w in members:
        job.pool.change(w, "placed" if w.state == WorkerState.READY else "", place=IN)
    job.reason = f"{plan.reason} (generation {job.ring.generation})"
    job.goodput.turn("starting" if first else "re-forming", job.now)
    job.servers.form()
    job.do(
        ef.Form(
            job.ring.generation,
            plan.members,
            root.id,
            plan.sync,
            job.train.epochs,
            shares,
            job.train.layout,
            job.train.done,
            plan.joining,
            root.round,
            root.callbacks_done,
            job.servers.wanted,
            job.servers.addresses,
            job.divergence.untrusted_up_to,
            job.divergence.why,
            job.servers.released_from,
        )
    )
    if job.ring.ranks.keys() != {w.id for w in candidates(list(job.pool), plan.members, job.limits)}:
        job.next_ring.review(job.now)  # a hand-over: re-rendezvous as soon as it is done


def _wait(job: State, reason: str) -> None:
    job.ring.dissolve()
    suspension = job.suspension
    job.reason = suspension or reason
    job.next_ring.wait("resumed" if suspension else "enough workers are ready again")
    kind = "suspended" if suspension else "waiting for workers"
    if job.ring.generation > 0 and job.goodput.kind != kind:
        job.goodput.turn(kind, job.now)
        if suspension:
            job.notice(Reason.Suspended, f"every worker has left the ring; the job is {suspension}")
        else:
            job.notice(Reason.RingPending, f"the ring is pending: {reason}")
