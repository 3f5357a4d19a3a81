# SPDX-License-Identifier: Apache-2.0
"""Synchronous steps of a ring (mode=hybrid): one after the other, each with the gradients of all ranks.

The last step is undone if a new ring continues from the step before it.

Promise: a call is rejected and changes nothing, or is logged and takes full effect. `staging` decides what
counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import ShardAssignment
from edl.contract.rows.wire import Bytes
from edl.ps.errors import Misplaced, check_not_stale
from edl.ps.phase import Phase
from edl.ps.reshard.transfer import ReshardTarget
from edl.ps.storage.records import APPLY, ASSIGN, BEGIN, GENERATION, PUSH, Record, record
from edl.ps.storage.requests import Gradients, read_begin, read_push
from edl.ps.storage.storage import Records, Storage
from edl.ps.storage.wal import Damaged
from edl.ps.sync.staging import Apply, Commit, Effect, Steps, TakeBack
from edl.ps.update_mode import UpdateMode


class SyncServer(UpdateMode[Steps]):
    """The state of one server with synchronous steps, and the calls that change it.

    Args:
        head: the first record of the log; None: the log is empty.
    """

    def __init__(self, storage: Storage, head: Mapping[str, Any] | None = None):
        super().__init__(storage, Steps() if head is None else _steps(head))

    # --- the calls

    def start_generation(self, request: pb.StartGenerationRequest) -> pb.Position:
        """Start a generation, and switch to its shard assignment if it names one.

        Raises:
            Misplaced: the server lacks rows of that assignment; or no tables are declared, because the server
                was restarted without its log and the caller does not know that yet.
        """
        self._storage.check_declared(request.run_id)
        steps, effects = self.state.start_generation(request.generation, request.step, _commit(request))
        if steps is not self.state:
            if request.HasField("assignment") and self.phase.has_rows:
                self._check_can_switch(ShardAssignment.from_proto(request.assignment), request.step)
            self._storage.append(GENERATION, request.SerializeToString())
            self._start_generation(request, steps, effects)
        return self.position()

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        self._storage.check_declared(request.run_id)
        steps = self.state.restore(request.generation, request.step, request.attempt)
        if steps is not self.state:
            self._roll_back(request, lambda _: steps)
        return self.position()

    def begin(self, raw: Bytes) -> pb.Progress:
        request, values = read_begin(raw)
        self._storage.check_declared(request.run_id)
        self._advance_to(request.generation, 0, None)
        rows = self._storage.gradients(raw, values)
        for number, (ids, _) in rows.of.items():
            self._storage.check_room(self._storage.tables[number], len(ids))
        self._storage.finish_copy()
        self._storage.append(BEGIN, raw)
        self._storage.begin_with_rows(rows)
        return self.progress()

    def push(self, raw: Bytes) -> pb.Progress:
        """Stage the gradients of one rank for the step of its ring.

        Raises:
            Misplaced: the step is one of mode=ps, or is not the server's.
        """
        request, gradients = read_push(raw)
        self._storage.check_declared(request.run_id)
        if request.incarnation:
            raise Misplaced(
                "the push is of an asynchronous step (mode=ps), and this server is synchronous "
                "(mode=hybrid): expected a generation and no incarnation"
            )
        staged = self._storage.gradients(raw, gradients)
        steps = self.state.stage(request.generation, request.step, request.rank, staged)
        if steps is not self.state:
            self._storage.check_memory([*self.state.staged.values(), staged])
            self._storage.append(PUSH, raw)
            self.state = steps
            self.rows_staged += sum(len(ids) for ids, _ in staged.of.values())
        return self.progress()

    # --- resharding

    def _lacks(self, request: pb.FetchRequest, to: ShardAssignment, of: ShardAssignment) -> bool:
        check_not_stale(request.generation, self.state.generation)
        if to == self._storage.assignment and self.state.begun_in == request.generation:
            return False  # a late duplicate: the server has joined with the rows of this fetch
        return self._misses(to, of, request.step)

    def _check_can_send(self, request: pb.PageRequest) -> None:
        self._check_started(request.generation)
        self.state.advance_to(request.generation, request.step, None)

    def assign(self, request: pb.AssignRequest) -> pb.Position:
        """Switch to that assignment, between two steps; or keep it, and drop the fetched rows.

        Raises:
            Stale: a newer generation has started.
        """
        self._storage.check_declared(request.run_id)
        to = ShardAssignment.from_proto(request.to)
        check_not_stale(request.generation, self.state.generation)
        if to != self._storage.assignment or self.is_resharding or not self.phase.has_rows:
            if self._storage.index in to.members:
                self._check_can_switch(to, request.step)
            self._storage.append(ASSIGN, request.SerializeToString())
            self._switch(to, request.generation, request.step, _commit(request))
        return self.position()

    # --- as an UpdateMode (ps/update_mode.py)

    @property
    def clock(self) -> int:
        return self.state.step

    @property
    def incarnation(self) -> str:
        generation, step, attempt = self.state.restored
        out = "".join(f"/{index}" for index in self._storage.assignment.out)
        return f"{self._storage.run_id}/{generation or self.state.begun_in}/{step}/{attempt}{out}"

    @property
    def pending(self) -> int:
        return sum(len(staged.raw) for staged in self.state.staged.values()) + self._resharding.nbytes

    def progress(self) -> pb.Progress:
        return pb.Progress(step=self.state.step, incarnation=self.incarnation, empty=not self.phase.has_rows)

    def _position(self) -> pb.Position:
        return pb.Position(generation=self.state.generation, step=self.state.step)

    def _tell_fetched(self, position: pb.Position, ready: ReshardTarget) -> None:
        position.ready.CopyFrom(ready.to.to_proto())
        position.ready_step = ready.request.step

    def advance_to(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        if isinstance(request, pb.WritePartRequest):
            self._check_started(request.generation)
        self._advance_to(request.generation, request.step, request if request.HasField("last") else None)

    def _about(self) -> Mapping[str, Any]:
        return {}

    def rebased(self) -> None:
        base = self._storage.log.base
        if base is not None and self.state.step == base.step:
            # A replay of the log from here cannot undo the step before.
            self.state = self.state.for_good()
            for table in self._storage.tables:
                table.forget_undo()

    def _replay(self, record: Record) -> None:
        kind, _, raw = record
        if kind == GENERATION:
            start = pb.StartGenerationRequest.FromString(raw)
            self._start_generation(
                start, *self.state.start_generation(start.generation, start.step, _commit(start))
            )
        elif kind == APPLY:
            pull = pb.PullRequest.FromString(raw)
            self._take(*self.state.advance_to(pull.generation, pull.step, _commit(pull)))
        elif kind == PUSH:
            request, gradients = read_push(raw)
            staged = self._storage.gradients(raw, gradients)
            self.state = self.state.stage(request.generation, request.step, request.rank, staged)
        elif kind == BEGIN:
            _, values = read_begin(raw)
            self._storage.begin_with_rows(self._storage.gradients(raw, values))
        elif kind == ASSIGN:
            assign = pb.AssignRequest.FromString(raw)
            to = ShardAssignment.from_proto(assign.to)
            self._switch(to, assign.generation, assign.step, _commit(assign))
        else:
            raise Damaged(f"log record of unknown kind {kind!r}")

    # --- state

    def _check_started(self, generation: int) -> None:
        """Reject a call that is made only after its generation has started here: it would wait forever.

        Raises:
            Misplaced: the generation has not started here.
        """
        if generation > self.state.generation:
            raise Misplaced(
                f"generation {generation} has not started here, the newest is {self.state.generation}: the "
                "server has lost its log"
            )

    def _advance_to(
        self,
        generation: int,
        step: int,
        request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest | None,
    ) -> None:
        steps, effects = self.state.advance_to(
            generation, step, None if request is None else _commit(request)
        )
        if steps is not self.state:
            assert request is not None
            pull = pb.PullRequest(generation=generation, step=step, last=request.last)
            self._storage.append(APPLY, pull.SerializeToString())
            self._take(steps, effects)

    def _start_generation(
        self, request: pb.StartGenerationRequest, steps: Steps, effects: Sequence[Effect]
    ) -> None:
        self._take(steps, effects)
        if request.HasField("assignment"):
            to = ShardAssignment.from_proto(request.assignment)
            self._switch(to, request.generation, request.step, _commit(request))

    def _misses(self, to: ShardAssignment, of: ShardAssignment, step: int) -> bool:
        """Whether the server lacks rows of assignment `to`."""
        index = self._storage.index
        if self._resharding.ready_for(to, step) is not None:
            return False
        mine = self._storage.assignment if self.phase.has_rows and index in of.members else of
        return bool((to.held(index) & ~mine.held(index)).any())

    def _check_can_switch(self, to: ShardAssignment, step: int) -> None:
        there = self._storage.assignment
        if self._storage.index in to.members and self._misses(to, there, step):
            raise Misplaced(f"cannot switch from {there} to {to}: this server lacks rows of it")

    def _switch(self, to: ShardAssignment, generation: int, step: int, last: Commit | None) -> None:
        """Switch to an assignment all of whose rows for this server are here."""
        index = self._storage.index
        target = self._resharding.ready_for(to, step)
        stays = self.phase.has_rows and (
            target is None or index in ShardAssignment.from_proto(target.request.of).members
        )
        fewer = self._resharding.switch(to, target, stays)
        if index not in to.members:
            self.state = replace(self.state.lost(), generation=generation)
        elif target is not None and not stays:
            self.state = self.state.joins(generation, step, last)
        elif stays and (target is not None or fewer):
            self.state = self.state.for_good()

    def _take(self, steps: Steps, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._storage.finish_copy()
            self._resharding.drop()
            if isinstance(effect, Apply):
                self._apply(effect.commit, effect.staged)
            elif isinstance(effect, TakeBack):
                for table in self._storage.tables:
                    table.take_back()
                self._storage.undone(steps.step)
        self.state = steps

    def _apply(self, commit: Commit, ranks: Sequence[Gradients]) -> None:
        for number, table in enumerate(self._storage.tables):
            if commit.skipped:
                table.forget_undo()
                continue
            gradients = [staged.of[number] for staged in ranks if number in staged.of]
            table.apply(commit.step, gradients, commit.scale, commit.learning_rate, commit.iteration)

    def _beginning(self, steps: Steps) -> Records:
        last = None if steps.last is None else list(steps.last.__dict__.values())
        head = {
            "generation": steps.generation,
            "step": steps.step,
            "began": steps.phase.has_rows,
            "last": last,
            "restored": list(steps.restored),
            "begun_in": steps.begun_in,
        }
        staged = [record(PUSH, steps.staged[rank].raw) for rank in sorted(steps.staged)]
        return [*self._storage.head(head), *staged]


def _commit(
    request: (
        pb.PullRequest | pb.ListRequest | pb.StartGenerationRequest | pb.WritePartRequest | pb.AssignRequest
    ),
) -> Commit | None:
    if not request.HasField("last"):
        return None
    c = request.last
    return Commit(c.step, c.skipped, c.scale, c.learning_rate, c.iteration)


def _steps(about: Mapping[str, Any]) -> Steps:
    last = None if about["last"] is None else Commit(*about["last"])
    generation, step, attempt = about["restored"]
    return Steps(
        about["generation"],
        about["step"],
        Phase.SERVING if about["began"] else Phase.EMPTY,
        last,
        restored=(generation, step, attempt),
        begun_in=about.get("begun_in", 0),
    )
