# SPDX-License-Identifier: Apache-2.0
"""Waits of a member that its ring can end: it does not hold the others, for any kind of record."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edl.contract.heartbeats import ServerWait
from edl.contract.layout import StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.evaluation.prediction import RingPrediction
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.base import RingBroken
from edl.trainer.session.client import MasterStream
from edl.trainer.session.state import Session
from tests.support.jobs.workers import EPOCHS, A, Held, ring_of
from tests.support.models.counting import CountingMetrics, Positions
from tests.unit.trainer.test_async_loop import A as Leased
from tests.unit.trainer.test_evaluation import plan
from tests.unit.trainer.test_prediction import BOOK, CONFIG, RECORDS, double, files_in

SOON = 5.0  # seconds: many times what it takes, on a busy machine too, and far less than a slow read
TIMEOUT = 60.0


class Slow(Positions):
    """Records whose reads do not return until the test lets them.

    Args:
        at_once: the number of reads that return at once.
    """

    def __init__(self, records: int, at_once: int = 0):
        super().__init__(records)
        self._at_once, self.reads = at_once, 0
        self.began, self.returns = threading.Event(), threading.Event()

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch | None:
        self.reads += 1
        self._at_once -= 1
        if self._at_once < 0:
            self.began.set()
            assert self.returns.wait(TIMEOUT)
        return super().batch(start, stop, part)


def training(path: Path) -> tuple[A, Slow]:
    source = Slow(12)
    return A(0, source=source, reading=ThreadPoolExecutor(1)), source


def evaluating(path: Path) -> tuple[A, Slow]:
    w, source = A(0), Slow(10)
    held_out = {"test": Batches(source, 4, wait=w.session.waiting.result)}
    w.rebuild(evaluation=RingEvaluation(plan(), held_out, CountingMetrics(10)))
    return w, source


def predicting(path: Path) -> tuple[A, Slow]:
    w, source, steps = A(0, config=CONFIG), Slow(RECORDS), Steps(0, 1)
    of, files = CONFIG.evaluation_plan(steps, {"predict": RECORDS}), files_in(path)
    files.begin(BOOK)
    w.rebuild(evaluation=RingPrediction(of, source, double, files, wait=w.session.waiting.result))
    w.worker.state.steps = steps
    return w, source


KINDS = pytest.mark.parametrize("make", [training, evaluating, predicting])


@KINDS
def test_a_cut_ends_a_wait_for_records_and_the_worker_says_when_it_can_make_steps_again(
    make: Callable[[Path], tuple[A, Slow]], tmp_path: Path
) -> None:
    w, source = make(tmp_path)
    epochs = 0 if make is predicting else EPOCHS
    ring_of(w, epochs=epochs)
    assert source.began.wait(TIMEOUT)
    began = time.monotonic()
    w.hears(1, cut=pb.Cut())
    out = w.says("left_ring", 1)
    assert time.monotonic() - began < SOON
    assert out.reads and "waited for records of" in out.broken
    assert not any(message.HasField("records_read") for message in w.said)
    source.returns.set()
    w.says("records_read", 0)
    ring_of(w, generation=2, epochs=epochs, step=out.step, round=out.round)
    left = w.says("left_ring", 2)
    assert (left.broken, left.reads) == ("", False)
    assert (w.learner.weights[: 12 * epochs] == 1).all(), "each record once"
    w.stop()


def test_the_others_are_told_that_the_root_reads_its_first_state() -> None:
    """No worker holds the state before, so all wait for the store of a checkpoint or a warm start."""
    w, began, returns = A(0), threading.Event(), threading.Event()

    def restore(expected: int) -> bool:
        began.set()
        return not returns.wait(TIMEOUT)

    w.worker.restore = restore
    ring_of(w)
    assert began.wait(TIMEOUT)
    reads = w.session.waiting.longest()
    assert reads is not None and reads.awaits
    assert reads.what == "waits for its first state (checkpoint.dir, initFrom.path)"
    returns.set()
    assert w.says("left_ring", 1).broken == ""
    assert w.session.waiting.longest() is None
    w.stop()


def test_a_cut_ends_the_wait_of_a_leased_step() -> None:
    a, source = Leased(), Slow(12)
    batches = a.async_loop._batches = Batches(source, 4, wait=a.session.waiting.result)
    batches.take(source.layout, StepSlice.even(0, 1))
    a.session.waiting.enter(1)
    threading.Timer(0.05, a.session.hear, [pb.ToWorker(generation=1, cut=pb.Cut())]).start()
    with pytest.raises(RingBroken, match=r"waited for records of step"):
        a.run()
    assert a.session.waiting.leave()
    source.returns.set()


def test_a_worker_that_leaves_while_it_reads_ahead_says_so() -> None:
    """Its next step would wait for the thread that reads."""
    source = Slow(12, at_once=1)
    w = A(0, ring=Held(), source=source, reading=ThreadPoolExecutor(1))
    w.hears(1, leave=pb.Leave())
    ring_of(w)
    assert source.began.wait(TIMEOUT)
    w.ring.free()
    out = w.says("left_ring", 1)
    assert (out.step, out.broken, out.reads) == (1, "", True)
    source.returns.set()
    w.says("records_read", 0)
    w.stop()


def test_reads_whose_turn_has_not_come_are_not_waited_for() -> None:
    """Or a worker with much to be read ahead would seem to be slow."""
    source = Slow(120)
    batches = Batches(source, 4)
    steps = range(30)
    batches._few = {step: batches._begun(step) for step in steps}
    assert source.began.wait(TIMEOUT)
    idle = batches.idle()
    source.returns.set()
    idle.result(TIMEOUT)
    assert source.reads == 1


@pytest.mark.parametrize("left", [False, True], ids=["in the ring", "after it was left"])
def test_what_is_read_beside_the_ring_is_given_up_when_the_worker_leaves_it(left: bool) -> None:
    """An evaluation batch that is computed ahead must not hold the next ring, whenever its read begins."""
    session = Session(0, lambda message: None, threading.Event())
    session.waiting.enter(1)
    source = Slow(10)
    evaluation = RingEvaluation(
        plan(), {"test": Batches(source, 4, wait=session.waiting.result)}, CountingMetrics(10)
    )
    if left:
        session.waiting.leave()
    evaluation._ahead = plan().after(3, 2)[0], 0, evaluation._compute(plan().after(3, 2)[0], 0)
    assert source.began.wait(TIMEOUT)
    while not left and session.waiting.longest() is None:  # a moment after the read has begun
        time.sleep(0.001)
    began = time.monotonic()
    session.waiting.leave()
    evaluation.idle()
    assert time.monotonic() - began < SOON
    source.returns.set()


class Stream(MasterStream):
    """A stream without a master, whose messages the test puts into its loop."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", "token", 0, "run")
        standbys: Any = SimpleNamespace(hear=lambda term: None)
        self._standbys, self.cut = standbys, threading.Event()
        self.session.cuts(self.cut.set)
        self.session.state.form(3, (0, 1))
        self.session.waiting.enter(3)

    def hears_leave(self) -> None:
        self._loop.call_soon(self._hear, pb.ToWorker(generation=3, leave=pb.Leave()))
        self._loop.run_until_complete(asyncio.sleep(1.0))


@pytest.fixture
def stream() -> Iterator[Stream]:
    found = Stream()
    yield found
    found._loop.close()


def test_an_order_to_leave_ends_a_wait_within_a_second(stream: Stream) -> None:
    ended: Future[None] = Future()

    def wait() -> None:
        try:
            stream.session.waiting.result(Future(), lambda: "records of step 5")
        except RingBroken as error:
            ended.set_exception(error)

    threading.Thread(target=wait).start()
    stream.hears_leave()
    assert stream.cut.is_set()
    with pytest.raises(RingBroken, match="records of step 5"):
        ended.result(TIMEOUT)


def test_an_order_to_leave_ends_a_call_to_a_server_that_does_not_answer(stream: Stream) -> None:
    stream.session.waits = lambda: ServerWait(1, "Pull", 1.0)
    stream.hears_leave()
    assert stream.cut.is_set()


def test_a_server_that_answers_in_time_breaks_no_ring(stream: Stream) -> None:
    looks = iter([ServerWait(1, "Pull", 1.0), ServerWait(1, "Pull", 1.2)])
    stream.session.waits = lambda: next(looks, None)
    stream.hears_leave()
    assert not stream.cut.is_set()


def test_a_member_that_computes_leaves_at_the_end_of_the_step(stream: Stream) -> None:
    stream.hears_leave()
    assert not stream.cut.is_set()


def test_heartbeats_say_what_a_worker_waits_for() -> None:
    said: list[pb.FromWorker] = []
    now = [100.0]
    session = Session(0, said.append, threading.Event())
    session.waiting._clock = lambda: now[0]
    with session.waiting.named(lambda: "records of step 5"):
        session.beat()
        now[0] += 41
        session.beat()
    session.beat()
    found = [message.heartbeat for message in said]
    assert [beat.HasField("activity") for beat in found] == [False, True, False]
    assert (found[1].activity.what, found[1].activity.seconds) == ("waits for records of step 5", 41.0)
