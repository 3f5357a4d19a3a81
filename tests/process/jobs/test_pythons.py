# SPDX-License-Identifier: Apache-2.0
"""edl on each Python that it is made for, and not only on the one that these tests run on.

A release is installed with that Python; then a job runs. For the Python of the images, in an empty container.
A version that is not found on this machine is no case here; the header of the tests says so (conftest.py).
Each commit has one of the cases; EDL_STORMS=all runs all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from tests.process.conftest import PYTHONS
from tests.support.jobs.by_commit import of_this_commit

ROOT = Path(__file__).parents[3]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
IMAGES = next(iter(PYTHONS))
# scripts/dev/image-base makes the container's image, and installs what it needs where it can.
CONTAINER = bool(
    os.geteuid() == 0 and PYTHONS[IMAGES] and (shutil.which("apt-get") or shutil.which("buildah"))
)
OTHERS = [version for version, path in PYTHONS.items() if path and version != HERE]
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "cmake", "make")


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


def run(*words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


Run = Callable[..., str]
Place = tuple[Run, Run]


@contextmanager
def environment(version: str, home: Path, uv: str) -> Iterator[Place]:
    """An empty environment with no other program on its path: functions that install, and run, in it."""
    root = home / "environment"
    run(uv, "venv", "--python", PYTHONS[version], root)
    bare = {"PATH": str(root / "bin"), "HOME": str(home)}
    yield partial(run, uv, "pip", "install", "--python", root), partial(run, cwd=home, env=bare)
    shutil.rmtree(root)  # two gigabytes


@contextmanager
def container(version: str, home: Path, uv: str) -> Iterator[Place]:
    """A container with Debian, Python and pip: functions that install, and run, in it."""
    run(ROOT / "scripts" / "dev" / "image-base")
    store, lock = run(uv, "cache", "dir").strip(), ROOT / "requirements.lock"
    settings = {name: value for name, value in os.environ.items() if name.startswith("UV_")}
    settings |= {"UV_CACHE_DIR": store, "UV_LINK_MODE": "copy", "UV_BREAK_SYSTEM_PACKAGES": "1"}
    mounts = [(uv, "/usr/local/bin/uv"), (store, store), (lock, lock)]
    if certificates := os.environ.get("SSL_CERT_FILE"):
        settings["SSL_CERT_FILE"] = "/certificates"
        mounts.append((certificates, "/certificates"))
    options = [f"--volume={here}:{there}" for here, there in mounts]
    options += [f"--env={name}={value}" for name, value in settings.items()]
    name = run("buildah", "from", "--pull-never", f"localhost/python:{version}-slim").strip()
    try:
        into = ["buildah", "run", "--isolation", "chroot", "--network", "host", "--workingdir", "/root"]
        within = partial(run, *into, *options, name, "--")
        yield partial(within, "uv", "pip", "install", "--system"), within
    finally:
        run("buildah", "rm", name)


@pytest.mark.timeout(1800)  # a busy machine takes minutes, and Horovod is compiled for that Python, once
@pytest.mark.parametrize(
    ("version", "place"),
    of_this_commit(
        [(version, environment) for version in OTHERS or [HERE] if not (CONTAINER and version == IMAGES)]
        + [(IMAGES, container)] * CONTAINER
    ),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_job_trains_where_a_release_was_installed(
    version: str, place: Any, index: Callable[[Path], str], tmp_path: Path
) -> None:
    """Where there is no compiler, and none of this tree."""
    dist = tmp_path / "dist"
    run(ROOT / "scripts" / "release", "--python", version, "--without-images", dist)
    with place(version, tmp_path, run("bash", "-c", ". scripts/dev/lib.sh; find_uv").strip()) as (
        install,
        within,
    ):
        found = within("python", "-c", f"import shutil; print([*filter(shutil.which, {COMPILERS})])")
        assert found.splitlines()[-1] == "[]"
        # Other packages come from the usual index or uv's cache, in the versions of the lock.
        lock = ROOT / "requirements.lock"
        install("--index", index(dist), "--constraint", lock, "edl-trainer[worker]")
        modules = within(
            "python", "-c", "import edl, horovod.tensorflow as h; print(edl.__file__, h.__file__)"
        )
        assert [str(ROOT) in file for file in modules.split()[-2:]] == [False, False]
        within("edl", "run", "digits", "--set", "workers=2,training.epochs=2", "--output", "job")
        assert "exactly once: 1,438 records x 2 epochs" in within("edl", "audit", "job")


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
