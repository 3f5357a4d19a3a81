# SPDX-License-Identifier: Apache-2.0
"""edl on each Python that it is made for, and not only on the one that these tests run on.

A release is installed with that Python; then a job runs. With the Python of EDL_CHECK_PYTHON, scripts/check
runs the unit tests: the job runs in its environment, which scripts/setup made.
A version that is not found on this machine is no case here; the header of the tests says so (conftest.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from tests.process.conftest import PYTHONS

ROOT = Path(__file__).parents[3]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
CHECKED = os.environ.get("EDL_CHECK_PYTHON", "")
OTHERS = {version: path for version, path in PYTHONS.items() if path and version not in (HERE, CHECKED)}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """Serves the wheels of a folder as a package index (PEP 503) on loopback, and returns its address."""
    root = tmp_path / "index"
    root.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=root)) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()

        def serve(folder: Path) -> str:
            for wheel in folder.glob("*.whl"):
                package = root / parse_wheel_filename(wheel.name)[0]
                package.mkdir(exist_ok=True)
                shutil.copy(wheel, package)
            return f"http://127.0.0.1:{server.server_port}/"

        yield serve
        server.shutdown()
        serving.join()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.timeout(1800)  # a busy machine takes minutes, and Horovod is compiled for that Python, once
@pytest.mark.parametrize("version", OTHERS or [HERE])
def test_a_job_trains_where_a_release_was_installed(
    version: str, index: Callable[[Path], str], tmp_path: Path
) -> None:
    """In an empty environment, with no other program on its path: no compiler, and none of this tree."""

    def run(*words: str | Path, cwd: Path = tmp_path, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    home, dist = tmp_path / "environment", tmp_path / "dist"
    run(ROOT / "scripts" / "release", "--python", version, dist)
    uv = run("bash", "-c", ". scripts/dev/lib.sh; find_uv", cwd=ROOT).strip()
    run(uv, "venv", "--python", PYTHONS[version], home)
    # Other packages come from the usual index or uv's cache, in the versions of the lock.
    lock = ROOT / "requirements.lock"
    run(uv, "pip", "install", "--python", home, "--index", index(dist), "--constraint", lock, "edl-trainer")
    bare = {"PATH": str(home / "bin"), "HOME": str(tmp_path)}
    modules = run(
        "python", "-c", "import edl, horovod.tensorflow as h; print(edl.__file__, h.__file__)", env=bare
    )
    assert [Path(file).is_relative_to(home) for file in modules.split()[-2:]] == [True, True]
    run("edl", "run", "digits", "--set", "workers=2,training.epochs=2", "--output", "job", env=bare)
    assert "exactly once: 1,438 records x 2 epochs" in run("edl", "audit", "job", env=bare)
    shutil.rmtree(home)  # two gigabytes


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
