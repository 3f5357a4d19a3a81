# SPDX-License-Identifier: Apache-2.0
"""The history of a job under earlier masters of its run.

A master that takes over starts with an empty core and learns the state of the training from the workers.
Only the earlier master knows the job's costs and outcomes so far. It records them as an `events.Past`: in its
journal on one machine, in the release's status in a cluster. So the summary covers the whole job, whichever
master writes it.
"""

from __future__ import annotations

from dataclasses import replace

from edl.contract.ids import Generation
from edl.master.core import facts
from edl.master.core.goodput import STALLS
from edl.master.core.ring import Earlier
from edl.master.core.state import State


def of(job: State) -> facts.Past:
    """Return the history for the next master. It changes with the job's events, not with time alone."""
    total = Earlier(job.ring.earlier.changes, job.ring.earlier.stall_seconds, job.ring.earlier.redone_records)
    for change in job.ring.changes:
        total.add(change)
    return facts.Past(
        seconds=dict(job.goodput.seconds),
        doing=job.goodput.kind,
        longest_wait=job.goodput.longest,
        kept_useful_seconds=job.goodput.kept,
        changes=total.changes,
        stall_seconds=total.stall_seconds,
        redone_records=total.redone_records,
        state_losses=job.restarts,
        checkpoint=job.checkpoints.step,
        failures=tuple((f.worker, f.why) for f in job.failures.charged),
        failure_count=job.failures.count,
        warnings=tuple(job.notes.warnings),
        evaluations=dict(job.latest.evaluations),
        safe=job.train.safe if job.train is not None else job.safe_before,
        generation=job.ring.generation,
        stepped=tuple(sorted(job.ring.changes[-1].stepped)) if job.ring.changes else (),
        ending=None if job.ending is None else (str(job.ending[0]), job.ending[1]),
        mode=job.mode,
        layout=job.train.layout if job.train is not None else None,
        done=job.train.done if job.train is not None else 0,
        result=replace(job.result, failed=tuple(replace(part, traceback="") for part in job.result.failed)),
    )


def until(past: facts.Past, active_seconds: float) -> facts.Past:
    """Return the same past with its account up to the earlier master's last sign of life.

    Args:
        active_seconds: from the beginning of the job until then. What they add to `past.seconds` is of the
            kind `past.doing`, for each change of the kind is recorded.
    """
    added = max(0.0, active_seconds - sum(past.seconds.values()))
    return replace(past, seconds={**past.seconds, past.doing: past.seconds.get(past.doing, 0.0) + added})


def restore(job: State, past: facts.Past, active_seconds: float) -> None:
    """Continue the job's accounts.

    Args:
        active_seconds: since the job began. What of it is not in `past.seconds` passed without a master.
            Less than these seconds: clocks differ, and the seconds count.
    """
    active = max(active_seconds, sum(past.seconds.values()))
    job.lifetime.continues(active)
    job.goodput.restore(past.seconds, past.doing, active, past.longest_wait, past.kept_useful_seconds)
    earlier = Earlier(past.changes, past.stall_seconds, past.redone_records)
    job.ring.restore(earlier, Generation(past.generation), past.stepped)
    job.restarts = past.state_losses
    job.checkpoints.know(past.checkpoint)
    job.failures.restore(past.failures, past.failure_count)
    job.notes.restore(past.warnings)
    job.latest.restore(past.evaluations)
    job.safe_before = past.safe
    job.unseen = trained_unseen(past)
    job.result = replace(past.result)


def trained_unseen(past: facts.Past) -> bool:
    """True if workers may have trained more steps than the earlier master has recorded.

    A ring was training or being formed when that master was last heard. In all other cases the workers had
    left their ring, and had reported their steps.
    """
    began = past.doing == "starting" and past.generation > 0
    return began or past.doing in ("useful", "re-forming", *STALLS)
