# SPDX-License-Identifier: Apache-2.0
"""What comes from elsewhere is in one folder: without it, edl trains models of Keras."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = (
    "benchmarks",
    "chart",
    "edl",
    "examples",
    "master",
    "model_zoo",
    "ps",
    "scripts",
    "tests",
    "trainer",
)
# Tests of the folder, and of the whole tree.
OF_COMPAT = ("tests/unit/compat", "tests/unit/repository")


# An editable installation finds each module of this tree that the copy lacks.
NOT_INSTALLED = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without the folder compat/."""
    copy = tmp_path_factory.mktemp("without") / "tree"
    copy.mkdir()
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "edl/compat").unlink()
    (copy / "sitecustomize.py").write_text(NOT_INSTALLED)
    return copy


def run(copy: Path, *words: str, seconds: float = 170) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_commands_of_edl_are_there_without_those_from_elsewhere(without: Path) -> None:
    assert str(without) in run(without, "-P", "-c", "import edl; print(edl.__file__)")
    told = run(without, "-P", "-m", "edl.cli", "--help")
    assert " run " in told and " horovod " not in told and " elasticdl " not in told and " mpi " not in told


def test_what_needs_the_folder_says_so(without: Path) -> None:
    code = "import edl\ntry: edl.fit\nexcept edl.EdlError as error: print(error)"
    told = run(without, "-P", "-c", code)
    assert told == "edl.fit() needs edl.compat, which this installation of edl lacks\n"


@pytest.mark.process
@pytest.mark.timeout(600)
def test_the_other_unit_tests_are_collected_without_it(without: Path) -> None:
    ignored = [f"--ignore={path}" for path in OF_COMPAT]
    collect = ("-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *ignored, "tests/unit")
    told = run(without, *collect, seconds=590)
    assert "error" not in told.lower().splitlines()[-1]


@pytest.mark.process
def test_a_model_of_keras_is_trained_without_it(without: Path, tmp_path: Path) -> None:
    sets = "workers=2,training.epochs=1"
    output = tmp_path / "job"
    run(without, "-P", "-m", "edl.cli", "run", "digits", "--set", sets, "--output", str(output))
    assert (output / "model.keras").exists()
