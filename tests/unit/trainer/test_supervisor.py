# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a pod, with real processes that are no workers: their successors, and how all ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from edl.contract.exit_codes import ANNOUNCED, WorkerExit
from edl.trainer.supervisor import CRASH_LOOP, Ended, Supervisor

SECONDS = 20.0
# Its worker does what the next line of a file says, after it has told of itself. Time passes as it says, too.
SUPERVISED = """
import json, os, pathlib, signal, subprocess, sys, time
from edl.trainer import supervisor
from edl.trainer.runtime import termination
script, said = (pathlib.Path(a) for a in sys.argv[1:])
clock = [0.0]

def work(arguments):
    number = len(said.read_text().splitlines()) if said.exists() else 0
    what = script.read_text().splitlines()[number]
    child = subprocess.Popen(["sleep", "100"], start_new_session=True).pid if what == "orphan" else 0
    with open(said, "a") as file:
        blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        told = {"pid": os.getpid(), "arguments": arguments, "child": child, "blocked": blocked}
        file.write(json.dumps(told) + "\\n")
    print("works", flush=True)
    if what == "orphan":
        os.kill(os.getpid(), signal.SIGKILL)
    if what.startswith("-"):
        os.kill(os.getpid(), int(what[1:]))
    if what == "wait":
        signal.pause()
    if what.startswith("user"):
        os._exit(int(what[4:]))
    if what == "polite":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        print("polite", flush=True)
        while True:
            signal.pause()
    return int(what)

def now():
    clock[0] += 100.0
    return clock[0] if os.environ.get("SLOW") else 0.0

termination.become_subreaper()
it = supervisor.Supervisor(work, place=7, clock=now)
it.handle_signals()
sys.exit(it.run())
"""


class Supervised:
    """A supervisor that runs.

    Args:
        said: where its workers tell of themselves.
    """

    def __init__(self, process: subprocess.Popen[str], said: Path):
        self.process, self._said = process, said

    @property
    def workers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._said.read_text().splitlines()]

    def hears(self, line: str) -> None:
        """Wait until a worker says this."""
        assert self.process.stdout is not None
        assert _line(self.process.stdout) == line

    def ends(self) -> int:
        return self.process.wait(SECONDS)


def _line(stream: IO[str]) -> str:
    return stream.readline().strip()


@contextmanager
def supervised(folder: Path, *script: str, slow: bool = True) -> Iterator[Supervised]:
    """Its workers do this, one after the other. `slow`: each of them lives long."""
    (folder / "script").write_text("\n".join(script))
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISED, str(folder / "script"), str(folder / "said")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **({"SLOW": "1"} if slow else {})},
    ) as process:
        try:
            yield Supervised(process, folder / "said")
        finally:
            process.kill()


@pytest.mark.parametrize("code", [0, 1, 3, 4])
def test_who_ends_by_itself_is_followed_by_nobody(tmp_path: Path, code: int) -> None:
    with supervised(tmp_path, str(code)) as it:
        assert it.ends() == code
        assert [w["arguments"] for w in it.workers] == [[]]


def test_who_crashes_is_followed_and_how_is_passed_on(tmp_path: Path) -> None:
    with supervised(tmp_path, "-11", "-9", "75", "0") as it:
        assert it.ends() == 0
        told = [json.loads(w["arguments"][1]) for w in it.workers[1:]]
        assert [w["arguments"][:1] for w in it.workers[1:]] == [["--predecessor"]] * 3
        assert told == [
            {"place": 7, "signal": "SIGSEGV"},
            {"place": 7, "signal": "SIGKILL"},
            {"place": 7, "code": 75},
        ]
        assert [w["blocked"] for w in it.workers] == [0] * 4, "a worker can be asked to end"


@pytest.mark.parametrize("code", sorted(ANNOUNCED))
def test_an_exit_code_of_edls_that_only_the_users_code_has_used_is_not_believed(
    tmp_path: Path, code: int
) -> None:
    with supervised(tmp_path, f"user{code}", "0") as it:
        assert it.ends() == WorkerExit.USER_CODE
        assert len(it.workers) == 1


def test_who_crashes_at_its_start_again_and_again_is_left_to_the_master(tmp_path: Path) -> None:
    with supervised(tmp_path, *["-11"] * (CRASH_LOOP + 1), slow=False) as it:
        assert it.ends() == 128 + 11
        assert len(it.workers) == CRASH_LOOP


@pytest.mark.parametrize(("way", "code"), [("polite", 0), ("wait", 128 + 15)])
def test_who_is_asked_to_end_is_followed_by_nobody(tmp_path: Path, way: str, code: int) -> None:
    with supervised(tmp_path, way, "0") as it:
        it.hears("works")
        if way == "polite":
            it.hears("polite")
        it.process.send_signal(signal.SIGTERM)
        assert it.ends() == code
        assert len(it.workers) == 1


def test_nobody_outlives_the_supervisor(tmp_path: Path) -> None:
    with supervised(tmp_path, "wait") as it:
        it.hears("works")
        worker = psutil.Process(it.workers[0]["pid"])
        it.process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.wait(SECONDS)
        assert not worker.is_running()


def test_what_a_worker_leaves_behind_is_gone_before_the_next_one_starts(tmp_path: Path) -> None:
    with supervised(tmp_path, "orphan", "wait") as it:
        it.hears("works")
        it.hears("works")
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(it.workers[0]["child"])
            deadline = time.monotonic() + SECONDS  # on a busy machine, a killed process lives on for a moment
            while left.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, "it lives on"
                time.sleep(0.01)


def test_a_container_out_of_memory_is_told_as_such() -> None:
    told = Ended(-9, out_of_memory=True).told(2)
    assert told == {"place": 2, "code": 137, "why": "OOMKilled"}
    assert Ended(-9).told(2) == {"place": 2, "signal": "SIGKILL"}
    assert Ended(-11, out_of_memory=True).told(2)["signal"] == "SIGSEGV", "another process was killed"


def test_a_request_to_end_may_come_when_the_worker_has_just_been_reaped() -> None:
    """The process id is known until the loop has noted the end; a signal handler runs in between."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    supervisor = Supervisor(lambda arguments: 0, place=0, worker=ended.pid)
    supervisor.ask(signal.SIGTERM)
    assert supervisor.asked
