# SPDX-License-Identifier: Apache-2.0
"""What a worker reports of its steps: `edl.trainer.session.telemetry`, with a real session."""

from __future__ import annotations

from threading import Event

import pytest

from edl.contract.heartbeats import ServerWait, Usage
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.trainer.agreement.control import Agreed
from edl.trainer.agreement.epochs import Epochs
from edl.trainer.session.state import EpochLoss, Progress, Session
from edl.trainer.session.telemetry import LOG_SECONDS, STALENESS_STEPS, Telemetry

STEPS = Steps(100, 8)  # 13 in an epoch
LOSS, METRICS = 2.5, {"accuracy": 0.5}  # of each epoch


class Teller:
    """A report, and a clock that the test moves."""

    def __init__(self, has_loss: bool = True) -> None:
        self.now = 100.0
        self.messages: list[pb.FromWorker] = []
        self.session = Session(0, self.messages.append, Event())
        self.near: list[float] = []  # times at which the end was reported to be near
        self.report = Telemetry(
            self.session,
            STEPS,
            lambda: self.now,
            near_end=lambda: self.near.append(self.now),
            has_loss=has_loss,
        )
        self.report.ring_formed()

    @property
    def ended(self) -> list[pb.EpochEnded]:
        return [m.epoch_ended for m in self.messages if m.WhichOneof("body") == "epoch_ended"]

    @property
    def said(self) -> list[pb.Stepped]:
        assert all(message.generation == 3 for message in self.messages)
        return [message.stepped for message in self.messages]

    def step(
        self,
        seconds: float = 1.0,
        trained: int = 4,
        step: int = 7,
        loss: float = 2.0,
        waits: float = 0.0,
        nonfinite: bool = False,
        rank: int = 0,
    ) -> None:
        """A step of two ranks.

        Args:
            seconds: of it.
            trained: records of it that each rank has.
            step: so many are in the model after it.
            waits: how long of `seconds` it waits for the other rank.
        """
        self.report.step_begins()
        self.now += seconds
        self.report.step_summed(waits)
        records = 2 * trained
        agreed = Agreed(records, loss if records else float("nan"), False, nonfinite, 2 * step, 0, 0, 2)
        self.report.step_done(3, rank, step, trained, agreed)
        if records and STEPS.ends_epoch(step):
            self.report.epoch_ends(STEPS.epoch(step), None if nonfinite else LOSS, METRICS)


def test_the_first_step_after_a_change_tells_what_it_cost() -> None:
    t = Teller()
    t.report.ring_up(redone=0)
    t.step()
    assert t.said == [pb.Stepped(step=7)], "a new worker has waited for no other"
    t.step()
    t.report.step_begins()
    t.now += 0.25
    t.report.step_breaks()
    t.now += 0.5
    t.report.ring_formed()
    t.report.ring_up(redone=4)
    t.step()
    assert t.said[1:] == [pb.Stepped(step=7, stall_seconds=1.75, redone_records=4, wasted_seconds=0.25)]
    t.step()
    assert len(t.said) == 2, "once"


def test_a_ring_that_breaks_before_a_step_has_wasted_none() -> None:
    t = Teller()
    t.report.ring_up(redone=0)
    t.step()
    t.report.step_begins()
    t.now += 0.25
    t.report.step_breaks()
    t.now += 5
    t.report.step_breaks()  # while the next ring was formed
    t.report.ring_up(redone=4)
    t.step()
    assert t.said[-1].wasted_seconds == 0.25


def test_beats_tell_of_the_records_of_this_ring() -> None:
    t = Teller()
    t.step(step=7)
    t.step(step=8)
    assert t.session.progress == Progress(3, 8, 8, 1.0, EpochLoss(0, 16, 2.0, 2.0))
    t.report.ring_left(8)
    assert t.session.progress == Progress(step=8)
    t.report.ring_formed()
    t.step(step=9)
    assert t.session.progress == Progress(3, 9, 4, 0.0, EpochLoss(0, 24, 2.0, 2.0))


def test_a_speed_is_that_of_computing_without_the_first_step_and_without_waiting() -> None:
    t = Teller()
    t.step(seconds=60.0)  # it is traced
    t.session.heartbeat(1.0, Usage())
    assert t.messages[-1].heartbeat.speed == 0.0, "nothing is measured yet"
    for _ in range(99):
        t.step(seconds=1.0, waits=0.5)
    t.session.heartbeat(1.0, Usage())
    assert t.messages[-1].heartbeat.speed == pytest.approx(8.0, rel=0.02)
    t.report.ring_formed()
    t.step(seconds=60.0)
    t.session.heartbeat(1.0, Usage())
    assert t.messages[-1].heartbeat.speed == 0.0, "each ring anew"


def test_the_loss_is_logged_at_once_and_then_now_and_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    t = Teller()
    for _ in range(int(LOG_SECONDS) + 1):
        t.step(seconds=1.0)
    line = "generation 3, rank 0, step 7: Loss 2.000 in this epoch, 2.000 in this step"
    assert caplog.messages == [line] * 2


def test_the_loss_is_the_mean_of_the_epoch_and_that_of_the_last_step() -> None:
    t = Teller()
    t.step(trained=2, step=12, loss=1.0)
    t.step(trained=4, step=13, loss=4.0)  # the last one of its epoch
    assert t.session.progress.loss == EpochLoss(0, 12, 3.0, 4.0)
    t.step(trained=0, step=13)  # nothing is left to train: nothing new
    assert t.session.progress.loss == EpochLoss(0, 12, 3.0, 4.0)
    t.step(trained=4, step=14, loss=0.5)
    assert t.session.progress.loss == EpochLoss(1, 8, 0.5, 0.5)
    t.step(trained=4, step=15, loss=float("inf"), nonfinite=True)
    assert t.session.progress.loss == EpochLoss(1, 8, 0.5, 0.5), "it was left out"
    t.session.heartbeat(1.0, Usage())
    beat = t.messages[-1].heartbeat
    assert (beat.loss, beat.epoch_loss) == (0.5, pb.EpochLoss(epoch=1, records=8, mean=0.5))


def test_the_end_of_an_epoch_is_told_once_by_rank_0_when_the_next_sum_has_made_it_safe() -> None:
    t = Teller()
    t.step(step=12, loss=1.0)
    t.step(step=13, loss=4.0)
    assert t.ended == [], "not every member may have it"
    t.step(step=14)
    t.step(step=15)
    assert t.ended == [
        pb.EpochEnded(epochs=1, loss=pb.EpochLoss(epoch=0, records=100, mean=LOSS), metrics=METRICS)
    ]
    other = Teller()
    for step in (12, 13, 14):
        other.step(step=step, rank=1)
    assert other.ended == []


def test_the_end_of_the_last_epoch_is_told_with_the_sum_that_has_no_records() -> None:
    t = Teller()
    t.step(step=13, loss=4.0)
    t.step(step=13, trained=0)
    assert t.ended == [
        pb.EpochEnded(epochs=1, loss=pb.EpochLoss(epoch=0, records=100, mean=LOSS), metrics=METRICS)
    ]


def test_the_end_of_an_epoch_in_a_ring_that_broke_is_told_in_the_next() -> None:
    t = Teller()
    t.step(step=13, loss=4.0)
    t.report.step_begins()
    t.report.step_breaks()
    t.report.ring_left(13)
    t.report.ring_formed()
    t.report.ring_up(redone=4)
    assert t.ended == []
    t.step(step=14)
    assert [e.epochs for e in t.ended] == [1]


def test_an_epoch_of_which_every_step_was_left_out_has_no_loss() -> None:
    t = Teller()
    t.step(step=13, loss=4.0)
    for step in range(14, 27):
        t.step(step=step, loss=float("nan"), nonfinite=True)
    t.step(step=27)
    assert t.ended[1:] == [pb.EpochEnded(epochs=2, metrics=METRICS)]


def test_a_loop_that_reports_no_loss_has_none_in_its_status() -> None:
    t = Teller(has_loss=False)
    t.step(step=7, loss=0.0)
    assert t.session.progress.loss is None
    t.report.boundary(3, 0, 8, Epochs(loss=0.0, records=8), 0)
    assert t.session.progress.loss is None


def test_goodput_is_the_share_of_time_in_steps_that_came_back() -> None:
    t = Teller()
    t.report.ring_up(redone=0)
    assert t.report.goodput == 1.0, "nothing is lost yet"
    t.step(seconds=3.0)
    t.report.step_begins()
    t.now += 0.5
    t.report.step_breaks()
    t.now += 0.5  # until the next ring
    assert t.report.goodput == pytest.approx(3 / 4)
    t.step(seconds=4.0)
    assert t.report.goodput == pytest.approx(7 / 8)


def test_ring_changes_and_their_stalls_add_up_from_the_first_step_on() -> None:
    t = Teller()
    t.report.ring_up(redone=0)
    t.step()
    assert (t.report.ring_changes, t.report.stall_seconds) == (0, 0.0), "the first ring is not a change"
    for waited in (1.0, 2.5):
        t.report.step_breaks()
        t.now += waited
        t.report.ring_up(redone=0)
        t.step(seconds=0.5)
        t.step(seconds=0.5)
    assert t.report.ring_changes == 2
    assert t.report.stall_seconds == pytest.approx(1.0 + 2.5 + 2 * 0.5), "each with the step that ends it"


def test_that_the_last_step_is_near_is_told_once_and_in_seconds() -> None:
    teller = Teller()
    teller.report.to_go(1)
    assert teller.near == [], "the length of a step is unknown yet"
    for step in range(3):
        teller.step(seconds=1.0, step=step)
    teller.report.to_go(6)
    assert teller.near == []
    teller.report.to_go(5)
    teller.report.to_go(4)
    assert teller.near == [teller.now]


def test_how_old_the_weights_of_the_last_steps_were_is_told_where_it_has_changed() -> None:
    t = Teller()

    def push(missed: int, repeated: int = 0) -> None:
        t.now += 1
        t.report.step_pushed(3, 0, 7, 7, 4, 0.5, 2.0, 4, missed, repeated)

    for missed in (0, 2, 9):
        push(missed)
    t.session.heartbeat(1.0, Usage(5))
    assert t.messages[-1].heartbeat.staleness == pb.Staleness(steps=3, median=2.0, most=9)
    t.session.heartbeat(1.0, Usage(5))
    assert not t.messages[-1].heartbeat.HasField("staleness"), "nothing is new"
    t.session.greeting()
    t.session.heartbeat(1.0, Usage(5))
    assert t.messages[-1].heartbeat.HasField("staleness"), "another master does not know it"
    for _ in range(STALENESS_STEPS):
        push(1)
    t.report.async_phase_done(repeated=4)
    beat = t.messages[-1].heartbeat
    assert beat.staleness == pb.Staleness(steps=STALENESS_STEPS, median=1.0, most=1, repeated=4), "at once"
    assert (beat.rate, beat.memory) == (1.0, 5)


def test_a_heartbeat_says_for_which_server_it_waits() -> None:
    t = Teller()
    t.session.waits = lambda: ServerWait(1, "Push", 2.5, "its disk is full")
    t.session.heartbeat(1.0, Usage())
    assert t.messages[-1].heartbeat.waits == pb.ServerWait(
        server=1, call="Push", seconds=2.5, why="its disk is full"
    )
