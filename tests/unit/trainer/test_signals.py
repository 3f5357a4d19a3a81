# SPDX-License-Identifier: Apache-2.0
"""Signals that a process was started to ignore stay ignored, and others end it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.unit.trainer.test_supervisor import SUPERVISED

ROOT = Path(__file__).parents[3]
SECONDS = 20
RUN = """
import subprocess, sys
from edl.cli.start.local_job import Interrupts
interrupts = Interrupts()
interrupts.process = subprocess.Popen(["sleep", "100"], start_new_session=True)
print("ready", flush=True)
sys.exit(128 + interrupts.number if interrupts.process.wait() else 1)
"""
MASTER = """
import asyncio, sys
from edl.master.__main__ import _on_signals

async def main():
    ended = asyncio.get_running_loop().create_future()
    _on_signals(ended.set_result)
    print("ready", flush=True)
    return await ended

why = asyncio.run(main())
sys.exit(128 + 15 if why == "the master got SIGTERM" else 1)
"""
WORKER = """
import os, signal, time
from edl.trainer.runtime.termination import when_asked_to_end
when_asked_to_end(lambda name: os._exit(128 + getattr(signal, name)))
print("ready", flush=True)
while True:
    time.sleep(100)
"""


# Its user's code has a handler of its own.
WITH_A_HANDLER = """
import os, signal, sys, time
from edl.trainer.runtime import termination
def leave(name):
    print("leaves", flush=True)
    termination.call_handler_of_user()
    os._exit(7)
termination.when_asked_to_end(leave)
def handler(number, frame):
    print("the user's", flush=True)
    {body}
assert signal.signal(signal.SIGTERM, {handler}) is signal.SIG_DFL
assert signal.signal(signal.SIGTERM, {handler}) is {handler}
print("ready", flush=True)
while True:
    time.sleep(100)
"""


@contextmanager
def started(ignored: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A program that a shell has started with signals ignored, and that has set up its handlers."""
    process = subprocess.Popen(
        ["bash", "-c", f"trap '' {ignored}; exec \"$@\"", "bash", *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None and process.stdout.readline().strip() in ("ready", "works")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)


def ignored_by(pid: int) -> set[signal.Signals]:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    bits = next(int(line.split()[1], 16) for line in status if line.startswith("SigIgn:"))
    return {number for number in signal.Signals if bits & 1 << (number - 1)}


@pytest.mark.parametrize("program", [RUN, MASTER, WORKER], ids=["run", "master", "worker"])
def test_what_was_ignored_at_the_start_stays_ignored(program: str) -> None:
    with started("HUP INT", sys.executable, "-c", program) as process:
        assert ignored_by(process.pid) >= {signal.SIGHUP, signal.SIGINT}
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM


def test_where_sigterm_is_ignored_processes_that_were_started_can_be_ended_with_it() -> None:
    with started("TERM", sys.executable, "-c", RUN) as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # `edl run` then sends SIGTERM to its master
        assert process.wait(SECONDS) == 128 + signal.SIGINT


def test_a_worker_of_a_supervisor_ignores_what_that_was_started_to_ignore(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("wait\n")
    words = [sys.executable, "-c", SUPERVISED, str(tmp_path / "script"), str(tmp_path / "said")]
    with started("INT", *words) as process:
        worker = psutil.Process(process.pid).children()[0]
        assert all(signal.SIGINT in ignored_by(pid) for pid in (process.pid, worker.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("handler", "body", "code"),
    [
        ("handler", "sys.exit(0)", 7),
        ("handler", "os._exit(3)", 3),
        ("handler", "raise ValueError", 7),
        ("handler", "pass", 7),
        ("signal.SIG_IGN", "pass", 7),
        ("signal.SIG_DFL", "pass", 7),
    ],
)
def test_a_worker_leaves_before_a_handler_of_its_users_is_called(handler: str, body: str, code: int) -> None:
    """A handler that ends the process in the middle of a step would break the ring."""
    program = WITH_A_HANDLER.format(handler=handler, body=body)
    with started("HUP", sys.executable, "-c", program) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == code
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert lines == ["leaves", "the user's"][: 2 if handler == "handler" else 1]
