# SPDX-License-Identifier: Apache-2.0
"""`edl plan` of a real job, compared with the journal of its short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edl.cli.tools.plan import MIN_STEPS
from edl.contract import artifacts
from edl.report import reading
from tests.process.cli.test_chaos import events
from tests.support.jobs.cgroups import limited
from tests.support.jobs.commands import EDL, all_gone, processes_of
from tests.unit.cli.test_output import documented, fields

SECONDS = 1
# The plan takes values of its own for the first two. A busy machine delays heartbeats.
SETS = "checkpoint.dir=elsewhere,training.epochs=1,elastic.heartbeatTimeoutSeconds=10"


def effects(output: Path) -> list[dict[str, Any]]:
    lines = (output / artifacts.JOURNAL).read_text().splitlines()
    return [effect for line in lines for effect in json.loads(line).get("effects", ())]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The directory of a plan's short run, and the plan."""
    where = tmp_path_factory.mktemp("plan") / "job"
    options = ["--max-workers=2", f"--seconds={SECONDS}s", "--mtbf=1h", f"--output={where}", "-o", "json"]
    environment = os.environ | {"XDG_STATE_HOME": str(where.parent / "state")}
    line = [*EDL, "plan", "digits", f"--set={SETS}", *options]
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env=environment, cwd=where.parent
    )
    assert done.returncode == 0, done.stderr
    return where, json.loads(done.stdout)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def test_a_plan_says_what_the_journal_of_its_run_says(planned: tuple[Path, dict[str, Any]]) -> None:
    where, told = planned
    assert (told["kind"], fields(told)) == ("Plan", documented("Plan"))
    assert (told["model"], told["run"], told["assumed"]["mtbf_seconds"]) == ("digits", str(where), 3600)
    assert all_gone(processes_of(where))
    assert artifacts.read_summary(where)["phase"] == "Stopped"
    assert not (where.parent / "elsewhere").exists()

    timeline = reading.read(where)
    assert [len(change.members) for change in timeline.changes] == [1, 2, 1, 2]
    formed = [effect for effect in effects(where) if effect["type"] == "Form"]
    alone, both = (speed["steps_per_second"] for speed in told["speeds"])
    begun = timeline.changes[0].stepped
    assert begun is not None
    # It was measured between the first step and the next ring.
    assert MIN_STEPS / (timeline.changes[1].formed - begun) < alone <= formed[1]["step"] / SECONDS
    assert formed[2]["step"] - formed[1]["step"] >= SECONDS * both
    assert [speed["workers"] for speed in told["speeds"]] == [1, 2]

    killed = told["preemption"]
    ends = [event.get("signal") for event in events(where, "Gone")]  # others have an exit code
    assert ends.count("SIGKILL") == 1
    assert killed["stall_seconds"] == sum(change.stall for change in timeline.changes[2:]) > 0
    assert killed["redone_records"] == sum(change.redone for change in timeline.changes[2:])
    lasted = timeline.changes[3].formed - timeline.changes[2].noticed
    assert lasted < killed["recovered_seconds"] < lasted + 30

    written = events(where, "Checkpointed")
    assert 1 <= told["checkpoint"]["count"] <= len(written)
    # Not of the last one: their sizes differ by the digits of the step.
    assert told["checkpoint"]["bytes"] in {checkpoint["nbytes"] for checkpoint in written}
    assert told["values"]["checkpoint"]["seconds"] >= 10
    assert told["worker_bytes"] > 100 << 20, "a process with TensorFlow"


def test_a_pod_with_the_recommended_memory_trains_saves_and_verifies_the_model(
    planned: tuple[Path, dict[str, Any]],
) -> None:
    """Real are the limit, the master and a pod's supervisor with its worker and the verifying process.

    The peak lacks the files of TensorFlow, 380 MiB, if they were in the page cache before.
    """
    limit = int(planned[1]["values"]["worker"]["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    sets = "--set=workers=1,training.epochs=3,elastic.prefork=true,elastic.heartbeatTimeoutSeconds=10"
    with ExitStack() as stack:
        try:
            cgroup = stack.enter_context(limited(limit))
        except OSError as error:
            pytest.skip(f"cgroups with a memory limit cannot be made here: {error}")
        master = subprocess.Popen(
            [*EDL, "master", "digits", sets, "--listen=127.0.0.1:0", "--output=job"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(master.kill)
        while not Path("job", artifacts.CONTACT).exists():
            assert master.poll() is None
            time.sleep(0.02)
        contact = artifacts.read_contact(Path("job"))
        pod = subprocess.Popen(
            [sys.executable, "-m", "edl.trainer.supervisor"],
            env=os.environ
            | {"EDL_MASTER": contact.address, "EDL_TOKEN": contact.token, "EDL_WORKER_ID": "0"},
            preexec_fn=cgroup.enter,
        )
        assert master.wait() == 0
        pod.wait()
        print(f"limit {limit >> 20} MiB, peak {cgroup.peak >> 20} MiB")
        assert cgroup.kills == 0
    assert artifacts.read_summary(Path("job"))["phase"] == "Succeeded"
    (listed,) = json.loads(Path("job", artifacts.EXPORTS).read_text())["exports"]
    assert listed["verified"]


def test_the_short_run_ends_with_a_plan_that_is_killed() -> None:
    plan = subprocess.Popen(
        [*EDL, "plan", "counting", f"--set={SETS}", "--max-workers=1", "--output=job"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not Path("job", artifacts.CONTACT).exists():  # its master listens
        assert plan.poll() is None
        time.sleep(0.02)
    pids = processes_of(Path("job"))
    plan.kill()
    plan.wait()
    assert all_gone(pids)
    assert artifacts.read_summary(Path("job"))["reason"].startswith("`edl plan` was ended")
