"""Which job a command without a directory means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edl.cli import latest
from edl.contract import artifacts
from edl.errors import ConfigError

ENDED = 2**22  # of no process: Linux has none of greater ids


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


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
    assert str(refused.value).splitlines()[1:] == [f"  {ended}", f"  {crashed}"], "the newest first"
    first, second = (a_job(tmp_path / name, started, os.getpid()) for name, started in (("x", 3), ("y", 4)))
    with pytest.raises(ConfigError, match=r"and 2 jobs of yours run; give an output directory:") as refused:
        latest.find(None)
    assert str(refused.value).splitlines()[1:] == [f"  {second}", f"  {first}"]


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
