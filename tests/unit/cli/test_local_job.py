# SPDX-License-Identifier: Apache-2.0
"""The end of a job on this machine: what its result and an unexpected end of its master tell the user."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from edl.checkpoints import Store
from edl.cli.local.job import Local
from edl.cli.local.latest import VALUES
from edl.cli.shared import display
from edl.cli.start import local_job
from edl.config import values
from edl.contract import artifacts
from edl.errors import EdlError
from tests.support.checkpoints.checkpoints import write

SUMMARY: dict[str, Any] = {
    "phase": "Stopped",
    "reason": "stopped by SIGINT",
    "seconds": 3.0,
    "traceback": "",
    "records": {"size": None},
    "metrics": {},
    "task": {},
    "goodput_seconds": {},
    "generations": [],
    "state_losses": 0,
}


@pytest.mark.parametrize(
    ("directory", "shown"),
    [
        ("here/runs/new/checkpoints", "runs/new/checkpoints"),
        ("here/runs/old/checkpoints", "runs/old/checkpoints"),  # the job was resumed and continues there
        ("elsewhere/checkpoints", "{root}/elsewhere/checkpoints"),
        ("s3://bucket/here", "s3://bucket/here"),
    ],
)
def test_the_newest_checkpoint_is_named_as_a_command_here_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str, shown: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    place = directory if "://" in directory else str(tmp_path / directory)
    result = display.result({**SUMMARY, "checkpoint": {"step": 7, "dir": place}}, "runs/new", "")
    assert f"  newest    checkpoint of step 7 in {shown.format(root=tmp_path)}\n" in result


def test_the_error_about_a_killed_master_says_how_to_resume_the_job(tmp_path: Path) -> None:
    job = tmp_path / "a job"
    (job / artifacts.LOGS).mkdir(parents=True)
    (job / artifacts.LOGS / "master.log").write_text("first\nlast\n")
    (job / VALUES).write_text(json.dumps({"checkpoint": {"dir": str(job / artifacts.CHECKPOINTS)}}))
    killed = "the master exited unexpectedly (SIGKILL); its last lines:\nfirst\nlast"
    assert local_job.exited(job, -signal.SIGKILL) == killed, "without a checkpoint, it cannot be resumed"
    write(Store.open(str(job / artifacts.CHECKPOINTS)), step=7)
    expected = f"{killed}\nresume the job: edl run --resume '{job}'"
    assert local_job.exited(job, -signal.SIGKILL) == expected
    (job / VALUES).unlink()
    assert local_job.exited(job, 3).startswith("the master exited unexpectedly (exit code 3)")


def test_the_status_of_a_script_names_what_the_script_has_saved_and_no_model(tmp_path: Path) -> None:
    of_script = values.load(sets=["model.script=/train.py"])
    (tmp_path / VALUES).write_text(json.dumps(of_script))
    summary = {**SUMMARY, "phase": "Succeeded", "model": "", "task": {"kind": "train", "epochs": 1}}
    (tmp_path / artifacts.SUMMARY).write_text(json.dumps(summary))
    job = Local(tmp_path).snapshot()
    assert job.notes == ()
    assert "model" not in display.result(job.data, job.kept, job.model)
    for name in ("w.npz", "history.json", ".hidden"):
        (tmp_path / name).touch()
    assert Local(tmp_path).snapshot().notes == ("saved by the script: w.npz",)


def test_no_model_is_copied_from_the_job_of_a_script(tmp_path: Path) -> None:
    of_script = values.load(sets=["mode=horovod,model.script=train.py"])
    (tmp_path / "values.json").write_text(json.dumps(of_script))
    (tmp_path / artifacts.SUMMARY).write_text("{}")
    with pytest.raises(EdlError, match="the job runs a script, which saves its files itself"):
        Local(tmp_path).fetch("keras", tmp_path / "copy.keras")
