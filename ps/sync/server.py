"""A ring's steps (mode=hybrid): one after the other, each of all ranks' gradients, the last one undone if the
ring goes on from the step before.

Promise: a call is refused, and has changed nothing, or is logged and has changed all. What counts is
decided in `staging`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.contract.rows.placement import Arrangement
from edl.contract.rows.wire import Bytes
from edl.ps.errors import Misplaced, Stale
from edl.ps.reshard.reshard import FETCH, FETCHED, PAGE, Rearranging
from edl.ps.storage.storage import Capture, Gradients, Records, Storage, read
from edl.ps.storage.wal import Damaged
from edl.ps.sync.staging import Apply, Commit, Effect, Steps, TakeBack

# What a record is, by its first byte.
SETTLE, COMMIT, STAGE = b"S", b"C", b"G"
ARRANGE, LOAD = b"A", b"L"


class RingOrder:
    """
    Args:
        head: how the log begins; None: nothing has begun.
    """

    def __init__(self, storage: Storage, head: Mapping[str, Any] | None = None):
        self._storage = storage
        self.steps = Steps() if head is None else _steps(head)
        self._moving = Rearranging(storage)
        self.rows_staged = 0

    # --- the calls

    def settle(self, request: pb.SettleRequest) -> pb.Position:
        """
        Raises:
            Misplaced: it has not what that arrangement gives it; or it does not know the job's tables, and so
                not in which order steps come here: it has just begun again, and who asks does not know that.
        """
        self._storage.check_declared(request.run_id)
        steps, effects = self.steps.settle(request.generation, request.step, _commit(request))
        if steps is not self.steps:
            if request.HasField("arrangement") and self.steps.began:
                self._check_can_go_over(Arrangement.of(request.arrangement), request.step)
            self._storage.log.append(SETTLE, request.SerializeToString())
            self._settle(request, steps, effects)
        return self.position()

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """
        Raises:
            Unreadable: the checkpoint cannot be read. The server is empty then.
        """
        self._storage.check_declared(request.run_id)
        steps, effects = self.steps.restore(request.generation, request.step, request.attempt)
        if not effects:
            return self.position()
        self._storage.check_checkpoint(request.step)
        self._moving.drop()
        if request.HasField("arrangement"):
            self._storage.arrangement = Arrangement.of(request.arrangement)
        try:
            if not request.step and request.HasField("start"):
                self._storage.begin_with(request.start, request.generation, self._beginning(steps))
            else:
                self._storage.go_back(request.step, request.attempt)
                self._storage.gone_back(request.step, request.attempt, self._beginning(steps))
        except BaseException:
            self.lost()
            raise
        self.steps = steps
        return self.position()

    def load(self, raw: Bytes) -> pb.Position:
        """Rows that the training begins with."""
        request, values = read(pb.LoadRequest.FromString, raw, pb.LoadRequest.VALUES_FIELD_NUMBER)
        self._storage.check_declared(request.run_id)
        self._reach(request.generation, 0, None)
        rows = self._storage.gradients(raw, values)
        for number, (ids, _) in rows.of.items():
            self._storage.check_room(self._storage.tables[number], len(ids))
        self._storage.finish_copy()
        self._storage.log.append(LOAD, raw)
        self._storage.begin_with_rows(rows)
        return self.position()

    def stage(self, raw: Bytes) -> pb.Position:
        request, gradients = read(pb.StageRequest.FromString, raw, pb.StageRequest.GRADIENTS_FIELD_NUMBER)
        self._storage.check_declared(request.run_id)
        staged = self._storage.gradients(raw, gradients)
        steps = self.steps.stage(request.generation, request.step, request.rank, staged)
        if steps is not self.steps:
            self._storage.check_memory([*self.steps.staged.values(), staged])
            self._storage.log.append(STAGE, raw)
            self.steps = steps
            self.rows_staged += sum(len(ids) for ids, _ in staged.of.values())
        return self.position()

    # --- another arrangement

    def fetch(self, request: pb.FetchRequest) -> list[int]:
        """What it is to have in another arrangement will come: of these servers, by `take_page`, and then
        `fetched`. None: it is here already."""
        self._storage.check_declared(request.run_id)
        to, of = Arrangement.of(request.to), Arrangement.of(request.of)
        if self.steps.generation > request.generation:
            raise Stale(f"generation {request.generation} has passed")
        if not self._misses(to, of, request.step):
            return []
        self._moving.log_fetch(request)
        self._begin_fetch(request)
        return list(of.members)

    def take_page(self, request: pb.FetchRequest, raw: bytes) -> pb.PageOfRows:
        return self._moving.take_page(request, raw)

    def fetched(self, request: pb.FetchRequest) -> pb.Position:
        self._moving.fetched(request)
        return self.position()

    def page(self, request: pb.PageRequest) -> pb.PageOfRows:
        """Some of the rows that another server is to have."""
        self._storage.check_declared(request.run_id)
        self._check_settled(request.generation)
        self.steps.reach(request.generation, request.step, None)
        return self._moving.page(request, self.steps.step)

    def arrange(self, request: pb.ArrangeRequest) -> pb.Position:
        """Go over to that arrangement, between two steps; or stay in it, and drop what was fetched."""
        self._storage.check_declared(request.run_id)
        to = Arrangement.of(request.to)
        if request.generation < self.steps.generation:
            raise Stale(f"generation {request.generation} has passed")
        if to != self._storage.arrangement or self._moving.incoming is not None or not self.steps.began:
            if self._storage.index in to.members:
                self._check_can_go_over(to, request.step)
            self._storage.log.append(ARRANGE, request.SerializeToString())
            self._go_over(to, request.generation, request.step, _commit(request))
        return self.position()

    # --- as a way (durable.Way)

    @property
    def began(self) -> bool:
        return self.steps.began

    @property
    def clock(self) -> int:
        return self.steps.step

    @property
    def line(self) -> str:
        generation, step, attempt = self.steps.restored
        out = "".join(f"/{index}" for index in self._storage.arrangement.out)
        return f"{self._storage.run_id}/{generation or self.steps.begun_in}/{step}/{attempt}{out}"

    @property
    def pending(self) -> int:
        return sum(len(staged.raw) for staged in self.steps.staged.values()) + self._moving.nbytes

    def position(self) -> pb.Position:
        steps, ready, there = self.steps, self._moving.incoming, self._storage.arrangement
        told = pb.Position(generation=steps.generation, step=steps.step, empty=not steps.began)
        if steps.began and there.servers:
            told.arrangement.CopyFrom(there.told())
        if ready is not None and ready.whole:
            told.ready.CopyFrom(ready.to.told())
            told.ready_step = ready.request.step
        return told

    def reach(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        if isinstance(request, pb.WritePartRequest):
            self._check_settled(request.generation)
        self._reach(request.generation, request.step, request if request.HasField("last") else None)

    @property
    def is_moving(self) -> bool:
        return self._moving.incoming is not None

    def capture(self) -> Capture:
        if self._moving.incoming is not None:
            raise Misplaced("rows are on their way to another arrangement of the servers")
        staged = [[STAGE, self.steps.staged[rank].raw] for rank in sorted(self.steps.staged)]
        step = self.steps.step
        return self._storage.begin_capture(step, step, [*self._beginning(self.steps), *staged], {})

    @property
    def parts_are_whole(self) -> bool:
        return True  # all parts are of one step: second copies are the rows of another part

    def rebased(self) -> None:
        base = self._storage.log.base
        if base is not None and self.steps.step == base.step:
            # Who reads the log from here on cannot take the step before back.
            self.steps = self.steps.for_good()
            for table in self._storage.tables:
                table.forget_undo()

    def lost(self) -> None:
        self.steps = self.steps.lost()
        self._storage.lose(self._beginning(self.steps))

    def beginning(self) -> Records:
        return self._beginning(self.steps)

    def replay(self, kind: bytes, text: bytes) -> None:
        if kind == SETTLE:
            settle = pb.SettleRequest.FromString(text)
            self._settle(settle, *self.steps.settle(settle.generation, settle.step, _commit(settle)))
        elif kind == COMMIT:
            pull = pb.PullRequest.FromString(text)
            self._take(*self.steps.reach(pull.generation, pull.step, _commit(pull)))
        elif kind == STAGE:
            request, gradients = read(
                pb.StageRequest.FromString, text, pb.StageRequest.GRADIENTS_FIELD_NUMBER
            )
            staged = self._storage.gradients(text, gradients)
            self.steps = self.steps.stage(request.generation, request.step, request.rank, staged)
        elif kind == LOAD:
            _, values = read(pb.LoadRequest.FromString, text, pb.LoadRequest.VALUES_FIELD_NUMBER)
            self._storage.begin_with_rows(self._storage.gradients(text, values))
        elif kind == FETCH:
            self._begin_fetch(pb.FetchRequest.FromString(text))
        elif kind in (PAGE, FETCHED):
            self._moving.replay(kind, text)
        elif kind == ARRANGE:
            arrange = pb.ArrangeRequest.FromString(text)
            to = Arrangement.of(arrange.to)
            self._go_over(to, arrange.generation, arrange.step, _commit(arrange))
        else:
            raise Damaged(f"a record of unknown kind {kind!r}")

    def load_base(self) -> None:
        self._storage.load_base()

    # --- state

    def _check_settled(self, generation: int) -> None:
        """Refuse a call that is made only after its generation was settled here: it would wait in vain."""
        if generation > self.steps.generation:
            raise Misplaced(
                f"generation {generation} is not settled here, the last one was {self.steps.generation}: the "
                "server has lost its log"
            )

    def _reach(
        self, generation: int, step: int,
        request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest | None,
    ) -> None:  # fmt: skip
        steps, effects = self.steps.reach(generation, step, None if request is None else _commit(request))
        if steps is not self.steps:
            assert request is not None
            record = pb.PullRequest(generation=generation, step=step, last=request.last)
            self._storage.log.append(COMMIT, record.SerializeToString())
            self._take(steps, effects)

    def _settle(self, request: pb.SettleRequest, steps: Steps, effects: Sequence[Effect]) -> None:
        self._take(steps, effects)
        if request.HasField("arrangement"):
            to = Arrangement.of(request.arrangement)
            self._go_over(to, request.generation, request.step, _commit(request))

    def _begin_fetch(self, request: pb.FetchRequest) -> None:
        self._moving.begin(request)
        if self._storage.index not in Arrangement.of(request.of).members:  # what it has is not of this step
            self._storage.drop_rows()
            self.steps = self.steps.lost()

    def _misses(self, to: Arrangement, of: Arrangement, step: int) -> bool:
        """Whether it has not what that arrangement gives it."""
        index = self._storage.index
        if self._moving.incoming is not None and self._moving.incoming.gives(index, to, step):
            return False
        mine = self._storage.arrangement if self.steps.began and index in of.members else of
        return bool((to.held(index) & ~mine.held(index)).any())

    def _check_can_go_over(self, to: Arrangement, step: int) -> None:
        there = self._storage.arrangement
        if self._storage.index in to.members and self._misses(to, there, step):
            raise Misplaced(f"the server is one of {there}, and has not what {to} would give it")

    def _go_over(self, to: Arrangement, generation: int, step: int, last: Commit | None) -> None:
        """To an arrangement of which it has all that is its own."""
        index, tables = self._storage.index, self._storage.tables
        self._storage.finish_copy()
        incoming = self._moving.incoming
        self._moving.drop()
        before, self._storage.arrangement = self._storage.arrangement, to
        if incoming is not None and not incoming.gives(index, to, step):
            incoming = None
        if index not in to.members:
            for table in tables:
                table.clear()
            self.steps = Steps(generation)
        elif incoming is not None:
            of = Arrangement.of(incoming.request.of)
            stays = self.steps.began and index in of.members
            self._moving.take_in(incoming, stays)
            self.steps = self.steps.for_good() if stays else Steps.joining(generation, step, last)
        elif self.steps.began and (before.held(index) & ~to.held(index)).any():
            for table in tables:
                table.keep(self._storage.has)
            self.steps = self.steps.for_good()

    def _take(self, steps: Steps, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._storage.finish_copy()
            self._moving.drop()
            if isinstance(effect, Apply):
                self._apply(effect.commit, effect.staged)
            elif isinstance(effect, TakeBack):
                for table in self._storage.tables:
                    table.take_back()
                self._storage.undone(steps.step)
        self.steps = steps

    def _apply(self, commit: Commit, ranks: Sequence[Gradients]) -> None:
        for number, table in enumerate(self._storage.tables):
            if commit.skipped:
                table.forget_undo()
                continue
            gradients = [staged.of[number] for staged in ranks if number in staged.of]
            table.apply(commit.step, gradients, commit.scale, commit.learning_rate, commit.iteration)

    def _beginning(self, steps: Steps) -> Records:
        last = None if steps.last is None else list(steps.last.__dict__.values())
        return self._storage.head({
            "generation": steps.generation, "step": steps.step, "began": steps.began,
            "last": last, "restored": list(steps.restored), "begun_in": steps.begun_in,
        })  # fmt: skip


def _commit(
    request: (pb.PullRequest | pb.ListRequest | pb.SettleRequest | pb.WritePartRequest | pb.ArrangeRequest),
) -> Commit | None:
    if not request.HasField("last"):
        return None
    c = request.last
    return Commit(c.step, c.skipped, c.scale, c.learning_rate, c.iteration)


def _steps(about: Mapping[str, Any]) -> Steps:
    last = None if about["last"] is None else Commit(*about["last"])
    generation, step, attempt = about["restored"]
    return Steps(
        about["generation"], about["step"], about["began"], last, restored=(generation, step, attempt),
        begun_in=about.get("begun_in", 0),
    )  # fmt: skip
