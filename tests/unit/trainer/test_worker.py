# SPDX-License-Identifier: Apache-2.0
"""The worker's loop, alone and with others: each step once, and what ends or breaks a ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl.contract.layout import Layout, StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.agreement import control
from edl.trainer.agreement.ledger import Ledger, LedgerBroken
from edl.trainer.records.batches import Batch
from edl.trainer.ring.local import InProcessGroup
from edl.trainer.session.orders import End
from tests.support.jobs.workers import BATCH, POSITIONS, SIZE, STEPS, A, Broken, Held, come_to_sum, ring_of
from tests.support.models.counting import CountingLearner, Positions


def test_two_workers_train_all_steps_and_leave_together_with_one_state() -> None:
    pair = [A(0), A(1)]
    ring_of(*pair)
    outs = [w.says("left_ring", 1) for w in pair]
    assert [(o.step, o.has_state, o.broken) for o in outs] == [(STEPS, True, "")] * 2
    assert outs[0].digest == outs[1].digest != ""
    for w in pair:
        assert (w.learner.weights == 1).all()
        assert w.learner.updates == STEPS
        assert w.stop() == End("done")


def test_after_the_last_step_one_more_sum_without_records_makes_it_safe() -> None:
    w = A(0, ring=Held())
    ring_of(w)
    for number in range(1, STEPS + 1):
        assert come_to_sum(number, w).records == BATCH
    assert come_to_sum(STEPS + 1, w).records == 0
    assert (w.worker.state.step, w.learner.updates) == (STEPS, STEPS), (
        "it has the last step while it sums once more"
    )
    w.ring.free()
    assert w.says("left_ring", 1).digest
    assert len(w.ring.sums) == STEPS + 1
    w.stop()


class Parts(CountingLearner):
    """Keeps which records it was given, step by step."""

    def __init__(self) -> None:
        super().__init__(POSITIONS)
        self.given: dict[int, list[int]] = {}

    def allreduce_step(
        self, batch: Batch | None, contribution: np.ndarray, step: int, *others: Any
    ) -> control.StepResult:
        if batch is not None:
            self.given[step] = batch.x.tolist()
        return super().allreduce_step(batch, contribution, step, *others)


@pytest.mark.parametrize("shares", [(1,), (1, 1), (3, 1), (1, 20), (1, 0), (1, 1, 1), (5, 20, 10)])
def test_the_parts_of_all_ranks_are_the_whole_step(shares: tuple[int, ...]) -> None:
    learners = [Parts() for _ in shares]
    workers = [A(i, learner, batch=5) for i, learner in enumerate(learners)]
    ring_of(*workers, shares=shares)
    assert [w.says("left_ring", 1).step for w in workers] == [STEPS] * len(shares)
    for step, (start, stop) in enumerate([(0, 5), (5, 10), (10, 12), (12, 17), (17, 22), (22, 24)]):
        parts = [learner.given.get(step, []) for learner in learners]
        assert [record for part in parts for record in part] == list(range(start, stop)), (
            "each record once, by one rank"
        )
        cuts = [StepSlice(rank, shares).of(stop - start) for rank in range(len(shares))]
        assert [len(part) for part in parts] == [b - a for a, b in cuts]
    for w in workers:
        assert (w.learner.weights == 1).all()
        w.stop()


def test_a_worker_reads_as_the_order_says_that_the_records_lie() -> None:
    w = A(0)
    ring_of(w, block=3)
    w.says("left_ring", 1)
    assert w.source.layout == Layout(SIZE, 3, 1)
    w.stop()


class Read(Positions):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.asked: list[tuple[int, int, StepSlice]] = []

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch | None:
        self.asked.append((start, stop, part))
        return super().batch(start, stop, part)


class Watched(Held):
    """Knows what had been read when it was last formed."""

    def __init__(self, source: Read) -> None:
        super().__init__()
        self._source = source
        self.read: list[tuple[int, int, StepSlice]] = []

    def form(self, rank: int, size: int) -> None:
        self.read = list(self._source.asked)
        super().form(rank, size)


def test_the_records_of_the_next_step_are_read_while_the_next_ring_is_formed() -> None:
    source = Read()
    ring = Watched(source)
    pair = [A(0, ring=ring, source=source), A(1, ring=Held())]
    ring_of(*pair)
    assert not ring.read, "a member without state does not know which step is next"
    come_to_sum(2, *pair)
    pair[1].ring.cut()
    for w in pair:
        w.ring.free()
    step = pair[0].says("left_ring", 1).step
    ring_of(pair[0], generation=2, sync=False, step=step)
    assert pair[0].says("left_ring", 2).step == STEPS
    assert ring.read[-1] == (step * BATCH, (step + 1) * BATCH, StepSlice(0, (1,)))
    assert source.asked.count(ring.read[-1]) == 1, "and not once more"
    assert (pair[0].learner.weights == 1).all()
    for w in pair:
        w.stop()


# --- what contradicts what is known


def test_ranks_at_different_steps_change_nothing_any_more() -> None:
    pair = [A(0), A(1)]
    pair[1].worker.state.step, pair[1].worker.state.ledger = 1, Ledger(1)
    ring_of(*pair, sync=False)
    for w, step in zip(pair, (0, 1), strict=True):
        assert isinstance(w.joined(), LedgerBroken)
        assert str(w.ended) == f"the ranks are at different steps (this one at step {step + 1})"
        assert w.worker.state.step == step
        assert not w.learner.weights.any()


class Lies(CountingLearner):
    def gradients(self, *arguments: Any) -> np.ndarray:
        vector = super().gradients(*arguments)
        vector[POSITIONS + control.RECORDS] -= 1
        return vector


def test_a_step_that_lacks_a_record_is_not_taken_by_anybody() -> None:
    pair = [A(0), A(1, Lies(POSITIONS))]
    ring_of(*pair)
    for w in pair:
        assert isinstance(w.joined(), LedgerBroken)
        assert str(w.ended) == "step 1 has 3 records of 2 ranks, expected 4"
        assert w.worker.state.step == 0
        assert not w.learner.weights.any()


# --- orders, state and what breaks


def test_a_worker_exports_when_it_is_ordered_to() -> None:
    w = A(0)
    w.hears(export=pb.Export())
    w.thread.start()
    assert w.says("finished", 0).model == "model.keras"
    assert w.stop() == End("done")


def test_a_sum_that_has_not_come_back_has_not_happened_and_its_step_is_trained_again() -> None:
    w = A(0, ring=Broken(1, "reduce"))
    ring_of(w)
    out = w.says("left_ring", 1)
    assert (out.step, out.broken, w.learner.updates) == (1, "a peer has died", 1)
    w.ring.left = 10**6
    ring_of(w, generation=2)
    assert w.says("stepped", 2).redone_records == 4
    assert w.says("left_ring", 2).step == STEPS
    assert (w.learner.weights == 1).all()
    w.stop()


def test_a_ring_that_was_cut_before_it_is_entered_is_left_at_once() -> None:
    w = A(0)
    w.hears(1, cut=pb.Cut())
    w.form(InProcessGroup(2), 1, [0, 1])
    assert w.says("left_ring", 1).broken == "the ring was cut before it was formed"
    w.session.end("given up")
    w.thread.join(10)
    assert w.ended == End("given up", lost=True)


class Alone(Held):
    """As Horovod's ring of one: it makes no sum that could break."""

    def cut(self) -> None:
        pass


@pytest.mark.parametrize("why", ["ended", "stopped", "cut"])
def test_a_ring_of_one_ends_as_well_when_it_is_cut(why: str) -> None:
    ring = Alone()
    only = A(0, ring=ring)
    ring_of(only)
    ring.comes()
    if why == "ended":  # the master is gone
        only.session.end("gone")
    elif why == "stopped":
        only.hears(stop=pb.Stop(why="the end"))
    else:
        only.hears(1, cut=pb.Cut())
    ring.free()
    assert only.says("left_ring", 1).broken == "the ring was cut"
    if why == "cut":
        only.session.end("gone")
    only.thread.join(10)
    assert isinstance(only.ended, End) and only.ended.lost == (why != "stopped")
    assert len(ring.sums) == 1, "no step more"
