"""Steps in any order (mode=ps): all weights are rows of this and the other servers, and whoever has made a
step pushes it.

Promise: a call is refused, and has changed nothing, or is logged and has changed all. A step counts once in
every row of this server, however often it comes and whoever has died. What counts is decided in `taking`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.contract.rows.placement import Arrangement
from edl.contract.rows.wire import Bytes
from edl.ps.asynchronous.applied_steps import Fate, Leases, Pushed, Rules, Taking, Update
from edl.ps.asynchronous.records import (
    decided,
    kept_of,
    ranges_of,
    read_decided,
    steps_told,
    taking_of,
    taking_of_parts,
    taking_told,
)
from edl.ps.errors import Invalid, Misplaced
from edl.ps.reshard.reshard import FETCH, FETCHED, PAGE, Rearranging
from edl.ps.storage.storage import Capture, Gradients, Records, Storage, read
from edl.ps.storage.wal import Damaged

# What a record is, by its first byte. Then what was decided about the request, and the request.
BEGIN, PUSH, AGAIN, DRAIN, REOPEN, KEEP = b"B", b"P", b"A", b"D", b"R", b"K"
WAITS = b"W"  # a push before this segment that is not in the rows
SETTLE, ARRANGE = b"S", b"G"


class AnyOrder:
    """
    Args:
        head: how the log begins; None: nothing has begun.
        clock: seconds, never going back.
    """

    def __init__(
        self, storage: Storage, head: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._storage = storage
        self.taking = Taking() if head is None else taking_of(head)
        self._leases = Leases(clock)
        self._moving = Rearranging(storage)
        self._pages: tuple[str, int] = "", 0  # of the rows that a job begins with: whose, and which is next
        self.rows_staged = 0

    # --- the calls

    def begin(self, raw: Bytes) -> pb.Progress:
        """
        Raises:
            OutOfMemory, Unavailable: it cannot have them.
        """
        request, given = read(pb.BeginRequest.FromString, raw, pb.BeginRequest.VALUES_FIELD_NUMBER)
        self._storage.check_declared(request.run_id)
        values = self._storage.gradients(raw, given)
        if self.taking.began:
            return self.progress()
        if request.attempt:
            self._begin_in_pages(request, values)
            return self.progress()
        self._storage.check_memory([values])
        line = self._another_line()
        self._storage.log.append(BEGIN, decided(line=line), raw)
        self._begin(request, values, line)
        return self.progress()

    def _begin_in_pages(self, request: pb.BeginRequest, values: Gradients) -> None:
        """One of several messages, which one worker sends one after the other: with the last one all of it is
        on the disk, and before nothing is. One that comes again changes nothing."""
        attempt, next_page = self._pages
        if request.page and (attempt != request.attempt or request.page not in (next_page, next_page - 1)):
            raise Misplaced(
                f"page {request.page} of the rows that the job begins with is not the next one here: the "
                "server has come back meanwhile, or another worker brings them"
            )
        storage = self._storage
        try:
            if not request.page:
                self._moving.drop()
                if request.HasField("arrangement"):
                    storage.arrangement = Arrangement.of(request.arrangement)
                storage.read_start(request.start)
            if request.more:
                for number, (ids, _) in values.of.items():
                    storage.check_room(storage.tables[number], len(ids))
                storage.begin_with_rows(values)
            else:
                taking = self.taking.begin(self._another_line(), request.since)
                self._put(values)
                storage.keep_beginning(f"snapshot-of-beginning-{request.attempt}", self._beginning(taking))
                self.taking = taking
        except BaseException:
            self.lost()
            raise
        self._pages = request.attempt, request.page + 1

    def take(self, request: pb.TakeRequest) -> pb.Taken:
        self._check(request, takes=True)
        index, coordinator = self._storage.index, self._storage.arrangement.coordinator
        if index != coordinator:
            raise Misplaced(f"steps are handed out by server {coordinator}, and this is server {index}")
        if request.most < 1 or request.limit < 0:
            raise Invalid(f"{request.most} steps below {request.limit}: expected at least 1, below 0 or more")
        steps = self._leases.take(request.worker, request.most, self.taking.open(request.limit))
        found = RangeSet.of((step, step + 1) for step in steps)
        return pb.Taken(steps=steps_told(found), progress=self.progress())

    def push(self, raw: Bytes) -> pb.Progress:
        """
        Raises:
            OutOfMemory, Unavailable: it cannot be taken.
        """
        request, given = _read_push(raw)
        self._check(request, takes=True)
        gradients = self._storage.gradients(raw, given)
        taking, rules = self.taking, self._rules
        self._leases.heard(request.worker)
        fate = taking.fate(request.step, request.version, request.skipped, rules)
        if fate is Fate.TOO_OLD:
            return self.progress(refused=True)
        if fate is Fate.REPEATED:
            self._storage.log.append(AGAIN, decided(step=request.step))
            self.taking = taking.again(request.step)
        else:
            rate = rules.rate(request.learning_rate, taking.staleness(request.version))
            if not request.skipped:
                self._storage.check_memory([*(one.gradients for one in taking.waiting), gradients])
            self._storage.log.append(PUSH, decided(rate=rate), raw)
            self._take(request, gradients, rate)
            self.rows_staged += sum(len(ids) for ids, _ in gradients.of.values())
        self._leases.made(request.step)
        return self.progress()

    def drain(self, request: pb.DrainRequest) -> pb.Progress:
        self._check(request)
        taking, update = self.taking.drain(request.step)
        if update is not None:
            self._check(request, takes=True)
            self._storage.log.append(DRAIN, decided(step=request.step))
            self._apply(taking, update)
        return self.progress()

    def reopen(self, request: pb.ReopenRequest) -> pb.Progress:
        self._check(request)
        line = self._another_line()
        taking = self._reopened(request, line)
        if taking is not self.taking:
            self._storage.log.append(REOPEN, decided(line=line), request.SerializeToString())
            if taking.line != self.taking.line:
                self._leases.clear()
            self.taking = taking
        return self.progress()

    def keep(self, request: pb.KeepRequest) -> pb.Progress:
        self._check(request)
        taking = self.taking.keep(kept_of(request))
        if taking is not self.taking:
            self._storage.log.append(KEEP, decided(), request.SerializeToString())
            self.taking = taking
        return self.progress()

    def kept(self, request: pb.KeptRequest) -> pb.KeepRequest:
        self._storage.check_declared(request.run_id)
        kept = self.taking.kept
        if kept is None:
            return pb.KeepRequest(run_id=request.run_id, line=self.line)
        return pb.KeepRequest(
            run_id=request.run_id, line=self.line, step=kept.step, order=kept.order, ledger=kept.ledger,
            repeated=self.taking.repeated,
        )  # fmt: skip

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """
        Raises:
            Unreadable: the checkpoint cannot be read. The server is empty then.
        """
        storage, before = self._storage, self.taking
        storage.check_declared(request.run_id)
        if not before.goes_back(request.generation, request.step, request.attempt):
            return self.position()
        storage.check_checkpoint(request.step)
        generation = request.generation or before.restored[0]
        restored = generation, request.step, request.attempt
        self._moving.drop()
        if request.HasField("arrangement"):
            storage.arrangement = Arrangement.of(request.arrangement)
        try:
            said = storage.go_back(request.step, request.attempt, alone=True)
            taking = Taking(restored=restored)
            if request.step:
                taking = taking_of_parts(said, storage.index, request.step)
                taking = replace(taking, line=self._another_line(), restored=restored, others=())
            taking = replace(
                taking, generation=max(before.generation, request.generation), still=before.still,
                arranged=request.generation,
            )  # fmt: skip
            storage.gone_back(request.step, request.attempt, self._beginning(taking))
        except BaseException:
            self.lost()
            raise
        self.taking = taking
        self._leases.clear()
        return self.position()

    # --- another arrangement

    def settle(self, request: pb.SettleRequest) -> pb.Position:
        """Stand still, until the root of this generation has it go on: no earlier one is heard any more."""
        self._storage.check_declared(request.run_id)
        taking = self.taking.settle(request.generation)
        if taking is not self.taking:
            self._storage.log.append(SETTLE, decided(generation=request.generation))
            self.taking = taking
        return self.position()

    def fetch(self, request: pb.FetchRequest) -> list[int]:
        """As of a ring's server: of which servers rows will come, by `take_page`, and then `fetched`."""
        self._storage.check_declared(request.run_id)
        self.taking.speaks(request.generation)
        of, to = Arrangement.of(request.of), Arrangement.of(request.to)
        if self._fetched(to, request.generation) or (self._storage.index in of.members and self._has(to)):
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
        """Some of the rows that another server is to have: all steps that are taken are in them."""
        self._storage.check_declared(request.run_id)
        self.taking.speaks(request.generation)
        if not (self.taking.began and self.taking.still) or self.taking.waiting:
            raise Misplaced("rows are given away while the server stands still, with all its steps in them")
        return self._moving.page(request, self.taking.version)

    def arrange(self, request: pb.ArrangeRequest) -> pb.Position:
        """Go on: in that arrangement, whatever it takes to go over to it, or as it was."""
        self._storage.check_declared(request.run_id)
        self.taking.speaks(request.generation)
        to = Arrangement.of(request.to)
        if self.taking.still or to != self._storage.arrangement:
            lacks = self.taking.began and not (self._has(to) or self._fetched(to, request.fetched))
            if self._storage.index in to.members and lacks:  # one that has nothing has still to begin there
                there = self._storage.arrangement
                raise Misplaced(f"the server is one of {there}, and has not what {to} would give it")
            line = self._another_line()
            self._storage.log.append(ARRANGE, decided(line=line), request.SerializeToString())
            self._go_over(request, line)
        return self.position()

    def _begin_fetch(self, request: pb.FetchRequest) -> None:
        self._moving.begin(request)
        if self._storage.index not in Arrangement.of(request.of).members:  # what it has is of an earlier time
            self._storage.drop_rows()
            self.taking = self.taking.lost()

    def _fetched(self, to: Arrangement, generation: int) -> bool:
        """Whether all is here that this arrangement gives the server, fetched in that generation."""
        ready = self._moving.incoming
        return (
            ready is not None
            and ready.request.generation == generation
            and ready.gives(self._storage.index, to, ready.request.step)
        )

    def _has(self, to: Arrangement) -> bool:
        """Whether it has all that this arrangement gives it; and, if it is to have fewer rows, no step that
        waits is still to be applied to them."""
        held, wanted = (of.held(self._storage.index) for of in (self._storage.arrangement, to))
        fewer = bool((held & ~wanted).any())
        return self.taking.began and not (fewer and self.taking.waiting) and bool((held >= wanted).all())

    def _go_over(self, request: pb.ArrangeRequest, line: str) -> None:
        storage, to, index = self._storage, Arrangement.of(request.to), self._storage.index
        storage.finish_copy()
        ready = self._moving.incoming if self._fetched(to, request.fetched) else None
        before, taking = storage.arrangement, self.taking
        self._moving.drop()
        storage.arrangement = to
        if to == before and taking.began:
            self.taking = replace(taking, still=False, arranged=request.since)
            return
        if index not in to.members:
            for table in storage.tables:
                table.clear()
            taking = replace(taking.lost(), still=False)
        elif ready is not None:
            fetch = ready.request
            self._moving.take_in(ready, stays=taking.began)
            if taking.began:
                taking = taking.moved(fetch.version, line, request.since)
            else:
                kept = kept_of(fetch.kept) if fetch.kept.ledger else None
                taking = taking.joins(ranges_of(fetch.steps), fetch.version, kept, line, request.since)
        elif taking.began:
            if (before.held(index) & ~to.held(index)).any():
                for table in storage.tables:
                    table.keep(storage.has)
            taking = taking.moved(0, line, request.since)
        else:
            taking = replace(taking, still=False)
        self.taking = taking
        self._leases.clear()

    def progress(self, refused: bool = False) -> pb.Progress:
        t = self.taking
        return pb.Progress(
            version=t.version, step=t.step, line=t.line, empty=not t.began, taken=len(t.taken), loss=t.loss,
            records=t.records, refused=refused, repeated=t.repeated,
        )  # fmt: skip

    @property
    def taken(self) -> pb.Steps:
        return steps_told(self.taking.taken)

    @property
    def reopened(self) -> pb.Steps:
        return steps_told(self.taking.reopened)

    # --- as a way (durable.Way)

    @property
    def began(self) -> bool:
        return self.taking.began

    @property
    def clock(self) -> int:
        return self.taking.version

    @property
    def line(self) -> str:
        return self.taking.line

    @property
    def pending(self) -> int:
        return sum(len(one.gradients.raw) for one in self.taking.waiting) + self._moving.nbytes

    @property
    def is_moving(self) -> bool:
        return self._moving.incoming is not None

    def position(self) -> pb.Position:
        t, there = self.taking, self._storage.arrangement
        generation = max(t.restored[0], t.generation)
        told = pb.Position(generation=generation, step=t.step, empty=not t.began, arranged=t.arranged)
        if t.began and there.servers:
            told.arrangement.CopyFrom(there.told())
        if (ready := self._moving.incoming) is not None and ready.whole:
            told.fetched.CopyFrom(ready.to.told())
            told.fetched_in = ready.request.generation
        return told

    def reach(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        if request.generation:
            raise Misplaced(
                f"generation {request.generation}: this server's steps come in any order (mode=ps), and it "
                "gives its rows as they are: expected generation 0"
            )
        self._storage.check_run(request.run_id)
        if not self.taking.began:
            raise Misplaced("the server has no rows yet: it has just been started, or has lost its log")

    def capture(self) -> Capture:
        if self.is_moving:
            raise Misplaced("rows are on their way to another arrangement of the servers")
        t = self.taking
        return self._storage.begin_capture(t.version, t.version, self.beginning(), taking_told(t.applied))

    @property
    def parts_are_whole(self) -> bool:
        # A second copy has learned what this server has taken, and is in no part: in another one the row is
        # as another server has it.
        return self._storage.arrangement.copies < 2

    def rebased(self) -> None:
        """Nothing is undone here."""

    def lost(self) -> None:
        self.taking, self._pages = self.taking.lost(), ("", 0)
        self._leases.clear()
        self._storage.lose(self.beginning())

    def beginning(self) -> Records:
        return self._beginning(self.taking)

    def replay(self, kind: bytes, text: bytes) -> None:
        if kind == FETCH:
            self._begin_fetch(pb.FetchRequest.FromString(text))
            return
        if kind in (PAGE, FETCHED):
            self._moving.replay(kind, text)
            return
        said, raw = read_decided(text)
        if kind == BEGIN:
            begin, given = read(pb.BeginRequest.FromString, raw, pb.BeginRequest.VALUES_FIELD_NUMBER)
            self._begin(begin, self._storage.gradients(raw, given), said["line"])
        elif kind == PUSH:
            push, given = _read_push(raw)
            self._take(push, self._storage.gradients(raw, given), said["rate"])
        elif kind == WAITS:
            # Whoever reads the segment before has it already.
            push, given = _read_push(raw)
            if all(one.step != push.step for one in self.taking.waiting):
                pushed = _pushed(push, self._storage.gradients(raw, given), said["rate"])
                self.taking = replace(self.taking, waiting=(*self.taking.waiting, pushed))
        elif kind == AGAIN:
            self.taking = self.taking.again(said["step"])
        elif kind == DRAIN:
            taking, update = self.taking.drain(said["step"])
            self._apply(taking, update)
        elif kind == REOPEN:
            self.taking = self._reopened(pb.ReopenRequest.FromString(raw), said["line"])
        elif kind == KEEP:
            self.taking = self.taking.keep(kept_of(pb.KeepRequest.FromString(raw)))
        elif kind == SETTLE:
            self.taking = self.taking.settle(said["generation"])
        elif kind == ARRANGE:
            self._go_over(pb.ArrangeRequest.FromString(raw), said["line"])
        else:
            raise Damaged(f"a record of unknown kind {kind!r}")

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
        request: pb.TakeRequest | pb.PushRequest | pb.DrainRequest | pb.ReopenRequest | pb.KeepRequest,
        takes: bool = False,
    ) -> None:
        """
        Args:
            takes: it would take a step, or change rows.
        """
        self._storage.check_declared(request.run_id)
        if not self.taking.began:
            raise Misplaced("the server has no rows yet: it has just been started, or has lost its log")
        if request.line != self.taking.line:
            raise Misplaced(
                f"this is of the line {request.line!r}, and the server is in {self.taking.line!r}: it went "
                "back to a checkpoint, or another server has, or rows have moved, meanwhile; look at all of "
                "them anew"
            )
        if takes and self.taking.still:
            raise Misplaced("the server stands still, until it is known which servers are to have the rows")

    def _another_line(self) -> str:
        return f"{self._storage.run_id}/{secrets.token_hex(6)}"

    def _begin(self, request: pb.BeginRequest, values: Gradients, line: str) -> None:
        self._storage.finish_copy()
        self._moving.drop()
        if request.HasField("arrangement"):
            self._storage.arrangement = Arrangement.of(request.arrangement)
        self._put(values)
        self.taking = self.taking.begin(line, request.since)

    def _put(self, values: Gradients) -> None:
        for number, (ids, rows) in values.of.items():
            self._storage.tables[number].put(0, ids, rows)

    def _take(self, request: pb.PushRequest, gradients: Gradients, rate: float) -> None:
        pushed = _pushed(request, gradients, rate)
        taking, update = self.taking.take(pushed, self._rules, request.skipped)
        self._apply(taking, update)

    def _apply(self, taking: Taking, update: Update | None) -> None:
        if update is not None:
            self._storage.finish_copy()
            for number, table in enumerate(self._storage.tables):
                gradients = [one.gradients.of[number] for one in update.pushed if number in one.gradients.of]
                if gradients:
                    at = update.version
                    table.apply(at, gradients, update.scale, update.learning_rate, at, for_good=True)
        self.taking = taking

    def _reopened(self, request: pb.ReopenRequest, line: str) -> Taking:
        return self.taking.reopen(ranges_of(request.steps), line, request.server, request.server_line)

    def _beginning(self, taking: Taking) -> Records:
        waiting = [[WAITS, decided(rate=one.learning_rate), one.gradients.raw] for one in taking.waiting]
        return [*self._storage.head(taking_told(taking)), *waiting]


def _read_push(raw: Bytes) -> tuple[pb.PushRequest, list[memoryview]]:
    return read(pb.PushRequest.FromString, raw, pb.PushRequest.GRADIENTS_FIELD_NUMBER)


def _pushed(request: pb.PushRequest, gradients: Gradients, rate: float) -> Pushed:
    return Pushed(request.step, rate, gradients, request.loss, request.records)
