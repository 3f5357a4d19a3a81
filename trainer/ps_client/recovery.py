# SPDX-License-Identifier: Apache-2.0
"""Derives from the servers' states which of them hold the rows of a step, in which shard assignment.

Promise: pure arithmetic. The same answers give the same assignment and the same messages, whichever root
receives them. The calls are in trainer/ps_client/root.py.

Synchronous steps (mode=hybrid): `ServerStates.choose_assignment`. Asynchronous SGD (mode=ps):
`plan_recovery`.

A server that was down during resharding still reports the old assignment. So only the assignments of servers
in the newest generation count: before rows move, all servers that hold them are in that generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.trainer.embedding.interfaces import Commit


@dataclass(frozen=True, slots=True)
class ServerStates:
    """The states that servers reported when a generation was claimed.

    Args:
        found: the answer of each server, by index.
        away: servers that have not answered and are not needed.
    """

    found: Mapping[int, pb.Position] = field(default_factory=dict)
    away: tuple[int, ...] = ()

    @property
    def generation(self) -> int:
        """The newest generation that any server knows; 0: none."""
        return max((position.generation for position in self.found.values()), default=0)

    @property
    def needed(self) -> int:
        """Number of servers that may hold current rows."""
        if (whole := self._whole) is not None:
            return whole.servers
        ready = [position.ready.servers for position in self.found.values()]
        return max([one.servers for one in self._assignments()] + ready, default=0)

    @property
    def newest(self) -> ShardAssignment | None:
        """The assignment of the servers in the newest generation; None if no server reports one."""
        newest = max(self._with_assignment(), key=lambda position: position.generation, default=None)
        return None if newest is None else ShardAssignment.from_proto(newest.assignment)

    @property
    def lost(self) -> list[int]:
        """The servers without log and rows."""
        return [index for index, position in self.found.items() if position.empty]

    def may_be_on(self, servers: Iterable[int]) -> bool:
        """True if any of these silent servers may hold current rows.

        A server that was only about to be added holds none.
        """
        known, some = self._assignments(), {*servers}
        if not some or self._whole is not None:
            return False
        ready = any(position.HasField("ready") for position in self.found.values())
        return ready or not known or any(some & {*one.members} for one in known)

    def choose_assignment(
        self, step: int, wanted: ShardAssignment, last: Commit | None
    ) -> tuple[ShardAssignment, str]:
        """Choose the assignment in which the servers hold, or can reach, the rows of a step.

        Args:
            step: the step of the ring.
            wanted: preferred, if it is possible.
            last: the result of the step before, from the ledger; None before the first step.

        Returns:
            the assignment, without the servers whose rows are missing or outdated. why it is incomplete; may
            be empty if servers are merely away.
        """
        positions = self.found.values()
        told = {ShardAssignment.from_proto(p.assignment) for p in positions if p.HasField("assignment")}
        told |= {ShardAssignment.from_proto(p.ready) for p in positions if p.HasField("ready")}
        found: list[tuple[bool, ShardAssignment, str]] = []
        # The wanted one, if it is possible; else the one with the most members.
        for one in sorted(told or {wanted}, key=lambda a: (a != wanted, -len(a.members))):
            reasons = {
                index: why
                for index in one.members
                if (why := self.missing_reason(index, one, step, last)) is not None
            }
            if not reasons and one.is_whole:
                return one, ""
            left = one.without(tuple(reasons))
            found.append((left.is_whole, left, "; ".join(filter(None, reasons.values()))))
        _, left, why = max(found, key=lambda each: each[0])  # the first of them
        return left, why

    def missing_reason(self, index: int, of: ShardAssignment, step: int, last: Commit | None) -> str | None:
        """Why server `index` lacks rows that `of` gives it at `step`.

        Returns:
            None if it has them; empty if it is away but not needed.
        """
        position = self.found.get(index)
        if position is None:
            return f"parameter server {index} is away" if index not in self.away else ""
        is_ready = position.HasField("ready")
        if position.empty and not is_ready:
            return f"parameter server {index} has lost its log and rows"
        if is_ready and ShardAssignment.from_proto(position.ready) == of and position.ready_step == step:
            return None
        mine = ShardAssignment.from_proto(position.assignment) if position.HasField("assignment") else of
        if position.empty or (of.held(index) & ~mine.held(index)).any():
            return f"parameter server {index} lacks rows of {of}"
        if last is not None and position.generation < last.generation:
            return f"parameter server {index} was not in the last ring"
        if has_dropped(position, step, last):
            return f"parameter server {index} has dropped what was staged for step {step:,}"
        if not step - 1 <= position.step <= step + 1:
            return why_behind(index, position, step)
        return None

    @property
    def _whole(self) -> ShardAssignment | None:
        """The newest assignment, if all its servers have answered and are in it.

        No further servers are needed then, even if a different assignment was prepared before.
        """
        if (newest := self.newest) is None or not newest.is_whole:
            return None
        told = (self.found.get(index, pb.Position()) for index in newest.members)
        in_it = (
            p.HasField("assignment") and not p.empty and ShardAssignment.from_proto(p.assignment) == newest
            for p in told
        )
        return newest if all(in_it) else None

    def _with_assignment(self) -> list[pb.Position]:
        return [position for position in self.found.values() if position.HasField("assignment")]

    def _assignments(self) -> list[ShardAssignment]:
        """The assignments of the servers in the newest generation among those that hold rows."""
        said = self._with_assignment()
        newest = max((position.generation for position in said), default=0)
        return [
            ShardAssignment.from_proto(position.assignment)
            for position in said
            if position.generation == newest
        ]


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The assignment in which the servers of mode=ps resume.

    Args:
        assignment: without the servers that lack their rows.
        since: the generation in which servers switched to it; 0: they switch now.
        fetched: the generation in which rows were fetched for it.
        missing: servers that lack rows which no other server holds.
    """

    assignment: ShardAssignment
    since: int = 0
    fetched: int = 0
    missing: tuple[int, ...] = ()

    def is_behind(self, found: Mapping[int, pb.Position], step: int) -> bool:
        """Whether a member that has answered has not reached this step."""
        return any(index in found and found[index].step < step for index in self.assignment.members)


def plan_recovery(found: Mapping[int, pb.Position]) -> RecoveryPlan | None:
    """Plan from the states of quiesced servers; None if no server holds rows.

    The server that switched last knows the assignment. No step is accepted in it before all servers have
    switched. So a server holds current rows if it holds all its rows of that assignment, from before or
    fetched. A server that was left out is not a member.
    """
    have = {index: position for index, position in found.items() if not position.empty}
    if not have:
        return None
    newest = have[max(have, key=lambda index: (have[index].assigned_in, -index))]
    of, since = ShardAssignment.from_proto(newest.assignment), newest.assigned_in
    if of.copies < 2:
        return RecoveryPlan(of, since, since)
    lacking = tuple(index for index in of.members if not _can_switch(index, found.get(index), of, since))
    if not lacking:
        return RecoveryPlan(of, since, since)
    left = of.without(lacking)
    return RecoveryPlan(left, 0, since) if left.is_whole else RecoveryPlan(of, since, since, lacking)


def _can_switch(index: int, position: pb.Position | None, to: ShardAssignment, since: int) -> bool:
    """Whether a server holds its rows of `to`, to which other servers switched in generation `since`."""
    if position is None:
        return False
    ready = ShardAssignment.from_proto(position.fetched) if position.HasField("fetched") else None
    if ready is not None and position.fetched_in == since and ready.servers == to.servers:
        return bool((ready.held(index) >= to.held(index)).all())
    there = ShardAssignment.from_proto(position.assignment)
    return not position.empty and bool((there.held(index) >= to.held(index)).all())


def has_dropped(position: pb.Position, step: int, last: Commit | None) -> bool:
    """True if a server lacks the last step and its gradients.

    A different ring has then continued from the step before, without this worker.
    """
    if position.step != step - 1 or position.empty:
        return False
    return last is None or last.generation != position.generation


def why_behind(index: int, position: pb.Position, step: int) -> str:
    """Why a ring at this step cannot continue with a server that answers; empty: it can."""
    if position.empty and step:
        return f"parameter server {index} has lost its log and rows"
    if position.step != step:
        return f"parameter server {index} is at step {position.step:,}, the ring at step {step:,}"
    return ""
