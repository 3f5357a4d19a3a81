# SPDX-License-Identifier: Apache-2.0
"""The state of one server in mode=ps, and its changes: a call makes them, and the log repeats them.

Each change is deterministic. What a call decides, such as a new incarnation or the learning rate of a stale
step, is in the log record beside the request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.ps.asynchronous.applied_steps import AppliedSteps, Leases, Pushed, Rules, Update
from edl.ps.asynchronous.records import (
    applied_from_json,
    applied_to_json,
    kept_from_proto,
    ranges_from_proto,
)
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


class AsyncState(UpdateMode[AppliedSteps]):
    """The rows and the accepted steps of one server.

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

    # --- the log

    def _forget(self) -> None:
        super()._forget()
        self._pages = "", 0
        self._leases.clear()

    def _about(self) -> Mapping[str, Any]:
        return applied_to_json(self.state.in_rows)

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
                pushed = pushed_from_proto(push, self._storage.gradients(raw, given), said["rate"])
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

    # --- steps

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
        pushed = pushed_from_proto(request, gradients, rate)
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

    def _beginning(self, applied: AppliedSteps) -> Records:
        waiting = [record(WAITS, one.gradients.raw, rate=one.learning_rate) for one in applied.waiting]
        return [*self._storage.head(applied_to_json(applied)), *waiting]

    # --- resharding

    def _fetched(self, to: ShardAssignment, generation: int) -> bool:
        """Whether all rows that `to` adds to this server were fetched in that generation."""
        ready = self._resharding.ready
        return (
            ready is not None
            and ready.request.generation == generation
            and ready.gives(self._storage.index, to, ready.request.step)
        )

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
        ready = self._resharding.ready if self._fetched(to, request.fetched) else None
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


def pushed_from_proto(request: pb.PushRequest, gradients: Gradients, rate: float) -> Pushed:
    """The accepted step, with the learning rate that its staleness has left."""
    return Pushed(request.step, rate, gradients, request.loss, request.records)
