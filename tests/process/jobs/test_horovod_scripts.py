# SPDX-License-Identifier: Apache-2.0
"""`edl horovod`: scripts that were written for Horovod, as real jobs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edl.contract import artifacts
from tests.process.faults.test_killed_masters import EPOCHS, RECORDS, External, in_ring_of
from tests.support.jobs.by_commit import of_this_commit
from tests.support.jobs.evidence import check_weights

SCRIPTS = Path(__file__).parents[2] / "models"
# A busy machine may keep a worker from sending heartbeats for seconds.
SETTINGS = "elastic.heartbeatTimeoutSeconds=60"
EDL = str(Path(sys.executable).with_name("edl"))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> tuple[dict[str, Any], list[str]]:
    """Run `edl horovod`; returns the job's summary, and each worker's log."""
    line = [EDL, "horovod", "--output-filename", "job", "--set", SETTINGS, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=170)
    logs = [log.read_text() for log in sorted(Path("job/logs").glob("worker-*.log"))]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    return json.loads(Path("job/summary.json").read_text()), logs


def check_ranks(*flags: str) -> None:
    """Ranks of a plain script train as one process, and start again when one dies."""
    summary, logs = run(*flags, "-np", "2", "--gloo", "python", str(SCRIPTS / "horovod_equal.py"))
    assert summary["reason"] == "the script has ended on all workers"
    assert summary["workers_created"] == 4, "both workers must start again"
    assert [len(Path(f"attempt-{rank}").read_text()) for rank in (0, 1)] == [2, 2]
    assert ["all are right" in log for log in logs] == [False, False, True, True]
    assert ["on Keras 2" in log for log in logs[2:]] == ["--legacy-keras" in flags] * 2


def test_ranks_of_a_plain_script_train_as_one_process_and_start_again_when_one_dies() -> None:
    check_ranks()


def test_survivors_of_a_kill_restore_the_last_commit_and_a_new_worker_joins() -> None:
    summary, logs = run("-np", "2", "--min-np", "1", str(SCRIPTS / "horovod_elastic.py"))
    assert summary["failures"] == [] and summary["state_losses"] == 0
    broken = [change for change in summary["generations"] if not change["planned"]]
    assert [change["step"] for change in broken] == [19], "the step of the dead rank was not committed"
    survivors = [log for log in logs if "in a ring of 1 at step 19" in log]
    assert len(survivors) == 1 and "ended in a ring of" in survivors[0]


WRITTEN_FOR_HOROVOD = SCRIPTS / "horovod_scripts"
# Scripts, and the last words of rank 0 on two workers.
TO_THE_END = (
    ("tape.py", "step 40: loss"),
    ("fit.py --fp16-allreduce", "Epoch 24/24"),
    ("speed.py", "images/s on 2 GPU(s)"),
    ("fit_elastic.py", "Epoch 24/24"),
    ("speed.py --elastic --fp16-allreduce", "images/s on 2 GPU(s)"),
)


@pytest.mark.parametrize(("script", "words"), of_this_commit(TO_THE_END))
def test_a_script_written_for_horovod_runs_to_its_end(script: str, words: str) -> None:
    flags = ["--min-np", "2"] if "elastic" in script else []
    summary, logs = run("-np", "2", *flags, *f"{WRITTEN_FOR_HOROVOD}/{script}".split())
    assert (summary["reason"], summary["failures"]) == ("the script has ended on all workers", [])
    assert {len(change["members"]) for change in summary["generations"]} == {2}
    assert words in logs[0], "the last words of rank 0"


def a_loop_goes_on_when_a_worker_leaves_and_too_few_are_left() -> None:
    """Horovod's issue 3494: the others do not synchronize their state, and a new worker waits for ever."""
    grace = ["--set", "elastic.gracePeriodSeconds=2"]  # then it does not wait for its successor
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDL_TEST_SIGNAL", "SIGTERM 10")
        script = str(WRITTEN_FOR_HOROVOD / "tape_elastic.py")
        summary, logs = run("-np", "2", "--min-np", "2", *grace, script)
    assert summary["failures"] == [] and summary["workers_created"] == 3
    rings = [change["members"] for change in summary["generations"]]
    assert {len(ring) for ring in rings} == {2} and 2 in rings[-1]
    assert any("step 40: loss" in log for log in logs), "50 steps on two workers"
    assert Path("checkpoints-1.index").exists()


def ranks_of_a_script_of_keras_2_train_as_one_process() -> None:
    check_ranks("--legacy-keras")


def fit_goes_on_with_keras_2_when_a_worker_is_killed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDL_TEST_SIGNAL", "SIGKILL 10")
        script = str(WRITTEN_FOR_HOROVOD / "fit_elastic.py")
        summary, logs = run("--legacy-keras", "-np", "2", "--min-np", "1", script)
    assert (summary["reason"], summary["failures"]) == ("the script has ended on all workers", [])
    broken = [change for change in summary["generations"] if not change["planned"]]
    assert len(broken) == 1, "one worker was killed; the second one may have joined late, which is planned"
    assert all("Keras is tf_keras" in log for log in logs[:2])


def outlives_its_master(sets: str) -> Path:
    """Kill masters and workers of a script that two workers run; returns the output directory.

    The script goes on until the order to idle is taken back.
    """
    job = External(Path.cwd())

    def start_master() -> subprocess.Popen[bytes]:
        values = f"workers=2,elastic.heartbeatTimeoutSeconds=20,elastic.masterOutageTimeoutSeconds=90,{sets}"
        output = ["--listen", job.address, "--output", str(job.output)]
        return job.start("master", "master", "--set", values, *output)

    try:
        master = start_master()
        job.until(lambda s: s["phase"] == "Starting")
        workers = [job.start_worker() for _ in range(2)]
        job.until(lambda s: in_ring_of(s, 2) and s["step"] > s["last_change"]["step"])
        before = job.status()
        for _ in range(2):
            master.kill()
            master.wait()
            master = start_master()
            job.until(lambda s: s["phase"] == "Training")
        assert job.status()["generation"] == before["generation"], "the ring has gone on"
        master.kill()
        master.wait()
        workers[1].kill()
        master = start_master()
        job.until(lambda s: in_ring_of(s, 1))
        job.start_worker()
        job.until(lambda s: in_ring_of(s, 2))
        workers[0].send_signal(signal.SIGTERM)
        job.until(lambda s: in_ring_of(s, 1))
        job.orders.go()
        assert master.wait(120) == 0
        summary = json.loads((job.output / artifacts.SUMMARY).read_text())
        assert (summary["phase"], summary["state_losses"]) == ("Succeeded", 0)
    finally:
        for process in job.processes:
            process.kill()
            process.wait()
        for log in sorted(Path.cwd().glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
    return job.output


def an_elastic_script_outlives_its_master() -> None:
    """Horovod's issue 2653: its driver must not die."""
    outlives_its_master(f"mode=horovod,horovod.elastic=true,model.script={SCRIPTS / 'horovod_idle.py'}")
    assert sum("exact" in log.read_text() for log in Path.cwd().glob("worker-*.log")) == 1


def an_own_loop_outlives_its_master() -> None:
    output = outlives_its_master(f"training.epochs={EPOCHS},model.script={SCRIPTS / 'counting_loop.py'}")
    assert check_weights(output / artifacts.MODEL, RECORDS, EPOCHS) == ""


SCENARIOS = (
    ranks_of_a_script_of_keras_2_train_as_one_process,
    fit_goes_on_with_keras_2_when_a_worker_is_killed,
    a_loop_goes_on_when_a_worker_leaves_and_too_few_are_left,
    an_elastic_script_outlives_its_master,
    an_own_loop_outlives_its_master,
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scenario", of_this_commit(SCENARIOS), ids=lambda of: of.__name__)
def test_scripts_under_faults(scenario: Callable[[], None]) -> None:
    scenario()
