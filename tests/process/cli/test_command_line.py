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
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from edl import __version__
from edl.checkpoints import Store
from edl.contract import artifacts
from edl.contract.proto import edl_pb2 as pb
from edl.contract.proto import edl_pb2_grpc as rpc
from edl.contract.steps import Steps
from edl.errors import Unauthenticated
from edl.net.master_client import Client
from tests.support.jobs.evidence import saved_weights

ROOT = Path(__file__).parents[3]
EDL = [str(Path(sys.executable).with_name("edl"))]
LONG = ["counting", "--set", "local.startMethod=fork,workers=2,training.epochs=1000"]


def edl(*arguments: str, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EDL, *arguments], capture_output=True, text=True, check=check, timeout=170, **options
    )


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def a_long_job(*sets: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`edl run` of a job that does not end by itself, once its ring trains."""
    job = subprocess.Popen(
        [*EDL, "run", *LONG, *[f"--set={s}" for s in sets], "--output", "job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.stdout is not None
    try:
        for line in job.stdout:
            if "ring 0 -> " in line:
                break
        yield job, Path("job")
    finally:
        job.terminate()
        job.communicate(timeout=60)


def processes_of(output: Path) -> list[int]:
    """The master and the workers of a job, as the journal names them."""
    pids = [artifacts.read_contact(output).pid]
    for line in (output / artifacts.JOURNAL).read_text().splitlines():
        event = json.loads(line).get("event", {})
        if event.get("type") == "Seen":
            pids.append(int(event["handle"]))
    return pids


def all_gone(pids: list[int], seconds: float = 20) -> bool:
    _, alive = psutil.wait_procs([p for pid in pids if (p := _process(pid))], timeout=seconds)
    return not alive


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


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
        "suspended",
        "starting",
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


def test_the_model_of_a_running_job_is_exported_from_a_checkpoint_that_it_is_asked_for() -> None:
    with a_long_job("checkpoint.dir=checkpoints,checkpoint.seconds=0") as (_, output):
        done = edl("model", "export", str(output), "--output", "early.keras")
        edl("stop", str(output))
    assert done.returncode == 0, done.stderr
    found = re.search(r"early.keras: the model of step ([\d,]+) .* as keras, loaded again", done.stdout)
    assert found is not None, done.stdout
    step = int(found[1].replace(",", ""))
    (counts,) = saved_weights(Path("early.keras"))
    assert counts.sum() == Steps(20_000, 32).begins_at(step) > 0
    refused = edl("model", "export", "job", "--output", "early.keras")
    assert (refused.returncode, refused.stderr) == (
        1,
        "edl: early.keras already exists; choose another --output\n",
    )


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
        assert edl("scale", "3", check=True).stdout == "workers 2 -> 3\n"
        refused = edl("scale", "65")
        assert refused.returncode == 1
        assert "workers is 65 and maxWorkers is 64" in refused.stderr
        assert job.stdout is not None
        assert any("ring 2 -> 3" in line for line in job.stdout)
        pids = processes_of(output)
        following = subprocess.Popen([*EDL, "logs", "--follow"], stdout=subprocess.PIPE, text=True)
        assert following.stdout is not None
        for who in ("master", "worker-0", "worker-1"):
            assert any(line.startswith(f"{who}: ") for line in following.stdout)
        assert edl("wait", "--for", "training").returncode == 0
        late = edl("wait", "--timeout", "3s")
        assert late.returncode == 124
        assert re.match(r"Training: \d workers? \(ring \d+\)", late.stdout), late.stdout
        waiting = subprocess.Popen([*EDL, "wait", "job"], stdout=subprocess.PIPE, text=True)
        refused = edl("stop")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert re.search(r"trained steps? of [\d,]+ would be lost; add --discard", refused.stderr), (
            refused.stderr
        )
        stopped = edl("stop", "--discard", check=True)
        assert stopped.stderr == f"edl: job {output.resolve()} (your only running job)\n"
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
    assert (
        f"no job of yours runs; give an output directory; the last ones were:\nedl:   {output.resolve()}"
        in (unnamed.stderr)
    )
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


def test_scale_takes_the_directory_and_the_number_in_any_order_and_either_number_alone() -> None:
    for asked in (("job", "--servers", "3"), ("job", "3"), ("3", "job")):
        assert edl("scale", *asked).stderr.startswith("edl: job: "), asked
    assert "expected a number of workers ('job' is none), or --servers" in edl("scale", "job").stderr
    assert "neither 'job' nor 'other' is a number" in " ".join(edl("scale", "job", "other").stderr.split())


def test_local_commands_import_nothing_of_a_cluster() -> None:
    program = "import sys, edl.cli.app; sys.exit('lightkube' in sys.modules or 'httpx2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


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
    assert "  next      resume the job: edl run --resume job" in out
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
            "local.startMethod=fork,workers=2,training.epochs=3,export.verify=false",
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["digits", "--set", "training.epoch=3"],
            "training.epoch: unknown key; did you mean training.epochs?",
        ),
        (["digits", "--set", "workers=0.5"], "workers: invalid value 0.5 (expected an integer, at least 0"),
        (["digits", "-f", "nowhere.yaml"], "nowhere.yaml: cannot read"),
        (["./nowhere.py"], "file nowhere.py not found"),
        ([__file__], f"{__file__}: has no function model()."),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    done = edl("run", *arguments, "--output", "job")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("job").exists()


def test_an_output_directory_is_never_used_twice() -> None:
    Path("job").mkdir()
    Path("job/events.jsonl").touch()
    done = edl("run", "digits", "--output", "job")
    assert done.returncode == 1
    assert "already holds a job" in done.stderr


def test_two_jobs_never_run_in_one_directory() -> None:
    with a_long_job() as (_, output):
        values = (output / "values.json").read_text()
        second = edl("run", "digits", "--output", str(output))
        assert second.returncode == 1
        assert second.stderr == "edl: job: another job runs in this directory; choose another --output\n"
        assert (output / "values.json").read_text() == values, "it has changed nothing"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "digit",
            "unknown model 'digit'; did you mean digits? (the zoo has counting, dcn_v2, deepfm, digits,",
        ),
        ("mine", "unknown model 'mine'; did you mean ./mine.py? (the zoo has"),
        ("nonsense", "unknown model 'nonsense'; a file is given by its path, such as ./my_model.py"),
        ("somewhere.else", "module 'somewhere.else' not found on the Python path"),
        ("package.model", "module 'package.model' not found on the Python path"),
        ("json.decoder.more", "module 'json.decoder.more' not found"),
    ],
)
def test_an_unknown_model_is_refused_before_anything_is_imported(model: str, words: str) -> None:
    Path("mine.py").touch()
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise SystemExit('this was imported')\n")
    done = edl("run", model, "--output", "job")
    assert done.returncode == 2
    assert f"edl: model.module: {words}" in done.stderr
    assert not Path("job").exists()


def test_a_dotted_module_is_found_without_importing_it() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise SystemExit('this was imported')\n")
    Path("package/model.py").touch()
    code = "from edl.cli import models; models.check('package.model'); models.check('json.decoder')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_zoo_is_listed_without_tensorflow() -> None:
    listed = edl("zoo", "list", check=True).stdout.splitlines()
    assert (
        "digits      Handwritten digits, 8x8 pixels: 1,797 real images that come with scikit-learn." in listed
    )
    code = "import sys; from edl.cli import models; models.zoo(); sys.exit('keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_and_a_status_without_a_job_say_what_to_do() -> None:
    assert edl("--version", check=True).stdout == f"edl {__version__}\n"
    none = edl("status")
    assert none.returncode == 2
    assert none.stderr.startswith(
        "edl: no job has been started on this machine; start one with `edl run MODEL`"
    )
    empty = edl("status", ".")
    assert empty.stderr == "edl: .: not the output directory of a job (master.json not found)\n"


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
        [*EDL, "master", "counting", "--set", "workers=2,training.epochs=100000000", "--output", "job"],
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


def test_calls_without_the_token_or_of_another_run_are_refused() -> None:
    with a_long_job() as (_, output):
        contact = artifacts.read_contact(output)
        assert oct((output / artifacts.CONTACT).stat().st_mode)[-3:] == "600"
        with pytest.raises(Unauthenticated, match="token is missing or wrong"):
            Client(artifacts.Contact(contact.address, "guess", 0)).stop("no")
        with grpc.insecure_channel(contact.address) as channel:
            stub = rpc.MasterStub(channel)
            calls = {
                "Work": lambda m: list(
                    stub.Work(iter([pb.FromWorker(hello=pb.Hello(worker=9))]), metadata=m)
                ),
                "Watch": lambda m: list(stub.Watch(pb.WatchRequest(), metadata=m)),
                "Scale": lambda m: stub.Scale(pb.ScaleRequest(workers=1), metadata=m),
                "Stop": lambda m: stub.Stop(pb.StopRequest(), metadata=m),
            }
            for metadata in ((), (("authorization", "Bearer guess"),)):
                for name, call in calls.items():
                    with pytest.raises(grpc.RpcError) as refused:
                        call(metadata)
                    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, name
            ours = (("authorization", f"Bearer {contact.token}"),)
            foreign = pb.FromWorker(run_id="another", hello=pb.Hello(worker=0, version="0.2.0"))
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Work(iter([foreign]), metadata=ours))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        before = Client(contact).status()["step"]
        deadline = time.monotonic() + 20
        while Client(contact).status()["step"] == before:
            assert time.monotonic() < deadline, "the job should go on undisturbed"


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
