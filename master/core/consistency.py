"""Whether all members hold the same state: they say its digest with each checkpoint, and at the end.

A bit that flips in one member's memory, or an operation that gives another result on one machine, is nothing
that a ring would notice: its sums are the same for all. So the digests are compared. Where they differ,

- the checkpoint is not completed: its parts may be of different states;
- if more than half of the members agree, the others are told why and dropped, and the ring goes on without
  them, with nothing redone;
- else nobody knows whose state is the job's: all go back to the newest checkpoint, whose members agreed. So
  they do where a state that differs may have been handed on before it was known.

Who has told no digest is not known to differ, and does not count as one who agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from edl.contract.ids import WorkerId
from edl.contract.phases import Phase
from edl.contract.reasons import Reason
from edl.master.core import effects as ef
from edl.master.core import events as ev
from edl.master.core import membership, training
from edl.master.core.state import State
from edl.text import how_many

CAUSES = "bad memory, or an operation whose result depends on the machine"
MOST_NAMED = 8  # workers in a sentence


@dataclass(frozen=True, slots=True)
class Difference:
    """States that ought to be equal are not.

    Args:
        odd: who differ from more than half of all; none: no state is that of so many.
        agree: so many hold the state that most hold.
        of: so many were asked.
    """

    odd: tuple[WorkerId, ...]
    agree: int
    of: int


def difference(told: Mapping[WorkerId, str]) -> Difference | None:
    """Between these digests; None: none that is known.

    Args:
        told: by who holds the state; "": not known.
    """
    counts = Counter(filter(None, told.values()))
    if len(counts) < 2:
        return None
    (most, agree), *_ = counts.most_common(1)
    odd = [w for w, digest in told.items() if digest not in ("", most)] if 2 * agree > len(told) else []
    return Difference(tuple(odd), agree, len(told))


def at_checkpoint(job: State, event: ev.PartsWritten) -> bool:
    """All parts of a checkpoint are written: whether it may be completed."""
    found = difference(_states(event))
    if found is None:
        return True
    known = not job.checkpoints.refuse(event, job.now)
    since = max(job.trust.not_of, job.trust.renewed - 1)  # up to this ring, states are nobody's any more
    if known or event.generation <= since or job.exporter is not None or job.ending is not None:
        return False
    if found.odd and job.trust.spread <= event.generation:
        _drop(job, found, event.step)
    else:
        _go_back(job, found, event.step)
    return False


def at_the_end(job: State, step: int, digests: Mapping[WorkerId, str]) -> bool:
    """The state is complete. Whether all who hold it hold the same one, or do so now."""
    found = difference(digests)
    if found is None:
        return True
    if found.odd and job.config.trains:
        _drop(job, found, step)
        return job.ending is None
    if job.config.asynchronous or not (job.checkpoints.enabled and job.config.trains):
        job.end(Phase.Failed, f"{_sentence(found, step)}. There is no checkpoint that they could go back to")
        return False
    job.result.model, job.result.variables, job.result.kept_at = "", "", None
    _go_back(job, found, step)
    job.regroup_at = job.now + max(job.config.elastic.join_delay_seconds, 0.1)  # there is no ring to be left
    return False


def _states(event: ev.PartsWritten) -> dict[WorkerId, str]:
    """By who has written a part. Parts of servers are told by a worker, and say nothing of its state."""
    in_order = (state for state, times in event.states for _ in range(times))
    told = dict.fromkeys(event.writers, "")
    for worker, state in zip(event.writers, in_order, strict=False):
        told[worker] = told[worker] or state
    return told


def _drop(job: State, found: Difference, step: int) -> None:
    """Go on without those who differ."""
    named = ", ".join(str(w) for w in found.odd[:MOST_NAMED])
    more = f" and {len(found.odd) - MOST_NAMED} more" if len(found.odd) > MOST_NAMED else ""
    are = "s" if len(found.odd) > 1 else ""
    job.notice(
        Reason.StatesDiffer,
        f"{_sentence(found, step)}; worker{are} {named}{more} {'are' if are else 'is'} dropped, "
        "the others go on",
    )
    for worker in found.odd:
        why = (
            f"worker {worker} holds another state than {found.agree} of {how_many(found.of, 'member')} at "
            f"step {step:,}: {CAUSES}"
        )
        w = job.pool.get(worker)
        if w is None or w.stopped:
            continue
        job.do(ef.Stop(w.id, why))  # before its stream ends: a worker that writes then does not hear why
        membership.give_up(job, w, ef.FenceReason.StateDiffers, why)
        membership.charge(job, w, why)


def _go_back(job: State, found: Difference, step: int) -> None:
    """Nobody's state counts any more: the next ring begins with the newest checkpoint."""
    trust, newest = job.trust, job.checkpoints.step
    trust.times += 1
    trust.why, trust.not_of = _sentence(found, step), job.ring.generation
    most = job.config.elastic.max_failures
    if trust.times > most:
        job.end(
            Phase.Failed,
            f"{trust.why}; {how_many(trust.times, 'time')} in a row all would go back to the same checkpoint "
            f"(elastic.maxFailures is {most})",
        )
        return
    for w in job.pool.where(lambda kind: kind.has_state):
        job.pool.change(w, has_state=False)
    job.pool.copies.clear()
    job.pool.bringing.clear()
    job.copies_awaited = 0
    training.go_back(job, trust.why, newest)
    job.close("the states of the members differ", planned=False)


def _sentence(found: Difference, step: int) -> str:
    if found.odd:
        return f"at step {step:,}, {len(found.odd)} of {how_many(found.of, 'member')} held another state"
    agree = f"no more than {found.agree} of {how_many(found.of, 'member')} agree"
    return f"at step {step:,} the members held different states, and {agree} ({CAUSES})"
