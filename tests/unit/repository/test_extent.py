# SPDX-License-Identifier: Apache-2.0
"""`scripts/test` runs a part of the tests without --all, and ends with what it left out."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTEST = """#!/bin/sh
echo "$@" >>calls
echo "     1.0  a test" >>"$EDL_DURATIONS"
case "$*" in *tests/cluster*) echo "needs root" >>"$EDL_DURATIONS.skipped" ;; esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the script, and programs that only write down how they were called."""
    for name in ("scripts/test", "scripts/dev/lib.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = {".venv/bin/pytest": PYTEST}
    programs |= dict.fromkeys(
        (".venv/bin/ruff", ".venv/bin/python", "scripts/setup", "scripts/check", "scripts/dev/frameworks"),
        "#!/bin/sh\n",
    )
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for n in range(9):
        (tmp_path / "tests/process").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"tests/process/test_{n}.py").touch()
    return tmp_path


def ran(tree: Path, *arguments: str) -> tuple[str, str]:
    """What pytest was called with, and the lines after `left out`."""
    done = subprocess.run([tree / "scripts/test", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return (tree / "calls").read_text(), done.stdout.partition("\nleft out\n")[2]


def test_without_arguments_it_leaves_out_most_processes_and_the_cluster_and_names_them(tree: Path) -> None:
    calls, left_out = ran(tree)
    assert "not thorough" in calls and "tests/process/faults/test_faults.py" in calls
    assert "tests/cluster" not in calls
    assert "3 files of tests/process" in left_out and "scripts/test --all" in left_out


def test_all_runs_the_cluster_and_names_what_was_skipped(tree: Path) -> None:
    calls, left_out = ran(tree, "--all")
    assert "tests/cluster" in calls and "tests/process tests/contract" in calls
    assert "alternate by commit" in left_out and left_out.split()[-4:] == ["skipped:", "1", "needs", "root"]


def test_the_files_that_it_chooses_exist() -> None:
    text = (ROOT / "scripts" / "test").read_text()
    chosen = text.partition("MOST=(")[2].partition(")")[0].split()
    assert chosen and all((ROOT / name).is_file() for name in chosen)
