"""Asynchronous SGD (mode=ps): all weights are rows of parameter servers, and each worker pushes its own
steps.

Promise: a call is rejected and changes nothing, or is logged and takes full effect. A step counts once in
every row of this server, however often it is pushed and whatever process dies. `applied_steps` decides what
counts.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
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
    decided,
    kept_from_proto,
    ranges_from_proto,
    read_decided,
    steps_to_proto,
)
from edl.ps.errors import Invalid, Misplaced
from edl.ps.reshard.reshard import FETCH, FETCHED, PAGE, Resharding
from edl.ps.storage.storage import Capture, Gradients, Records, Storage, read
from edl.ps.storage.wal import Damaged

# The kind of a log record: its first byte. The decision about the request and the request itself follow.
BEGIN, PUSH, DUPLICATE, DRAIN, RESCHEDULE, KEEP = b"B", b"P", b"A", b"D", b"R", b"K"
WAITS = b"W"  # a push that precedes this segment and is not in the rows yet
GENERATION, ASSIGN = b"S", b"G"


class AsyncServer:
    """
    Args:
        head: the first record of the log; None: the log is empty.
        clock: monotonic seconds.
    """

    def __init__(
        self, storage: Storage, head: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._storage = storage
        self.applied = AppliedSteps() if head is None else applied_from_json(head)
        self._leases = Leases(clock)
        self._resharding = Resharding(storage)
        self._pages: tuple[str, int] = "", 0  # of initial rows: the attempt, and the number of the next page
        self.rows_staged = 0

    # --- the calls

    def begin(self, raw: Bytes) -> pb.Progress:
        """Start the job with these initial rows; if the job has started, change nothing.

        Raises:
            OutOfMemory: the rows exceed the memory limit.
            Unavailable: the log cannot be written.
        """
        request, given = read(pb.BeginRequest.FromString, raw, pb.BeginRequest.VALUES_FIELD_NUMBER)
        self._storage.check_declared(request.run_id)
        values = self._storage.gradients(raw, given)
        if self.applied.began:
            return self.progress()
        if request.attempt:
            self._begin_in_pages(request, values)
            return self.progress()
        self._storage.check_memory([values])
        incarnation = self._new_incarnation()
        self._storage.log.append(BEGIN, decided(incarnation=incarnation), raw)
        self._begin(request, values, incarnation)
        return self.progress()

    def _begin_in_pages(self, request: pb.BeginRequest, values: Gradients) -> None:
        """Add one page of initial rows; one worker sends all pages in order.

        All pages reach the disk together, with the last one. A repeated page changes nothing.
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
                applied = self.applied.begin(self._new_incarnation(), request.since)
                self._put(values)
                storage.keep_beginning(f"snapshot-of-beginning-{request.attempt}", self._beginning(applied))
                self.applied = applied
        except BaseException:
            self.lost()
            raise
        self._pages = request.attempt, request.page + 1

    def lease(self, request: pb.LeaseRequest) -> pb.LeasedSteps:
        self._check(request, changes_rows=True)
        index, coordinator = self._storage.index, self._storage.assignment.coordinator
        if index != coordinator:
            raise Misplaced(
                f"steps are leased by the coordinator, server {coordinator}; this is server {index}"
            )
        if request.most < 1 or request.limit < 0:
            raise Invalid(
                f"lease of {request.most} steps below {request.limit}: expected at least 1, below 0 or more"
            )
        steps = self._leases.lease(request.worker, request.most, self.applied.missing(request.limit))
        found = RangeSet.of((step, step + 1) for step in steps)
        return pb.LeasedSteps(steps=steps_to_proto(found), progress=self.progress())

    def push(self, raw: Bytes) -> pb.Progress:
        """Accept one step's gradients, unless they are too stale or the step was accepted before.

        Raises:
            OutOfMemory: the gradients exceed the memory limit.
            Unavailable: the log cannot be written.
        """
        request, given = _read_push(raw)
        self._check(request, changes_rows=True)
        gradients = self._storage.gradients(raw, given)
        applied, rules = self.applied, self._rules
        self._leases.heard(request.worker)
        outcome = applied.classify(request.step, request.version, request.skipped, rules)
        if outcome is PushOutcome.TOO_STALE:
            return self.progress(refused=True)
        if outcome is PushOutcome.DUPLICATE:
            self._storage.log.append(DUPLICATE, decided(step=request.step))
            self.applied = applied.mark_duplicate(request.step)
        else:
            rate = rules.rate(request.learning_rate, applied.staleness(request.version))
            if not request.skipped:
                self._storage.check_memory([*(one.gradients for one in applied.waiting), gradients])
            self._storage.log.append(PUSH, decided(rate=rate), raw)
            self._accept(request, gradients, rate)
            self.rows_staged += sum(len(ids) for ids, _ in gradients.of.values())
        self._leases.made(request.step)
        return self.progress()

    def drain(self, request: pb.DrainRequest) -> pb.Progress:
        self._check(request)
        applied, update = self.applied.drain(request.step)
        if update is not None:
            self._check(request, changes_rows=True)
            self._storage.log.append(DRAIN, decided(step=request.step))
            self._apply(applied, update)
        return self.progress()

    def reschedule(self, request: pb.RescheduleRequest) -> pb.Progress:
        self._check(request)
        incarnation = self._new_incarnation()
        applied = self._rescheduled(request, incarnation)
        if applied is not self.applied:
            self._storage.log.append(
                RESCHEDULE, decided(incarnation=incarnation), request.SerializeToString()
            )
            if applied.incarnation != self.applied.incarnation:
                self._leases.clear()
            self.applied = applied
        return self.progress()

    def keep(self, request: pb.KeepRequest) -> pb.Progress:
        self._check(request)
        applied = self.applied.keep(kept_from_proto(request))
        if applied is not self.applied:
            self._storage.log.append(KEEP, decided(), request.SerializeToString())
            self.applied = applied
        return self.progress()

    def kept(self, request: pb.KeptRequest) -> pb.KeepRequest:
        self._storage.check_declared(request.run_id)
        kept = self.applied.kept
        if kept is None:
            return pb.KeepRequest(run_id=request.run_id, incarnation=self.incarnation)
        return pb.KeepRequest(
            run_id=request.run_id, incarnation=self.incarnation, step=kept.step, order=kept.order,
            ledger=kept.ledger, repeated=self.applied.repeated,
        )  # fmt: skip

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """Roll back to a checkpoint, unless the server has done so already.

        Raises:
            Unreadable: the checkpoint cannot be read; the server is empty then.
        """
        storage, before = self._storage, self.applied
        storage.check_declared(request.run_id)
        if not before.goes_back(request.generation, request.step, request.attempt):
            return self.position()
        storage.check_checkpoint(request.step)
        generation = request.generation or before.restored[0]
        restored = generation, request.step, request.attempt
        self._resharding.drop()
        if request.HasField("assignment"):
            storage.assignment = ShardAssignment.from_proto(request.assignment)
        try:
            said = storage.go_back(request.step, request.attempt, alone=True)
            applied = AppliedSteps(restored=restored)
            if request.step:
                applied = applied_from_shards(said, storage.index, request.step)
                applied = replace(applied, incarnation=self._new_incarnation(), restored=restored, others=())
            applied = replace(
                applied, generation=max(before.generation, request.generation), quiesced=before.quiesced,
                assigned_in=request.generation,
            )  # fmt: skip
            storage.gone_back(request.step, request.attempt, self._beginning(applied))
        except BaseException:
            self.lost()
            raise
        self.applied = applied
        self._leases.clear()
        return self.position()

    # --- resharding

    def start_generation(self, request: pb.StartGenerationRequest) -> pb.Position:
        """Accept no steps until the root of this generation assigns shards, and reject older generations."""
        self._storage.check_declared(request.run_id)
        applied = self.applied.quiesce(request.generation)
        if applied is not self.applied:
            self._storage.log.append(GENERATION, decided(generation=request.generation))
            self.applied = applied
        return self.position()

    def fetch(self, request: pb.FetchRequest) -> list[int]:
        """Begin to fetch rows for another assignment.

        Returns:
            the servers that send pages of rows, for `take_page` and then `fetched`; empty: no row is missing.
        """
        self._storage.check_declared(request.run_id)
        self.applied.check_generation(request.generation)
        of, to = ShardAssignment.from_proto(request.of), ShardAssignment.from_proto(request.to)
        if self._fetched(to, request.generation) or (self._storage.index in of.members and self._has(to)):
            return []
        self._resharding.log_fetch(request)
        self._begin_fetch(request)
        return list(of.members)

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        return self._resharding.take_page(request, raw)

    def fetched(self, request: pb.FetchRequest) -> pb.Position:
        self._resharding.fetched(request)
        return self.position()

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        """One page of rows for another server. All accepted steps are in them."""
        self._storage.check_declared(request.run_id)
        self.applied.check_generation(request.generation)
        if not (self.applied.began and self.applied.quiesced) or self.applied.waiting:
            raise Misplaced("rows can be copied only while the server is quiesced and no accepted step waits")
        return self._resharding.page(request, self.applied.version)

    def assign(self, request: pb.AssignRequest) -> pb.Position:
        """Resume, in the present shard assignment or in a new one whose rows are here."""
        self._storage.check_declared(request.run_id)
        self.applied.check_generation(request.generation)
        to = ShardAssignment.from_proto(request.to)
        if self.applied.quiesced or to != self._storage.assignment:
            lacks = self.applied.began and not (self._has(to) or self._fetched(to, request.fetched))
            if self._storage.index in to.members and lacks:  # a server without rows starts later, by `begin`
                there = self._storage.assignment
                raise Misplaced(f"cannot switch from {there} to {to}: this server lacks rows of it")
            incarnation = self._new_incarnation()
            self._storage.log.append(ASSIGN, decided(incarnation=incarnation), request.SerializeToString())
            self._switch(request, incarnation)
        return self.position()

    def _begin_fetch(self, request: pb.FetchRequest) -> None:
        self._resharding.begin(request)
        if self._storage.index not in ShardAssignment.from_proto(request.of).members:  # its rows are outdated
            self._storage.drop_rows()
            self.applied = self.applied.lost()

    def _fetched(self, to: ShardAssignment, generation: int) -> bool:
        """Whether all rows that `to` adds to this server were fetched in that generation."""
        ready = self._resharding.target
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
        return self.applied.began and not (fewer and self.applied.waiting) and bool((held >= wanted).all())

    def _switch(self, request: pb.AssignRequest, incarnation: str) -> None:
        storage, to, index = self._storage, ShardAssignment.from_proto(request.to), self._storage.index
        storage.finish_copy()
        ready = self._resharding.target if self._fetched(to, request.fetched) else None
        before, applied = storage.assignment, self.applied
        self._resharding.drop()
        storage.assignment = to
        if to == before and applied.began:
            self.applied = replace(applied, quiesced=False, assigned_in=request.since)
            return
        if index not in to.members:
            for table in storage.tables:
                table.clear()
            applied = replace(applied.lost(), quiesced=False)
        elif ready is not None:
            fetch = ready.request
            self._resharding.take_in(ready, stays=applied.began)
            if applied.began:
                applied = applied.moved(fetch.version, incarnation, request.since)
            else:
                kept = kept_from_proto(fetch.kept) if fetch.kept.ledger else None
                applied = applied.joins(
                    ranges_from_proto(fetch.steps), fetch.version, kept, incarnation, request.since
                )
        elif applied.began:
            if (before.held(index) & ~to.held(index)).any():
                for table in storage.tables:
                    table.keep(storage.has)
            applied = applied.moved(0, incarnation, request.since)
        else:
            applied = replace(applied, quiesced=False)
        self.applied = applied
        self._leases.clear()

    def progress(self, refused: bool = False) -> pb.Progress:
        t = self.applied
        return pb.Progress(
            version=t.version, step=t.step, incarnation=t.incarnation, empty=not t.began,
            accepted=len(t.accepted), loss=t.loss, records=t.records, refused=refused, repeated=t.repeated,
        )  # fmt: skip

    @property
    def accepted(self) -> pb.Steps:
        return steps_to_proto(self.applied.accepted)

    @property
    def rescheduled(self) -> pb.Steps:
        return steps_to_proto(self.applied.rescheduled)

    # --- as an UpdateMode (ps/server.py)

    @property
    def began(self) -> bool:
        return self.applied.began

    @property
    def clock(self) -> int:
        return self.applied.version

    @property
    def incarnation(self) -> str:
        return self.applied.incarnation

    @property
    def pending(self) -> int:
        return sum(len(one.gradients.raw) for one in self.applied.waiting) + self._resharding.nbytes

    @property
    def is_resharding(self) -> bool:
        return self._resharding.target is not None

    def position(self) -> pb.Position:
        t, there = self.applied, self._storage.assignment
        generation = max(t.restored[0], t.generation)
        told = pb.Position(generation=generation, step=t.step, empty=not t.began, assigned_in=t.assigned_in)
        if t.began and there.servers:
            told.assignment.CopyFrom(there.to_proto())
        if (ready := self._resharding.target) is not None and ready.whole:
            told.fetched.CopyFrom(ready.to.to_proto())
            told.fetched_in = ready.request.generation
        return told

    def advance_to(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        if request.generation:
            raise Misplaced(
                f"generation {request.generation}: this server is asynchronous (mode=ps) and serves its "
                "current rows only: expected generation 0"
            )
        self._storage.check_run(request.run_id)
        if not self.applied.began:
            raise Misplaced("the server has no rows: it is new, or has lost its log")

    def capture(self) -> Capture:
        if self.is_resharding:
            raise Misplaced("rows are being moved to another shard assignment")
        t = self.applied
        return self._storage.begin_capture(t.version, t.version, self.beginning(), applied_to_json(t.in_rows))

    @property
    def shards_suffice(self) -> bool:
        # No shard has the second replica of a row, and replicas differ: each applies steps in its own order.
        return self._storage.assignment.copies < 2

    def rebased(self) -> None:
        """Nothing to do: steps are never undone here."""

    def lost(self) -> None:
        self.applied, self._pages = self.applied.lost(), ("", 0)
        self._leases.clear()
        self._storage.lose(self.beginning())

    def beginning(self) -> Records:
        return self._beginning(self.applied)

    def replay(self, kind: bytes, text: bytes) -> None:
        if kind == FETCH:
            self._begin_fetch(pb.FetchRequest.FromString(text))
            return
        if kind in (PAGE, FETCHED):
            self._resharding.replay(kind, text)
            return
        said, raw = read_decided(text)
        if kind == BEGIN:
            begin, given = read(pb.BeginRequest.FromString, raw, pb.BeginRequest.VALUES_FIELD_NUMBER)
            self._begin(begin, self._storage.gradients(raw, given), said["incarnation"])
        elif kind == PUSH:
            push, given = _read_push(raw)
            self._accept(push, self._storage.gradients(raw, given), said["rate"])
        elif kind == WAITS:
            # Replay of the segment before has added it already.
            push, given = _read_push(raw)
            if all(one.step != push.step for one in self.applied.waiting):
                pushed = _pushed(push, self._storage.gradients(raw, given), said["rate"])
                self.applied = replace(self.applied, waiting=(*self.applied.waiting, pushed))
        elif kind == DUPLICATE:
            self.applied = self.applied.mark_duplicate(said["step"])
        elif kind == DRAIN:
            applied, update = self.applied.drain(said["step"])
            self._apply(applied, update)
        elif kind == RESCHEDULE:
            self.applied = self._rescheduled(pb.RescheduleRequest.FromString(raw), said["incarnation"])
        elif kind == KEEP:
            self.applied = self.applied.keep(kept_from_proto(pb.KeepRequest.FromString(raw)))
        elif kind == GENERATION:
            self.applied = self.applied.quiesce(said["generation"])
        elif kind == ASSIGN:
            self._switch(pb.AssignRequest.FromString(raw), said["incarnation"])
        else:
            raise Damaged(f"log record of unknown kind {kind!r}")

    def load_base(self) -> None:
        self._storage.load_base(alone=True)

    # --- state

    @property
    def _rules(self) -> Rules:
        assert self._storage.declared is not None
        a = self._storage.declared.asynchronous
        return Rules(max(1, a.grads_to_wait), a.max_staleness, a.scale_rate)

    def _check(
        self,
        request: pb.LeaseRequest | pb.PushRequest | pb.DrainRequest | pb.RescheduleRequest | pb.KeepRequest,
        changes_rows: bool = False,
    ) -> None:
        """Reject a call of another run or incarnation, or one that the server's state does not allow.

        Args:
            changes_rows: whether the call accepts a step or changes rows.
        """
        self._storage.check_declared(request.run_id)
        if not self.applied.began:
            raise Misplaced("the server has no rows: it is new, or has lost its log")
        if request.incarnation != self.applied.incarnation:
            raise Misplaced(
                f"stale incarnation {request.incarnation!r} (current {self.applied.incarnation!r}): a server "
                "was restored or resharded; refresh and retry"
            )
        if changes_rows and self.applied.quiesced:
            raise Misplaced("the server is quiesced: it accepts steps again after `Assign`")

    def _new_incarnation(self) -> str:
        return f"{self._storage.run_id}/{secrets.token_hex(6)}"

    def _begin(self, request: pb.BeginRequest, values: Gradients, incarnation: str) -> None:
        self._storage.finish_copy()
        self._resharding.drop()
        if request.HasField("assignment"):
            self._storage.assignment = ShardAssignment.from_proto(request.assignment)
        self._put(values)
        self.applied = self.applied.begin(incarnation, request.since)

    def _put(self, values: Gradients) -> None:
        for number, (ids, rows) in values.of.items():
            self._storage.tables[number].put(0, ids, rows)

    def _accept(self, request: pb.PushRequest, gradients: Gradients, rate: float) -> None:
        pushed = _pushed(request, gradients, rate)
        applied, update = self.applied.accept(pushed, self._rules, request.skipped)
        self._apply(applied, update)

    def _apply(self, applied: AppliedSteps, update: Update | None) -> None:
        if update is not None:
            self._storage.finish_copy()
            for number, table in enumerate(self._storage.tables):
                gradients = [one.gradients.of[number] for one in update.pushed if number in one.gradients.of]
                if gradients:
                    at = update.version
                    table.apply(at, gradients, update.scale, update.learning_rate, at, for_good=True)
        self.applied = applied

    def _rescheduled(self, request: pb.RescheduleRequest, incarnation: str) -> AppliedSteps:
        return self.applied.reschedule(
            ranges_from_proto(request.steps), incarnation, request.server, request.server_incarnation
        )

    def _beginning(self, applied: AppliedSteps) -> Records:
        waiting = [[WAITS, decided(rate=one.learning_rate), one.gradients.raw] for one in applied.waiting]
        return [*self._storage.head(applied_to_json(applied)), *waiting]


def _read_push(raw: Bytes) -> tuple[pb.PushRequest, list[memoryview]]:
    return read(pb.PushRequest.FromString, raw, pb.PushRequest.GRADIENTS_FIELD_NUMBER)


def _pushed(request: pb.PushRequest, gradients: Gradients, rate: float) -> Pushed:
    return Pushed(request.step, rate, gradients, request.loss, request.records)
