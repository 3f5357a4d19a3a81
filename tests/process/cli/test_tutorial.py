# SPDX-License-Identifier: Apache-2.0
"""The tutorial docs/first-ring.md: its commands, in their order, do what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "first-ring.md").read_text()
EDL = str(Path(sys.executable).with_name("edl"))
COMMANDS = re.findall(r"^\$ (.*?)(?: {2,}#.*)?$", PAGE, re.MULTILINE)
# Steps of the page that other tests make: set-up by CI itself, `fit` by test_docs.py, `edl check` by
# test_check_command.py, and --resume by test_checkpoints.py.
ELSEWHERE = [
    "scripts/setup",
    "source .venv/bin/activate",
    "python fit.py",
    "edl check ./my_model.py",
    "edl run --resume runs/NAME --workers 2",
]
HERE = [
    "edl run ./my_model.py --workers 3 --epochs 200 --batch-size 256",
    "edl status",
    "kill -9 PID",
    "edl scale 2",
    "edl stop",
    "edl audit",
]


def edl(command: str, *more: str) -> str:
    assert command in COMMANDS
    words = [EDL, *shlex.split(command)[1:], *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_ring_survives_kill_9_as_the_tutorial_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(COMMANDS) == sorted(ELSEWHERE + HERE), "a command of the page that no test runs"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    _, model = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("my_model.py").write_text(model)
    # Workers that are forked start sooner; nothing else differs. A busy machine delays heartbeats.
    sets = ["--set", "local.startMethod=fork,elastic.heartbeatTimeoutSeconds=60"]
    run = [EDL, *shlex.split(HERE[0])[1:], *sets]
    job = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert job.stdout is not None
    lines: list[str] = []

    def until(pattern: str) -> None:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line has {pattern!r}:\n" + "".join(lines))

    try:
        until(r"ring \d -> 3\b")  # "ring 0 -> 3 (start)" if all are ready at once
        status = json.loads(edl("edl status", "-o", "json"))
        victim = next(worker for worker in status["workers"] if worker["rank"] == 1)
        os.kill(victim["pid"], signal.SIGKILL)
        until(rf"ring 3 -> 2 in .*worker {victim['id']} is lost")
        until(r"ring 2 -> 3 in")
        edl("edl scale 2")
        until(r"ring 3 -> 2 in .* 0 records redone")
        edl("edl stop")
        until("Stopped after .* its state is in the checkpoint of step")
    finally:
        job.terminate()
        job.communicate(timeout=60)
    assert "each of their records counted once" in edl("edl audit")
