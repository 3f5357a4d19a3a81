"""The worker's loop, alone and with others: the real loop, session and local ring, on threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from edl import config
from edl.config import values
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from tests.counting import AtOnce, CountingLearner, Positions
from trainer.data import Batches
from trainer.ring.base import RingBroken
from trainer.ring.local import Circle, LocalRing
from trainer.session.orders import End, FormRing
from trainer.session.state import Session
from trainer.telemetry import Telemetry
from trainer.worker import NonFinite, Worker

SIZE, EPOCHS = 12, 2
POSITIONS = SIZE * EPOCHS
CONFIG = config.parse(values.merge(values.defaults(), {"training": {"epochs": EPOCHS, "batchSize": 4}}))


class A:
    """A worker, and what a test does in its master's place."""

    def __init__(self, number: int, learner: CountingLearner | None = None, config: config.Config = CONFIG):
        self.said: list[pb.FromWorker] = []
        self.changed = threading.Condition()
        self.asked_to_beat = threading.Event()
        self.session = Session(number, self._send, self.asked_to_beat.set, threading.Event())
        self.ring = LocalRing()
        self.session.cuts(self.ring.cut)
        self.learner = learner or CountingLearner(POSITIONS)
        batches = Batches(Positions(SIZE), SIZE, AtOnce())
        report = Telemetry(self.session, SIZE, log=lambda line: None)
        export = lambda: self.session.say(finished=pb.Finished(model="model.keras"))  # noqa: E731
        self.worker = Worker(config, self.session, self.ring, self.learner, batches, report, export)
        self.ended: End | Exception | None = None
        self.thread = threading.Thread(target=self._train, daemon=True)

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
        """Wait until it has said that in that ring."""

        def found() -> list[Any]:
            ours = [m for m in self.said if m.WhichOneof("body") == what and m.generation == generation]
            return [getattr(m, what) for m in ours]

        with self.changed:
            assert self.changed.wait_for(found, 10), f"worker {self.session.worker} never said {what}"
            return found()[0]

    def hears(self, generation: int = 0, **what: object) -> None:
        self.session.hear(pb.ToWorker(generation=generation, **what))  # type: ignore[arg-type]

    def form(self, circle: Circle, generation: int, members: list[int], root: int = 0, **leases: Any) -> None:
        self.ring.open(circle)
        mine = [pb.Range(start=a, stop=b) for a, b in leases.get("leases", ())]
        self.hears(generation, form=pb.Form(members=members, root=root, sync=True, leases=mine))
        if not self.thread.is_alive():
            self.thread.start()

    def stop(self) -> End | Exception | None:
        self.hears(stop=pb.Stop(why="done"))
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.ended


def test_two_workers_train_what_they_lease_and_leave_together_with_one_state() -> None:
    pair, circle = [A(0), A(1)], Circle(2)
    halves = [[(0, 6), (12, 18)], [(6, 12), (18, 24)]]
    for w, leases in zip(pair, halves, strict=True):
        w.form(circle, 1, [0, 1], leases=leases)
    for w in pair:
        w.says("stepped", 1)
    assert pair[0].asked_to_beat.wait(10), "nobody has data any more, and the master is not told"
    assert [len(w.worker.applied) for w in pair] == [POSITIONS] * 2
    pair[0].hears(1, leave=pb.Leave())
    outs = [w.says("left_ring", 1) for w in pair]
    assert [(o.step, o.has_state, o.broken) for o in outs] == [(outs[0].step, True, "")] * 2
    assert outs[0].digest == outs[1].digest != ""
    for w in pair:
        assert (w.learner.weights == 1).all()
        assert w.stop() == End("done")


def test_a_worker_exports_when_it_is_ordered_to() -> None:
    w = A(0)
    w.hears(export=pb.Export())
    w.thread.start()
    assert w.says("finished", 0).model == "model.keras"
    assert w.stop() == End("done")


def test_a_newcomer_takes_the_state_and_the_root_keeps_it() -> None:
    old, new = A(0), A(1)
    old.form(Circle(1), 1, [0], leases=[(0, 8)])
    old.hears(1, grant=pb.Range(start=8, stop=10))
    old.says("stepped", 1)
    old.hears(1, leave=pb.Leave())
    step = old.says("left_ring", 1).step
    assert step > 0
    circle = Circle(2)
    new.form(circle, 2, [1, 0])
    old.form(circle, 2, [1, 0])
    assert new.says("joined_ring", 2).step == step
    old.hears(2, leave=pb.Leave())
    new.says("left_ring", 2)
    assert new.worker.applied == old.worker.applied
    assert np.array_equal(new.learner.weights, old.learner.weights)
    assert new.worker.holds_state
    old.stop()
    new.stop()


class Broken(LocalRing):
    """Breaks at its `at`-th broadcast or sum."""

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


@pytest.mark.parametrize("broadcasts", [0, 1, 2])
def test_a_state_that_has_not_come_whole_is_not_taken(broadcasts: int) -> None:
    old, new, circle = A(0), A(1), Circle(2)
    old.learner.weights[:3], old.worker.applied, old.worker.step = 1, RangeSet(((0, 3),)), 1
    new.worker.ring = new.ring = Broken(broadcasts, "broadcast")
    new.session.cuts(new.ring.cut)
    for w in (old, new):
        w.form(circle, 1, [0, 1])
    out = new.says("left_ring", 1)
    assert (out.step, out.has_state, list(out.applied)) == (0, False, [])
    assert out.broken == "a peer has died"
    assert "rank 1 has cut the ring" in old.says("left_ring", 1).broken
    assert not new.learner.weights.any()


def test_a_sum_that_has_not_come_back_has_not_happened_and_its_batch_is_trained_again() -> None:
    w = A(0)
    w.worker.ring = w.ring = Broken(1, "reduce")
    w.form(Circle(1), 1, [0], leases=[(0, 8)])
    out = w.says("left_ring", 1)
    assert (out.step, [(r.start, r.stop) for r in out.applied]) == (1, [(0, 4)])
    w.ring.left = 10**6
    w.form(Circle(1), 2, [0], leases=[(4, 8)])
    assert w.says("stepped", 2).redone_records == 4
    w.hears(2, leave=pb.Leave())
    assert [(r.start, r.stop) for r in w.says("left_ring", 2).applied] == [(0, 8)]
    assert w.learner.weights.tolist() == [1] * 8 + [0] * (POSITIONS - 8)
    w.stop()


def test_a_ring_that_was_cut_before_it_is_entered_is_left_at_once() -> None:
    w = A(0)
    w.hears(1, cut=pb.Cut())
    w.form(Circle(2), 1, [0, 1])
    assert w.says("left_ring", 1).broken == "the ring was cut before it was formed"
    w.session.end("given up")
    w.thread.join(10)
    assert w.ended == End("given up", lost=True)


class Infinite(CountingLearner):
    def gradients(self, *arguments: Any) -> np.ndarray:
        vector = super().gradients(*arguments)
        vector[POSITIONS + 3] = 1  # the control vector's field for it
        return vector


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_what_is_not_finite_changes_nothing_and_ends_the_worker_or_is_skipped(policy: str) -> None:
    training = CONFIG.training.model_copy(update={"non_finite": policy})
    w = A(0, Infinite(POSITIONS), CONFIG.model_copy(update={"training": training}))
    w.form(Circle(1), 1, [0], leases=[(0, 4)])
    if policy == "stop":
        w.thread.join(10)
        assert isinstance(w.ended, NonFinite)
        assert "at step 1, on worker 0, in the records at positions [0, 4)" in str(w.ended)
    else:
        w.says("stepped", 1)
        w.hears(1, leave=pb.Leave())
        out = w.says("left_ring", 1)
        assert (
            [(r.start, r.stop) for r in out.skipped] == [(0, 4)] == [(r.start, r.stop) for r in out.applied]
        )
        w.stop()
    assert not w.learner.weights.any()


def test_orders_come_in_turn_and_leases_are_drained() -> None:
    w = A(3)
    w.hears(4, grant=pb.Range(start=0, stop=2))
    w.hears(4, form=pb.Form(members=[3, 5], root=5, sync=True, leases=[pb.Range(start=2, stop=4)]))
    w.hears(stop=pb.Stop(why="enough"))
    assert w.session.next_order() == FormRing(4, (3, 5), 5, True, RangeSet(((2, 4),)))
    assert w.session.next_order() == End("enough")
    assert w.session.new_leases() == [(0, 2)]
    assert w.session.new_leases() == []
