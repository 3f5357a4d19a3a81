# SPDX-License-Identifier: Apache-2.0
"""Mistakes as they happen: a job that is left alone, called off at once, or started with nonsense.

Each of them ends in a clear message, and no process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from lightkube.config.kubeconfig import KubeConfig
from lightkube.config.models import Cluster, User

from edl.cli import main
from edl.config import values
from edl.contract import artifacts
from edl.contract.phases import WorkerState
from edl.contract.workers import MALLOC
from edl.kubernetes.client import Api
from edl.kubernetes.timing import Timing
from tests.support.jobs.commands import EDL, LONG, a_long_job, all_gone, edl, processes_of
from tests.support.kubernetes.small_server import PLACE

A_Job = Callable[..., Any]
PROXY = dict.fromkeys(
    ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    "http://127.0.0.1:9",  # nothing listens there
)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


# --- `edl run` and its job


def test_a_detached_job_goes_on_and_no_proxy_is_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PROXY.items():
        monkeypatch.setenv(name, value)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    sets = "--set=workers=2,training.epochs=10000000"
    begun = edl("run", "counting", sets, "--output", "job", "--detach", check=True)
    assert begun.stdout == (
        "the job has begun and goes on by itself; its output directory is job\n"
        "to see it: edl status job; to end it: edl stop job\n"
    )
    try:
        assert edl("wait", "--for", "training", "--timeout", "60s").returncode == 0
        assert " of 10000000, " in edl("status", "job", check=True).stdout
        gone = subprocess.Popen([*EDL, "status", "job"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert gone.stdout is not None and gone.stderr is not None
        gone.stdout.close()  # `edl status | true`
        assert gone.stderr.read() == b""
        gone.stderr.close()
        assert gone.wait() in (0, 1)
        pids = processes_of(Path("job"))
        assert len(pids) >= 3
        began = time.monotonic()
    finally:
        stopped = edl("stop", "job", "--discard")
    assert stopped.stdout == "the job is ending\n"
    assert edl("wait", "job", "--for", "stopped", "--timeout", "30s").returncode == 0
    assert time.monotonic() - began < 20
    assert all_gone(pids)
    assert (Path("job") / artifacts.SUMMARY).stat().st_size < 20_000


def test_a_job_ends_with_edl_run_that_is_killed() -> None:
    with a_long_job() as (job, output):
        pids = processes_of(output)
        job.kill()
        assert all_gone(pids)
    summary = json.loads((output / artifacts.SUMMARY).read_text())
    assert summary["phase"] == "Stopped"
    assert re.match(r"`edl run` was ended; its state is in the checkpoint of step \d", summary["reason"])


def test_a_job_whose_edl_run_is_killed_before_its_master_listens_has_ended_too() -> None:
    Path("values.json").write_text(json.dumps(values.load([], ["workers=0"])))
    reads, writes = os.pipe()
    os.close(reads)
    words = ["--values", "values.json", "--output", "job", "--attached", "edl run"]
    with open(writes, "wb") as closed:
        master = [sys.executable, "-m", "edl.master", *words]
        subprocess.run(master, input=b"", stdout=closed, timeout=60)
    assert re.match(r"Stopped after .* s: `edl run` was ended", edl("status", "job", check=True).stdout)


def test_a_job_ends_when_nobody_reads_what_edl_run_says() -> None:
    errors = Path("errors")
    with open(errors, "wb") as log:
        job = subprocess.Popen(
            [*EDL, "run", "counting", *LONG, "--output", "job"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert job.stdout is not None
    assert job.stdout.readline()  # `| head -1`
    pids = processes_of(Path("job"))
    job.stdout.close()
    assert job.wait(60) == 128 + signal.SIGPIPE
    assert all_gone([*pids, *processes_of(Path("job"))])
    assert json.loads(Path("job/summary.json").read_text())["phase"] == "Stopped"
    assert errors.read_text() == ""


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.2])
def test_ctrl_c_in_the_first_second_is_quiet(seconds: float) -> None:
    job = subprocess.Popen(
        [*EDL, "run", "counting", *LONG, "--output", "job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    maps = Path(f"/proc/{job.pid}/maps")
    while "cygrpc" not in maps.read_text():  # it imports what it needs
        time.sleep(0.002)
    time.sleep(seconds)  # the point of this test: any moment is right
    job.send_signal(signal.SIGINT)
    out, errors = job.communicate(timeout=60)
    assert job.returncode == 130, out + errors
    assert "Traceback" not in errors
    assert errors in ("", "stopping the job (interrupt again to kill it)\n")
    here = str(Path.cwd())
    left = [p for p in psutil.process_iter() if p.pid != os.getpid() and _in(p, here)]
    assert not psutil.wait_procs(left, timeout=20)[1]


def _in(process: psutil.Process, folder: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cwd() == folder
    return False


# --- what is wrong with what was typed


class Refused(NamedTuple):
    code: int
    text: str


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Refused]:
    """What the command says against its arguments, in this process: Python need not start for each."""

    def run(*arguments: str, stdin: str = "") -> Refused:
        monkeypatch.setattr("sys.argv", ["edl", *arguments])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        text = capsys.readouterr().err
        assert text.startswith("edl: ")
        assert text.count("\n") == 1, text
        assert text.endswith("\n")
        assert "\x1b" not in text
        assert isinstance(ended.value.code, int)
        return Refused(ended.value.code, text[len("edl: ") : -1])

    return run


def test_an_address_that_is_none_is_told_before_anything_is_written(refused: Callable[..., Refused]) -> None:
    for listen, words in (
        ("127.0.0.1", "expected HOST:PORT, e.g. 127.0.0.1:8500"),
        ("127.0.0.1:99999", "port 99999 is out of range (expected 0 to 65535)"),
    ):
        said = refused("master", "counting", "--listen", listen, "--output", "job")
        assert said == (2, f"--listen {listen}: {words}")
    assert refused("worker", "--master", "nowhere") == (
        2,
        "--master nowhere: expected HOST:PORT, e.g. 127.0.0.1:8500",
    )
    assert refused("worker", "--master", "here:0").code == 2
    assert not Path("job").exists()


def test_an_address_where_nobody_can_listen_leaves_the_directory_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for listen, words in (
            (f"127.0.0.1:{port}", "Address already in use"),
            ("192.0.2.1:0", "Cannot assign requested address"),
        ):
            done = edl("master", "counting", "--listen", listen, "--output", "job")
            assert done.returncode == 2
            assert done.stderr == f"edl master: cannot listen on {listen}: {words}\n"
            assert not Path("job", artifacts.JOURNAL).exists()
            assert not Path("job", artifacts.SUMMARY).exists()


def test_a_name_that_is_too_long_is_told_in_a_line(refused: Callable[..., Refused]) -> None:
    name = "x" * 300
    for arguments in (
        ("run", name),
        ("run", f"./{name}.py"),
        ("run", f"a.{name}"),
        ("run", "counting", "--output", name),
        ("run", "-f", name),
        ("run", f"--set-file=model.source={name}"),
        ("run", f"--set={name}=1"),
        ("status", name),
        ("logs", name),
        ("stop", name),
        ("wait", name),
        ("audit", name),
        ("model", "export", name),
        ("report", name),
        ("rm", name),
        ("status", "--release", name),
        ("run", "\udcff\x1b[2J"),
        ("run", "--set", "workers=\x1b[2J"),
    ):
        assert refused(*arguments).code in (1, 2), arguments
    assert not Path("runs").exists()


def test_values_come_from_standard_input_and_a_model_from_a_file(refused: Callable[..., Refused]) -> None:
    Path("mine.py").write_text("def model(:\n")
    said = refused("run", "-f", "-", stdin="workers: 0.5\n")
    assert said.code == 2
    assert said.text.startswith("workers: invalid value 0.5 (expected an integer, at least 0")
    said = refused("run", "--set-file", "model.source=mine.py")
    assert said.text.startswith("model.source: line 1: invalid syntax")
    assert not Path("runs").exists()


def test_a_closed_standard_output_is_no_error() -> None:
    done = subprocess.run(["sh", "-c", 'exec "$0" --version >&-', *EDL], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- workers


async def test_workers_that_start_end_at_once(a_job: A_Job) -> None:
    async with a_job("elastic.gracePeriodSeconds=60", workers=2, model="stuck.py") as job:
        await job.until(lambda: [w.state for w in job.job.pool] == [WorkerState.INITIALIZING] * 2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        job.kill(0, number=signal.SIGTERM)  # preempted
        ended = await job.until(lambda: job.gone(0))
        assert (ended.code, loop.time() - began < 5) == (0, True)
        await job.until(lambda: 2 in [w.id for w in job.job.pool])
        began = loop.time()
        job.master.stop("enough")
        summary = await job.end()
        assert loop.time() - began < 5, "the grace period is not for workers with nothing to save"
    assert (summary["phase"], summary["failures"]) == ("Stopped", [])


async def test_what_workers_start_ends_with_them(
    a_job: A_Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("PYTHONHASHSEED", "random")

    def said() -> dict[int, dict[str, Any]]:
        found = (tmp_path / "orders").glob("parent-*[0-9]")
        return {int(p.name.partition("-")[2]): json.loads(p.read_text()) for p in found}

    async with a_job(workers=2, model="parent.py") as job:
        members = await job.ring_of(2)
        await job.until(lambda: {job.pid(m) for m in members} <= said().keys())
        here = said()
        assert len({s["hash"] for s in here.values()}) == 1, "all workers make one model"
        assert {s["backend"] for s in here.values()} == {"tensorflow"}
        assert all(MALLOC in psutil.Process(pid).environ() for pid in here), "before the process begins"
        children = {pid: psutil.Process(pid).children(recursive=True) for pid in here}
        assert all(len(found) == 3 for found in children.values()), children
        for child in (c for found in children.values() for c in found):
            blocked = next(
                line.split()[1]
                for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
                if line.startswith("SigBlk:")
            )
            assert not int(blocked, 16) & 1 << (signal.SIGTERM - 1)
        first, second = (job.pid(m) for m in members)
        mine = [psutil.Process(here[first][kind]) for kind in ("forked", "run")]
        for (
            child
        ) in mine:  # the user's code ends a process of its own: the worker must not take it for itself
            child.terminate()
        await job.until(lambda: all(_ended(child) for child in mine))
        await job.stepping()
        assert job.ring == members
        job.kill(members[1])
        await job.until(lambda: job.gone(members[1]))
        assert not psutil.wait_procs(children[second], timeout=10)[1]
        await job.ring_of(2, without=(members[1],))
        left = [c for pid in said() if psutil.pid_exists(pid) for c in psutil.Process(pid).children(True)]
        assert left
        await job.exact()
    assert not psutil.wait_procs([*left, *children[first]], timeout=10)[1]


def _ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


# --- clusters


async def test_a_cluster_on_this_machine_is_asked_without_a_proxy(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PROXY.items():
        monkeypatch.setenv(name, value)
    api = Api(Timing(), KubeConfig.from_one(cluster=Cluster(server=server.url), user=User()))
    try:
        assert "items" in await api.get(PLACE.path("configmaps"))
    finally:
        await api.close()
