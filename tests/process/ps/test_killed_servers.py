# SPDX-License-Identifier: Apache-2.0
"""A parameter server that is killed at random moments, while a worker pulls, stages and commits.

Every call is repeated until it is answered, as workers do. At the end the rows are, bit for bit, those of a
server that was not killed.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from edl.checkpoints import CheckpointFile
from edl.contract.proto import ps_pb2 as pb
from edl.contract.proto import ps_pb2_grpc
from edl.ps.server import ParameterServer
from tests.support.ps.requests import RUN, commit, pull, stage, start_generation, tables
from tests.support.ps.server_states import begin, commit_parts, content, train

pytestmark = pytest.mark.waits
STEPS = 60
KILLS = 5
SECONDS = 120.0  # for what must happen, on a machine that is busy
AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class Process:
    """A server as a process, started again whenever it has ended.

    Args:
        more: arguments.
    """

    def __init__(self, directory: Path, *more: str):
        self._directory, self._more = directory, more
        directory.mkdir(exist_ok=True)
        (directory / "token").write_text("token")
        self.started = 0
        self.start()

    def start(self) -> None:
        self.started += 1
        (self._directory / "address").unlink(missing_ok=True)
        with open(self._directory / "output", "ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "edl.ps",
                    "--servers",
                    "1",
                    "--run-id",
                    RUN,
                    "--token-file",
                    self._directory / "token",
                    "--log-dir",
                    self._directory / "log",
                    "--checkpoint-dir",
                    self._directory / "checkpoints",
                    "--address-file",
                    self._directory / "address",
                    *self._more,
                ],
                stdout=output,
                stderr=output,
            )

    def address(self) -> str:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            try:
                return (self._directory / "address").read_text()
            except FileNotFoundError:
                time.sleep(0.01)
        raise TimeoutError((self._directory / "output").read_text())

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


class Worker:
    """Calls a server until it answers, wherever it is."""

    def __init__(self, server: Process):
        self._server, self._address = server, ""
        self._channel: Any = None

    def __call__(self, name: str, request: Any) -> Any:
        until = time.monotonic() + SECONDS
        while True:
            address = self._server.address()
            if address != self._address:
                self.close()
                self._channel, self._address = grpc.insecure_channel(address), address
            try:
                return getattr(ps_pb2_grpc.ParameterServerStub(self._channel), name)(
                    request, metadata=[("authorization", "Bearer token")], timeout=5.0, wait_for_ready=False
                )
            except grpc.RpcError as error:
                if error.code() not in AGAIN or time.monotonic() > until:
                    raise
                time.sleep(0.01)  # no server listens yet

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.process.kill()
    process.process.wait()


def checkpoint(worker: Worker, directory: Path, step: int, attempt: str) -> None:
    request = pb.WritePartRequest(
        run_id=RUN,
        generation=1,
        step=step,
        last=commit(step - 1, (step - 1) % 5 == 4),
        attempt=attempt,
        index=0,
        of=1,
    )
    part = worker("WritePart", request)
    assert not part.why
    commit_parts(
        directory / "checkpoints", step, attempt, [CheckpointFile(part.name, part.nbytes, part.sha256.hex())]
    )
    worker("Committed", pb.CommittedRequest(run_id=RUN, step=step, attempt=attempt))


def work(worker: Worker, directory: Path, progress: Callable[[int], None]) -> None:
    worker("Declare", tables())
    worker("StartGeneration", start_generation(1, 0))
    for step in range(STEPS):
        last = commit(step - 1, (step - 1) % 5 == 4) if step else None
        worker("Pull", pull(1, step, range(50), last))
        for rank in (1, 0):
            worker("Push", stage(1, step, rank))
        if step % 20 == 10:
            checkpoint(worker, directory, step, f"a{step}")
        progress(step)
    worker("Pull", pull(1, STEPS, (), commit(STEPS - 1, (STEPS - 1) % 5 == 4)))


def test_a_server_killed_at_any_moment_ends_as_one_that_nobody_has_killed(
    server: Process, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # with the failure
    dice = random.Random(seed)
    moments = sorted(dice.sample(range(1, STEPS - 1), KILLS))
    reached = [threading.Event() for _ in range(STEPS)]
    worker = Worker(server)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work(worker, tmp_path, lambda step: reached[step].set())
        except BaseException as error:
            failed.append(error)
        finally:
            for event in reached:
                event.set()

    thread = threading.Thread(target=run)
    thread.start()
    for moment in moments:
        assert reached[moment].wait(SECONDS)
        time.sleep(dice.uniform(0, 0.01))  # somewhere within a step
        server.end(signal.SIGKILL)
        server.start()
    thread.join(SECONDS)
    assert not failed and not thread.is_alive(), failed
    server.address()  # after a kill behind the last step its successor was not awaited
    assert server.end(signal.SIGTERM) == 0
    worker.close()

    said: list[str] = []
    found = ParameterServer(0, 1, RUN, tmp_path / "log", str(tmp_path / "checkpoints"), warn=said.append)
    straight = begin(ParameterServer(0, 1, RUN, tmp_path / "straight"))
    train(straight, 0, STEPS)
    assert not said and content(found) == content(straight), f"seed {seed}"
    assert server.started == KILLS + 1


def test_a_server_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    def run(*args: Any) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "edl.ps", *map(str, args)], capture_output=True, text=True
        )
        return done.returncode, done.stderr

    (tmp_path / "token").write_text("token")
    (tmp_path / "file").write_text("")
    known = ["--run-id", RUN, "--token-file", tmp_path / "token"]
    for args, text in (
        ([], "--log-dir is required"),
        ([*known, "--log-dir", tmp_path / "log", "--index", 2, "--servers", 2], "--index 2: expected 0 to 1"),
        ([*known, "--log-dir", tmp_path / "file"], "file"),
        (["--run-id", RUN, "--log-dir", tmp_path / "log"], "token is missing"),
        ([*known, "--log-dir", tmp_path / "log", "--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
    ):
        code, said = run(*args)
        assert code == 2 and text in said, said
