# SPDX-License-Identifier: Apache-2.0
"""Steps in any order, from one worker's side: what it asks of its servers, and when it leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from edl import config
from edl.config import values
from edl.contract.layout import StepSlice
from edl.contract.proto import edl_pb2 as to_master
from edl.contract.proto import ps_pb2 as pb
from edl.trainer.agreement.checks import NonFinite
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.embedding.interfaces import Start, Table
from edl.trainer.parts.async_loop import AT_ONCE, AsyncLoop
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.interfaces import Pulled, StepGradients, Whole
from edl.trainer.records.batches import Batch, Batches
from edl.trainer.ring.base import RingBroken
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from tests.support.models.counting import AtOnce, Positions

SIZE, BATCH = 12, 4  # three steps in an epoch
TABLE = Table("counts", 1, "{}", "{}")
IDS = np.arange(3, dtype=np.int64)
SECONDS = 60.0  # for what must happen


class Servers:
    """They hand out the steps below the limit, and have a push refused as often as requested."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, tuple[int, ...]]] = []  # step, and the versions it was made with
        self.refuses, self.progress, self.pulls, self.coordinator = 0, Whole(), 0, 0
        self.left: list[int] = []
        self.others_make: Callable[[], None] = lambda: None  # what is left

    def declare(self, tables: Sequence[Table]) -> None:
        assert tables == (TABLE,)

    def lease_steps(self, worker: int, most: int, limit: int) -> list[int]:
        found, self.left = self.left[:most], self.left[most:]
        if not found:
            self.others_make()
        return found

    def pull_current(self, ids: Sequence[np.ndarray]) -> Pulled:
        self.pulls += 1
        return Pulled([np.zeros((len(i), 1), np.float32) for i in ids], {0: self.pulls, 1: self.pulls})

    def push(self, made: StepGradients, worker: int, versions: Mapping[int, int]) -> bool:
        if self.refuses:
            self.refuses -= 1
            return False
        self.pushed.append((made.step, tuple(versions.values())))
        self.progress = Whole(step=len(self.pushed), version=self.progress.version + 1)
        return True

    def pause(self, seconds: float) -> None:
        pass


class Stopped(Servers):
    """They hand out steps without end, and take none of them until they go on."""

    def __init__(self, goes_on: threading.Event) -> None:
        super().__init__()
        self.goes_on, self.came, self.accepted = goes_on, threading.Event(), 0

    def lease_steps(self, worker: int, most: int, limit: int) -> list[int]:
        found = super().lease_steps(worker, most, limit)
        self.accepted += len(found)
        return found

    def push(self, made: StepGradients, worker: int, versions: Mapping[int, int]) -> bool:
        self.came.set()
        assert self.goes_on.wait(SECONDS)
        return super().push(made, worker, versions)


class Learner:
    """Nothing to learn."""

    tables: tuple[Table, ...] = ()
    server_tables = (TABLE,)
    fails = False

    def dense_ids(self, whole: bool) -> list[np.ndarray]:
        return [IDS]

    def put(self, whole: bool, rows: Sequence[np.ndarray]) -> None:
        pass

    def gradients(self, step: int, batch: Batch, of_rows: Any) -> StepGradients:
        assert len(batch) == BATCH
        return StepGradients(step, [], 0.5, len(batch), 0.1, skipped=self.fails)


class A:
    def __init__(self, **overrides: Any) -> None:
        typed = config.parse(values.merge(values.defaults(), {"mode": "ps", **overrides}))
        self.said: list[to_master.FromWorker] = []
        self.session = Session(0, self.said.append, threading.Event())
        self.servers, self.learner = Servers(), Learner()
        batches = Batches(Positions(SIZE), BATCH, reading=AtOnce())
        batches.take(Positions(SIZE).layout, StepSlice.even(0, 1))
        report = Telemetry(self.session, batches.steps, log=lambda incarnation: None)
        self.async_loop = AsyncLoop(typed, self.session, self.learner, self.servers, batches, report)  # type: ignore[arg-type]

    def run(self, limit: int = 3, now_and_then: Callable[[], None] = lambda: None) -> bool:
        self.servers.left = list(range(limit))
        return self.async_loop.run(1, 0, limit, now_and_then)


def test_all_steps_below_the_limit_are_made_in_whatever_order_they_are_handed_out() -> None:
    a = A()
    a.servers.left = [2, 0, 1]
    assert a.async_loop.run(1, 0, 3, lambda: None)
    assert [step for step, _ in a.servers.pushed] == [2, 0, 1]
    assert a.async_loop.reached == 3 and a.session.progress.step == 3


def test_a_step_that_is_refused_is_made_again_with_new_weights() -> None:
    a = A()
    a.servers.refuses = 2
    assert a.run(1)
    assert a.servers.pushed == [(0, (3, 3))]


def test_weights_are_pulled_before_each_so_many_steps() -> None:
    a = A(ps={"pullSteps": 2})
    assert a.run()
    assert [versions[0] for _, versions in a.servers.pushed] == [1, 1, 2]


def test_a_worker_leaves_at_once_and_makes_what_it_holds_in_the_next_ring() -> None:
    a = A()
    leave = to_master.ToWorker(generation=1, leave=to_master.Leave())
    assert not a.run(now_and_then=lambda: a.session.hear(leave))
    assert [step for step, _ in a.servers.pushed] == [0]
    assert a.async_loop.run(2, 0, 3, lambda: None)
    assert [step for step, _ in a.servers.pushed] == [0, 1, 2], "one that it held was left to time"


def test_a_ring_that_is_cut_ends_it() -> None:
    a = A()
    cut = to_master.ToWorker(generation=1, cut=to_master.Cut())
    with pytest.raises(RingBroken):
        a.run(now_and_then=lambda: a.session.hear(cut))
    assert len(a.servers.pushed) == 1


def test_workers_whose_server_is_stopped_hold_two_steps_each_and_no_more() -> None:
    goes_on = threading.Event()
    workers = [A() for _ in range(4)]
    for a in workers:
        a.servers = a.async_loop.servers = Stopped(goes_on)  # type: ignore[assignment]
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(a.run) for a in workers]
        stopped: list[Any] = [a.servers for a in workers]
        assert all(servers.came.wait(SECONDS) for servers in stopped)
        # Each has one push on its way, which it waits for, and asks for no step meanwhile.
        assert [servers.accepted for servers in stopped] == [AT_ONCE] * 4
        goes_on.set()
        assert all(run.result(SECONDS) for run in runs)
    assert all(len(servers.pushed) == 3 for servers in stopped)


def test_it_waits_for_the_steps_that_others_make() -> None:
    a = A()
    asked = 0

    def others_make() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            a.servers.progress = Whole(step=9)

    a.servers.others_make = others_make
    assert a.async_loop.run(1, 0, 9, lambda: None)
    assert asked == 3 and a.async_loop.reached == 9


def test_what_is_not_finite_ends_the_job_or_is_left_out() -> None:
    a = A()
    a.learner.fails = True
    with pytest.raises(NonFinite, match="at step 1, on worker 0, in the records 0, 1, 2, 3"):
        a.run()
    b = A(training={"onNonFinite": "skip"})
    b.learner.fails = True
    assert b.run(1)
    (warned,) = [m.warned.text for m in b.said if m.WhichOneof("body") == "warned"]
    assert warned == "step 1 is left out: its loss or a gradient is not finite"


def test_boundaries_are_where_something_is_made_of_the_weights() -> None:
    a = A(evaluation={"steps": 5}, checkpoint={"steps": 7, "dir": "/d"})
    found, step = [], 0
    while step < 12:
        found.append(step := a.async_loop.boundary(step, 11) if step < 11 else 12)
    assert found == [3, 5, 6, 7, 9, 10, 11, 12]


def test_an_async_phase_in_the_ledger_counts_the_skipped_steps() -> None:
    ledger = Ledger().after_async_phase(3, 6.0, 8, 4, 0)
    assert (ledger.step, ledger.epochs.loss, ledger.epochs.records, ledger.bad) == (3, 6.0, 8, {0: 4})


# --- the servers


class Link:
    """Answers at once; may refuse pushes."""

    def __init__(self, index: int, calls: list[tuple[int, str]]):
        self.index, self.calls, self.refuses = index, calls, False
        self.asked: list[Any] = []
        self.accepted = [0, 7]
        self.incarnation = f"line {index}"
        self.listed: Callable[[], None] = lambda: None

    def begin(self, method: str, request: Any, generation: int | None = None) -> Link:
        self.calls.append((self.index, method))
        self.asked.append(request)
        self._answer: Any = pb.Progress(step=7, version=2, refused=self.refuses)
        if method == "Describe":
            self._answer = pb.Description(
                incarnation=self.incarnation, accepted=pb.Steps(bounds=self.accepted)
            )
        elif method == "List":
            self._answer = pb.Listed(ids=np.array([self.index], np.int64).tobytes(), rows=bytes(4))
            self.listed()
        elif method == "Declare":
            self._answer = pb.Position()
        return self

    def result(self, wait_forever: bool = False, look: Callable[[], None] = lambda: None) -> Any:
        return self._answer

    def check(self) -> None:
        pass

    def forget(self) -> None:
        pass


def linked() -> tuple[PsClient, list[Link], list[tuple[int, str]]]:
    calls: list[tuple[int, str]] = []
    links = [Link(index, calls) for index in range(3)]
    servers = PsClient(links, "run", 1, asynchronous=pb.Asynchronous())  # type: ignore[arg-type]
    servers.declare([TABLE])
    servers.look()
    calls.clear()
    return servers, links, calls


MADE = StepGradients(4, [(np.arange(50, dtype=np.int64), np.ones((50, 1), np.float32))], 0.5, 4, 0.1)


def test_server_0_hears_of_a_step_when_all_others_have_it() -> None:
    servers, _, calls = linked()
    assert servers.push(MADE, 0, {0: 1, 1: 1, 2: 1})
    assert calls == [(1, "Push"), (2, "Push"), (0, "Push")]
    assert servers.progress.step == 7


def test_server_0_does_not_hear_of_a_step_that_another_one_refuses() -> None:
    servers, links, calls = linked()
    links[2].refuses = True
    assert not servers.push(MADE, 0, {0: 1, 1: 1, 2: 1})
    assert (0, "Push") not in calls


def test_rows_that_a_job_begins_with_come_in_pages_to_all_servers_and_once() -> None:
    servers, links, _ = linked()
    rows = np.arange(3_000_000, dtype=np.float32)[:, None]
    ids = np.arange(len(rows), dtype=np.int64)
    servers.begin_with(Start("/there", 4, "a", tables=("others",), rows={0: (ids, rows)}))
    for link in links:
        link.asked.clear()
    servers.begin([(ids[:9], rows[:9])])
    for link in links:
        first, *_, last = asked = link.asked
        assert [(r.page, r.more) for r in asked] == [(0, True), (1, True), (2, True), (3, False)][
            : len(asked)
        ]
        assert len({r.attempt for r in asked}) == 1 and first.attempt
        assert (first.start.directory, first.start.tables) == ("/there", ["others"])
        assert not any(r.HasField("start") for r in asked[1:]) and not last.more
    brought = [np.frombuffer(g.ids, np.int64) for link in links for r in link.asked[:-1] for g in r.values]
    np.testing.assert_array_equal(np.sort(np.concatenate(brought)), ids)
    servers.begin([(ids[:9], rows[:9])])
    assert not links[0].asked[-1].attempt, "they were brought"


def test_all_rows_are_those_of_servers_that_have_all_steps_of_the_model() -> None:
    servers, links, _ = linked()
    ids, rows = servers.all_rows(0, step=7)
    assert ids.tolist() == [0, 1, 2] and rows.shape == (3, 1)
    links[2].accepted = [0, 3, 4, 9]
    with pytest.raises(RingBroken, match="parameter server 2 has lost its log, and some of 7 steps"):
        servers.all_rows(0, step=7)


def test_rows_that_are_read_while_a_server_goes_back_are_not_taken() -> None:
    servers, links, _ = linked()

    def goes_back() -> None:
        links[1].incarnation = "another line"

    links[1].listed = goes_back
    with pytest.raises(RingBroken, match="parameter server 1 has lost its log while its rows were read"):
        servers.all_rows(0, step=7)
