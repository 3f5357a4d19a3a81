# SPDX-License-Identifier: Apache-2.0
"""Asynchronous SGD (mode=ps): all weights are rows of servers, and each worker pushes its own steps.

Promise: a call is rejected and changes nothing, or is logged and takes full effect. A step counts once in
every row of this server, even if it is pushed twice or any process dies. `applied_steps` decides what
counts. A replay of the log makes the same changes again: what a call decides, such as a new incarnation or
the learning rate of a stale step, is in the log record beside the request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.wire import Bytes
from edl.ps.asynchronous.applied_steps import AppliedSteps, Leases, Pushed, PushOutcome, Rules, Update
from edl.ps.asynchronous.records import (
    applied_from_json,
    applied_from_shards,
    applied_to_json,
    kept_from_proto,
    ranges_from_proto,
    steps_to_proto,
)
from edl.ps.errors import Invalid, Misplaced
from edl.ps.reshard.transfer import ReshardTarget
from edl.ps.storage.records import (
    APPLY,
    ASSIGN,
    BEGIN,
    DUPLICATE,
    GENERATION,
    KEEP,
    PUSH,
    RESCHEDULE,
    WAITS,
    Record,
    record,
)
from edl.ps.storage.requests import Gradients, read_begin, read_push
from edl.ps.storage.storage import Records, Storage
from edl.ps.storage.wal import Damaged
from edl.ps.update_mode import UpdateMode


class AsyncServer(UpdateMode[AppliedSteps]):
    """The rows and the accepted steps of one server, and the calls that change them.

    Args:
        head: the first record of the log; None: the log is empty.
        clock: monotonic seconds.
    """

    one_step = False  # each server applies the steps in an order of its own

    def __init__(
        self,
        storage: Storage,
        head: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(storage, AppliedSteps() if head is None else applied_from_json(head))
        self._leases = Leases(clock)
        self._pages: tuple[str, int] = "", 0  # of initial rows: the attempt, and the number of the next page

    # --- the calls

    def begin(self, raw: Bytes) -> pb.Progress:
        """Start the job with these initial rows; if the job has started, change nothing.

        Raises:
            OutOfMemory: the rows exceed the memory limit.
            Unavailable: the log cannot be written.
        """
        request, given = read_begin(raw)
        _check_mode(request.generation)
        self._storage.check_declared(request.run_id)
        values = self._storage.gradients(raw, given)
        if self.phase.has_rows:
            return self.progress()
        if request.attempt:
            self._begin_in_pages(request, values)
            return self.progress()
        self._storage.check_memory([values])
        incarnation = self._new_incarnation()
        self._storage.append(BEGIN, raw, incarnation=incarnation)
        self._begin(request, values, incarnation)
        return self.progress()

    def lease(self, request: pb.LeaseRequest) -> pb.LeasedSteps:
        self._check("lease steps", request)
        index, coordinator = self._storage.index, self._storage.assignment.coordinator
        if index != coordinator:
            raise Misplaced(
                f"steps are leased by the coordinator, server {coordinator}; this is server {index}"
            )
        if request.most < 1 or request.limit < 0:
            raise Invalid(
                f"lease of {request.most} steps below {request.limit}: expected at least 1, below 0 or more"
            )
        steps = self._leases.lease(request.worker, request.most, self.state.missing(request.limit))
        found = RangeSet.of((step, step + 1) for step in steps)
        return pb.LeasedSteps(steps=steps_to_proto(found), progress=self.progress())

    def push(self, raw: Bytes) -> pb.Progress:
        """Accept one step's gradients, unless they are too stale or the step was accepted before.

        Raises:
            OutOfMemory: the gradients exceed the memory limit.
            Unavailable: the log cannot be written.
        """
        request, given = read_push(raw)
        _check_mode(request.generation)
        self._check("accept a step", request)
        gradients = self._storage.gradients(raw, given)
        applied, rules = self.state, self._rules
        self._leases.heard(request.worker)
        outcome = applied.classify(request.step, request.version, request.skipped, rules)
        if outcome is PushOutcome.TOO_STALE:
            return self.progress(refused=True)
        if outcome is PushOutcome.DUPLICATE:
            self._storage.append(DUPLICATE, step=request.step)
            self.state = applied.mark_duplicate(request.step)
        else:
            rate = rules.rate(request.learning_rate, applied.staleness(request.version))
            if not request.skipped:
                self._storage.check_memory([*(one.gradients for one in applied.waiting), gradients])
            self._storage.append(PUSH, raw, rate=rate)
            self._accept(request, gradients, rate)
            self.rows_staged += sum(len(ids) for ids, _ in gradients.of.values())
        self._leases.made(request.step)
        return self.progress()

    def drain(self, request: pb.DrainRequest) -> pb.Progress:
        self._check("drain", request)
        applied, update = self.state.drain(request.step)
        if update is not None:
            self.phase.check_can("apply waiting steps")
            self._storage.append(APPLY, step=request.step)
            self._apply(applied, update)
        return self.progress()

    def reschedule(self, request: pb.RescheduleRequest) -> pb.Progress:
        self._check("reschedule steps", request)
        incarnation = self._new_incarnation()
        applied = self._rescheduled(request, incarnation)
        if applied is not self.state:
            self._storage.append(RESCHEDULE, request.SerializeToString(), incarnation=incarnation)
            if applied.incarnation != self.state.incarnation:
                self._leases.clear()
            self.state = applied
        return self.progress()

    def keep(self, request: pb.KeepRequest) -> pb.Progress:
        self._check("keep the workers' state", request)
        applied = self.state.keep(kept_from_proto(request))
        if applied is not self.state:
            self._storage.append(KEEP, request.SerializeToString())
            self.state = applied
        return self.progress()

    def start_generation(self, request: pb.StartGenerationRequest) -> pb.Position:
        """Accept no steps until the root of this generation assigns shards, and reject older generations."""
        self._storage.check_declared(request.run_id)
        applied = self.state.quiesce(request.generation)
        if applied is not self.state:
            self._storage.append(GENERATION, generation=request.generation)
            self.state = applied
        return self.position()

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        before = self.state
        self._storage.check_declared(request.run_id)
        if not before.goes_back(request.generation, request.step, request.attempt):
            return self.position()

        def after(shards: Sequence[Mapping[str, Any]]) -> AppliedSteps:
            applied = AppliedSteps()
            if request.step:
                applied = applied_from_shards(shards, self._storage.index, request.step)
                applied = replace(applied, incarnation=self._new_incarnation(), others=())
            return replace(
                applied,
                phase=before.phase.after("restore" if request.step else "lose"),
                restored=(request.generation or before.restored[0], request.step, request.attempt),
                generation=max(before.generation, request.generation),
                assigned_in=request.generation,
            )

        self._roll_back(request, after)
        self._leases.clear()
        return self.position()

    # --- resharding

    def _lacks(self, request: pb.FetchRequest, to: ShardAssignment, of: ShardAssignment) -> bool:
        self.state.check_generation(request.generation)
        self.phase.check_can("fetch rows")
        stays = self._storage.index in of.members and self._has(to)
        return not (stays or self._fetched(to, request.generation))

    def _check_can_send(self, request: pb.PageRequest) -> None:
        self.state.check_generation(request.generation)
        self.phase.check_can("send rows")
        if self.state.waiting:
            raise Misplaced("rows can be copied only while no accepted step waits: call Drain first")

    def assign(self, request: pb.AssignRequest) -> pb.Position:
        """Resume, in the present shard assignment or in a new one whose rows are here.

        Raises:
            Misplaced: the server lacks rows of the new assignment.
        """
        self._storage.check_declared(request.run_id)
        self.state.check_generation(request.generation)
        to = ShardAssignment.from_proto(request.to)
        if self.phase.is_quiesced or to != self._storage.assignment:
            lacks = self.phase.has_rows and not (self._has(to) or self._fetched(to, request.fetched))
            if self._storage.index in to.members and lacks:  # a server without rows starts later, by `begin`
                there = self._storage.assignment
                raise Misplaced(f"cannot switch from {there} to {to}: this server lacks rows of it")
            incarnation = self._new_incarnation()
            self._storage.append(ASSIGN, request.SerializeToString(), incarnation=incarnation)
            self._switch(request, incarnation)
        return self.position()

    def _fetched(self, to: ShardAssignment, generation: int) -> ReshardTarget | None:
        """The rows that `to` adds to this server; None unless all were fetched in that generation."""
        ready = self._resharding.ready_for(to, step=0)  # `Fetch` names no step in mode=ps
        return ready if ready is not None and ready.request.generation == generation else None

    def _has(self, to: ShardAssignment) -> bool:
        """Whether this server's tables hold all its rows of `to`.

        False also if it loses rows to which a waiting step must still be applied.
        """
        held, wanted = (of.held(self._storage.index) for of in (self._storage.assignment, to))
        fewer = bool((held & ~wanted).any())
        return self.phase.has_rows and not (fewer and self.state.waiting) and bool((held >= wanted).all())

    def _switch(self, request: pb.AssignRequest, incarnation: str) -> None:
        to, applied = ShardAssignment.from_proto(request.to), self.state
        if to == self._storage.assignment and applied.phase.has_rows:
            self._storage.finish_copy()
            self._resharding.drop()
            self.state = replace(applied.resumed(), assigned_in=request.since)
            return
        ready = self._fetched(to, request.fetched)
        self._resharding.switch(to, ready, stays=applied.phase.has_rows)
        if self._storage.index not in to.members:
            applied = applied.lost().resumed()
        elif applied.phase.has_rows:
            version = ready.request.version if ready is not None else 0
            applied = applied.moved(version, incarnation, request.since)
        elif ready is not None:
            fetch = ready.request
            kept = kept_from_proto(fetch.kept) if fetch.kept.ledger else None
            applied = applied.joins(
                ranges_from_proto(fetch.steps), fetch.version, kept, incarnation, request.since
            )
        else:
            applied = applied.resumed()
        self.state = applied
        self._leases.clear()

    # --- as an UpdateMode (ps/update_mode.py)

    @property
    def clock(self) -> int:
        return self.state.version

    @property
    def incarnation(self) -> str:
        return self.state.incarnation

    @property
    def pending(self) -> int:
        return sum(len(one.gradients.raw) for one in self.state.waiting) + self._resharding.nbytes

    def _position(self) -> pb.Position:
        t = self.state
        generation = max(t.restored[0], t.generation)
        return pb.Position(generation=generation, step=t.step, assigned_in=t.assigned_in)

    def _tell_fetched(self, position: pb.Position, ready: ReshardTarget) -> None:
        position.fetched.CopyFrom(ready.to.to_proto())
        position.fetched_in = ready.request.generation

    def progress(self, refused: bool = False) -> pb.Progress:
        t = self.state
        return pb.Progress(
            version=t.version,
            step=t.step,
            incarnation=t.incarnation,
            empty=not t.phase.has_rows,
            accepted=len(t.accepted),
            loss=t.loss,
            records=t.records,
            refused=refused,
            repeated=t.repeated,
        )

    def advance_to(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        _check_mode(request.generation)
        self._storage.check_run(request.run_id)
        self.phase.check_can("read rows")

    def rebased(self) -> None:
        """Nothing to do: steps are never undone here."""

    def _about(self) -> Mapping[str, Any]:
        return applied_to_json(self.state.in_rows)

    def _forget(self) -> None:
        super()._forget()
        self._pages = "", 0
        self._leases.clear()

    def _replay(self, record: Record) -> None:
        kind, said, raw = record
        if kind == BEGIN:
            begin, given = read_begin(raw)
            self._begin(begin, self._storage.gradients(raw, given), said["incarnation"])
        elif kind == PUSH:
            push, given = read_push(raw)
            self._accept(push, self._storage.gradients(raw, given), said["rate"])
        elif kind == WAITS:
            # Replay of the segment before has added it already.
            push, given = read_push(raw)
            if all(one.step != push.step for one in self.state.waiting):
                pushed = _pushed(push, self._storage.gradients(raw, given), said["rate"])
                self.state = replace(self.state, waiting=(*self.state.waiting, pushed))
        elif kind == DUPLICATE:
            self.state = self.state.mark_duplicate(said["step"])
        elif kind == APPLY:
            applied, update = self.state.drain(said["step"])
            self._apply(applied, update)
        elif kind == RESCHEDULE:
            self.state = self._rescheduled(pb.RescheduleRequest.FromString(raw), said["incarnation"])
        elif kind == KEEP:
            self.state = self.state.keep(kept_from_proto(pb.KeepRequest.FromString(raw)))
        elif kind == GENERATION:
            self.state = self.state.quiesce(said["generation"])
        elif kind == ASSIGN:
            self._switch(pb.AssignRequest.FromString(raw), said["incarnation"])
        else:
            raise Damaged(f"log record of unknown kind {kind!r}")

    def _beginning(self, applied: AppliedSteps) -> Records:
        waiting = [record(WAITS, one.gradients.raw, rate=one.learning_rate) for one in applied.waiting]
        return [*self._storage.head(applied_to_json(applied)), *waiting]

    def describe(self, description: pb.Description, kept: bool) -> None:
        description.accepted.CopyFrom(steps_to_proto(self.state.accepted))
        description.rescheduled.CopyFrom(steps_to_proto(self.state.rescheduled))
        description.version, description.waiting = self.clock, len(self.state.waiting)
        if kept:
            description.kept.CopyFrom(self.kept)

    @property
    def kept(self) -> pb.KeepRequest:
        """The workers' state that the server stores; without a ledger: none."""
        kept = self.state.kept
        if kept is None:
            return pb.KeepRequest(run_id=self._storage.run_id, incarnation=self.incarnation)
        return pb.KeepRequest(
            run_id=self._storage.run_id,
            incarnation=self.incarnation,
            step=kept.step,
            order=kept.order,
            ledger=kept.ledger,
            repeated=self.state.repeated,
        )

    # --- changes of the state, which a call makes and the log repeats

    def _begin_in_pages(self, request: pb.BeginRequest, values: Gradients) -> None:
        """Add one page of initial rows; one worker sends all pages in order.

        All pages reach the disk together, with the last one. A repeated page changes nothing.

        Raises:
            Misplaced: this is not the next page of the attempt.
        """
        attempt, next_page = self._pages
        if request.page and (attempt != request.attempt or request.page not in (next_page, next_page - 1)):
            raise Misplaced(
                f"page {request.page} of the initial rows: expected page {next_page} of attempt {attempt!r}: "
                "the server was restarted, or another worker sends these rows"
            )
        storage = self._storage
        try:
            if not request.page:
                self._resharding.drop()
                if request.HasField("assignment"):
                    storage.assignment = ShardAssignment.from_proto(request.assignment)
                storage.read_start(request.start)
            if request.more:
                for number, (ids, _) in values.of.items():
                    storage.check_room(storage.tables[number], len(ids))
                storage.begin_with_rows(values)
            else:
                applied = self.state.begin(self._new_incarnation(), request.since)
                self._put(values)
                storage.keep_beginning(f"snapshot-of-beginning-{request.attempt}", self._beginning(applied))
                self.state = applied
        except BaseException:
            self.lost()
            raise
        self._pages = request.attempt, request.page + 1

    @property
    def _rules(self) -> Rules:
        assert self._storage.declared is not None
        a = self._storage.declared.asynchronous
        return Rules(max(1, a.grads_to_wait), a.max_staleness, a.scale_rate)

    def _new_incarnation(self) -> str:
        return f"{self._storage.run_id}/{secrets.token_hex(6)}"

    def _begin(self, request: pb.BeginRequest, values: Gradients, incarnation: str) -> None:
        self._storage.finish_copy()
        self._resharding.drop()
        if request.HasField("assignment"):
            self._storage.assignment = ShardAssignment.from_proto(request.assignment)
        self._put(values)
        self.state = self.state.begin(incarnation, request.since)

    def _put(self, values: Gradients) -> None:
        for number, (ids, rows) in values.of.items():
            self._storage.tables[number].put(0, ids, rows)

    def _accept(self, request: pb.PushRequest, gradients: Gradients, rate: float) -> None:
        pushed = _pushed(request, gradients, rate)
        applied, update = self.state.accept(pushed, self._rules, request.skipped)
        self._apply(applied, update)

    def _apply(self, applied: AppliedSteps, update: Update | None) -> None:
        if update is not None:
            self._storage.finish_copy()
            for number, table in enumerate(self._storage.tables):
                gradients = [one.gradients.of[number] for one in update.pushed if number in one.gradients.of]
                if gradients:
                    at = update.version
                    table.apply(at, gradients, update.scale, update.learning_rate, at, for_good=True)
        self.state = applied

    def _rescheduled(self, request: pb.RescheduleRequest, incarnation: str) -> AppliedSteps:
        return self.state.reschedule(
            ranges_from_proto(request.steps), incarnation, request.server, request.server_incarnation
        )

    def _check(
        self,
        act: str,
        request: pb.LeaseRequest | pb.PushRequest | pb.DrainRequest | pb.RescheduleRequest | pb.KeepRequest,
    ) -> None:
        """Check the run, the phase and the incarnation.

        Raises:
            Misplaced: the call is of another run or incarnation, or the server's phase does not allow it.
        """
        self._storage.check_declared(request.run_id)
        self.phase.check_can(act)
        if request.incarnation != self.state.incarnation:
            raise Misplaced(
                f"stale incarnation {request.incarnation!r} (current {self.state.incarnation!r}): a server "
                "was restored or resharded; refresh and retry"
            )


def _check_mode(generation: int) -> None:
    if generation:
        raise Misplaced(
            f"generation {generation}: the call is for synchronous steps (mode=hybrid), and this server is "
            "asynchronous (mode=ps): expected generation 0"
        )


def _pushed(request: pb.PushRequest, gradients: Gradients, rate: float) -> Pushed:
    """The accepted step, with the learning rate that its staleness has left."""
    return Pushed(request.step, rate, gradients, request.loss, request.records)
