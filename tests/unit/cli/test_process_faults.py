# SPDX-License-Identifier: Apache-2.0
"""Faults of `edl chaos` hit processes of the user's own job only, and a stopped process always goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from edl.cli.local import pause
from edl.cli.local.process_faults import ProcessFaults
from edl.cli.shared.storm import Fault, Kind
from edl.contract import artifacts
from edl.errors import EdlError


def a_job(output: Path, master: int) -> Path:
    """An output directory with the address of a running master."""
    contact = {"address": "127.0.0.1:1", "token": "secret", "pid": master}
    (output / artifacts.CONTACT).write_text(json.dumps(contact))
    return output


def worker(pid: int) -> dict[str, object]:
    return {"id": 1, "handle": str(pid), "state": "member"}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


@pytest.mark.parametrize(("kind", "number"), [(Kind.kill, 9), (Kind.term, 15), (Kind.server, 9)])
def test_a_process_of_the_job_is_hit_by_its_signal(
    child: subprocess.Popen[bytes], tmp_path: Path, kind: Kind, number: int
) -> None:
    faults = ProcessFaults(a_job(tmp_path, os.getpid()))
    assert faults.inflict(Fault(kind, 0, 0, 1), worker(child.pid))
    assert child.wait(20) == -number
    assert not faults.inflict(Fault(kind, 0, 0, 1), worker(child.pid)), "it is gone"


def test_a_stop_lasts_its_time(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    began = time.monotonic()
    assert ProcessFaults(a_job(tmp_path, os.getpid())).inflict(Fault(Kind.stop, 0, 0, 0.3), worker(child.pid))
    assert time.monotonic() - began >= 0.3
    until(lambda: not is_stopped(child.pid))


def test_a_stopped_process_goes_on_when_the_command_dies(child: subprocess.Popen[bytes]) -> None:
    handle = os.pidfd_open(child.pid)
    command = [sys.executable, "-I", pause.__file__, str(handle), "60"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[handle]) as guard:
        os.close(handle)
        until(lambda: is_stopped(child.pid))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            guard.send_signal(number)
        assert guard.poll() is None and is_stopped(child.pid)
        assert guard.stdin is not None
        guard.stdin.close()  # as the kernel does when the command dies
        until(lambda: not is_stopped(child.pid))
    assert guard.returncode == 0


def test_a_process_that_the_master_has_not_started_is_spared(
    child: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    faults = ProcessFaults(a_job(tmp_path, child.pid))
    with pytest.raises(EdlError, match=f"process {os.getpid()} was not started by the job's master"):
        faults.inflict(Fault(Kind.term, 0, 0, 1), worker(os.getpid()))


def test_a_job_of_a_different_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = a_job(tmp_path, os.getpid())
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(EdlError, match=r"the job belongs to .*; faults are only for jobs of your own"):
        ProcessFaults(output)


def test_a_job_without_a_master_is_refused(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    child.kill()
    child.wait()
    with pytest.raises(EdlError, match="the job's master does not run on this machine"):
        ProcessFaults(a_job(tmp_path, child.pid))
