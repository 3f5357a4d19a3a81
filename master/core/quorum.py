# SPDX-License-Identifier: Apache-2.0
"""Quorum: the members and the root of the next ring, decided as values with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edl.contract.ids import WorkerId
from edl.formatting import how_many
from edl.master.core.workers import DRAINING, WorkerRecord

MAX_TAKERS = 4  # receivers of the state for each sender; for more, one broadcast to all is faster


@dataclass(frozen=True, slots=True)
class RingPlan:
    """A decision about the next generation. `members` is empty if no ring can be formed."""

    members: tuple[WorkerId, ...]
    root: WorkerId | None
    sync: bool  # all receive the root's state before the first step
    joining: tuple[WorkerId, ...]  # or: these receive the state from other members while the ring trains
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The smallest and largest size of a ring, in workers."""

    min_size: int
    max_size: int  # the target, which users can change while the job runs
    may_empty: bool = False  # whether all members may leave, because the state is kept elsewhere


def candidates(
    workers: Sequence[WorkerRecord], old: Sequence[WorkerId], limits: Limits
) -> list[WorkerRecord]:
    """Return the members of a ring of these workers, in rank order.

    Survivors keep their order, so the oldest keep the lowest ranks; new workers follow. Workers that cannot
    make a step yet, because a read of theirs has not returned, are left out if the others can go on without
    them. Draining workers fill a gap below the smallest size, because they can train until they must exit.
    """
    rank = {worker: i for i, worker in enumerate(old)}

    def seniority(w: WorkerRecord) -> tuple[bool, int, int]:
        return (not w.has_state, rank.get(w.id, len(rank)), w.id)

    ready = _without_readers([w for w in workers if w.is_ready], limits)
    stay = sorted(ready, key=seniority)[: limits.max_size]
    missing = max(limits.min_size, 1) - len(stay)
    if missing > 0 and not limits.may_empty:
        leaving = (w for w in workers if w.state == DRAINING and w.has_state and not w.stopped)
        stay += sorted(leaving, key=seniority)[:missing]
    return stay


def _without_readers(ready: list[WorkerRecord], limits: Limits) -> list[WorkerRecord]:
    """Leave out workers whose reads have not returned, unless they are needed.

    They are if the others are too few, or none of them holds as new a state.
    """
    others = [w for w in ready if not w.reads]
    newest = max((w.progress for w in ready if w.has_state), default=None)
    held = max((w.progress for w in others if w.has_state), default=None)
    return (
        others if len(others) >= max(limits.min_size, 1) and (limits.may_empty or held == newest) else ready
    )


def too_few(here: int, limits: Limits) -> str:
    """Describe why these workers form no ring."""
    why = " (minWorkers)" if limits.min_size > 1 else ""
    are = "is" if here == 1 else "are"
    return (
        f"{how_many(here, 'worker')} {are} ready, and training needs at least {max(limits.min_size, 1)}{why}"
    )


def plan_ring(workers: Sequence[WorkerRecord], old: Sequence[WorkerId], limits: Limits) -> RingPlan:
    """Plan the next ring of `workers`, which must all be outside of rings.

    The root is the most advanced holder of the state, as it alone may have the last step. A draining worker
    becomes a member once more if no other member holds its state.
    """
    stay = candidates(workers, old, limits)
    if len(stay) < max(limits.min_size, 1):
        return RingPlan((), None, False, (), too_few(len(stay), limits))
    staying = {w.id for w in stay}
    holders = [w for w in workers if w.has_state and (w.id in staying or w.state == DRAINING)]
    root = max(holders, key=lambda w: (w.progress, w.made_in, w.id in staying, -w.id), default=None)
    members = stay if root is None or root.id in staying else [root, *stay]
    reason = how_many(len(stay), "worker")
    if root is not None and root.state == DRAINING:
        reason += f"; worker {root.id} transfers the state before it leaves"
    lack = tuple(w.id for w in members if root is None or not is_state_of(w, root))
    few = len(lack) <= MAX_TAKERS * (len(members) - len(lack))
    return RingPlan(
        members=tuple(w.id for w in members),
        root=members[0].id if root is None else root.id,
        sync=bool(lack) and not few,
        joining=lack if few else (),
        reason=reason,
    )


def is_state_of(w: WorkerRecord, root: WorkerRecord) -> bool:
    """True if the worker holds the same state as the root: of the same step, made by the same ring."""
    return w is root or (w.has_state and (w.progress, w.made_in) == (root.progress, root.made_in))
