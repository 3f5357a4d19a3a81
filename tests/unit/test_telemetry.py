"""What a worker reports of its steps: `trainer.telemetry`, with a real session."""

from __future__ import annotations

from threading import Event

import pytest

from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from trainer.control import Agreed
from trainer.session.state import EpochLoss, Progress, Session
from trainer.telemetry import LOG_SECONDS, Telemetry

SAFE = RangeSet(((0, 10),))


class Teller:
    """A report, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.beats = 100.0, 0
        self.messages: list[pb.FromWorker] = []
        self.session = Session(0, self.messages.append, self.beat, Event())
        self.report = Telemetry(self.session, 100, lambda: self.now)
        self.report.ring_formed()

    def beat(self) -> None:
        self.beats += 1

    @property
    def said(self) -> list[pb.Stepped]:
        assert all(message.generation == 3 for message in self.messages)
        return [message.stepped for message in self.messages]

    def step(
        self,
        seconds: float = 1.0,
        trained: int = 4,
        rank: int = 0,
        safe: RangeSet = SAFE,
        start: int = 0,
        loss: float = 2.0,
    ) -> None:
        self.report.step_begins()
        self.now += seconds
        records = 2 * trained
        batches = ((start, start + records),) if records else ()
        agreed = Agreed(records, loss if records else float("nan"), False, False, records == 0, batches)
        self.report.step_done(3, rank, 7, trained, agreed, safe)


def test_the_first_step_after_a_change_tells_what_it_cost() -> None:
    t = Teller()
    t.report.ring_up(redone=0)
    t.step()
    assert t.said == [pb.Stepped(step=7)], "a newcomer has waited for nobody"
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


def test_beats_tell_of_the_records_of_this_ring_and_rank_0_of_what_is_safe() -> None:
    t = Teller()
    t.step()
    t.step()
    assert t.session.progress == Progress(3, 7, 8, EpochLoss(0, 16, 2.0, 2.0), SAFE)
    t.report.ring_left(7)
    assert t.session.progress == Progress(step=7)
    t.report.ring_formed()
    t.step(rank=1)
    assert t.session.progress == Progress(3, 7, 4, EpochLoss(0, 24, 2.0, 2.0), None)


def test_when_nobody_has_data_rank_0_tells_at_once_and_only_what_is_new() -> None:
    t = Teller()
    t.step(rank=1, trained=0)
    assert t.beats == 0
    for _ in range(3):
        t.step(trained=0)
    assert t.beats == 1
    t.step(trained=0, safe=RangeSet(((0, 20),)))
    assert t.beats == 2


def test_the_loss_is_logged_at_once_and_then_now_and_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    t = Teller()
    for _ in range(int(LOG_SECONDS) + 1):
        t.step(seconds=1.0)
    line = "generation 3, rank 0, step 7: Loss 2.0000 in this epoch, 2.0000 in this step"
    assert caplog.messages == [line] * 2


def test_the_loss_is_the_mean_of_the_epoch_and_that_of_the_last_step() -> None:
    t = Teller()
    t.step(trained=2, start=0, loss=1.0)
    t.step(trained=4, start=4, loss=4.0)
    assert t.session.progress.loss == EpochLoss(0, 12, 3.0, 4.0)
    t.step(trained=0)  # nobody has records: nothing new
    assert t.session.progress.loss == EpochLoss(0, 12, 3.0, 4.0)
    t.step(trained=4, start=100, loss=0.5)
    assert t.session.progress.loss == EpochLoss(1, 8, 0.5, 0.5)
    t.session.heartbeat(rate=1.0, memory=0)
    beat = t.messages[-1].heartbeat
    assert (beat.loss, beat.epoch_loss) == (0.5, pb.EpochLoss(epoch=1, records=8, mean=0.5))
