# SPDX-License-Identifier: Apache-2.0
"""scripts/setup keeps the packages that a user has installed, also when it installs the lock's anew.

The script runs in a small tree: an empty lock, and wheels of one module each for Horovod and edl.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
BACKEND = """
import shutil
def build_editable(directory, settings=None, metadata=None):
    return shutil.copy("wheels/edl-1.0-py3-none-any.whl", directory).rpartition("/")[2]
"""
PROJECT = """
[project]
name = "edl"
version = "1.0"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


def wheel(directory: Path, name: str) -> Path:
    """Make a wheel with one empty module."""
    made, about = directory / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in (*files.items(), (f"{about}/RECORD", record)):
            archive.writestr(path, text)
    return made


def run(tree: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_package_that_a_user_has_installed_stays_when_the_lock_changes(tmp_path: Path) -> None:
    tree, wheels = tmp_path / "tree", tmp_path / "tree" / "wheels"
    for folder in ("scripts/dev", "patches/horovod", "wheels"):
        (tree / folder).mkdir(parents=True)
    for name in ("scripts/setup", "scripts/dev/lib.sh"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("edl", "horovod", "yours"):
        wheel(wheels, name)
    build = tree / "scripts/dev/build-horovod"
    build.write_text(f"#!/bin/sh\necho {wheels}/horovod-1.0-py3-none-any.whl\n")
    build.chmod(0o755)
    (tree / "scripts/dev/horovodrun").touch()
    texts = {"pyproject.toml": PROJECT, "backend.py": BACKEND, "setup.py": "", "patches/horovod/0.patch": ""}
    for name, text in (texts | {"requirements.lock": "# the first lock\n"}).items():
        (tree / name).write_text(text)

    run(tree, "scripts/setup")
    find = ". scripts/dev/lib.sh && find_uv"
    uv, python = run(tree, "bash", "-c", find).strip(), tree / ".venv/bin/python"
    yours = wheels / "yours-1.0-py3-none-any.whl"
    run(tree, uv, "pip", "install", "--offline", "--no-deps", "--python", python, yours)
    before = (tree / ".venv/edl-stamp").read_text()
    (tree / "requirements.lock").write_text("# the second lock\n")
    run(tree, "scripts/setup")
    assert (tree / ".venv/edl-stamp").read_text() != before, "it has installed the second lock"
    run(tree, python, "-c", "import edl, horovod, yours")
