"""Files of the current folder replace no module of the product, and user code still finds its own modules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from edl.contract.own_modules import module_command
from edl.errors import ConfigError, ModelError
from trainer import user_model

ROOT = Path(__file__).parents[2]
MODULE = "def model(): ...\ndef data(split): ...\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files that have the names of our packages and of Python's own modules."""
    for name in ("edl.py", "master.py", "ps.py", "trainer.py", "logging.py", "numpy.py", "grpc.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the current folder was run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trainer, "__path__", list(trainer.__path__))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    return tmp_path


@pytest.mark.parametrize("module", ["edl.cli", "master", "ps", "trainer"])
def test_files_of_the_current_folder_replace_no_module_of_a_process(project: Path, module: str) -> None:
    done = subprocess.run([*module_command(module), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lower().lstrip().startswith("usage: ")


def test_every_start_of_a_process_leaves_out_the_current_folder() -> None:
    places = {
        "edl": "*.py",
        "master": "*.py",
        "ps": "*.py",
        "trainer": "*.py",
        "docker": "*",
        "chart/templates": "*",
    }
    files = [
        file for folder, names in places.items() for file in (ROOT / folder).rglob(names) if file.is_file()
    ]
    starts = [
        (file.relative_to(ROOT), line)
        for file in files
        if "__pycache__" not in file.parts
        for line in file.read_text().splitlines()
        if re.search(r"""["' ]-m["',]|python -m (edl|master|ps|trainer).*""", line) and "`" not in line
    ]
    assert len(starts) >= 9, "those of the chart and of the images, and that of all other processes"
    usage = re.compile(r"^ +python -m|prog=")
    assert [start for start in starts if "-P" not in start[1] and not usage.search(start[1])] == []


@pytest.mark.parametrize("entry", ["{folder}", ""], ids=["named", "empty"])
def test_a_module_in_pythonpath_that_hides_ours_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    (project / "edl.py").unlink()
    entry = entry.format(folder=project)
    monkeypatch.setenv("PYTHONPATH", f"{entry}{os.pathsep}/nowhere")
    with pytest.raises(
        ConfigError, match=rf"PYTHONPATH: {project}/master.py hides edl's own package 'master'"
    ):
        module_command("ps")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{entry}")
    assert module_command("ps")[-1] == "ps"


def test_user_code_finds_the_modules_beside_it_and_those_of_the_current_folder(project: Path) -> None:
    models = project / "models"
    (models / "trainer").mkdir(parents=True)
    (models / "trainer" / "task.py").write_text("WIDTH = 3\n")
    for folder, text in ((models, "SIDE = 'model'\n"), (project, "SIDE = 'current folder'\n")):
        (folder / "sides.py").write_text(text)
    (project / "of_the_project.py").write_text("VALUE = 1\n")
    (models / "finds_them.py").write_text(
        "import logging, numpy, trainer.user_model\n"
        "from of_the_project import VALUE\nfrom sides import SIDE\nfrom trainer.task import WIDTH\n" + MODULE
    )
    found = user_model.load("models/finds_them.py").model.__globals__
    assert (found["VALUE"], found["SIDE"], found["WIDTH"]) == (1, "model", 3)
    assert found["trainer"].user_model is user_model
    assert found["logging"] is sys.modules["logging"]
    position = sys.path.index(str(models))
    assert sys.path[position - 1].endswith("lib-dynload")
    assert sys.path[position + 1] == str(project)


def test_a_module_of_the_user_that_cannot_be_imported_because_of_its_name_is_named(project: Path) -> None:
    (project / "trainer.py").unlink()
    (project / "trainer").mkdir()
    (project / "trainer" / "data.py").write_text("def load(): ...\n")
    (project / "wants_it.py").write_text("from trainer.data import load\n" + MODULE)
    with pytest.raises(
        ModelError, match=rf"{project}/trainer/data.py is hidden by .*/trainer/data.py; rename it"
    ):
        user_model.load("wants_it.py")


def test_a_model_file_with_the_name_of_a_module_in_use_is_refused(project: Path) -> None:
    (project / "trainer.py").write_text(MODULE)
    with pytest.raises(ModelError, match=r"trainer.py has the name of a module that edl uses \(trainer\)"):
        user_model.load("./trainer.py")
    assert sys.modules["trainer"].user_model is user_model
