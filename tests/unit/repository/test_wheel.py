# SPDX-License-Identifier: Apache-2.0
"""The wheel has all of edl and nothing beside it, and one version with the chart and the program."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import edl

ROOT = Path(__file__).parents[3]
LINKS = {
    "chart": "chart",
    "compat": "compat",
    "examples": "examples",
    "master": "master",
    "ps": "ps",
    "trainer": "trainer",
    "zoo": "model_zoo",
}
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each file in a wheel that is built from a copy of this tree, by its path."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    copy.mkdir()
    for name in ("LICENSE", "NOTICE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy)
    for name in ("edl", *LINKS.values()):
        without = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=without)
    done = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def metadata(wheel: dict[str, str]) -> str:
    return next(text for name, text in wheel.items() if name.endswith(".dist-info/METADATA"))


def test_the_links_lead_to_the_folders_at_the_top() -> None:
    assert {path.name: str(path.readlink()) for path in (ROOT / "edl").iterdir() if path.is_symlink()} == {
        name: f"../{folder}" for name, folder in LINKS.items()
    }


def test_the_wheel_has_every_module_and_claims_no_name_but_edl(wheel: dict[str, str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "edl").rglob("*.py")}
    for name, folder in LINKS.items():
        modules |= {f"edl/{name}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in wheel if name.endswith(".py")} == modules
    assert {name.partition("/")[0] for name in wheel} == {"edl", f"edl_trainer-{edl.__version__}.dist-info"}


def test_the_wheel_has_the_default_values_and_its_types(wheel: dict[str, str]) -> None:
    assert all(wheel[f"edl/{n}"] == (ROOT / n).read_text() for n in ("chart/values.yaml", "chart/rules.yaml"))
    assert wheel["edl/py.typed"] == ""
    assert not [name for name in wheel if name.startswith("edl/chart/templates")]


def test_the_wheel_has_the_examples(wheel: dict[str, str]) -> None:
    files = subprocess.check_output(["git", "ls-files", "examples/*/*"], cwd=ROOT, text=True).splitlines()
    assert {f"edl/{name}" for name in files} <= wheel.keys()


def test_wheel_chart_and_program_have_one_version(wheel: dict[str, str]) -> None:
    chart = yaml.safe_load((ROOT / "chart" / "Chart.yaml").read_text())
    versions = {chart["version"], chart["appVersion"], message_from_string(metadata(wheel))["Version"]}
    assert versions == {edl.__version__}
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{edl.__version__}]" in changes, "a version that CHANGELOG.md does not describe"


def test_no_module_hides_a_function_of_the_package() -> None:
    modules = {path.stem for path in (ROOT / "edl").iterdir()}
    assert not modules & set(edl.__all__), "an import of such a module would replace the function"
