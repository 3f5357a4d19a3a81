# SPDX-License-Identifier: Apache-2.0
"""A worker that joins a ring: it has the whole state of the others, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edl import config
from edl.config import values
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.trainer.agreement import control
from edl.trainer.agreement.ledger import Ledger, LedgerBroken
from edl.trainer.model import digests
from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.session.orders import FormRing
from tests.support.jobs.workers import (
    BATCH,
    EPOCHS,
    POSITIONS,
    SIZE,
    STEPS,
    A,
    Broken,
    Held,
    Later,
    come_to_sum,
    joining_at_step_2,
    ring_of,
)
from tests.support.models.counting import CountingLearner


def test_a_newcomer_takes_the_state_and_the_root_keeps_it() -> None:
    old, new = A(0, ring=Held()), A(1)
    ring_of(old)
    come_to_sum(2, old)
    old.hears(1, leave=pb.Leave())
    old.ring.free()
    assert old.says("left_ring", 1).step == 3
    group = InProcessGroup(2)
    new.form(group, 2, [1, 0])
    old.form(group, 2, [1, 0])
    assert new.says("joined_ring", 2).step == 3
    outs = [w.says("left_ring", 2) for w in (old, new)]
    assert [o.step for o in outs] == [STEPS] * 2
    assert outs[0].digest == outs[1].digest != ""
    assert new.worker.state.has_state
    assert (new.learner.weights == 1).all()
    old.stop()
    new.stop()


def test_who_joins_takes_part_with_weight_zero_until_the_state_has_come_and_what_it_kept_is_applied() -> None:
    old, new = joining_at_step_2()
    assert [come_to_sum(n, old, new).synced_ranks for n in (1, 2, 3)] == [1, 1, 1]
    assert not new.learner.weights.any() and new.worker.state.step == 4
    assert old.says("joined_ring", 2).step == 2
    new.ring.may_come.set()
    assert [come_to_sum(n, old, new).synced_ranks for n in (4, 5)] == [1, 2], (
        "two steps are applied in one's time"
    )
    assert new.says("joined_ring", 2).step == new.worker.state.ledger.step == STEPS
    old.ring.free()
    new.ring.free()
    outs = [w.says("left_ring", 2) for w in (old, new)]
    assert [(o.step, o.has_state) for o in outs] == [(STEPS, True)] * 2
    assert outs[0].digest == outs[1].digest != ""
    assert (new.learner.weights == 1).all() and new.learner.updates == STEPS
    for w in (old, new):
        w.stop()


def test_an_epoch_that_has_ended_while_rank_0_catches_up_is_reported_with_the_state_at_its_end() -> None:
    deterministic = config.parse(values.load([], ["training.deterministic=true"]))
    old, new = joining_at_step_2(leads=True, config=deterministic)
    come_to_sum(2, old, new)  # the epoch's last step is complete, and rank 0 has no state
    new.ring.may_come.set()
    come_to_sum(4, old, new)
    ended = new.says("epoch_ended", 2)
    at_end = CountingLearner(POSITIONS)
    for _ in range(SIZE // BATCH):
        at_end.apply(
            control.StepResult(control.read(np.zeros(control.LENGTH)), False, 0.0, 0, np.zeros(POSITIONS))
        )
    at_end.weights[:SIZE] = 1
    assert (ended.epochs, ended.sha256) == (1, digests.sha256(at_end.parts()))
    for w in (old, new):
        w.ring.free()
    for w in (old, new):
        w.stop()


class Noted(LocalRing):
    """The sender of a state, and by rank which member receives it from which and forwards it."""

    def __init__(self, given: list[tuple[int, int, bool]], rank: int):
        super().__init__()
        self.given, self.rank = given, rank

    def send_state(self, parts: Any) -> None:
        self.given.append((self.rank, self.rank, True))

    def receive_state(self, source: int, prepare: Any, forward: bool = False) -> Any:
        self.given.append((self.rank, source, forward))
        return self


def test_each_gives_the_state_to_one_however_many_join() -> None:
    given: list[tuple[int, int, bool]] = []
    members, joining = (3, 4, 0, 1, 2, 5), (0, 1, 2, 5)
    form = FormRing(2, members, 3, False, EPOCHS, (1,) * 6, Layout(SIZE), step=2, joining=joining)
    for rank, number in enumerate(members):
        A(number).worker.state.pass_on(Noted(given, rank), form, rank)
    #                 these have it            two from those          and two from these
    assert given == [(0, 0, True), (1, 1, True), (2, 0, True), (3, 1, True), (4, 2, False), (5, 3, False)]


def test_a_ring_that_breaks_while_the_state_travels_leaves_nothing_of_it() -> None:
    old, new = joining_at_step_2()
    come_to_sum(2, old, new)
    old.hears(2, cut=pb.Cut())
    for w in (old, new):
        w.ring.free()
    out = new.says("left_ring", 2)
    assert (out.step, out.has_state) == (0, False)
    assert not new.learner.weights.any() and not new.worker.state.pending_updates
    assert old.says("left_ring", 2).step >= 3
    for w in (old, new):
        w.stop()


def test_a_state_that_has_come_is_one_even_if_the_ring_is_left_before_the_rest_is_applied() -> None:
    old, new = joining_at_step_2()
    come_to_sum(4, old, new)
    new.ring.may_come.set()  # it loads the state of step 2, and applies two of the four steps since
    for w in (old, new):
        w.ring.free()
    out = new.says("left_ring", 2)
    assert (out.has_state, out.step, old.says("left_ring", 2).step) == (True, 4, STEPS)
    applied = new.worker.state.steps.begins_at(4)
    assert new.learner.weights.tolist() == [1] * applied + [0] * (POSITIONS - applied)
    for w in (old, new):
        w.stop()


def test_who_cannot_apply_sums_later_has_the_others_wait_for_its_state() -> None:
    ring = Later()
    ring.may_come.set()
    old, new = A(0), A(1, ring=ring)
    new.learner.can_catch_up = False
    old.learner.weights[:8], old.worker.state.ledger, old.worker.state.step = 1, Ledger(2), 2
    ring_of(old, new, sync=False, step=2, joining=[1])
    assert new.says("joined_ring", 1).step == 2
    assert [w.says("left_ring", 1).step for w in (old, new)] == [STEPS] * 2
    assert (new.learner.weights == 1).all()
    for w in (old, new):
        w.stop()


@pytest.mark.parametrize("broadcasts", [0, 1, 2])
def test_a_state_that_has_not_come_whole_is_not_taken(broadcasts: int) -> None:
    old, new = A(0), A(1, ring=Broken(broadcasts, "broadcast"))
    old.learner.weights[:4], old.worker.state.ledger = 1, Ledger(2, RangeSet(((1, 2),)))
    ring_of(old, new)
    out = new.says("left_ring", 1)
    assert (out.step, out.has_state, list(out.skipped)) == (0, False, [])
    assert out.broken == "a peer has died"
    assert "rank 1 has cut the ring" in old.says("left_ring", 1).broken
    assert not new.learner.weights.any()


class Older(LocalRing):
    """Takes over states as another version sends them."""

    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray:
        data = super().broadcast(data, root)
        if b"skipped" not in data.tobytes():
            return data
        older = data.copy()
        older[:8] = np.array([1], np.int64).view(np.uint8)
        return older


def test_a_state_of_another_version_is_refused_in_words() -> None:
    old, new = A(0), A(1, ring=Older())
    ring_of(old, new)
    new.thread.join(10)
    assert isinstance(new.ended, LedgerBroken)
    assert "the state to take over has version 1, expected 6" in str(new.ended)
    assert not new.worker.state.has_state


def test_who_can_keep_no_more_has_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.trainer.state.PENDING_BYTES", 0)
    old, new = joining_at_step_2()
    for w in (old, new):
        w.ring.free()
    old.thread.join(0.5)
    assert not [m for m in old.said if m.HasField("left_ring") and m.generation == 2]
    assert old.thread.is_alive()
    new.ring.may_come.set()
    assert [w.says("left_ring", 2).step for w in (old, new)] == [STEPS] * 2
    assert (new.learner.weights == 1).all()
    for w in (old, new):
        w.stop()
