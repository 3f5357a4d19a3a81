# SPDX-License-Identifier: Apache-2.0
"""How many epochs a ring trains may change while it trains: all take the change up at the same step."""

from __future__ import annotations

from typing import Any

from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.trainer.session.orders import End, FormRing
from tests.support.jobs.workers import BATCH, SIZE, A, Held, come_to_sum, ring_of
from tests.support.models.counting import CountingLearner


def held_pair(**order: Any) -> list[A[Held]]:
    pair = [A(number, CountingLearner(3 * SIZE), ring=Held()) for number in (0, 1)]
    ring_of(*pair, **order)
    return pair


def end_of(pair: list[A[Held]]) -> tuple[int, int]:
    """The step at which they have left the ring, and after how many sums."""
    for w in pair:
        w.ring.free()
    (step,) = {w.says("left_ring", 1).step for w in pair}
    (sums,) = {len(w.ring.sums) for w in pair}
    assert len({w.says("left_ring", 1).digest for w in pair}) == 1
    for w in pair:
        assert w.learner.weights.tolist() == [1] * step * BATCH + [0] * (3 * SIZE - step * BATCH)
        w.stop()
    return step, sums


def test_a_change_of_the_task_is_taken_up_at_the_step_at_which_rank_0_knows_of_it() -> None:
    pair = held_pair()
    come_to_sum(1, *pair)
    pair[1].hears(1, train=pb.Train(epochs=3))
    for number in (2, 3):
        assert come_to_sum(number, *pair).epochs == 0
    pair[0].hears(1, train=pb.Train(epochs=3))
    assert come_to_sum(4, *pair).epochs == 3
    assert [w.worker.state.epochs for w in pair] == [2, 2], "nothing has changed before its sum came back"
    assert come_to_sum(5, *pair).epochs == 0
    assert [w.worker.state.epochs for w in pair] == [3, 3]
    assert end_of(pair) == (9, 10)


def test_members_that_hear_a_change_another_number_of_times_train_alike() -> None:
    # A master that takes over repeats its order to each member that comes back, and the next one differs.
    pair = held_pair(epochs=3)
    come_to_sum(1, *pair)
    for w, orders in zip(pair, ((2, 2, 1), (2, 1)), strict=True):
        for epochs in orders:
            w.hears(1, train=pb.Train(epochs=epochs))
    come_to_sum(4, *pair)
    assert [w.worker.state.task for w in pair] == [1, 1]
    assert end_of(pair) == (3, 4)


def test_fewer_epochs_let_the_epoch_that_has_begun_be_trained_to_its_end() -> None:
    pair = held_pair(epochs=3)
    come_to_sum(4, *pair)
    for w in pair:
        w.hears(1, train=pb.Train(epochs=1))
    assert end_of(pair) == (6, 7)


def test_fewer_epochs_told_with_the_last_step_of_one_end_the_training_there() -> None:
    pair = held_pair(epochs=3)
    come_to_sum(2, *pair)
    for w in pair:
        w.hears(1, train=pb.Train(epochs=1))  # it rides with the third sum
    assert end_of(pair) == (3, 4)


def test_more_epochs_that_all_know_of_in_the_closing_sum_keep_the_ring_together() -> None:
    pair = held_pair(epochs=1)
    come_to_sum(3, *pair)
    for w in pair:
        w.hears(1, train=pb.Train(epochs=2))
    closing = come_to_sum(4, *pair)
    assert (closing.records, closing.epochs) == (0, 2)
    assert come_to_sum(5, *pair).records == BATCH
    assert end_of(pair) == (6, 8)


def test_more_epochs_that_come_too_late_for_rank_0_are_the_next_rings() -> None:
    pair = held_pair(epochs=1)
    come_to_sum(3, *pair)
    pair[1].hears(1, train=pb.Train(epochs=2))
    assert come_to_sum(4, *pair).epochs == 0
    for w in pair:
        w.ring.free()
        assert w.says("left_ring", 1).step == 3
    ring_of(*pair, generation=2, epochs=2, sync=False)
    for w in pair:
        assert w.says("left_ring", 2).step == 6
        assert w.session.epochs == 2, "the order contains the task of the ring before"
        w.stop()


def test_a_change_does_not_hinder_leaving() -> None:
    pair = held_pair()
    come_to_sum(1, *pair)
    pair[0].hears(1, leave=pb.Leave())
    for w in pair:
        w.hears(1, train=pb.Train(epochs=3))
        w.ring.free()
    outs = [w.says("left_ring", 1) for w in pair]
    assert [(o.step, o.digest, o.broken) for o in outs] == [(2, "", "")] * 2
    for w in pair:
        w.stop()


def test_orders_come_in_turn_and_a_task_is_that_of_its_ring() -> None:
    session = A(3).session
    layout = pb.Layout(records=12, block=3, shards=2)
    form = pb.Form(members=[3, 5], root=5, sync=True, epochs=2, shares=[1, 2], layout=layout)
    session.hear(pb.ToWorker(generation=4, form=form))
    session.hear(pb.ToWorker(generation=3, train=pb.Train(epochs=9)))
    assert session.epochs == 2, "the other one is for a ring that is no more"
    for epochs in (6, 7):
        session.hear(pb.ToWorker(generation=4, train=pb.Train(epochs=epochs)))
    assert session.next_order() == FormRing(4, (3, 5), 5, True, 2, (1, 2), Layout(12, 3, 2))
    session.hear(pb.ToWorker(export=pb.Export()))
    session.hear(pb.ToWorker(stop=pb.Stop(why="enough")))
    assert session.next_order() == End("enough"), "nothing else is wanted any more"
    assert session.epochs == 7, "the newest order counts"
    session.hear(pb.ToWorker(generation=4, train=pb.Train(epochs=8)))
    session.hear(pb.ToWorker(generation=5, form=form))
    assert session.epochs == 2, "the order to form a ring says all"
