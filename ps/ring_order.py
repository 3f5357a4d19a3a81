"""A ring's steps (mode=hybrid): one after the other, each of all ranks' gradients, the last one undone if the
ring goes on from the step before.

Promise: a call is refused, and has changed nothing, or is logged and has changed all. What counts is
decided in `staging`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edl.contract.proto import ps_pb2 as pb
from ps.log import Damaged
from ps.staging import Apply, Commit, Effect, Steps, TakeBack
from ps.storage import Capture, Gradients, Records, Storage

# What a record is, by its first byte.
SETTLE, COMMIT, STAGE = b"S", b"C", b"G"


class RingOrder:
    """
    Args:
        head: how the log begins; None: nothing has begun.
    """

    def __init__(self, storage: Storage, head: Mapping[str, Any] | None = None):
        self._storage = storage
        self.steps = Steps() if head is None else _steps(head)
        self.rows_staged = 0

    # --- the calls

    def settle(self, request: pb.SettleRequest) -> pb.Position:
        self._storage.check_run(request.run_id)
        steps, effects = self.steps.settle(request.generation, request.step, _commit(request))
        if steps is not self.steps:
            self._storage.log.append(SETTLE, request.SerializeToString())
            self._take(steps, effects)
        return self.position()

    def restore(self, request: pb.RestoreRequest) -> pb.Position:
        """
        Raises:
            Unavailable: the checkpoint cannot be read. The server is empty then.
        """
        self._storage.check_declared(request.run_id)
        steps, effects = self.steps.restore(request.generation, request.step, request.attempt)
        if not effects:
            return self.position()
        self._storage.check_checkpoint(request.step)
        try:
            self._storage.go_back(request.step, request.attempt)
            self._storage.gone_back(request.step, request.attempt, self._beginning(steps))
        except BaseException:
            self.lost()
            raise
        self.steps = steps
        return self.position()

    def stage(self, raw: bytes) -> pb.Position:
        request = pb.StageRequest.FromString(raw)
        self._storage.check_declared(request.run_id)
        staged = self._storage.gradients(raw, request.gradients)
        steps = self.steps.stage(request.generation, request.step, request.rank, staged)
        if steps is not self.steps:
            self._storage.check_memory([*self.steps.staged.values(), staged])
            self._storage.log.append(STAGE, raw)
            self.steps = steps
            self.rows_staged += sum(len(ids) for ids, _ in staged.of.values())
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
        return f"{self._storage.run_id}/{generation or self.steps.begun_in}/{step}/{attempt}"

    @property
    def pending(self) -> int:
        return sum(len(staged.raw) for staged in self.steps.staged.values())

    def position(self) -> pb.Position:
        steps = self.steps
        return pb.Position(generation=steps.generation, step=steps.step, empty=not steps.began)

    def reach(self, request: pb.PullRequest | pb.ListRequest | pb.WritePartRequest) -> None:
        steps, effects = self.steps.reach(request.generation, request.step, _commit(request))
        if steps is not self.steps:
            record = pb.PullRequest(generation=request.generation, step=request.step, last=request.last)
            self._storage.log.append(COMMIT, record.SerializeToString())
            self._take(steps, effects)

    def capture(self) -> Capture:
        staged = [[STAGE, self.steps.staged[rank].raw] for rank in sorted(self.steps.staged)]
        step = self.steps.step
        return self._storage.begin_capture(step, step, [*self._beginning(self.steps), *staged], {})

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
            self._take(*self.steps.settle(settle.generation, settle.step, _commit(settle)))
        elif kind == COMMIT:
            pull = pb.PullRequest.FromString(text)
            self._take(*self.steps.reach(pull.generation, pull.step, _commit(pull)))
        elif kind == STAGE:
            request = pb.StageRequest.FromString(text)
            staged = self._storage.gradients(text, request.gradients)
            self.steps = self.steps.stage(request.generation, request.step, request.rank, staged)
        else:
            raise Damaged(f"a record of unknown kind {kind!r}")

    def load_base(self) -> None:
        self._storage.load_base()

    # --- state

    def _take(self, steps: Steps, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._storage.wait_for_copy()
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
    request: pb.PullRequest | pb.ListRequest | pb.SettleRequest | pb.WritePartRequest,
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
