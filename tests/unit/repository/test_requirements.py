# SPDX-License-Identifier: Apache-2.0
"""What the images install: a part of the one lock, complete and no more."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


def subset(*words: str, root: Path = ROOT) -> str:
    command: list[str | Path] = [sys.executable, root / "scripts" / "dev" / "requirements", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def names(text: str) -> set[str]:
    return {line.split("==")[0] for line in text.splitlines() if "==" in line}


def needed(*extras: str) -> set[str]:
    """What the packages themselves say that edl needs, by what is installed here."""
    found: set[str] = set()
    seen: set[tuple[str, tuple[str, ...]]] = set()  # one package may want another with more extras
    todo: list[tuple[str, tuple[str, ...]]] = [("edl-trainer", extras)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for line in importlib.metadata.requires(name) or []:
            asked = Requirement(line)
            if asked.marker and not any(asked.marker.evaluate({"extra": extra}) for extra in wanted or ("",)):
                continue
            other = canonicalize_name(asked.name)
            found.add(other)
            todo.append((other, ("", *sorted(asked.extras))))
    return found


@pytest.mark.parametrize(("side", "extras"), [("master", ("", "ps")), ("worker", ("", "worker"))])
def test_a_side_installs_what_it_needs_and_no_more(side: str, extras: tuple[str, ...]) -> None:
    assert names(subset(side)) == needed(*extras)


def test_the_master_has_nothing_heavy_and_nobody_has_the_tools() -> None:
    assert not names(subset("master")) & {"tensorflow-cpu", "keras", "pyarrow"}
    assert not names(subset("worker")) & {"pytest", "mypy", "ruff", "grpcio-tools", "pip", "moto", "boto3"}
    # Workers and servers, which run in the master's image, write checkpoints to S3.
    assert "s3fs" in names(subset("worker")) & names(subset("master"))


@pytest.mark.parametrize(("framework", "others"), [("torch", "jax"), ("jax", "torch")])
def test_a_worker_with_another_framework_has_no_tensorflow_and_the_versions_that_were_tried(
    framework: str, others: str
) -> None:
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", subset(framework), re.MULTILINE))
    assert names(subset("worker", "tensorflow-cpu")) <= {*pins}
    assert not {*pins} & {"tensorflow-cpu", others}
    assert {*pins} >= {"filelock", "opt-einsum"}, "what frameworks ask of the packages of the other lock"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"{framework}=={pins[framework]}" in extras[framework]


def test_every_package_keeps_its_hashes() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    for entry in subset("worker").replace(" \\\n", " ").splitlines():
        version, *hashes = entry.split()
        assert version in lock
        assert len(hashes) > 0
        assert all(word.startswith("--hash=sha256:") and word in lock for word in hashes)
    assert subset("all").count("--hash") == lock.count("--hash")


def test_a_package_can_be_left_out_with_what_only_it_needs() -> None:
    left = names(subset("worker")) - names(subset("worker", "tensorflow-cpu"))
    assert {"tensorflow-cpu", "libclang", "gast"} <= left
    assert not left & {"numpy", "keras", "grpcio"}
    assert names(subset("worker")) - names(subset("worker", "libclang")) == {"libclang"}


def test_a_stale_lock_is_told(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "dev").mkdir(parents=True)
    for name in ("scripts/dev/requirements", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    project = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace('"grpcio>=', '"not-there>=1", "grpcio>=', 1))
    with pytest.raises(subprocess.CalledProcessError) as error:
        subset("master", root=tmp_path)
    assert "lacks not-there, which pyproject.toml asks for; run scripts/dev/lock" in error.value.stderr


def test_the_master_starts_without_what_its_image_lacks() -> None:
    """All packages are installed here, so the master must not ask for what its image lacks."""
    code = "import sys, edl.master.__main__, edl.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "edl.master.__main__" in loaded
    assert not loaded & {"numpy", "tensorflow", "keras", "horovod", "pyarrow", "sklearn", "edl.trainer"}
