# SPDX-License-Identifier: Apache-2.0
"""The tutorials and the README: their commands, in their order, do what the pages say."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# Workers that are forked start sooner; nothing else differs. A busy machine delays heartbeats.
SETS = ["--set", "elastic.heartbeatTimeoutSeconds=60"]


class Page:
    """A page whose commands a test runs."""

    def __init__(self, path: str):
        text = (ROOT / path).read_text()
        self.commands = re.findall(r"^\$ (.*?)(?: {2,}#.*)?$", text, re.MULTILINE)
        self.files = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    def words(self, command: str) -> list[str]:
        """The words of a command of the page, for the programs of this environment."""
        assert command in self.commands
        program, *rest = shlex.split(command)
        return [str(Path(sys.executable).with_name(program)), *rest]

    def run(self, command: str, *more: str) -> str:
        """What a command of the page prints.

        Raises:
            AssertionError: it fails.
        """
        done = subprocess.run([*self.words(command), *more], capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def job(self, command: str) -> Iterator[Job]:
        """The job of an `edl run` of the page, while it runs."""
        process = subprocess.Popen(
            [*self.words(command), *SETS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield Job(process)
        finally:
            process.terminate()
            process.communicate(timeout=60)

    def status(self) -> Any:
        return json.loads(self.run("edl status", "-o", "json"))


class Job:
    """A running job, and the lines that it has printed."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.lines: list[str] = []

    def until(self, pattern: str) -> None:
        """Read until a line has the pattern.

        Raises:
            AssertionError: the job ends before.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no line has {pattern!r}:\n" + "".join(self.lines))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


FIRST = Page("docs/first-ring.md")
RUN = "edl run ./my_model.py --workers 3 --epochs 200 --batch-size 256"
# Steps of the page that other tests make: set-up by CI itself, `fit` by test_docs.py, `edl check` by
# test_check_command.py, and --resume by test_checkpoints.py.
ELSEWHERE = [
    "scripts/setup",
    "source .venv/bin/activate",
    "python fit.py",
    "edl check ./my_model.py",
    "edl run --resume runs/NAME --workers 2",
]
HERE = [RUN, "edl status", "kill -9 PID", "edl scale 2", "edl stop", "edl audit"]


def test_a_ring_survives_kill_9_as_the_tutorial_says() -> None:
    assert sorted(FIRST.commands) == sorted(ELSEWHERE + HERE), "a command of the page that no test runs"
    _, model = FIRST.files
    Path("my_model.py").write_text(model)
    with FIRST.job(RUN) as job:
        job.until(r"ring \d -> 3\b")  # "ring 0 -> 3 (start)" if all are ready at once
        victim = next(worker for worker in FIRST.status()["workers"] if worker["rank"] == 1)
        os.kill(victim["pid"], signal.SIGKILL)
        job.until(rf"ring 3 -> 2 in .*worker {victim['id']} is lost")
        job.until(r"ring 2 -> 3 in")
        job.until(r"held out: loss .*, mae 0\.")  # 2.3 for a model that has not learned the sum
        FIRST.run("edl scale 2")
        job.until(r"ring 3 -> 2 in .* 0 records redone")
        FIRST.run("edl stop")
        job.until("Stopped after .* its state is in the checkpoint of step")
    [audited] = FIRST.run("edl audit").splitlines()
    assert "each of their records counted once" in audited


def test_the_readme_trains_the_model_of_the_tutorial_with_its_commands() -> None:
    readme = Page("README.md")
    assert readme.files == FIRST.files[1:]
    assert RUN in readme.commands
    more = set(readme.commands) - set(FIRST.commands)
    of_a_cluster = {command for command in more if re.search(r"^helm|--release|^scripts/images", command)}
    assert more - of_a_cluster == {
        "git clone URL edl && cd edl",
        "scripts/run",
        "scripts/test",
        "scripts/test --all",
    }


SERVERS = Page("docs/recommender.md")
TRAIN = "edl run ./recommender.py --workers 2 --epochs 300 --batch-size 256 --set ps.servers=2"
EXPORT = "edl rows export --output rows"
NEWS = "edl rows export --output changed --since rows"
EXPORTED = "edl model export --output recommender.keras"  # by test_saved_rows_of_a_job.py


@pytest.mark.timeout(400)  # four starts of servers and ten commands, each in processes of its own
def test_a_recommender_survives_a_killed_server_as_the_tutorial_says() -> None:
    before = ["edl new recommender.py --from recommender", TRAIN]
    during = ["edl status", "kill -9 PID", "edl scale --servers 3", EXPORT, "python top.py", NEWS, "edl stop"]
    after = ["edl audit", EXPORTED]
    assert SERVERS.commands == before + during + after, "a command of the page that no test runs"
    (script,) = SERVERS.files
    Path("top.py").write_text(script)
    SERVERS.run(before[0])
    with SERVERS.job(TRAIN) as job:
        job.until(r"the model has 3 edl.layers.Embedding: their rows are on 2 parameter servers")
        job.until(r"held out: .* auc (1\.0|0\.9)")
        os.kill(SERVERS.status()["servers"][0]["pid"], signal.SIGKILL)
        job.until(r"parameter server 0 listens again")
        SERVERS.run("edl scale --servers 3")
        job.until(r"ring 2 -> 2 in .* 0 records redone \(parameter servers 2 -> 3\)")
        assert "users.parquet: 2,000 rows (all)" in SERVERS.run(EXPORT)
        best = SERVERS.run("python top.py").removeprefix("user 7 likes the items").split()
        assert len(best) == 5 and {int(item) % 4 for item in best} == {3}
        assert "rows (those that have changed)" in SERVERS.run(NEWS)
        SERVERS.run("edl stop")
        job.until("Stopped after .* its state is in the checkpoint of step")
    assert "each of their records counted once" in SERVERS.run("edl audit")
