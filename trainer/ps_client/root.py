# SPDX-License-Identifier: Apache-2.0
"""The calls that bring all parameter servers to one state: a ring starts, rolls back, or moves rows.

The root of a ring makes them, and in mode=ps the worker that moves rows. The root claims a generation, which
all later calls of the ring carry, and `recovery` derives from the servers' states which of them hold the
rows.

    mode=hybrid   claim ─▶ start_generation, or restore ─▶ move, when all members have the root's state
    mode=ps       take_charge ─▶ restore and begin, for servers without rows ─▶ introduce
                  ─▶ move_quiesced, between two async phases

**In mode=ps**, servers have no common step. So the root quiesces all servers, and resumes them in the newest
assignment that one of them knows. Calls of earlier roots are rejected from then on.

**Resharding**: when all servers are at the same step, or have accepted the same steps and are quiesced, the
servers that gain rows fetch them, and all switch. If each row is on two servers, a server that is down or has
lost its rows is left out, and returns as a server that gains rows. In mode=ps both accept each step, each in
its own order, so they differ as much as two runs differ that apply the same steps in another order. If only
the servers that were left out return, they know themselves as members and resume: the steps that they lack
are computed again, as for servers that lost their logs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from edl.contract.converted import written
from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.contract.rows.placement import ShardAssignment
from edl.trainer.embedding.interfaces import Start
from edl.trainer.ps_client.calls import ServerAway, ServerRefused
from edl.trainer.ps_client.interfaces import Values, Whole
from edl.trainer.ps_client.messages import add_values, ranges_of, rows_per_page
from edl.trainer.ps_client.pending import forget
from edl.trainer.ps_client.recovery import RecoveryPlan, plan_recovery, why_behind
from edl.trainer.ps_client.server_group import ServerGroup
from edl.trainer.ring.base import RingBroken

LAST = 1 << 62  # greater than any step number
NOWHERE = -1  # no step: no rows need to move


class RootCalls(ServerGroup):
    """The servers of one job, as the root of a ring uses them. Arguments as in ServerGroup."""

    _start = Start()  # initial rows for the next `restore` of step 0, or `begin`
    progress = Whole()  # the coordinator's last report, in mode=ps

    # --- a ring begins

    def start_generation(self, step: int) -> str:
        """As the root of a new ring with synchronous steps, report the ring's step to all servers.

        Returns:
            why ring and servers must roll back; "" if all servers are at this step.

        Raises:
            RingBroken: the ring was cut before all servers had answered.
        """
        self._check_known(self._states.needed)
        last = self._last()
        chosen, why = self._states.choose_assignment(step, self._wanted, last)
        while not chosen.is_whole and self._states.away:
            # A server that is away may hold the missing rows.
            self._wait_for(self._states.away[:1])  # or know that later servers have ended
            chosen, why = self._states.choose_assignment(step, self._wanted, last)
        if not chosen.is_whole:
            return why
        self.assignment = chosen  # not before: if this ring is cut meanwhile, this worker may save the model
        if not step and (lost := [index for index in self._states.lost if index in self._members]):
            # It would start with default initial rows, and this job's are loaded from elsewhere.
            return f"parameter server {lost[0]} has lost its log and rows"
        request = self._request(
            pb.StartGenerationRequest,
            step=step,
            last=self._commit(step),
            assignment=self.assignment.to_proto(),
        )
        positions = self._ask("StartGeneration", dict.fromkeys(self._members, request))
        behind = (why_behind(index, position, step) for index, position in positions.items())
        return "; ".join(filter(None, behind))

    def take_charge(self, worker: int, step: int = 0) -> bool:
        """As the root of a new ring in mode=ps, reject calls of earlier roots, and resume all servers.

        They resume in the assignment in which they hold the rows. Unfinished resharding is completed or
        dropped.

        Args:
            step: reached by all servers in the previous ring. If the answering servers have not reached it, a
                server that is away has later rows, and is waited for.

        Returns:
            whether rows are lost on both servers that held them; all servers must roll back then.
        """
        plan = self._quiesce(worker, step)
        self._resume(plan)
        return bool(plan.missing)

    def _quiesce(self, worker: int, step: int = 0) -> RecoveryPlan:
        """Quiesce all servers that answer, including all that are needed; returns how they can resume.

        Args:
            step: as in `take_charge`.

        Raises:
            RingBroken: the ring was cut, or the master has not named all servers that hold rows.
        """
        self.claim(worker)
        while True:
            self._claims_above = self.generation  # the next must be greater, though servers may forget
            most, away = self._expected(self._states), self._states.away
            self._there = tuple(index for index in range(most) if index not in away)
            request = self._request(pb.StartGenerationRequest)
            told = self._ask("StartGeneration", dict.fromkeys(self._there, request))
            plan = plan_recovery(told)
            if plan is None:
                if not away:  # otherwise a server that is away may hold all rows
                    return RecoveryPlan(self._wanted)
            elif not away or not ({*plan.missing} & {*away} or plan.is_behind(told, step)):
                self._check_known(plan.assignment.servers)
                return plan
            self._wait_for(away[:1])  # it may hold the missing rows

    def _resume(self, plan: RecoveryPlan) -> None:
        """Resume all quiesced servers in this assignment, the coordinator first."""
        to = plan.assignment
        since = plan.since or self.generation
        request = self._request(pb.AssignRequest, to=to.to_proto(), since=since, fetched=plan.fetched)
        for some in ([to.coordinator], [index for index in self._there if index != to.coordinator]):
            self._ask("Assign", dict.fromkeys(some, request))
        self.adopt(to)

    def _check_known(self, servers: int) -> None:
        if servers > len(self._links):
            raise RingBroken(
                f"the rows are on {servers} parameter servers, and this worker knows {len(self._links)}: "
                "waiting for the master to name the others"
            )

    # --- initial rows and rollback

    def begin_with(self, start: Start) -> None:
        """Use these initial rows when the servers begin. Once, because they may be large."""
        self._start = start

    def restore(self, step: int, attempt: str, lost: Iterable[int] | None = None) -> None:
        """Have all servers restore the checkpoint of this step; 0: they begin again, in mode=ps without rows.

        Args:
            lost: in mode=ps, the servers that have lost their rows, if only these restore their shards. The
                steps that they lack then are computed again after `introduce`.

        Raises:
            RingBroken: the ring was cut before all servers had answered.
            ServerRefused: a server cannot restore it.
        """
        if self._asynchronous is None:
            self.assignment = self._reachable
            if not self.assignment.is_whole:
                self.assignment = self._wanted
                self._wait_for(self._members)
        request = pb.RestoreRequest(
            run_id=self._run_id,
            generation=self.generation if lost is None else 0,  # 0: it replaces lost rows only
            step=step,
            attempt=attempt,
            assignment=self.assignment.to_proto(),
        )
        if self._asynchronous is None and not step and self._start.tables:
            request.start.CopyFrom(written(pb.Start, self._start))
        positions = self._ask("Restore", dict.fromkeys(self._members if lost is None else lost, request))
        if self._asynchronous is not None:
            self.look()
            return
        for index, position in positions.items():
            if position.step != step:
                raise ServerRefused(
                    f"parameter server {index} is at step {position.step:,}: expected step {step:,} after "
                    "its rollback"
                )
        self._declare(self._members)  # for servers that have restarted empty meanwhile
        if not step:
            for page in self._pages():
                requests = self._begin_requests(page, generation=self.generation)
                self._ask("Begin", {i: one for i, one in requests.items() if one.values}, known=True)
            self._start = Start()

    def begin(self, values: Values, only: Iterable[int] | None = None) -> None:
        """Start a job of mode=ps with these initial rows.

        Args:
            values: the values of each table: ids int64 [n], rows float32 [n, dim].
            only: the servers concerned; None for all servers.
        """
        start, attempt = self._start, ""
        if start.tables or start.rows:
            attempt = secrets.token_hex(8)
        pages = [*self._pages(), values]
        for number, page in enumerate(pages):
            requests = self._begin_requests(
                page,
                only,
                attempt=attempt,
                page=number,
                assignment=self.assignment.to_proto(),
                since=self.generation,
                more=number + 1 < len(pages),
                start=written(pb.Start, start) if attempt and not number else None,
            )
            for index, progress in self._ask("Begin", requests).items():
                self._incarnations[index] = progress.incarnation
        self._start = Start()

    def _begin_requests(
        self, values: Values, only: Iterable[int] | None = None, **fields: Any
    ) -> dict[int, pb.BeginRequest]:
        """The requests that bring initial rows to these servers."""
        shares = [self._shares(ids) for ids, _ in values]
        requests = {}
        for index in self._members if only is None else only:
            requests[index] = pb.BeginRequest(run_id=self._run_id, **fields)
            add_values(requests[index].values, index, values, shares)
        return requests

    def _pages(self) -> Iterator[Values]:
        """Pages of the initial rows that the servers cannot read by themselves."""
        nothing = [(np.zeros(0, np.int64), np.zeros((0, t.dim), np.float32)) for t in self._tables]
        for number, (ids, rows) in self._start.rows.items():
            most = rows_per_page(self._tables[number].dim)
            for at in range(0, len(ids), most):
                here = slice(at, at + most)
                yield [*nothing[:number], (ids[here], rows[here]), *nothing[number + 1 :]]

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

    # --- resharding

    def move(self, step: int) -> str:
        """As the root of a ring with synchronous steps, have the rows moved.

        All members in sync hold the state of this step.

        Returns:
            why the rows stay where they are; "" if they moved.

        Raises:
            RingBroken: the ring was cut. One assignment is complete then, and the next root finds it.
        """
        of, to = self.assignment, self._reachable
        if not to.is_whole:  # impossible while these servers are away
            names = ", ".join(map(str, self._states.away))
            return f"parameter server {names} does not answer" if to.copies < 2 else ""
        last = self._commit(step)
        reached: Iterable[int] = sorted({*of.members, *to.members} - {*self._states.away})
        try:
            why = self._fetch(of, to, step=step, last=last)
        except ServerAway as error:
            if to.copies > 1:
                raise RingBroken(str(error)) from error
            why, reached = str(error), of.members
        if why:
            to = of
        request = self._request(pb.AssignRequest, step=step, last=last, to=to.to_proto())
        self._ask("Assign", dict.fromkeys(reached, request))
        self.assignment = to
        return why

    def move_quiesced(self, worker: int) -> tuple[int, str]:
        """In mode=ps, have one worker move the rows, while no worker computes a step.

        Returns:
            the step at which rows can move, if not all servers have the same steps now; NOWHERE if they have
            moved, or stay. why they stay; "" if they have moved.

        Raises:
            RingBroken: the ring was cut. One assignment is complete then, and the next root finds it.
        """
        plan = self._quiesce(worker)
        of, to, why = plan.assignment, self._reachable, ""
        told = self._ask("Describe", dict.fromkeys(of.members, pb.DescribeRequest(kept=True)))
        first = told[of.coordinator]
        if any(one.accepted != first.accepted or one.waiting or one.position.empty for one in told.values()):
            self._resume(plan)
            self.look()
            return self.furthest, ""
        if to != of and to.is_whole:  # otherwise a server that would gain rows is away
            version = max(one.version for one in told.values())
            try:
                why = self._fetch(of, to, steps=first.accepted, version=version, kept=first.kept)
            except ServerAway as error:
                raise RingBroken(str(error)) from error
            if not why:
                plan = RecoveryPlan(to, fetched=self.generation)
        self._resume(plan)
        self.introduce()
        return NOWHERE, why

    def _fetch(self, of: ShardAssignment, to: ShardAssignment, **state: Any) -> str:
        """Have the servers that gain rows fetch them; return why one of them refuses.

        Args:
            state: what the rows are of, as fields of the request.

        Raises:
            RingBroken: the ring was cut.
            ServerAway: a server that gains rows does not answer.
        """
        request = self._request(
            pb.FetchRequest, of=of.to_proto(), to=to.to_proto(), addresses=self.addresses, **state
        )
        gaining = [index for index in to.members if (to.held(index) & ~of.held(index)).any()]
        calls = self._begin("Fetch", dict.fromkeys(gaining, request))
        try:
            for call in calls.values():
                call.result()
        except ServerRefused as error:
            return str(error)
        finally:
            forget(calls.values())
        return ""

    def restart_as(self, servers: int) -> None:
        """Assign shards to as many servers as wrote the checkpoint to restore, if there are as many.

        Called when no server holds current rows, in mode=ps. Each server then loads its own shard, with all
        the steps in it. The rows move to the wanted assignment, and to replicas, afterwards.
        """
        if 0 < servers <= len(self._links):
            self.adopt(ShardAssignment(servers))

    # --- private

    def _told(self, progress: pb.Progress) -> None:
        p = progress
        self.progress = Whole(p.step, p.loss, p.records, p.version, p.repeated)
