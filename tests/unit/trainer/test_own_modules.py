# SPDX-License-Identifier: Apache-2.0
"""Files of the user replace no module of the product, with any name, and user code finds its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import edl
from edl.contract.own_modules import module_command
from edl.errors import ConfigError, ModelError
from edl.trainer.model import user_model

ROOT = Path(__file__).parents[3]
MODULE = "def model(): ...\ndef data(split): ...\n"
OURS = ("compat", "edl", "master", "model_zoo", "ps", "trainer")
OTHERS = ("random", "keras", "types")  # modules that are in use when a model is imported


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a process that has imported nothing of the user's yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(edl, "__path__", list(edl.__path__))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    # As in a worker, which imports Keras before the model. Here the real one would take seconds.
    if "keras" not in sys.modules:
        keras = ModuleType("keras")
        keras.__file__ = "/installed/keras/__init__.py"
        monkeypatch.setitem(sys.modules, "keras", keras)
    there = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - there:
        del sys.modules[name]


@pytest.fixture
def hostile(project: Path) -> Path:
    """The current folder, with files that have the names of our packages and of Python's own modules."""
    for name in (*OURS, "logging", "numpy", "grpc"):
        (project / f"{name}.py").write_text("raise SystemExit('a file of the current folder was run')\n")
    return project


@pytest.mark.parametrize("module", ["edl.cli", "edl.master", "edl.ps", "edl.trainer"])
def test_files_of_the_current_folder_replace_no_module_of_a_process(hostile: Path, module: str) -> None:
    done = subprocess.run([*module_command(module), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lower().lstrip().startswith("usage: ")


def test_every_start_of_a_process_leaves_out_the_current_folder() -> None:
    places = {
        "compat": "*.py",
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
        if re.search(r"""["' ]-m["',]|python -m edl.*""", line) and "`" not in line
    ]
    assert len(starts) >= 9, "those of the chart and of the images, and that of all other processes"
    usage = re.compile(r"""^ +python -m|prog=|== "-m":""")
    assert [start for start in starts if "-P" not in start[1] and not usage.search(start[1])] == []


def test_the_product_has_one_top_level_name() -> None:
    """Users own `trainer`, `master` and the like: none of these is in use when the product is imported."""
    code = (
        "import edl.cli, edl.master.__main__, edl.ps.__main__, edl.trainer.__main__, edl.zoo, sys\n"
        f"print([name for name in {OURS} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "['edl']"


@pytest.mark.parametrize("entry", ["{folder}", ""], ids=["named", "empty"])
def test_a_module_in_pythonpath_that_hides_ours_is_refused(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    entry = entry.format(folder=hostile)
    monkeypatch.setenv("PYTHONPATH", f"{entry}{os.pathsep}/nowhere")
    with pytest.raises(ConfigError, match=rf"PYTHONPATH: {hostile}/edl.py hides edl itself; rename it"):
        module_command("edl.ps")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{entry}")
    assert module_command("edl.ps")[-1] == "edl.ps"


def test_user_code_finds_the_modules_beside_it_and_those_of_the_current_folder(project: Path) -> None:
    models = project / "models"
    models.mkdir()
    for folder, text in ((models, "SIDE = 'model'\n"), (project, "SIDE = 'current folder'\n")):
        (folder / "sides.py").write_text(text)
    (project / "logging.py").write_text("raise SystemExit\n")
    (project / "of_the_project.py").write_text("VALUE = 1\n")
    (models / "finds_them.py").write_text(
        "import logging\nfrom of_the_project import VALUE\nfrom sides import SIDE\n" + MODULE
    )
    found = user_model.load("models/finds_them.py").model.__globals__
    assert (found["VALUE"], found["SIDE"]) == (1, "model")
    assert found["logging"] is sys.modules["logging"]
    position = sys.path.index(str(models))
    assert sys.path[position - 1].endswith("lib-dynload")
    assert sys.path[position + 1] == str(project)


@pytest.mark.parametrize("name", OURS)
def test_packages_of_the_user_with_names_of_ours_are_found(project: Path, name: str) -> None:
    for folder, text in ((project / name, "WIDTH = 3\n"), (project / name / "deep", "DEPTH = 2\n")):
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "helpers.py").write_text(text)
    (project / "mine.py").write_text(
        f"import edl\nfrom {name}.helpers import WIDTH\nfrom {name}.deep.helpers import DEPTH\n"
        + "from edl.trainer import worker\n"
        + MODULE
    )
    found = user_model.load("mine.py").model.__globals__
    assert (found["WIDTH"], found["DEPTH"]) == (3, 2)
    assert found["edl"] is edl
    assert found["worker"].__file__.endswith("/edl/trainer/worker.py")


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_a_model_may_have_any_name(project: Path, name: str) -> None:
    taken = sys.modules.get(name)
    (project / f"{name}.py").write_text(f"import edl, keras, random, types\nNAME = {name!r}\n" + MODULE)
    found = user_model.load(f"./{name}.py").model.__globals__
    assert found["NAME"] == name
    assert (found["edl"], found["random"]) == (edl, sys.modules["random"])
    assert found["keras"].__name__ == "keras"
    assert found["__name__"] == (name if taken is None else f"edl_user_{name}")
    assert sys.modules.get(name, taken) is (taken or sys.modules[found["__name__"]])
    assert sys.modules[found["__name__"]].model is found["model"]  # where Keras looks for its classes


def test_a_helper_that_a_module_in_use_hides_is_named(project: Path) -> None:
    for name in OTHERS:
        (project / f"{name}.py").write_text("def mine(): ...\n")
        for words in (f"from {name} import mine", f"import {name}\n{name}.mine()"):
            (project / "wants_it.py").write_text(f"{words}\n" + MODULE)
            with pytest.raises(ModelError, match=rf"{project}/{name}.py is hidden by .*{name}.*; rename it"):
                user_model.load("wants_it.py")


@pytest.mark.parametrize("package", ["models", "random", "edl"])
def test_a_model_in_a_package_imports_relatively(project: Path, package: str) -> None:
    inner = project / package / "census"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner.parent / "layers.py").write_text("WIDTH = 3\n")
    (inner / "features.py").write_text("import sys\nMODEL = sys.modules[__package__ + '.wide']\n")
    (inner / "wide.py").write_text("from ..layers import WIDTH\nfrom .features import MODEL\n" + MODULE)
    found = user_model.load(f"{package}/census/wide.py").model.__globals__
    assert found["WIDTH"] == 3
    assert found["MODEL"].model is found["model"], "the helper sees the same module"
    expected = "models.census.wide" if package == "models" else f"edl_user_{package}.census.wide"
    assert found["__name__"] == expected


def test_two_models_of_one_name_are_two_modules(project: Path) -> None:
    loaded = []
    for number in (1, 2, 3):
        (project / f"v{number}").mkdir()
        (project / f"v{number}" / "census.py").write_text(f"NUMBER = {number}\n" + MODULE)
        loaded.append(user_model.load(f"v{number}/census.py").model.__globals__)
    assert [found["NUMBER"] for found in loaded] == [1, 2, 3]
    assert [found["__name__"] for found in loaded] == ["census", "edl_user_census", "edl_user_census_2"]
    (project / "v2" / "census.py").write_text("NUMBER = 4\nimport nothing_of_this_name\n" + MODULE)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        user_model.load("v2/census.py")
    assert "edl_user_census" not in sys.modules, "a module that failed can be imported anew"


def test_a_name_of_an_installed_package_is_left_to_it(project: Path) -> None:
    installed = project / "installed"
    installed.mkdir()
    (installed / "lazily.py").write_text("WHOSE = 'installed'\n")
    sys.path.append(str(installed))
    (project / "models").mkdir()
    (project / "models" / "lazily.py").write_text(MODULE)
    assert user_model.load("models/lazily.py").model.__globals__["__name__"] == "edl_user_lazily"


def test_a_model_that_imports_the_zoo_by_its_folder_is_told_its_name(project: Path) -> None:
    (project / "mine.py").write_text("from model_zoo.digits import data\n" + MODULE)
    with pytest.raises(ModelError, match=r"mine.py: .*are imported as edl.zoo, not model_zoo"):
        user_model.load("mine.py")
