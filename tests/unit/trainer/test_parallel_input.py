# SPDX-License-Identifier: Apache-2.0
"""Reader processes, real ones without TensorFlow: order, exactly once, and what happens when one dies."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pytest
from pyarrow import parquet

import edl
from edl.contract.layout import Layout, StepSlice
from edl.contract.order import Order
from edl.contract.proto import edl_pb2 as pb
from edl.errors import DataError
from edl.trainer.records import fork_server, wire
from edl.trainer.records.batches import BadRecord, Batch, Batches
from edl.trainer.records.parallel_records import ParallelRecords
from edl.trainer.records.processes import ForkServer
from edl.trainer.records.workers import own_cores, reader_count
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.error_report import RelayedError, error_location, format_traceback
from edl.trainer.runtime.watchdog import Doing
from edl.trainer.session.state import Session
from edl.trainer.start.build_data import wait_for_readers

ROOT = Path(__file__).parents[3]
SIZE, BATCH, SEED = 1000, 50, 5
KILLS = 10
SINGLE, BLOCKS = Layout(SIZE), Layout(SIZE, 10, 16)
MINE = StepSlice.even(0, 1)


class Readers:
    """Parallel records of `tests.support.jobs.numbers_service`, and the reports about them."""

    def __init__(self, count: int, layout: Layout, seconds: float, **spec: Any):
        self.told: list[str] = []
        shuffle = spec.setdefault("shuffle", False)
        spec.setdefault("seed", SEED)
        self.server = ForkServer(
            "tests.support.jobs.numbers_service:Numbers", spec, 60.0, "elastic.startupTimeoutSeconds"
        )
        self.records = ParallelRecords(
            self.server,
            count,
            layout,
            spec["seed"],
            shuffle,
            random_access=layout.block == 1,
            lenient=spec.get("lenient", False),
            name="mine",
            seconds=seconds,
            warn=self.told.append,
            place=lambda index: f"f.bin: record {index % 100}",
        )


Start = Callable[..., Readers]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started: list[Readers] = []

    def begin(count: int = 2, layout: Layout = SINGLE, seconds: float = 60.0, **spec: Any) -> Readers:
        started.append(Readers(count, layout, seconds, **spec))
        return started[-1]

    yield begin
    for readers in started:
        readers.records.close()


def values(batch: Batch | None) -> list[int]:
    assert batch is not None
    assert batch.x.tolist() == batch.indices.tolist()
    return [int(value) for value in batch.x]


def epoch(batches: Batches, steps: int = SIZE // BATCH, first: int = 0) -> list[list[int]]:
    return [values(batches.of(step, first + steps)) for step in range(first, first + steps)]


def in_order(layout: Layout, shuffle: bool, part: StepSlice = MINE, first: int = 0) -> list[list[int]]:
    order = Order(layout, SEED, shuffle)
    starts = range(first * BATCH, first * BATCH + SIZE, BATCH)
    return [order.part(start, start + BATCH, part)[0].tolist() for start in starts]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("layout", "shuffle"), [(SINGLE, True), (BLOCKS, True), (BLOCKS, False)])
def test_batches_come_in_the_order_of_the_job_for_any_number_of_processes(
    start: Start, tmp_path: Path, count: int, layout: Layout, shuffle: bool
) -> None:
    read = tmp_path / "read"
    readers = start(count, layout, shuffle=shuffle, read=str(read))
    batches = Batches(readers.records, BATCH, ahead_bytes=1000)
    assert epoch(batches) == in_order(layout, shuffle)
    assert not readers.told
    if count > 1 and layout.block > 1 and shuffle:
        assert Counter(map(int, read.read_text().split())) == dict.fromkeys(range(SIZE // 10), 1), (
            "each block is read once, by one of the processes"
        )


def test_a_change_of_the_ring_throws_batches_away_and_asks_for_others(start: Start) -> None:
    readers = start(3, shuffle=True)
    batches, half = Batches(readers.records, BATCH, ahead_bytes=4000), StepSlice(1, (1, 1))
    assert values(batches.of(0, 20)) == in_order(SINGLE, True)[0]
    batches.take(BLOCKS, half)
    assert values(batches.of(1, 20)) == in_order(BLOCKS, True, half)[1]


def test_all_processes_are_up_and_have_read_before_a_worker_is_ready(start: Start) -> None:
    readers, doing = start(3), Doing()
    wait_for_readers("mine", readers.records, doing)
    processes = readers.records._processes
    assert [process is not None and process.answered for process in processes] == [True] * 3
    assert doing.words() == "mine: the start of the reader processes (data.workers)"


def test_a_cut_ends_the_wait_for_a_process_that_reads(start: Start) -> None:
    readers = start(2, slow=3.0)
    session = Session(0, lambda message: None, threading.Event())
    session.waiting.enter(1)
    readers.records.idle().result(60)
    batches = Batches(readers.records, BATCH, wait=session.waiting.result)
    threading.Timer(0.2, session.hear, [pb.ToWorker(generation=1, cut=pb.Cut())]).start()
    began = time.monotonic()
    with pytest.raises(RingBroken, match="records of step 1"):
        batches.of(0, 20)
    assert time.monotonic() - began < 2.0
    assert session.waiting.leave()
    returned = batches.idle()
    assert not returned.done()
    returned.result(60)
    assert time.monotonic() - began > 2.5, "it was reading"


@pytest.mark.parametrize("lives", [True, False])
def test_readers_come_from_the_process_that_the_worker_has_prepared(
    monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """If it has died, a new one is started, which imports again."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ours, theirs = socket.socketpair()
    program = "import os, socket, sys; from edl.trainer.records.fork_server import _run; "
    program += "_run(socket.socket(fileno=int(sys.argv[1])), os.getppid(), None)"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    if not lives:
        process.kill()
        process.wait()
    monkeypatch.setattr(fork_server, "_prepared", [(process, ours)])
    service = "tests.support.jobs.numbers_service:Numbers"
    server = ForkServer(service, {"slow": 0.0}, 60.0, "x", environment={"OF_READERS": "1"}, prepared=True)
    try:
        reader = server.reader()
        assert (server.pid == process.pid) is lives
        assert psutil.Process(reader.pid).name() == fork_server.NAME
        reader.call("alone", (0, 1), (), 30.0)
        reader.close()
    finally:
        server.close()
    assert process.poll() is not None


def test_a_spare_forks_the_readers_when_their_parent_is_killed(start: Start) -> None:
    """Spares that are killed are replaced; only when both end at once, a process is started by exec."""
    records = (readers := start(2)).records

    def parent_and_spare() -> list[psutil.Process]:
        records.idle().result(60)
        parent = psutil.Process(readers.server.pid)
        while not (found := [p for p in parent.children() if p.name() == fork_server.SPARE]):
            time.sleep(0.01)
        return [parent, *found]

    def kill(*victims: psutil.Process) -> list[psutil.Process]:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                os.kill(victim.pid, number)
        psutil.wait_procs(victims, timeout=10)
        assert values(records.batch(0, 10, MINE)) == list(range(10))
        return parent_and_spare()

    parent, spare = parent_and_spare()
    for _ in range(2):
        successor, spare = kill(parent)
        assert successor != parent
        assert spare.ppid() == successor.pid
        parent = successor
    assert kill(spare)[0] == parent
    assert kill(*parent_and_spare())[0].ppid() == os.getpid(), "it was started by the worker"


@pytest.mark.parametrize("kills", [False, True], ids=["closed", "killed and closed"])
def test_nothing_of_the_readers_outlives_their_end(start: Start, kills: bool) -> None:
    """A spare that takes over from a parent whose worker has closed the connection ends, too."""
    records = (readers := start(2)).records
    assert values(records.batch(0, 10, MINE)) == list(range(10))
    parent = readers.server.pid
    assert parent is not None
    group = os.getpgid(parent)
    if kills:
        os.kill(parent, signal.SIGKILL)
    records.close()

    def left() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if p.status() != psutil.STATUS_ZOMBIE and in_group(p)]

    def in_group(process: psutil.Process) -> bool:
        try:
            return os.getpgid(process.pid) == group
        except ProcessLookupError:
            return False

    deadline = time.monotonic() + 10
    while left():
        assert time.monotonic() < deadline, left()
        time.sleep(0.05)  # a chain of spares has no last one to wait for


def test_processes_read_at_the_same_time_and_ahead_of_the_step(start: Start) -> None:
    readers = start(4, slow=0.2)
    batches = Batches(readers.records, BATCH)  # no bytes ahead: as many batches as processes
    batches.of(0, 8)
    began = time.monotonic()
    for step in range(1, 5):
        batches.of(step, 8)
    assert time.monotonic() - began < 4 * 0.2, "one after the other they would take longer"


@pytest.mark.parametrize("layout", [SINGLE, BLOCKS])
def test_processes_that_are_killed_lose_no_record(start: Start, tmp_path: Path, layout: Layout) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    draw = random.Random(seed)
    readers = start(3, layout, shuffle=True, read=str(tmp_path / "read"), slow=0.01)
    batches, done = Batches(readers.records, BATCH, ahead_bytes=1000), threading.Event()
    killed: list[int] = []

    def kill() -> None:
        while not done.wait(draw.uniform(0.05, 0.2)):
            if len(pids := readers.records.pids) == 3:
                victim = draw.choice([*pids * 3, readers.server.pid or pids[0]])
                with contextlib.suppress(ProcessLookupError):  # it has been waited for meanwhile
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)

    killer = threading.Thread(target=kill)
    first = 0
    assert epoch(batches) == in_order(layout, True)  # they are there
    killer.start()
    try:
        while len(killed) < KILLS:
            first += 20
            assert epoch(batches, first=first) == in_order(layout, True, first=first)
    finally:
        done.set()
        killer.join()
    assert readers.told, "none of them has died in a request"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("exit", "has ended with exit code 7"),
        ("crash", "has crashed (SIGSEGV)"),
        ("kill", "was killed (SIGKILL), perhaps because memory ran out"),
    ],
)
@pytest.mark.parametrize("layout", [SINGLE, BLOCKS])
def test_a_record_that_kills_its_process_is_left_out_and_named(
    start: Start, tmp_path: Path, how: str, why: str, layout: Layout
) -> None:
    readers = start(2, layout, deadly={"123": how}, lenient=True, raising=[7], read=str(tmp_path / "read"))
    batches = Batches(readers.records, BATCH)
    found = [batches.of(step, 20) for step in range(20)]
    assert [i for batch in found if batch for i in batch.indices] == [*set(range(SIZE)) - {7, 123}]
    bad = [record for batch in found if batch for record in batch.bad]
    assert [(b.index, b.why) for b in bad] == [
        (7, "it is bad"),
        (123, f"f.bin: record 23: its reader process {why}, twice"),
    ]
    assert any("while it read the records 1" in line and why in line for line in readers.told)
    told = len(readers.told)
    batch = batches.of(22, 40)
    assert batch is not None
    assert [record.index for record in batch.bad] == [123]
    assert len(readers.told) == told, "it is known now, and kills no process any more"


def test_a_record_that_kills_its_process_ends_a_job_that_allows_no_bad_ones(start: Start) -> None:
    readers = start(2, deadly={"123": "exit"})
    batches = Batches(readers.records, BATCH)
    with pytest.raises(
        DataError,
        match=r"mine: record 123 cannot be read: f.bin: record 23: its reader process has ended with",
    ):
        epoch(batches)


def test_a_process_that_hangs_is_ended(start: Start) -> None:
    readers = start(1, deadly={"3": "hang"}, lenient=True)
    assert values(readers.records.batch(4, 9, MINE)) == [4, 5, 6, 7, 8]  # its data are open
    readers.server.seconds, readers.records.seconds = 2.0, 0.2
    batch = readers.records.batch(3, 4, MINE)
    assert batch is not None
    why = "f.bin: record 3: its reader process has not answered for 2.2 s (elastic.stepTimeoutSeconds), twice"
    assert batch.bad == (BadRecord(3, why),)
    assert values(readers.records.batch(4, 9, MINE)) == [4, 5, 6, 7, 8]


def test_an_error_of_the_data_is_raised_as_in_the_process(start: Start) -> None:
    readers = start(2, raising=[60])
    with pytest.raises(DataError, match=r"^record 60 is bad$"):
        epoch(Batches(readers.records, BATCH))


def test_data_that_cannot_be_opened_are_told_with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    server = ForkServer("tests.support.jobs.numbers_service:Unopened", {}, 60.0, "x")
    records = ParallelRecords(
        server, 1, Layout(SIZE), 0, False, True, False, "mine", seconds=60, warn=lambda line: None
    )
    try:
        with pytest.raises(
            RelayedError, match=r"^FileNotFoundError: there is no file numbers\.bin$"
        ) as raised:
            records.batch(0, 10, MINE)
    finally:
        records.close()
    assert error_location(raised.value).startswith("numbers_service.py, line ")
    assert "raise FileNotFoundError" in format_traceback(raised.value)


WORKER = """
import sys, time
from edl.contract.layout import Layout, StepSlice
from edl.trainer.records.parallel_records import ParallelRecords
from edl.trainer.records.processes import ForkServer

server = ForkServer("tests.support.jobs.numbers_service:Numbers", {"slow": 0.05}, 60.0, "x")
records = ParallelRecords(server, 3, Layout(1000), 0, False, True, False, "mine", 60.0, print)
for _ in range(6):
    records.batch(0, 10, StepSlice.even(0, 1))
while len(records.pids) < 3:
    time.sleep(0.01)
print(server.pid, *records.pids, flush=True)
records.submit(0, 10, StepSlice.even(0, 1), lambda batch: batch)
time.sleep(3600)
"""


@pytest.mark.parametrize("victim", ["worker", "fork server"])
def test_processes_do_not_outlive_their_worker(monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            server, *readers = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
            assert len(readers) == 3
            (worker if victim == "worker" else server).kill()
            gone = [server, *readers] if victim == "worker" else readers
            _, alive = psutil.wait_procs(gone, timeout=10)
            assert not alive
        finally:
            worker.kill()


def test_arrays_travel_in_shared_memory_and_hold_it_until_they_are_gone() -> None:
    value = {
        "x": np.arange(4096.0).reshape(1024, 4),
        "small": np.arange(3),
        "text": np.array(["a", "b"], object),
        "none": np.zeros((0, 3)),
    }
    packet = wire.pack(value)
    assert len(packet.data) < 1000
    found = packet.unpack()
    descriptor = packet.memory
    assert descriptor is not None
    del packet
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert (found["x"] == value["x"]).all()
    assert found["small"].tolist() == [0, 1, 2]
    assert found["text"].tolist() == ["a", "b"]
    assert found["none"].shape == (0, 3)
    with pytest.raises(ValueError, match="read-only"):
        found["x"][0, 0] = 1


def test_the_number_of_processes_follows_the_cores_for_files_only(tmp_path: Path) -> None:
    table = pyarrow.table({"x": [1.0, 2.0], "y": [0, 1]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = edl.parquet(tmp_path / "rows.parquet", label="y")
    assert [reader_count("auto", rows, cores) for cores in (2, 4, 9, 64)] == [0, 1, 2, 4]
    assert reader_count("auto", edl.split(rows, validation=0.5)["train"], 8) == 2
    assert reader_count("auto", edl.arrays(np.zeros(3)), 64) == 0
    assert reader_count("auto", edl.dataset([1.0, 2.0], source="list"), 64) == 0
    assert [reader_count(n, rows, 2) for n in (0, 3)] == [0, 3]


def test_cores_are_limited_by_the_container_and_shared_by_workers(tmp_path: Path) -> None:
    limit, here = tmp_path / "cpu.max", len(os.sched_getaffinity(0))
    assert own_cores(1, limit) == here
    limit.write_text("max 100000\n")
    assert own_cores(1, limit) == here
    limit.write_text("150000 100000\n")
    assert (own_cores(1, limit), own_cores(2, limit)) == (min(here, 1), 0)
