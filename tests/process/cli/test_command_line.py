# SPDX-License-Identifier: Apache-2.0
"""The `edl` command as people use it: real processes, real signals, a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from edl.checkpoints import Store
from edl.contract import artifacts
from edl.net.master_client import Client
from tests.support.jobs.commands import EDL, a_long_job, all_gone, edl, processes_of


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def ranks(status: dict[str, Any]) -> list[int]:
    return [w["rank"] for w in status["workers"] if w["rank"] is not None]


def test_digits_trains_to_the_accuracy_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDL_REPORT")
    done = edl("run", "digits", "--set", "workers=3", "--output", "job")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(Path("job/summary.json").read_text())
    assert summary["phase"] == "Succeeded"
    assert summary["metrics"]["accuracy"] >= 0.97
    assert (summary["records"]["applied"], summary["step"]) == (20 * 1438, 20 * 45)
    assert abs(sum(summary["goodput_seconds"].values()) - summary["seconds"]) < 0.01
    assert set(summary["goodput_seconds"]) == {
        "useful",
        "redone",
        "re-forming",
        "waiting for workers",
        "waiting for servers",
        "waiting for records",
        "suspended",
        "starting",
        "finishing",
    }
    assert re.search(r"held out  accuracy (0\.9|1\.0)", done.stdout)
    kept = {p.name for p in Path("job").iterdir()}
    assert {"summary.json", "events.jsonl", "model.keras", "exports.json", "logs"} <= kept
    (exported,) = json.loads(Path("job/exports.json").read_text())["exports"]
    assert exported["verified"]
    fetched = edl("model", "get", "mine.keras", "job")
    assert fetched.stdout.endswith(" bytes, as they were written (SHA-256)\n"), fetched.stderr
    assert Path("mine.keras").read_bytes() == Path("job/model.keras").read_bytes()
    assert edl("audit", "job").stdout.startswith("exactly once: 1,438 records x 20 epochs")
    assert edl("replay", "job").stdout.startswith("the same end: Succeeded")
    assert edl("status", "job").stdout.startswith("Succeeded after")
    assert "  model     job/model.keras\n" in edl("status", "job").stdout
    assert "  model     job/model.keras\n" in done.stdout
    assert "\n  report    job/report.html\n" in done.stdout
    report = Path("job/report.html").read_text()
    assert "28,760" in report and "exactly once: 1,438 records x 20 epochs in 900 steps" in report
    a_tampered_journal_is_found_out(Path("job"))


def a_tampered_journal_is_found_out(output: Path) -> None:
    """Change the last step in the journal of a job that has trained 900 steps."""
    journal = output / artifacts.JOURNAL
    lines = journal.read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if '"LeftRing"' in line)
    journal.write_text("\n".join(lines).replace('"step":900', '"step":899'))
    verdict = edl("audit", str(output))
    assert verdict.returncode == 1
    found = re.fullmatch(r"edl: job/events.jsonl: line (\d+): the chain is broken: .*\n", verdict.stderr)
    assert found, verdict.stderr
    assert 1 < int(found[1]) <= last + 1
    replay = edl("replay", str(output))
    assert replay.returncode == 1
    assert f"line {found[1]}: the chain is broken" in replay.stderr


def test_status_scale_and_stop_from_another_terminal() -> None:
    with a_long_job("checkpoint.dir=") as (job, output):
        deadline = time.monotonic() + 60
        # The ring may have begun with one.
        while sorted(ranks(status := json.loads(edl("status", "-o", "json", check=True).stdout))) != [0, 1]:
            assert time.monotonic() < deadline, status
        assert status["phase"] == "Training"
        assert status["kind"] == "Job" and all(psutil.pid_exists(w["pid"]) for w in status["workers"])
        told = edl("status", str(output), check=True).stdout
        assert "records/s" in told
        assert "model: job/model.keras, once the job succeeds\n" in told
        unnamed = edl("scale", "3")
        assert (unnamed.returncode, unnamed.stdout) == (2, ""), "the job is not under runs"
        assert unnamed.stderr.endswith(f"1 running job of yours:\nedl:   edl scale 3 {output.resolve()}\n")
        assert edl("scale", "3", "job", check=True).stdout == "workers 2 -> 3\n"
        refused = edl("scale", "65", "job")
        assert refused.returncode == 1
        assert "workers is 65 and maxWorkers is 64" in refused.stderr
        assert job.stdout is not None
        assert any("ring 2 -> 3" in line for line in job.stdout)
        pids = processes_of(output)
        following = subprocess.Popen([*EDL, "logs", "--follow"], stdout=subprocess.PIPE, text=True)
        assert following.stdout is not None
        for process in ("master", "worker-0", "worker-1"):
            assert any(line.startswith(f"{process}: ") for line in following.stdout)
        assert edl("wait", "--for", "training").returncode == 0
        late = edl("wait", "--timeout", "3s")
        assert late.returncode == 124
        assert re.match(r"Training: \d workers? \(generation \d+\)", late.stdout), late.stdout
        waiting = subprocess.Popen([*EDL, "wait", "job"], stdout=subprocess.PIPE, text=True)
        refused = edl("stop", "job")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert re.search(r"trained steps? of [\d,]+ would be lost; add --discard", refused.stderr), (
            refused.stderr
        )
        edl("stop", "job", "--discard", check=True)
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 1
        assert "Stopped after" in out
        assert all_gone(pids)
        told, _ = waiting.communicate(timeout=60)
        assert (waiting.returncode, told) == (1, "Stopped: stopped by edl stop\n")
        told, _ = following.communicate(timeout=60)
        assert following.returncode == 0
        assert "the job stopped: stopped by edl stop" in told
    unnamed = edl("stop")
    assert (unnamed.returncode, unnamed.stdout) == (2, "")
    assert unnamed.stderr == "edl: there is no job under runs here, and no job of yours runs\n"
    Path("runs").mkdir()
    output.rename("runs/job")
    status = edl("status", "-o", "json")
    assert (status.returncode, status.stderr) == (0, "edl: job runs/job (the newest under runs)\n")
    assert json.loads(status.stdout)["phase"] == "Stopped"
    assert edl("stop", check=True).stdout == "the job has already ended: Stopped, stopped by edl stop\n"
    assert edl("scale", "3").returncode == 1
    assert edl("wait", "--for", "stopped").returncode == 0
    assert len(edl("logs", "worker-1", "--tail", "2").stdout.splitlines()) == 2
    assert edl("logs", "worker-9").stderr.endswith("no log of worker-9 found\n")
    assert edl("logs", "evaluator").returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_job_leaves_no_process(number: signal.Signals) -> None:
    with a_long_job() as (job, output):
        pids = processes_of(output)
        assert len(pids) == 3
        job.send_signal(number)
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 128 + number
        assert "Stopped after" in out
        assert all_gone(pids)
    step = json.loads((output / artifacts.SUMMARY).read_text())["step"]
    assert f"its state is in the checkpoint of step {step:,}" in out
    assert re.search(r"^  next      resume the job: \S*edl run --resume job$", out, re.MULTILINE)
    assert Store.open(str(output / artifacts.CHECKPOINTS)).checkpoints()[-1].step == step > 0
    assert edl("rm", "job").stdout == "removed job\n" and not output.exists()


def test_workers_of_a_killed_master_end_by_themselves() -> None:
    with a_long_job() as (job, output):
        pids = processes_of(output)
        os.kill(pids[0], signal.SIGKILL)
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 1
        assert "the master exited unexpectedly (SIGKILL)" in out
        assert all_gone(pids)


def test_on_a_terminal_it_draws_a_bar_and_a_table() -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    job = subprocess.Popen(
        [
            *EDL,
            "run",
            "counting",
            "--output",
            "job",
            "--set",
            "local.startMethod=spawn,workers=2,training.epochs=3,export.verify=false",
        ],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        close_fds=True,
    )
    os.close(follower)
    screen = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(leader, 65536):
            screen += chunk
    assert job.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.decode())
    for expected in (
        "worker",
        "rank",
        "state",
        "memory",
        "MiB",
        "█",
        "epoch 2 of 3",
        "records/s",
        "Succeeded after",
    ):
        assert expected in text, expected


def test_both_sides_by_hand() -> None:
    master = subprocess.Popen(
        [*EDL, "master", "counting", "--set", "workers=2,training.epochs=1", "--output", "job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert master.stdout is not None
    address = master.stdout.readline().strip()
    workers = [
        subprocess.Popen(
            [*EDL, "worker", "--master", address, "--token-from", "job"], stderr=subprocess.DEVNULL
        )
        for _ in range(2)
    ]
    assert master.wait(100) == 0
    assert [w.wait(20) for w in workers] == [0, 0]
    assert edl("audit", "job").stdout.startswith("exactly once: 20,000 records x 1 epoch")
    master.stdout.close()


def test_a_worker_by_hand_leaves_on_ctrl_c_in_one_line_and_the_others_go_on() -> None:
    master = subprocess.Popen(
        [*EDL, "master", "counting", "--set", "workers=2,training.epochs=10000000", "--output", "job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert master.stdout is not None
    command = [*EDL, "worker", "--master", master.stdout.readline().strip(), "--token-from", "job"]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert edl("wait", "job", "--for", "training", "--timeout", "100s").returncode == 0
        client = Client(artifacts.read_contact(Path("job")))
        next(s for s in client.follow() if len([w for w in s["workers"] if w["state"] == "member"]) == 2)
        workers[0].send_signal(signal.SIGINT)
        _, said = workers[0].communicate(timeout=60)
        assert workers[0].returncode == 0
        assert "SIGINT: leaving at the next step boundary\n" in said
        assert "Traceback" not in said
        status = next(
            s for s in client.follow() if len([w for w in s["workers"] if w["state"] == "member"]) == 1
        )
        assert status["failures"] == 0
    finally:
        for process in (master, *workers):
            process.terminate()
            process.communicate(timeout=60)


def test_a_model_comes_with_the_values_and_files_of_the_folder_replace_nothing(tmp_path: Path) -> None:
    for name in ("edl.py", "master.py", "trainer.py", "logging.py", "keras.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the current folder was run')\n")
    (tmp_path / "of_the_project.py").write_text("from edl.zoo.digits import data, model as zoo\n")
    source = "from of_the_project import data, zoo\n\ndef model():\n    return zoo()\n"
    (tmp_path / "mine.yaml").write_text(json.dumps({"model": {"source": source}, "training": {"epochs": 1}}))
    done = edl("run", "-f", "mine.yaml", "--set", "workers=1", "--output", "job", check=True)
    assert "Succeeded" in done.stdout
    assert artifacts.SUMMARY in os.listdir("job")
    (tmp_path / "bad.yaml").write_text(json.dumps({"model": {"source": "def model(:\n"}}))
    refused = edl("run", "-f", "bad.yaml")
    assert refused.returncode == 2
    assert "model.source: line 1: invalid syntax" in refused.stderr
