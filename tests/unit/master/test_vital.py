# SPDX-License-Identifier: Apache-2.0
"""A thread or task of the product that dies ends its process, and the exception is reported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from edl.contract.ids import WorkerId
from edl.master.backends.launchers import Spawn
from edl.master.backends.processes import Processes
from edl.master.core import effects as ef
from edl.master.core import events as ev

ROOT = Path(__file__).parents[3]
# No master listens there: a worker whose link lives looks for its master for half a minute.
WORKER = """
import sys
from edl.trainer import __main__ as worker
from edl.trainer.session.kvstore import KeyValueStore

async def start(self):
    raise AttributeError("the link broke")

KeyValueStore.start = start
worker.main(["--master", "127.0.0.1:1", "--worker", "0"])
"""
TASK = """
import asyncio
from edl.contract import vital

async def dies():
    raise LookupError("the task broke")

async def main():
    vital.task(dies(), "of a test")
    await asyncio.sleep(100)

vital.end_with_threads()
asyncio.run(main())
"""
USERS = """
import threading
from edl.contract import vital

vital.end_with_threads()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
print("goes on")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=25
    )


def test_a_worker_whose_link_dies_ends_and_its_last_line_is_the_exception() -> None:
    done = run(WORKER)
    assert done.returncode == 1
    assert "edl: thread link died" in done.stderr
    assert done.stderr.strip().splitlines()[-1] == "AttributeError: the link broke"


def test_a_task_that_nobody_awaits_ends_its_process() -> None:
    done = run(TASK)
    assert done.returncode == 1
    assert "edl: task of a test died" in done.stderr
    assert done.stderr.splitlines()[-1] == "LookupError: the task broke"


def test_a_thread_of_user_code_may_die() -> None:
    done = run(USERS)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "ZeroDivisionError" in done.stderr


ABORT = "echo step 1; echo; echo 'LLVM ERROR: inconsistency'; echo '    @ 0x7f1 abort'; kill -ABRT $$"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "echo 'Traceback ...'; echo 'AttributeError: the link broke'; exit 1",
            ev.Gone(WorkerId(0), code=1, why="AttributeError: the link broke"),
        ),
        (
            ABORT,
            ev.Gone(
                WorkerId(0), signal="SIGABRT", why="its log ends with: step 1; LLVM ERROR: inconsistency"
            ),
        ),
        ("echo step 1; kill -KILL $$", ev.Gone(WorkerId(0), signal="SIGKILL")),
    ],
    ids=["exits", "crashes", "is killed"],
)
async def test_the_log_of_a_worker_that_could_not_tell_its_master_has_the_reason(
    tmp_path: Path, command: str, expected: ev.Gone
) -> None:
    events: list[ev.Event] = []
    backend = Processes(events.append, Spawn(["sh", "-c", command], {}), tmp_path)
    await backend.start()
    backend.perform(ef.Create(WorkerId(0)))
    async with asyncio.timeout(20):
        while not any(isinstance(event, ev.Gone) for event in events):
            await asyncio.sleep(0.01)
    await backend.close()
    assert events[-1] == expected
