# SPDX-License-Identifier: Apache-2.0
"""Two parameter servers of mode=ps that are killed at random moments, with their logs or without, while three
workers make steps in any order and die in the middle of them.

Every call is repeated until it is answered, as workers do. At the end each step counts once, in the dense
variable and in the rows of its ids.
"""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from edl.checkpoints import CheckpointFile, Store
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc
from edl.contract.ranges import RangeSet
from tests.process.ps.test_killed_servers import SECONDS, Process, Worker
from tests.support.models import counting_steps as counting
from tests.support.ps.requests import RUN
from tests.support.ps.server_states import commit_parts

pytestmark = pytest.mark.waits
STEPS = 120
SERVERS = 2
WORKERS = 3
KILLS = 5


class Died(Exception):
    """A worker, in the middle of a step."""


class Trainer:
    """Workers, one after the other, in one thread: when one has died the next one comes."""

    def __init__(self, servers: list[Process], directory: Path, names: Iterator[int], dice: random.Random):
        self._calls = [Worker(server) for server in servers]
        self._checkpoints, self._names, self._dice = directory / "checkpoints", names, dice
        self._name, self._incarnations = next(names), [""] * SERVERS

    def run(self, whole: threading.Event) -> None:
        while not whole.is_set():
            try:
                self.look()
                while self.make():
                    pass
                if self.step() == STEPS:
                    whole.set()
            except Died:
                self._name = next(self._names)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise  # else: look at all of them anew
        for call in self._calls:
            call.close()

    def look(self) -> None:
        """Have all servers begin, or go on from the newest checkpoint, and all that they lack made again."""
        for index, call in enumerate(self._calls):
            if call("Declare", counting.tables()).empty:
                found = Store.open(str(self._checkpoints)).checkpoints()
                whole = [one for one in found if one.is_complete]
                newest = max(whole, key=lambda one: one.step, default=None)
                step, attempt = (newest.step, newest.attempt) if newest else (0, "")
                request = pb.RestoreRequest(run_id=RUN, generation=0, step=step, attempt=attempt)
                if call("Restore", request).empty:
                    call("Begin", counting.begin(STEPS, index, SERVERS))
        told = [call("Describe", pb.DescribeRequest()) for call in self._calls]
        incarnation = told[0].incarnation
        for index in range(1, SERVERS):
            has = RangeSet.of(
                zip(told[index].accepted.bounds[::2], told[index].accepted.bounds[1::2], strict=True)
            )
            lacks = [bound for one in RangeSet.of([(0, 1 << 62)]).minus(has) for bound in one]
            request = pb.RescheduleRequest(
                run_id=RUN,
                incarnation=incarnation,
                steps=pb.Steps(bounds=lacks),
                server=index,
                server_incarnation=told[index].incarnation,
            )
            incarnation = self._calls[0]("Reschedule", request).incarnation
        self._incarnations = [incarnation, *(one.incarnation for one in told[1:])]

    def make(self) -> bool:
        """One step, if there is one."""
        request = pb.LeaseRequest(
            run_id=RUN, incarnation=self._incarnations[0], worker=self._name, most=1, limit=STEPS
        )
        leased = self._calls[0]("Lease", request)
        if not leased.steps.bounds:
            return False
        step = leased.steps.bounds[0]
        versions = [
            call("Pull", counting.pull(STEPS, index, SERVERS)).version
            for index, call in enumerate(self._calls)
        ]
        for index in (*range(1, SERVERS), 0):
            self._calls[index]("Push", self.push(index, step, versions[index]))
            if self._dice.random() < 0.05:
                raise Died
        if step % 40 == 20:
            self.checkpoint(step)
        return True

    def push(self, index: int, step: int, version: int) -> pb.PushRequest:
        incarnation = self._incarnations[index]
        return counting.push(incarnation, step, STEPS, version, index, SERVERS, worker=self._name)

    def checkpoint(self, step: int) -> None:
        """The servers' parts are of different moments."""
        attempt, parts = f"a{next(self._names)}", []
        for index, call in enumerate(self._calls):
            request = pb.WritePartRequest(run_id=RUN, step=step, attempt=attempt, index=index, of=SERVERS)
            written = call("WritePart", request)
            assert not written.why
            parts.append(CheckpointFile(written.name, written.nbytes, written.sha256.hex()))
        commit_parts(self._checkpoints, step, attempt, parts)
        for call in self._calls:
            call("Committed", pb.CommittedRequest(run_id=RUN, step=step, attempt=attempt))

    def step(self) -> int:
        """How far server 0 is, and that the others have what it has."""
        found = [
            call("Drain", pb.DrainRequest(run_id=RUN, incarnation=incarnation, step=0))
            for call, incarnation in zip(self._calls, self._incarnations, strict=True)
        ]
        if found[0].step == STEPS:
            for call, incarnation in zip(self._calls, self._incarnations, strict=True):
                call("Drain", pb.DrainRequest(run_id=RUN, incarnation=incarnation, step=STEPS))
        return int(found[0].step)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Process]]:
    places = ["--servers", str(SERVERS), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    found = [Process(tmp_path / f"server-{i}", "--index", str(i), *places) for i in range(SERVERS)]
    yield found
    for one in found:
        one.process.kill()
        one.process.wait()


def test_each_step_counts_once_whatever_is_killed(servers: list[Process], tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # with the failure
    dice, names, whole = random.Random(seed), count(1), threading.Event()
    failed: list[BaseException] = []

    def run(trainer: Trainer) -> None:
        try:
            trainer.run(whole)
        except BaseException as error:
            failed.append(error)
            whole.set()

    trainers = [Trainer(servers, tmp_path, names, random.Random(seed + 1 + i)) for i in range(WORKERS)]
    threads = [threading.Thread(target=run, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    watching = Worker(servers[0])
    for number in range(KILLS):
        until = time.monotonic() + SECONDS
        while watching("Describe", pb.DescribeRequest()).position.step < number * STEPS // KILLS:
            if whole.is_set() or time.monotonic() > until:
                break
            time.sleep(0.005)
        victim = dice.randrange(SERVERS)
        time.sleep(dice.uniform(0, 0.01))  # somewhere within a step
        servers[victim].end(signal.SIGKILL)
        if dice.random() < 0.5:
            # One that had just been started has none yet.
            shutil.rmtree(tmp_path / f"server-{victim}" / "log", ignore_errors=True)
        servers[victim].start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failed and not any(thread.is_alive() for thread in threads), (seed, failed)
    # A server may have lost its log after the last step.
    Trainer(servers, tmp_path, names, random.Random(seed)).run(threading.Event())
    calls: list[Any] = [Worker(server) for server in servers]
    answers = [call("Pull", counting.pull(STEPS, i, SERVERS)).rows for i, call in enumerate(calls)]
    for call in (*calls, watching):
        call.close()
    dense, rows = counting.counts(STEPS, answers)
    assert (dense == 1).all() and (rows == 1).all(), (seed, dense, rows)


def test_a_full_disk_refuses_a_step_that_counts_once_when_there_is_room_and_after_a_kill(
    tmp_path: Path,
) -> None:
    server, steps = Process(tmp_path / "server"), 16
    try:
        call = Worker(server)
        call("Declare", counting.tables())
        incarnation = call("Begin", counting.begin(steps)).incarnation
        pushes = [counting.push(incarnation, step, steps) for step in range(steps)]
        call("Push", pushes[0])
        [log] = (tmp_path / "server" / "log").glob("log-*")
        process = psutil.Process(server.process.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (log.stat().st_size + 50, psutil.RLIM_INFINITY))
        with (
            grpc.insecure_channel(server.address()) as channel,
            pytest.raises(grpc.RpcError, match=r"cannot be written.*nothing was changed"),
        ):
            ps_pb2_grpc.ParameterServerStub(channel).Push(
                pushes[1], metadata=[("authorization", "Bearer token")], timeout=SECONDS
            )
        said = call("Describe", pb.DescribeRequest())
        assert said.accepted.bounds == [0, 1] and said.log_bytes == log.stat().st_size
        process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        for push in pushes:
            call("Push", push)
        server.end(signal.SIGKILL)
        server.start()
        dense, rows = counting.counts(steps, [call("Pull", counting.pull(steps)).rows])
        assert (dense == 1).all() and (rows == 1).all()
        call.close()
    finally:
        server.process.kill()
        server.process.wait()
