# SPDX-License-Identifier: Apache-2.0
"""`edl check` as people use it; and a job on files that values name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edl.cli import main
from edl.contract import artifacts

EDL = str(Path(sys.executable).with_name("edl"))
MODEL = """\
import keras

print("of the user's code")


def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model
"""
NAMED = "data.train=houses.csv,data.label=price,data.features={rooms,age}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 7},{i},{i % 3}" for i in range(100)]
    Path("houses.csv").write_text("\n".join(["rooms,age,price", *lines]) + "\n")
    Path("my_model.py").write_text(MODEL)


def edl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([EDL, *arguments], capture_output=True, text=True, timeout=170)


def test_a_good_model_is_described_in_a_report() -> None:
    done = edl("check", "./my_model.py", "--set", NAMED, "-o", "json")
    assert (done.returncode, done.stderr) == (0, "of the user's code\n")
    report = json.loads(done.stdout)
    assert [(split["name"], split["records"]) for split in report["splits"]] == [
        ("train", 90),
        ("validation", 10),
    ]
    assert report["mistakes"] == report["warnings"] == []


def test_mistakes_are_lines_of_the_users_file_without_a_traceback() -> None:
    Path("my_model.py").write_text(
        MODEL.replace("Dense(1)", "Dens(1)") + '\n\ndef data():\n    return [1, "a", 3], [1, 2]\n'
    )
    done = edl("check", "./my_model.py")
    assert done.returncode == 1
    assert done.stdout == ""
    first, code, why, _, second, *rest = done.stderr.splitlines()[1:]
    assert first == "my_model.py, line 7, in model"
    assert code == "    model = keras.Sequential([keras.Input((2,)), keras.layers.Dens(1)])"
    assert why == "  AttributeError: module 'keras.layers' has no attribute 'Dens'"
    assert second == "my_model.py, line 13, in data"
    assert rest[-1] == "2 mistakes in ./my_model.py"
    assert "Traceback" not in done.stderr


def test_a_check_that_crashes_says_how() -> None:
    Path("my_model.py").write_text("import os\nos.kill(os.getpid(), 9)\ndef model():\n    return 1\n")
    done = edl("check", "./my_model.py", "--set", NAMED)
    assert done.returncode == 1
    assert done.stderr.startswith("edl: the check crashed (SIGKILL)")


def test_what_the_text_of_a_file_shows_is_found_without_tensorflow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def called(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["edl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    Path("my_model.py").write_text(MODEL + "\n\ndef data()\n    return 1\n")
    assert called("check", "./my_model.py") == (
        1,
        "my_model.py, line 12\n    def data()\n  expected ':': def data()\n\n1 mistake in ./my_model.py\n",
    )
    assert called("check", "./none.py") == (2, "edl: model.module: file none.py not found\n")
    Path("my_model.py").write_text(MODEL)
    for command in ("check", "run"):
        code, told = called(command, "./my_model.py", "--set", "data.train=none.csv")
        assert (code, told.startswith("edl: data.train: no such file or directory: ")) == (2, True)
        code, told = called(command, "./my_model.py", "--set", "data.train=none*.csv")
        assert (code, told.startswith("edl: data.train: no file matches ")) == (2, True)
    assert not Path("runs").exists()


def test_a_file_with_the_model_alone_trains_on_named_files() -> None:
    sets = f"workers=1,training.epochs=2,export.verify=false,{NAMED}"
    done = edl("run", "./my_model.py", "--set", sets, "--output", "job")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((Path("job") / artifacts.SUMMARY).read_text())
    assert summary["records"]["applied"] == 2 * 90
    assert "loss" in summary["metrics"], "ten records are held out"
