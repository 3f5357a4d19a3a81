# SPDX-License-Identifier: Apache-2.0
"""The servers of mode=ps: their start, their return from a checkpoint, and resharding.

**Resharding**: when all servers have accepted the same steps, they are quiesced, the servers that gain rows
fetch them, and all switch, one of them first. The assignment of that server is authoritative: the root of
each ring quiesces all servers and resumes them in the newest assignment that one of them knows
(`take_charge`). Calls of earlier roots are rejected from then on.

**Each row on two servers**: both accept each step, each in its own order. So both replicas have learned from
each step once; they differ as much as two runs differ that apply the same steps in another order. A server
that is down is left out, and returns as a server that gains rows. If only the servers that were left out
return, they know themselves as members and resume: the steps that they lack are computed again, as for
servers that lost their logs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import Range, RangeSet
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.shares import IDS, PAGE_BYTES, VALUES, Shares, encoded
from edl.trainer.embedding.interfaces import Start, Table
from edl.trainer.ps_client.calls import Link, ServerRefused
from edl.trainer.ps_client.interfaces import Values, Whole
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.messages import start_to_proto
from edl.trainer.ps_client.recovery import RecoveryPlan, plan_recovery
from edl.trainer.ps_client.server_group import ServerGroup
from edl.trainer.ring.base import RingBroken

LAST = 1 << 62  # greater than any step number
NOWHERE = -1  # no step: no rows need to move


class AsyncServerGroup(ServerGroup):
    """The servers of one job in mode=ps. Arguments as in ServerGroup."""

    def __init__(
        self,
        links: Sequence[Link],
        run_id: str,
        seed: int,
        interrupt: Interrupt | None = None,
        replicas: int = 1,
        connect: Callable[[int, str], Link] | None = None,
        addresses: Sequence[str] = (),
        asynchronous: pb.Asynchronous | None = None,
    ):
        how = asynchronous or pb.Asynchronous()
        super().__init__(links, run_id, seed, interrupt, replicas, connect, addresses, how)
        self._incarnations: dict[int, str] = {}
        self._known: dict[bytes, tuple[Shares, ...]] = {}  # of id arrays that are used repeatedly
        self._there: tuple[int, ...] = ()  # servers that answer and hold rows or will hold some
        self._claimed = 0  # the generation in which this worker quiesced the servers
        self.furthest = 0  # one more than the last step that any server has accepted
        self.progress = Whole()  # the coordinator's last report

    def declare(self, tables: Sequence[Table]) -> None:
        """Set the tables of this job."""
        self._tables = tuple(tables)

    @property
    def coordinator(self) -> int:
        return self._assignment.coordinator

    # --- states of the servers

    def look(self, wait_forever: bool = False) -> dict[int, pb.Description]:
        """Refresh the servers' states and incarnations, which later calls use.

        Args:
            wait_forever: wait for every server, even if others hold its rows.
        """
        self._ask("Declare", dict.fromkeys(self._members, self._tables_message()), wait_forever=wait_forever)
        found = self._ask(
            "Describe", dict.fromkeys(self._members, pb.DescribeRequest()), wait_forever=wait_forever
        )
        self._incarnations = {index: told.incarnation for index, told in found.items()}
        self.furthest = furthest_of(found)
        return found

    def begin(self, values: Values, only: Iterable[int] | None = None) -> None:
        """Start the job with these initial rows.

        Args:
            values: the values of each table: ids int64 [n], rows float32 [n, dim].
            only: the servers concerned; None for all servers.
        """
        asked, start = tuple(self._members if only is None else only), self._start
        attempt = secrets.token_hex(8) if start.tables or start.rows else ""
        pages = [*self._pages_of(start), values] if attempt else [values]
        for number, page in enumerate(pages):
            shares = [self._shares(ids) for ids, _ in page]
            requests = {
                index: pb.BeginRequest(
                    run_id=self._run_id,
                    values=values_of(index, page, shares),
                    attempt=attempt,
                    page=number,
                    assignment=self._assignment.to_proto(),
                    since=self._claimed,
                    more=number + 1 < len(pages),
                    start=start_to_proto(start) if attempt and not number else None,
                )
                for index in asked
            }
            for index, progress in self._ask("Begin", requests).items():
                self._incarnations[index] = progress.incarnation
        self._start = Start()

    def _pages_of(self, start: Start) -> Iterator[Values]:
        """Pages of initial rows that the servers cannot read by themselves."""
        nothing = [(np.zeros(0, np.int64), np.zeros((0, t.dim), np.float32)) for t in self._tables]
        for number, (ids, rows) in start.rows.items():
            most = max(PAGE_BYTES // (8 + 4 * self._tables[number].dim), 1)
            for at in range(0, len(ids), most):
                here = slice(at, at + most)
                yield [*nothing[:number], (ids[here], rows[here]), *nothing[number + 1 :]]

    def go_back(self, step: int, attempt: str) -> None:
        """Roll all servers back to the checkpoint of this step; 0: to no rows."""
        self._restore(self._members, step, attempt, self._claimed)

    def bring_back(self, lost: Sequence[int], step: int, attempt: str) -> None:
        """Restore servers that have lost their rows from their shards of that checkpoint.

        The steps that they lack then are computed again after `introduce`.
        """
        self._restore(lost, step, attempt, 0)

    def introduce(self) -> None:
        """Report the incarnations of the other servers to the coordinator, and the steps that they lack.

        The coordinator reschedules these steps. Called before any worker computes a step with these servers.
        """
        first = self.coordinator
        for index, told in self.look().items():
            if index == first:
                continue
            lack = RangeSet.of([(0, LAST)]).minus(ranges_of(told.accepted))
            request = pb.RescheduleRequest(
                run_id=self._run_id,
                incarnation=self._incarnations[first],
                server=index,
                server_incarnation=told.incarnation,
                steps=pb.Steps(bounds=[bound for piece in lack for bound in piece]),
            )
            progress = self._ask("Reschedule", {first: request})[first]
            self._incarnations[first] = progress.incarnation
            self._told(progress)

    def _restore(self, some: Iterable[int], step: int, attempt: str, generation: int) -> None:
        request = pb.RestoreRequest(
            run_id=self._run_id,
            generation=generation,
            step=step,
            attempt=attempt,
            assignment=self._assignment.to_proto(),
        )
        self._ask("Restore", dict.fromkeys(some, request))
        self.look()

    # --- resharding

    def take_charge(self, worker: int, step: int = 0) -> bool:
        """Act as the root of a new ring: reject calls of earlier roots, and resume all servers.

        They resume in the assignment in which they hold the rows. Unfinished resharding is completed or
        dropped.

        Args:
            step: reached by all servers in the previous ring. If the answering servers have not reached it, a
                server that is away has later rows, and is waited for.

        Returns:
            whether rows are lost on both servers that held them; all servers must roll back then.
        """
        of = self._quiesce(worker, step)
        self._resume(of)
        return bool(of.missing)

    def moves_at(self) -> int:
        """Return the step at which rows can move; NOWHERE if no rows need to move.

        When all steps below it are done, all servers have the same steps.
        """
        return self.furthest if self.moves else NOWHERE

    def move_rows(self, worker: int) -> tuple[int, str]:
        """Move the rows to the wanted assignment. Called by one worker, while no worker computes a step.

        Returns:
            the step at which rows can move, if not all servers have the same steps now; NOWHERE: they have
                moved, or stay.
            why they stay; empty: they have moved.

        Raises:
            RingBroken: the ring was cut. One assignment is complete then, and the next root finds it.
        """
        place = self._quiesce(worker)
        of, to, why = place.assignment, self._wanted.without(self._states.away), ""
        told = self._ask("Describe", dict.fromkeys(of.members, pb.DescribeRequest(kept=True)))
        first = told[of.coordinator]
        if any(one.accepted != first.accepted or one.waiting or one.position.empty for one in told.values()):
            self._resume(place)
            self.look()
            return self.furthest, ""
        if to == of or not to.is_whole:  # a server that would gain rows is away
            self._resume(place)
            self.introduce()
            return NOWHERE, ""
        fetch = pb.FetchRequest(
            run_id=self._run_id,
            generation=self._claimed,
            of=of.to_proto(),
            to=to.to_proto(),
            addresses=self._addresses,
            steps=first.accepted,
            version=max(one.version for one in told.values()),
            kept=first.kept,
        )
        gaining = [index for index in to.members if (to.held(index) & ~of.held(index)).any()]
        try:
            self._ask("Fetch", dict.fromkeys(gaining, fetch))
        except ServerRefused as error:
            self._resume(place)
            why = str(error)
        else:
            self._resume(RecoveryPlan(to, fetched=self._claimed))
        self.introduce()
        return NOWHERE, why

    def restart_as(self, servers: int) -> None:
        """Assign shards to as many servers as wrote the checkpoint to restore, if there are as many.

        Called when no server holds current rows. Each server then loads its own shard, with all the steps
        in it. The rows move to the wanted assignment, and to replicas, afterwards.
        """
        if 0 < servers <= len(self._links):
            self.adopt(ShardAssignment(servers))

    def adopt(self, assignment: ShardAssignment, addresses: Sequence[str] = ()) -> None:
        super().adopt(assignment, addresses)
        self._known.clear()

    def _quiesce(self, worker: int, step: int = 0) -> RecoveryPlan:
        """Quiesce all servers that answer, including all that are needed; returns how they can resume.

        Args:
            step: as in `take_charge`.

        Raises:
            RingBroken: the ring was cut, or the master has not named all servers that hold rows.
        """
        self._claimed = self.claim(worker)
        while True:
            self._claims_above = self._claimed  # the next claim must be greater, though servers may forget
            most, away = self._expected(self._states), self._states.away
            self._there = tuple(index for index in range(most) if index not in away)
            request = pb.StartGenerationRequest(run_id=self._run_id, generation=self._claimed)
            told = self._ask("StartGeneration", dict.fromkeys(self._there, request))
            of = plan_recovery(told)
            if of is None:
                if not away:  # otherwise a server that is away may hold all rows
                    return RecoveryPlan(self._wanted)
            elif not away or not ({*of.missing} & {*away} or _behind(told, of, step)):
                if of.assignment.servers > len(self._links):
                    raise RingBroken(
                        f"the rows are on {of.assignment}, and the master has named {len(self._links)} "
                        "servers so far"
                    )
                return of
            self._find_late(away[:1])  # it may hold the missing rows
            self._claimed = self._next_generation()

    def _resume(self, of: RecoveryPlan) -> None:
        """Resume all servers in this assignment, the coordinator first."""
        to = of.assignment
        request = pb.AssignRequest(
            run_id=self._run_id,
            generation=self._claimed,
            to=to.to_proto(),
            since=of.since or self._claimed,
            fetched=of.fetched,
        )
        first = to.coordinator
        for some in ([first], [index for index in self._there if index != first]):
            self._ask("Assign", dict.fromkeys(some, request))
        self.adopt(to)

    # --- private

    def _told(self, progress: pb.Progress) -> None:
        p = progress
        self.progress = Whole(p.step, p.loss, p.records, p.version, p.repeated)

    def _shares(self, ids: np.ndarray) -> tuple[Shares, ...]:
        """The servers of these ids, and those of their replicas; cached for the ids of the dense weights."""
        key = id(ids).to_bytes(8, "little")
        if not ids.flags.writeable and (known := self._known.get(key)) is not None and known[0].ids is ids:
            return known
        of = self._assignment
        shares = tuple(Shares(ids, of, second) for second in ((False, True) if of.copies > 1 else (False,)))
        if not ids.flags.writeable:
            self._known[key] = shares
        return shares


def values_of(index: int, values: Values, shares: Sequence[Sequence[Shares]]) -> list[pb.Gradients]:
    """The gradients or rows for one server, including those of replicas."""
    found = []
    for table, ((ids, rows), copies) in enumerate(zip(values, shares, strict=True)):
        if mine := [share.of(index) for share in copies if share.has(index)]:
            here = mine[0] if len(mine) == 1 else np.concatenate(mine)
            found.append(
                pb.Gradients(table=table, ids=encoded(ids[here], IDS), values=encoded(rows[here], VALUES))
            )
    return found


def _behind(told: Mapping[int, pb.Position], of: RecoveryPlan, step: int) -> bool:
    """Whether a server of the plan has not reached this step."""
    return any(index in told and told[index].step < step for index in of.assignment.members)


def furthest_of(told: Mapping[int, pb.Description]) -> int:
    """One more than the last step that one of these servers has accepted."""
    return max((one.accepted.bounds[-1] for one in told.values() if one.accepted.bounds), default=0)


def ranges_of(steps: pb.Steps) -> RangeSet:
    """Parse steps, which a message has as the bounds of their ranges."""
    bounds = list(steps.bounds)
    pairs: list[Range] = list(pairwise(bounds))[::2]
    return RangeSet.of(pairs)
