# SPDX-License-Identifier: Apache-2.0
"""A worker on a thread: the real loop, session and local ring, with the test as its master."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, Generic, cast

import numpy as np
from typing_extensions import TypeVar

from edl import config
from edl.config import values
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.parts.restore import Restore
from edl.trainer.records.batches import Batches
from edl.trainer.ring.base import RingBroken
from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.session.orders import End
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.start.assembly import assemble
from edl.trainer.state import State
from edl.trainer.worker import Worker
from tests.support.models.counting import AtOnce, CountingLearner, Positions

SIZE, EPOCHS, BATCH = 12, 2, 4
POSITIONS, STEPS = SIZE * EPOCHS, 6
SECONDS = 60.0  # for what must happen; servers of other processes start slowly on a busy machine
CONFIG = config.parse(values.defaults())  # the loop reads only its settings for nonfinite values


class Held(LocalRing):
    """A ring that waits after each sum until the test calls `go_on` or `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[control.Agreed] = []  # the control vector of each sum
        self.held_at = 0  # the number of the sum that the test has seen
        self._came, self._may, self._free = threading.Semaphore(0), threading.Semaphore(0), False

    def reduce(self, vector: Any) -> Any:
        total = super().reduce(vector)
        self.sums.append(control.read(total[-control.LENGTH :]))
        self._came.release()
        assert self._free or self._may.acquire(timeout=SECONDS)
        return total

    def go_on(self) -> None:
        if self.held_at:
            self._may.release()

    def comes(self) -> None:
        """Wait until this ring has one more sum."""
        self.held_at += 1
        assert self._came.acquire(timeout=SECONDS), f"sum {self.held_at} does not come"

    def free(self) -> None:
        self._free = True
        self._may.release()


R = TypeVar("R", bound=LocalRing, default=LocalRing, covariant=True)


class A(Generic[R]):
    """A worker, with the actions of its master as methods for the test."""

    def __init__(
        self,
        number: int,
        learner: CountingLearner | None = None,
        config: config.Config = CONFIG,
        ring: R | None = None,
        batch: int = BATCH,
        source: Positions | None = None,
        reading: Executor | None = None,
    ):
        self.said: list[pb.FromWorker] = []
        self.changed = threading.Condition()
        self.session = Session(number, self._send, threading.Event())
        self.ring = cast(R, ring or LocalRing())
        self.session.cuts(self.ring.cut)
        self.learner = learner or CountingLearner(POSITIONS)
        self.learner.joins(self.ring)
        self.source = source or Positions(SIZE)
        self.config = config
        wait = self.session.waiting.result
        self.batches = Batches(self.source, batch, reading=reading or AtOnce(), wait=wait)
        report = Telemetry(self.session, self.batches.steps, log=lambda line: None)
        export = lambda final_metrics: self.session.say(finished=pb.Finished(model="model.keras"))  # noqa: E731
        self.worker = self.assembled(config, self.batches, report, export)
        self.ended: End | Exception | None = None
        self.thread = threading.Thread(target=self._train, daemon=True)

    def assembled(
        self, config: config.Config, batches: Batches, report: Telemetry, export: Any, **more: Any
    ) -> Worker:
        """Return a worker with further parts.

        Args:
            more: see `assemble`; and `checkpoints`.
        """
        state = State(self.learner, batches.steps)
        checkpoints, servers = more.pop("checkpoints", None), more.get("servers")
        first = self.learner.parts() if servers is not None else ()
        restore = Restore(state, checkpoints, None, first)
        return assemble(config, self.session, self.ring, state, batches, report, restore, export, **more)

    def rebuild(self, **more: Any) -> None:
        """Give the worker further parts, before its first ring."""
        session = self.session
        export = lambda final_metrics: session.say(finished=pb.Finished(model="model.keras"))  # noqa: E731
        self.worker = self.assembled(self.config, self.batches, self.worker.report, export, **more)

    def _send(self, message: pb.FromWorker) -> None:
        with self.changed:
            self.said.append(message)
            self.changed.notify_all()

    def _train(self) -> None:
        try:
            self.ended = self.worker.train()
        except Exception as error:
            self.ended = error

    def says(self, what: str, generation: int) -> Any:
        """Wait until the worker has sent the message `what` in this generation, and return it."""

        def found() -> list[Any]:
            ours = [m for m in self.said if m.WhichOneof("body") == what and m.generation == generation]
            return [getattr(m, what) for m in ours]

        with self.changed:
            assert self.changed.wait_for(found, 10), f"worker {self.session.worker} never said {what}"
            return found()[0]

    def hears(self, generation: int = 0, **what: object) -> None:
        self.session.hear(pb.ToWorker(generation=generation, **what))  # type: ignore[arg-type]

    def form(
        self,
        group: InProcessGroup,
        generation: int,
        members: list[int],
        root: int = 0,
        *,
        sync: bool = True,
        epochs: int = EPOCHS,
        shares: tuple[int, ...] = (),
        block: int = 1,
        step: int = 0,
        joining: Sequence[int] = (),
        round: int = 0,
        callbacks_done: int = 0,
        untrusted_up_to: int = 0,
        untrusted_reason: str = "",
    ) -> None:
        self.ring.open(group)
        layout = pb.Layout(records=SIZE, block=block, shards=1)
        even = [1] * len(members)
        order = pb.Form(
            members=members,
            root=root,
            sync=sync,
            epochs=epochs,
            shares=shares or even,
            layout=layout,
            step=step,
            joining=joining,
            round=round,
            callbacks_done=callbacks_done,
            untrusted_up_to=untrusted_up_to,
            untrusted_reason=untrusted_reason,
        )
        self.hears(generation, form=order)
        if not self.thread.is_alive():
            self.thread.start()

    def stop(self) -> End | Exception | None:
        self.hears(stop=pb.Stop(why="done"))
        return self.joined()

    def joined(self) -> End | Exception | None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.ended


def ring_of(*workers: A, generation: int = 1, **order: Any) -> None:
    """Form a ring of these workers, with the first one as its root."""
    group, members = InProcessGroup(len(workers)), [w.session.worker for w in workers]
    for w in workers:
        w.form(group, generation, members, members[0], **order)


def come_to_sum(number: int, *workers: A[Held]) -> control.Agreed:
    """Let all of a ring continue to the sum of this number, counted from 1; return its control vector."""
    rings = [w.ring for w in workers]
    while rings[0].held_at < number:
        for ring in rings:
            ring.go_on()
        for ring in rings:
            ring.comes()
    said = [str(ring.sums[-1]) for ring in rings]  # as text: no records have a loss that is not a number
    assert len(set(said)) == 1
    return rings[0].sums[-1]


class Later(LocalRing):
    """A ring whose received state arrives only when the test sets `may_come`."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: Any = None
        self.may_come = threading.Event()

    def receive_state(self, source: int, prepare: Any, forward: bool = False) -> Any:
        self.coming = super().receive_state(source, prepare, forward)
        return self

    @property
    def done(self) -> bool:
        return self.may_come.is_set()

    def result(self) -> Any:
        assert self.may_come.wait(10)
        return self.coming.result()


class Both(Held, Later):
    """A ring with both held sums and delayed states."""

    def __init__(self) -> None:
        Held.__init__(self)
        self.coming, self.may_come = None, threading.Event()


def joining_at_step_2(leads: bool = False, config: config.Config = CONFIG) -> tuple[A[Held], A[Both]]:
    """Return a worker with two steps, and a worker that has joined its ring without them.

    Args:
        leads: whether the second one has rank 0.
    """
    old, new = A(0, ring=Held(), config=config), A(1, ring=Both(), config=config)
    ring_of(old)
    come_to_sum(1, old)
    old.hears(1, leave=pb.Leave())
    old.ring.free()
    assert old.says("left_ring", 1).step == 2
    old.ring = old.worker.ring = Held()
    old.session.cuts(old.ring.cut)
    old.learner.joins(old.ring)
    members: list[A] = [new, old] if leads else [old, new]
    ring_of(*members, generation=2, sync=False, step=2, joining=[1])
    return old, new


class Broken(LocalRing):
    """A ring that breaks at its broadcast or sum number `at`, counted from 0."""

    def __init__(self, at: int, verb: str):
        super().__init__()
        self.left, self.verb = at, verb

    def _fails(self, verb: str) -> None:
        self.left -= verb == self.verb
        if self.left < 0:
            raise RingBroken("a peer has died")

    def reduce(self, vector: Any) -> Any:
        self._fails("reduce")
        return super().reduce(vector)

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        self._fails("broadcast")
        return super().broadcast(data, root)
