# SPDX-License-Identifier: Apache-2.0
"""Divergence check: members report a digest of their state with each checkpoint and at the end.

A flipped bit in one member's memory, or an operation with a different result on one machine, is invisible to
the all-reduce, whose result is the same for all members. So the digests are compared. If they differ,

- the checkpoint is not completed, because its shards may be of different states;
- if more than half of the members agree, the others are stopped with the reason, and the ring continues
  without them and without redoing steps;
- otherwise the correct state is unknown, and all members roll back to the newest checkpoint, whose members
  agreed. They also do so if a diverged state may have been sent to new workers before it was detected.

A member without a digest counts neither as diverged nor as agreeing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from edl.contract.ids import WorkerId
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.formatting import how_many
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import membership, training
from edl.master.core.ring import BREAK
from edl.master.core.state import State

CAUSES = "an operation whose result depends on the machine, or bad memory"
CAUSES_OF_A_LOOP = f"something that the loop changes is missing from the `state` of edl.join(), {CAUSES}"
MAX_NAMED = 8  # workers in a sentence


@dataclass(frozen=True, slots=True)
class Difference:
    """Members hold different states.

    Args:
        odd: the workers that differ from the majority; empty if no state has a majority.
        agree: number of workers that hold the most frequent state.
        of: number of workers that were compared.
    """

    odd: tuple[WorkerId, ...]
    agree: int
    of: int


def difference(told: Mapping[WorkerId, str]) -> Difference | None:
    """Compare digests; None if no two known digests differ.

    Args:
        told: digest of each worker that holds the state; "" if it is unknown.
    """
    counts = Counter(filter(None, told.values()))
    if len(counts) < 2:
        return None
    (most, agree), *_ = counts.most_common(1)
    odd = [w for w, digest in told.items() if digest not in ("", most)] if 2 * agree > len(told) else []
    return Difference(tuple(odd), agree, len(told))


def at_checkpoint(job: State, event: ev.PartsWritten) -> bool:
    """Decide whether a checkpoint whose shards are all written may be completed."""
    found = difference(_states(event))
    if found is None:
        return True
    known = not job.checkpoints.refuse(event, job.now)
    since = max(job.divergence.untrusted_up_to, job.divergence.renewed - 1)  # states up to this ring are void
    if known or event.generation <= since or job.exporter is not None or job.ending is not None:
        return False
    if found.odd and job.divergence.spread <= event.generation:
        _drop(job, found, event.step)
    else:
        _go_back(job, found, event.step)
    return False


def at_the_end(job: State, step: int, digests: Mapping[WorkerId, str]) -> bool:
    """Check the complete state. Returns whether all remaining workers in sync agree."""
    found = difference(digests)
    if found is None:
        return True
    if found.odd and job.config.trains:
        _drop(job, found, step)
        return job.ending is None
    if job.config.asynchronous or not (job.checkpoints.enabled and job.config.trains):
        job.end(
            Phase.Failed, f"{_sentence(job, found, step)}. There is no checkpoint that they could go back to"
        )
        return False
    job.result.void()
    _go_back(job, found, step)
    # No ring exists whose end would trigger it.
    job.next_ring.review(job.now + max(job.config.elastic.join_delay_seconds, 0.1))
    return False


def _states(event: ev.PartsWritten) -> dict[WorkerId, str]:
    """Digests by the workers that wrote shards. Shards of servers carry no digest of a worker's state."""
    in_order = (state for state, times in event.states for _ in range(times))
    told = dict.fromkeys(event.writers, "")
    for worker, state in zip(event.writers, in_order, strict=False):
        told[worker] = told[worker] or state
    return told


def _drop(job: State, found: Difference, step: int) -> None:
    """Stop the workers that differ, and continue without them."""
    named = ", ".join(str(w) for w in found.odd[:MAX_NAMED])
    more = f" and {len(found.odd) - MAX_NAMED} more" if len(found.odd) > MAX_NAMED else ""
    are = "s" if len(found.odd) > 1 else ""
    job.notice(
        Reason.ReplicaDivergence,
        f"{_sentence(job, found, step)}; worker{are} {named}{more} {'are' if are else 'is'} dropped, "
        "the others go on",
    )
    for worker in found.odd:
        why = (
            f"worker {worker} holds another state than {found.agree} of {how_many(found.of, 'member')} at "
            f"step {step:,}: {_causes(job)}"
        )
        w = job.pool.get(worker)
        if w is None or w.stopped:
            continue
        job.do(ef.Stop(w.id, why))  # before its stream ends, so that the worker receives the reason
        membership.give_up(job, w, ef.FenceReason.StateDiffers, why)
        membership.charge(job, w, why)


def _go_back(job: State, found: Difference, step: int) -> None:
    """Void all states: the next ring starts from the newest checkpoint."""
    divergence, newest = job.divergence, job.checkpoints.step
    divergence.roll_back(_sentence(job, found, step), job.ring.generation)
    most = job.config.elastic.max_failures
    if divergence.times > most:
        job.end(
            Phase.Failed,
            f"{divergence.why}; {how_many(divergence.times, 'time')} in a row all would go back to the same "
            f"checkpoint (elastic.maxFailures is {most})",
        )
        return
    for w in job.pool.where(lambda kind: kind.has_state):
        job.pool.change(w, has_state=False)
    training.go_back(job, divergence.why, newest)
    job.close("the states of the members differ", BREAK)


def _causes(job: State) -> str:
    """The possible causes of a difference, the likeliest first."""
    return CAUSES_OF_A_LOOP if job.config.model.script else CAUSES


def _sentence(job: State, found: Difference, step: int) -> str:
    if found.odd:
        return f"at step {step:,}, {len(found.odd)} of {how_many(found.of, 'member')} held another state"
    agree = f"no more than {found.agree} of {how_many(found.of, 'member')} agree"
    return f"at step {step:,} the members held different states, and {agree} ({_causes(job)})"
