# SPDX-License-Identifier: Apache-2.0
"""Processes of the product with a file that never answers: a named pipe that no process writes or reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edl.config import values
from edl.contract import artifacts
from edl.contract.vital import FAILED

pytestmark = pytest.mark.waits
SECONDS = 60.0  # for what must happen
# The bounds of the product, 300 times as short.
SOONER = """
import sys
from edl.contract import hangs
hangs.LOOK_SECONDS, hangs.WARN_SECONDS, hangs.END_SECONDS = 0.05, 0.1, 2.0
"""
PS = SOONER + "from edl.ps.__main__ import main\nsys.exit(main(sys.argv[1:]))"
MASTER = SOONER + "from edl.master.__main__ import main\nsys.exit(main(sys.argv[1:]))"
THREADS = (
    SOONER
    + """
import asyncio, time
async def job():
    hangs.end_with_hangs("this process")
    await asyncio.to_thread(compute)
    print("computed", flush=True)
    await asyncio.to_thread(read)
def compute():
    with hangs.watched():
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            pass
def read():
    with hangs.watched():
        open(sys.argv[1], "rb").read()
asyncio.run(job())
"""
)


def ends(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **environment},
    )


def test_a_server_ends_with_a_message_if_the_disk_of_its_log_does_not_answer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "base.json")
    ended = ends(PS, "--log-dir", str(tmp_path), "--run-id", "a-run", EDL_TOKEN="token")
    assert ended.returncode == FAILED, ended.stderr
    first, *_, last = [line for line in ended.stderr.splitlines() if "parameter server 0 has waited" in line]
    assert "without using the processor: a disk or mount that does not answer" in first
    assert first.endswith("if this lasts, parameter server 0 ends after 2 s")
    assert last.endswith("parameter server 0 ends")
    assert "_read_base" in ended.stderr, "the stack names the read"


def test_a_master_ends_with_a_message_if_the_disk_of_its_journal_does_not_answer(tmp_path: Path) -> None:
    spec, output = tmp_path / "values.json", tmp_path / "job"
    spec.write_text(json.dumps(values.merge(values.defaults(), {"model": {"module": "edl.zoo.digits"}})))
    output.mkdir()
    os.mkfifo(output / artifacts.JOURNAL)
    ended = ends(MASTER, "--values", str(spec), "--output", str(output), "--backend", "external")
    assert ended.returncode == FAILED, ended.stderr
    assert "edl: the master has waited for 2 s" in ended.stderr
    assert ended.stderr.strip().endswith("the master ends")


def test_a_thread_that_computes_for_long_does_not_hang_and_one_that_reads_a_mount_does(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "mounted")
    ended = ends(THREADS, str(tmp_path / "mounted"))
    assert (ended.stdout, ended.returncode) == ("computed\n", FAILED), ended.stderr
    assert ended.stderr.strip().endswith("this process ends")
