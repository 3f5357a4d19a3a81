# SPDX-License-Identifier: Apache-2.0
"""`scripts/release`: the same commit gives the same files, and its wheel works without this tree."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from edl import __version__
from tests.chart.conftest import ROOT, Helm

WHEEL, CHART = f"edl_trainer-{__version__}-py3-none-any.whl", f"edl-{__version__}.tgz"


def released(folder: Path) -> Path:
    done = subprocess.run([ROOT / "scripts" / "release", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released(tmp_path_factory.mktemp("release") / "dist")


def test_the_same_commit_gives_the_same_files(dist: Path, tmp_path: Path, helm: Helm) -> None:
    assert {path.name for path in dist.iterdir()} == {WHEEL, CHART, "SHA256SUMS"}
    again = released(tmp_path / "again")
    for path in dist.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    digests = {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in (CHART, WHEEL)}
    lines = [f"{digest}  {name}\n" for name, digest in digests.items()]
    assert (dist / "SHA256SUMS").read_text() == "".join(lines)
    assert "kind: Deployment" in helm("template", "edl", str(dist / CHART), "--set", "token.value=x")


def test_the_wheel_works_in_an_environment_without_a_compiler(dist: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    offline = ["--no-index", "--find-links", str(dist), "--no-deps", "edl-trainer"]
    done = subprocess.run([*pip, "install", *offline], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Its dependencies are those of this environment: a test loads nothing from an index.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def edl(*words: str) -> str:
        bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        ran = subprocess.run(
            [home / "bin" / "edl", *words],
            cwd=tmp_path,
            env=bare | {"PATH": str(home / "bin"), "XDG_STATE_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert "Train a model on this machine" in edl("--help")
    assert "next: edl run" in edl("new", "mine.py")
    assert "batchSize: 64" in edl("run", "mine.py", "--batch-size", "64", "--dry-run")
    code = "import edl; print(edl.__file__)"
    where = subprocess.run(
        [python, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert where.stdout.startswith(str(home)), "the test must not find the edl of this tree"
