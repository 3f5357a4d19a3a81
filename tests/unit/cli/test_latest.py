# SPDX-License-Identifier: Apache-2.0
"""Which job a command without a directory means; the list of jobs, and the removal of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edl.cli.app import app
from edl.cli.jobs import listing
from edl.cli.local import job_values, latest
from edl.cli.local.job import Local
from edl.cli.shared.jobs import in_short, unsaved
from edl.cli.shared.output import Form
from edl.contract import artifacts
from edl.errors import ConfigError, EdlError
from edl.master.core import events as ev
from edl.master.core import view
from tests.support.jobs.journals import keep, whole_story
from tests.support.jobs.stories import Story

EDL = "edl status -o json"  # the command that was entered
ENDED = 2**22  # of no process: Linux has none of greater ids


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("sys.argv", ["edl", "status", "-o", "json"])


def a_job(output: Path, started: int, pid: int | None = None) -> Path:
    """A job's output directory; the job runs if a process id is given."""
    output.mkdir(parents=True)
    (output / latest.VALUES).touch()
    os.utime(output / latest.VALUES, (started, started))
    (output / artifacts.JOURNAL).touch()
    if pid is None:
        (output / artifacts.SUMMARY).touch()
    else:
        artifacts.write_contact(output, artifacts.Contact("127.0.0.1:1", "token", pid))
    latest.remember(output)
    return output


def test_the_newest_job_of_the_current_folder_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_job(tmp_path / "elsewhere", started=9, pid=os.getpid())
    a_job(Path("runs/b-first"), started=3, pid=os.getpid())
    second = a_job(Path("runs/a-second"), started=5)
    (Path("runs") / "no-job").mkdir()
    assert latest.find(None) == second
    assert capsys.readouterr() == ("", "edl: job runs/a-second (the newest under runs)\n")
    assert latest.find(Path("named")) == Path("named")
    assert capsys.readouterr() == ("", "")


def test_else_the_only_running_job_is_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_job(tmp_path / "crashed", started=8, pid=ENDED)
    a_job(tmp_path / "ended", started=9)
    running = a_job(tmp_path / "running", started=1, pid=os.getpid())
    assert latest.find(None) == running
    assert capsys.readouterr() == ("", f"edl: job {running} (your only running job)\n")


def test_else_the_jobs_that_could_be_meant_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no job has been started on this machine"):
        latest.find(None)
    ended, crashed = a_job(tmp_path / "ended", started=2), a_job(tmp_path / "crashed", started=1, pid=ENDED)
    with pytest.raises(ConfigError, match=r"no job under runs here, and no job of yours runs") as refused:
        latest.find(None)
    assert str(refused.value).splitlines()[1:] == [f"  {EDL} {ended}", f"  {EDL} {crashed}"], "newest first"
    first, second = (a_job(tmp_path / name, started, os.getpid()) for name, started in (("x", 3), ("y", 4)))
    with pytest.raises(ConfigError, match=r"no job under runs here; 2 running jobs of yours:") as refused:
        latest.find(None)
    assert str(refused.value).splitlines()[1:] == [f"  {EDL} {second}", f"  {EDL} {first}"]


# The commands that change a job, with the arguments that each needs.
CHANGING = ("stop", "stop --discard", "scale 3", "scale --servers 2", "checkpoint create", "model export")


@pytest.mark.parametrize("command", [*CHANGING, "chaos --faults 1", "rm"])
def test_a_command_that_changes_a_job_takes_none_of_a_different_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    elsewhere = tmp_path / "else where"
    a_job(elsewhere, started=9, pid=None if command == "rm" else os.getpid())
    words = command.split()
    monkeypatch.setattr("sys.argv", ["edl", *words])
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, ConfigError), "exit code 2"
    assert str(refused).endswith(
        f"1 {'ended' if command == 'rm' else 'running'} job of yours:\n  edl {command} '{elsewhere}'"
    )
    (tmp_path / "state").rename(tmp_path / "no state")
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, ConfigError) and "\n" not in str(refused), "without candidates"


@pytest.mark.parametrize("command", CHANGING)
def test_a_command_that_changes_a_job_takes_the_newest_of_its_folder(command: str) -> None:
    a_job(Path("runs/mine"), started=1)
    a_job(Path("elsewhere"), started=9, pid=os.getpid())
    told = CliRunner().invoke(app, command.split())
    assert "edl: job runs/mine (the newest under runs)\n" in told.stderr


@pytest.mark.parametrize("command", ["chaos", "rm"])
def test_faults_and_removal_need_the_name_of_their_job(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    mine = a_job(Path("runs/mine"), started=1, pid=None if command == "rm" else os.getpid()).resolve()
    monkeypatch.setattr("sys.argv", ["edl", command])
    refused = CliRunner().invoke(app, [command]).exception
    assert isinstance(refused, ConfigError) and str(refused).endswith(f"\n  edl {command} {mine}")
    assert mine.exists()


def test_each_command_about_a_job_is_one_that_reads_or_one_that_changes() -> None:
    """A new command must say here which it is."""
    reading = {
        "status",
        "logs",
        "wait",
        "audit",
        "replay",
        "report",
        "ui",
        "token",
        "model get",
        "rows export",
    }
    named = {words.partition(" --")[0].removesuffix(" 3") for words in (*CHANGING, "chaos", "rm")}
    found = {}
    for path, command in commands(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.name == "directory" and "job directory" in (parameter.help or "").lower():
                found[path] = "running job" in parameter.help
    assert {path for path, guesses in found.items() if guesses} == reading
    assert {path for path, guesses in found.items() if not guesses} == named


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all commands of a group, each with its words."""
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{path} {name}".strip())
    if path and not hasattr(command, "commands"):
        yield path, command


def test_a_directory_that_was_removed_is_forgotten(tmp_path: Path) -> None:
    a_job(tmp_path / "removed", started=1).rename(tmp_path / "renamed")
    with pytest.raises(ConfigError, match=r"no job has been started"):
        latest.find(None)
    assert list((tmp_path / "state" / "edl" / "jobs").iterdir()) == []


def test_a_user_without_a_home_directory_names_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    a_job(Path("job"), started=1, pid=os.getpid())
    with pytest.raises(ConfigError, match=r"no job has been started"):
        latest.find(None)


def test_a_changing_command_names_its_job_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job(tmp_path / "named", started=1, pid=os.getpid())
    Local(job).announce()
    assert capsys.readouterr().err == f"edl: job {job}\n"
    Local(None).announce()
    assert capsys.readouterr().err == f"edl: job {job} (your only running job)\n"


# --- edl list


def test_all_jobs_are_listed_the_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing.list_jobs()
    assert capsys.readouterr().out == "no job has been started on this machine\n"
    ended = a_job(tmp_path / "ended", started=2)
    keep(whole_story(), ended)
    here = a_job(Path("runs/here"), started=3, pid=ENDED).resolve()
    silent = a_job(tmp_path / "silent", started=4, pid=os.getpid())
    listing.list_jobs(form=Form.json)
    rows = json.loads(capsys.readouterr().out)["items"]
    assert [row.pop("directory") for row in rows] == [str(silent), str(here), str(ended)]
    unknown, crashed, succeeded = rows
    assert unknown["phase"] == "Unknown" and "does not answer" in unknown["progress"]
    assert (crashed["phase"], crashed["progress"]) == ("NoMaster", "its master left no summary.json")
    assert succeeded == {
        "started": "1970-01-01T00:00:02+00:00",
        "phase": "Succeeded",
        "reason": artifacts.read_summary(ended)["reason"],
        "progress": "step 10 of 10",
        "workers": 0,
    }
    listing.list_jobs()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == [str(silent), "runs/here", str(ended)]


def test_a_running_job_is_listed_with_its_progress_and_members() -> None:
    story = Story(workers=2).running()
    status = view.status(story.job, story.now)
    assert in_short(status) == {
        "phase": "Training",
        "reason": status["reason"],
        "progress": "step 0 of 10",
        "workers": len(story.job.ring.members),
    }
    fresh = Story(workers=2)
    told = in_short(view.status(fresh.job, fresh.now))
    assert (told["phase"], told["workers"]) == ("Starting", 0)


# --- edl rm


def test_an_ended_job_is_removed_and_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job(tmp_path / "ended", started=2)
    keep(whole_story(), job)
    (job / artifacts.LOGS).mkdir()
    (job / artifacts.LOGS / "worker-0.log").touch()
    listing.rm(job)
    assert not job.exists() and latest.known() == []
    assert not list((tmp_path / "state" / "edl" / "jobs").iterdir())
    assert capsys.readouterr() == (f"removed {job}\n", f"edl: job {job}\n")


def test_files_that_are_not_the_jobs_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job(tmp_path / "project", started=2)
    (job / "my_model.py").touch()
    (tmp_path / "logs elsewhere").mkdir()
    (tmp_path / "logs elsewhere" / "log").touch()
    (job / artifacts.LOGS).symlink_to(tmp_path / "logs elsewhere")
    listing.rm(job)
    assert [path.name for path in job.iterdir()] == ["my_model.py"]
    assert (tmp_path / "logs elsewhere" / "log").exists(), "the target of a link is not the job's"
    assert capsys.readouterr().out.endswith("because it holds other files: my_model.py\n")
    with pytest.raises(ConfigError, match=r"not the output directory of a job"):
        listing.rm(job)


def test_checkpoints_are_removed_unless_a_resumed_job_uses_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, resumed = a_job(tmp_path / "first", started=2), a_job(tmp_path / "resumed", started=3)
    where = first / artifacts.CHECKPOINTS
    (where / "step-000000000007").mkdir(parents=True)
    for job in (first, resumed):
        (job / latest.VALUES).write_text(json.dumps({"checkpoint": {"dir": str(where)}}))
    latest.remember(resumed)
    listing.rm(first)
    assert [path.name for path in first.iterdir()] == [artifacts.CHECKPOINTS]
    assert capsys.readouterr().out == f"removed the job; kept {where}, which the job {resumed} uses\n"
    (first / latest.VALUES).write_text("{}")
    listing.rm(resumed)
    listing.rm(first)
    assert not first.exists()


def test_a_job_writes_checkpoints_to_its_output_directory_unless_a_place_is_given(tmp_path: Path) -> None:
    local = job_values.local_checkpoints(tmp_path / "job", {"keep": 5})
    where = str(tmp_path / "job" / artifacts.CHECKPOINTS)
    assert local == {"checkpoint": {"dir": where, "seconds": job_values.LOCAL_SECONDS}}
    assert job_values.local_checkpoints(tmp_path / "job", {"dir": ""}) == {}


def test_a_running_job_is_not_removed(tmp_path: Path) -> None:
    job = a_job(tmp_path / "running", started=2, pid=os.getpid())
    lock = artifacts.lock(job)
    with pytest.raises(EdlError, match=r"the job runs; end it with `edl stop"):
        listing.rm(job)
    os.close(lock)
    assert {path.name for path in job.iterdir()} >= {artifacts.JOURNAL, artifacts.CONTACT, latest.VALUES}


# --- edl stop


def test_only_steps_that_no_checkpoint_can_hold_are_lost_with_a_stop() -> None:
    story = Story(workers=1).running()
    assert unsaved(view.status(story.job, story.now)) == "", "no step is complete"
    story.tell(ev.Progress(story.job.ring.generation, 5))
    trained = view.status(story.job, story.now)
    assert trained["task"]["step"] == 4
    assert unsaved(trained) == (
        "the job writes no checkpoints (checkpoint.dir is empty), so its 4 trained steps of 10 would be lost"
    )
    kept = Story(workers=1, checkpoint={"dir": "/checkpoints"}).running()
    kept.tell(ev.Progress(kept.job.ring.generation, 5))
    assert unsaved(view.status(kept.job, kept.now)) == ""
