# SPDX-License-Identifier: Apache-2.0
"""edl on each Python that it is made for, and not only on the one that these tests run on.

A copy of the tree is set up as on a machine that has just that Python, from the one lock; then a job runs in
it. With the Python of EDL_CHECK_PYTHON, scripts/check runs the unit tests: the job runs in its environment.
A version that is not found on this machine is no case here; the header of the tests says so (conftest.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.conftest import PYTHONS

ROOT = Path(__file__).parents[3]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
CHECKED = os.environ.get("EDL_CHECK_PYTHON", "")
OTHERS = {version: path for version, path in PYTHONS.items() if path and version not in (HERE, CHECKED)}


@pytest.fixture(params=OTHERS)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A copy of this tree, beside a folder in which `python3` is of that version."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(OTHERS[request.param])
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    there = [name for name in names.splitlines() if (ROOT / name).is_file() or (ROOT / name).is_symlink()]
    copy = tmp_path / request.param
    copy.mkdir()
    subprocess.run(["cp", "--parents", "-pd", *there, copy], cwd=ROOT, check=True)
    yield copy
    subprocess.run(["rm", "-rf", copy / ".venv"], check=True)  # more than a gigabyte


@pytest.mark.timeout(1800)  # a busy machine takes ten minutes, and Horovod is compiled for that Python, once
def test_a_job_trains_on_each(tree: Path) -> None:
    def run(*words: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        env["PATH"] = f"{tree.parent / 'bin'}:{env['PATH']}"
        done = subprocess.run(
            words, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    run("scripts/setup")
    assert run(".venv/bin/python", "--version").startswith(f"Python {tree.name}.")
    run("scripts/run", "digits", "--set", "workers=2,training.epochs=5", "--output", "job")
    assert "exactly once: 1,438 records x 5 epochs" in run(".venv/bin/edl", "audit", "job")


def test_a_job_trains_on_the_python_of_the_unit_tests(tmp_path: Path) -> None:
    """In the environment that scripts/check has made for them; this one, where it uses no other."""
    if CHECKED:
        subprocess.run(["scripts/setup", "--python", CHECKED], cwd=ROOT, check=True)
    edl = ROOT / f".venv{CHECKED and '-'}{CHECKED}" / "bin" / "edl"
    job: list[str | Path] = [
        edl,
        "run",
        "digits",
        "--set",
        "workers=2,training.epochs=5",
        "--output",
        tmp_path / "job",
    ]
    subprocess.run(job, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    told = subprocess.check_output([edl, "audit", tmp_path / "job"], text=True)
    assert "exactly once: 1,438 records x 5 epochs" in told


@pytest.mark.parametrize(
    ("pythons", "found"),
    [
        ({"bin/python3": "3.12", "bin/python3.13": "3.13"}, "bin/python3"),
        ({"bin/python3": "3.10", "bin/python3.13": "", "bin/python3.11": "3.11"}, "bin/python3.11"),
        ({"bin/python3": "3.14", "versions/3.12.9/bin/python3": "3.12"}, "versions/3.12.9/bin/python3"),
        ({"bin/python3": "3.14"}, ""),
    ],
    ids=["the usual one first", "one that runs", "pyenv's", "none"],
)
def test_which_python_is_taken(tmp_path: Path, pythons: dict[str, str], found: str) -> None:
    for name, version in pythons.items():
        python = tmp_path / name
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\necho {version} {python}\n" if version else "#!/bin/sh\nexit 127\n")
        python.chmod(0o755)
    (tmp_path / "bin" / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(
        ["/bin/bash", "-c", ". scripts/dev/lib.sh && find_python"],
        cwd=ROOT,
        env={"PATH": f"{tmp_path}/bin", "PYENV_ROOT": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if found:
        assert done.stdout == f"{tmp_path / found}\n"
    else:
        assert done.returncode != 0
        assert "Python 3.13, 3.12 or 3.11 is needed and was not found" in done.stderr
