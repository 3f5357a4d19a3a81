# SPDX-License-Identifier: Apache-2.0
"""A job that loses everything but its disk goes on from its newest checkpoint, exactly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from edl.checkpoints import Store
from edl.contract import artifacts
from edl.contract.reasons import Reason
from edl.contract.steps import Steps
from edl.journal import audit
from edl.master.core import events as ev
from edl.master.core import view
from edl.net.master_client import Client
from tests.process.conftest import ROOT, Running
from tests.process.jobs.test_saved import A_Job
from tests.support.checkpoints.checkpoints import write
from tests.support.jobs.evidence import check_weights, saved_weights
from tests.support.jobs.small_disk import SmallDisk

pytestmark = pytest.mark.process
EDL = [str(Path(sys.executable).with_name("edl"))]
RECORDS = 3000
MANY = 6000  # so that commands find a job that idles


def newest(job: Running) -> int:
    """The step of the newest checkpoint, as the status tells it."""
    return int(job.status["checkpoint"]["step"])


async def test_when_all_workers_are_killed_at_once_others_go_on_from_the_newest_checkpoint(
    a_job: A_Job, tmp_path: Path
) -> None:
    where = tmp_path / "checkpoints"
    async with a_job(f"checkpoint.dir={where}", "checkpoint.seconds=2", workers=3, records=RECORDS) as job:
        first = await job.ring_of(3)
        for _ in range(2):  # and then again
            before = newest(job)
            await job.until(lambda before=before: before < newest(job) < job.status["step"] - 3)
            lost, at_least = job.ring or first, newest(job)
            job.kill(*lost)
            first = await job.ring_of(3, without=lost)
            assert job.status["task"]["step"] >= at_least
        summary = await job.exact()
    assert summary["state_losses"] == 2
    told = job.noticed(Reason.StateLost)
    assert all("the job goes on from the checkpoint of step" in text for text in told), told
    assert len(job.noticed(Reason.Restored)) == 2
    steps = summary["task"]["steps_done"]
    kept = Store.open(str(where)).checkpoints()
    assert len(kept) == 3 and kept[-1].step == steps == summary["checkpoint"]["step"]
    for checkpoint in kept:
        checkpoint.verify()


async def test_scaled_to_zero_and_back_nothing_is_lost(a_job: A_Job, tmp_path: Path) -> None:
    where = tmp_path / "checkpoints"
    async with a_job(f"checkpoint.dir={where}", "checkpoint.seconds=1000", workers=2, records=RECORDS) as job:
        await job.ring_of(2)
        await job.stepping()
        job.master.emit(ev.Scale(0))
        await job.until(lambda: not any(True for _ in job.job.pool))
        assert job.status["phase"] == "Suspended"
        assert (kept := newest(job)) >= max(1, job.status["task"]["step"])
        job.master.emit(ev.Scale(1))
        await job.ring_of(1)
        assert job.status["task"]["step"] >= kept
        summary = await job.exact()
    assert summary["state_losses"] == 0
    assert job.noticed(Reason.Restored)


async def test_a_job_at_its_deadline_fails_with_its_state_in_a_checkpoint(
    a_job: A_Job, tmp_path: Path
) -> None:
    where = tmp_path / "checkpoints"
    async with a_job(f"checkpoint.dir={where}", "checkpoint.seconds=0", workers=2, records=RECORDS) as job:
        await job.ring_of(2)
        await job.stepping()
        job.master.emit(ev.Live(2, 1, False, job.job.epochs, active_deadline_seconds=1))
        await job.until(lambda: job.job.ended)
        summary = view.summary(job.job)
    assert summary["phase"] == "Failed" and "DeadlineExceeded: the job has been active" in summary["reason"]
    (kept,) = Store.open(str(where)).checkpoints()
    assert kept.step == summary["step"] == summary["task"]["steps_done"] > 0
    assert f"its state is in the checkpoint of step {kept.step:,}" in summary["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
async def test_a_full_disk_is_told_and_the_training_goes_on(a_job: A_Job, tmp_path: Path) -> None:
    where = tmp_path / "checkpoints"
    disk = SmallDisk(where, mebibytes=1)
    try:
        async with a_job(
            f"checkpoint.dir={where}", "checkpoint.seconds=0.5", workers=2, records=RECORDS
        ) as job:
            await job.ring_of(2)
            await job.until(lambda: newest(job))
            disk.fill()
            why = await job.until(lambda: job.status["degraded"].get("writing checkpoints"))
            assert (
                "No space left on device" in why and "the training goes on, the newest one is of step" in why
            )
            await job.stepping()
            kept = Store.open(str(where)).newest(pytest.fail)
            assert kept is not None and kept.step == newest(job)
            disk.make_room()
            await job.until(lambda: not job.status["degraded"])
            assert newest(job) > kept.step
            await job.exact()
        assert job.noticed(Reason.Recovered) == ["writing checkpoints works again"]
    finally:
        disk.unmount()


class Jobs:
    """Runs of one job as people start them, one after the other."""

    def __init__(self, directory: Path):
        self.directory, self.orders, self.count = directory, directory / "orders", 0
        self.orders.mkdir()
        self.environment = {
            **os.environ,
            "EDL_FAULTS": str(self.orders),
            "EDL_COUNTING_RECORDS": str(MANY),
            "XDG_STATE_HOME": str(directory / "state"),
        }

    def idle(self, idle: bool) -> None:
        (self.orders / "idle").touch() if idle else (self.orders / "idle").unlink(missing_ok=True)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*EDL, *arguments], capture_output=True, text=True, env=self.environment, timeout=170
        )

    @contextmanager
    def run(self, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """`edl run` in a new output directory."""
        self.count += 1
        output = self.directory / f"run-{self.count}"
        job = subprocess.Popen(
            [*EDL, "run", *arguments, "--output", str(output)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        )
        with job:
            try:
                yield job, output
            finally:
                job.kill()


def read_until(job: subprocess.Popen[str], words: str) -> str:
    """What it prints up to the line with these words."""
    assert job.stdout is not None
    said = ""
    for line in job.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it never said {words!r}:\n{said}")


def kill_all(output: Path) -> None:
    """The master and all of its workers, with SIGKILL, at once."""
    master = psutil.Process(artifacts.read_contact(output).pid)
    for process in [master, *master.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def several_more(output: Path) -> bool:
    """Wait until the job has written several more checkpoints."""
    seen = set()
    for status in Client(artifacts.read_contact(output)).follow(60):
        seen.add(status["checkpoint"]["step"])
        if len(seen) > 4:
            return True
    return False


def the_model_of_a_running_job_is_exported(jobs: Jobs, output: Path, to: Path) -> None:
    """It comes from a checkpoint that the job is asked for."""
    done = jobs.command("model", "export", str(output), "--output", str(to))
    found = re.search(r"early.keras: the model of step ([\d,]+) .* as keras, loaded again", done.stdout)
    assert found is not None, done.stdout + done.stderr
    (counts,) = saved_weights(to)
    assert counts.sum() == Steps(MANY, 32).begins_at(int(found[1].replace(",", ""))) > 0


@pytest.mark.timeout(360)  # eight processes, one after the other, import TensorFlow
def test_a_job_is_resumed_after_a_stop_and_after_a_kill_of_everything_with_other_workers_and_epochs(
    tmp_path: Path,
) -> None:
    jobs, where = Jobs(tmp_path), tmp_path / "checkpoints"
    jobs.idle(True)
    model = str(ROOT / "tests" / "models" / "counting_faulty.py")
    sets = f"workers=3,training.epochs=2,checkpoint.dir={where},checkpoint.seconds=0"
    with jobs.run(model, "--set", sets) as (job, first):
        read_until(job, "ring 0 -> ")
        assert "a checkpoint is written to" in jobs.command("checkpoint", "create", str(first)).stdout
        read_until(job, "the checkpoint of step")
        assert json.loads(jobs.command("status", str(first), "-o", "json").stdout)["checkpoint"]["step"] > 0
        the_model_of_a_running_job_is_exported(jobs, first, tmp_path / "early.keras")
        stopped = jobs.command("stop", str(first), "--checkpoint")
        assert stopped.returncode == 0, stopped.stderr
        read_until(job, "Stopped after")
    summary = artifacts.read_summary(first)
    last = summary["checkpoint"]["step"]
    assert (
        last == summary["step"] > 0 and f"; its state is in the checkpoint of step {last:,}" in stopped.stdout
    )

    # Others are refused by name, before anything begins.
    refused = jobs.command("run", model, "--set", sets, "--output", str(tmp_path / "no"))
    assert refused.returncode == 2 and "holds checkpoints of another run" in refused.stderr
    refused = jobs.command("run", "--resume", str(first), "--set", "training.batchSize=16")
    assert refused.returncode == 2 and "training.batchSize is 16, and the checkpoint" in refused.stderr

    often = "workers=2,checkpoint.seconds=0.1"
    with jobs.run("--resume", str(first), "--set", often) as (job, second):
        said = read_until(job, "the checkpoint of step")
        assert f"the state of step {last:,} is restored from" in said
        assert several_more(second)
        kill_all(second)  # most of the time one is being written

    jobs.idle(False)
    copy = tmp_path / "copied" / "the same model.py"
    copy.parent.mkdir()
    copy.write_text(Path(model).read_text())
    shutil.copy(Path(model).with_name("orders.py"), copy.parent)
    other = ("--resume", str(second), "--set", f"workers=1,training.epochs=3,model.module={copy}")
    refused = jobs.command("run", *other)
    assert refused.returncode == 2 and "goes on all the same" in refused.stderr, refused
    with jobs.run(*other, "--force") as (job, third):
        assert job.stdout is not None
        said = job.stdout.read()
        assert job.wait() == 0, said
    (forced,) = artifacts.read_summary(third)["forced"]
    assert forced.startswith(f"model.module '{model}' -> '{copy}' at step ") and f"; forced: {forced}" in said
    assert check_weights(third / artifacts.MODEL, MANY, 3) == ""
    proved = audit.audit(third)
    assert "exactly once" in proved and "of the checkpoint that it went on from" in proved

    # By no force any more; it is complete: only saved again.
    with jobs.run("--resume", str(third)) as (job, fourth):
        assert job.stdout is not None
        said = job.stdout.read()
        assert job.wait() == 0, said
    assert check_weights(fourth / artifacts.MODEL, MANY, 3) == ""

    # A training of its own begins with these weights: they say how often each record is in them, in all.
    begins = f"workers=2,training.epochs=1,training.seed=9,initFrom.path={where}"
    with jobs.run(model, "--set", begins) as (job, fifth):
        assert job.stdout is not None
        said = job.stdout.read()
        assert job.wait() == 0, said
    assert "the training begins with the weights of the checkpoint of step" in said
    assert check_weights(fifth / artifacts.MODEL, MANY, 4) == ""
    summary = artifacts.read_summary(fifth)
    assert summary["records"]["applied"] == MANY and str(where) in summary["began_with"]
    # From checkpoints alone, by their step; and the trained model in a different format.
    late = tmp_path / "late.keras"
    last = Store.open(str(where)).checkpoints()[-1].step
    done = jobs.command("model", "export", str(where), "--step", str(last), "--output", str(late))
    assert (done.returncode, check_weights(late, MANY, 3)) == (0, ""), done.stderr
    served = tmp_path / "served"
    done = jobs.command("model", "export", str(fourth), "--format", "savedmodel", "--output", str(served))
    assert f"{served}: the trained model as savedmodel, loaded again" in done.stdout, done.stderr
    refused = jobs.command("model", "export", str(fourth), "--format", "savedmodel", "--output", str(served))
    assert (refused.returncode, "already exists; choose another" in refused.stderr) == (1, True)
    refused = jobs.command(
        "model", "export", str(where), "--step", "7", "--output", str(tmp_path / "7.keras")
    )
    assert "neither a job's output directory nor a whole checkpoint of step 7" in refused.stderr


def test_a_start_from_nothing_or_from_another_model_ends_before_the_first_step(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    (tmp_path / "values.json").write_text("{}")
    refused = jobs.command("run", "--resume", str(tmp_path))
    assert refused.returncode == 2 and "no checkpoint to resume from" in refused.stderr
    nothing = jobs.command("run", "digits", "--set", f"initFrom.path={tmp_path / 'none'}")
    assert nothing.returncode == 2 and "initFrom.path" in nothing.stderr, nothing
    assert "no whole checkpoint found" in nothing.stderr
    write(Store.open(str(tmp_path / "other")), 7)
    sets = f"workers=1,initFrom.path={tmp_path / 'other'}"
    refused = jobs.command("run", "counting", "--set", sets, "--output", str(tmp_path / "out"))
    assert refused.returncode == 1, refused
    assert f"count/count is float32 [{MANY}] here, and missing there" in refused.stdout
