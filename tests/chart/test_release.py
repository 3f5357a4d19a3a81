# SPDX-License-Identifier: Apache-2.0
"""`scripts/release`: the same commit gives the same files, which are what they say.

A job where they were installed: tests/process/jobs/test_pythons.py.
The archives of images, which take minutes to write: tests/cluster/test_images.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import cyclonedx.schema
import jsonschema
import pytest
from packaging.utils import parse_wheel_filename

from edl import __version__
from tests.chart.conftest import CHART, ROOT, Helm

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
WHEEL, PACKAGE, SBOM = (
    f"edl_trainer-{__version__}-py3-none-any.whl",
    f"edl-{__version__}.tgz",
    f"edl-{__version__}.cdx.json",
)


def released(folder: Path, key: Path) -> Path:
    command: list[str | Path] = [ROOT / "scripts" / "release", "--python", PYTHON, "--without-images", folder]
    env = os.environ | {"EDL_SIGNING_KEY": str(key)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private key of SSH."""
    file = tmp_path_factory.mktemp("key") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file


@pytest.fixture(scope="module")
def dist(key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released(tmp_path_factory.mktemp("release") / "dist", key)


@pytest.fixture(scope="module")
def horovod(dist: Path) -> Path:
    """The wheel of edl-horovod."""
    [wheel] = dist.glob("edl_horovod-*.whl")
    return wheel


def test_the_same_commit_gives_the_same_files(dist: Path, key: Path, horovod: Path, tmp_path: Path) -> None:
    files = sorted([WHEEL, PACKAGE, SBOM, horovod.name])
    assert {path.name for path in dist.iterdir()} == {*files, "SHA256SUMS", "SHA256SUMS.sig"}
    again = released(tmp_path / "again", key)
    for path in dist.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name
    digests = {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in files}
    sums = {name: digest for digest, name in map(str.split, (dist / "SHA256SUMS").read_text().splitlines())}
    assert sums == digests


def test_the_checksums_are_signed(dist: Path, key: Path, tmp_path: Path) -> None:
    signers = tmp_path / "signers"
    signers.write_text(f"edl {key.with_suffix('.pub').read_text()}")
    sums = (dist / "SHA256SUMS").read_bytes()
    command: list[str | Path] = ["ssh-keygen", "-Y", "verify", "-f", signers]
    command += ["-I", "edl", "-n", "edl-release", "-s", dist / "SHA256SUMS.sig"]

    def verifies(text: bytes) -> bool:
        done = subprocess.run(command, input=text, stdout=subprocess.DEVNULL)
        return done.returncode == 0

    assert verifies(sums)
    assert not verifies(sums + b"\n")


def test_a_key_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    env = os.environ | {"EDL_SIGNING_KEY": str(tmp_path / "key")}
    command = [ROOT / "scripts" / "release", tmp_path / "dist"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (2, f"EDL_SIGNING_KEY: cannot read {tmp_path / 'key'}\n")


def test_the_wheel_of_horovod_is_not_mistaken_for_stock_horovod(dist: Path, horovod: Path) -> None:
    name, version, _, tags = parse_wheel_filename(horovod.name)
    assert (name, version.is_postrelease) == ("edl-horovod", True)
    [tag] = tags
    assert tag.interpreter == f"cp{PYTHON.replace('.', '')}"
    assert tag.platform.startswith("manylinux_2_")

    def metadata(wheel: Path) -> dict[str, list[str]]:
        with zipfile.ZipFile(wheel) as archive:
            [file] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            about = message_from_bytes(archive.read(file))
        return {key: about.get_all(key, []) for key in about}

    about = metadata(horovod)
    assert about["Version"] == [str(version)]
    assert "with edl's patches" in about["Summary"][0]
    needed = metadata(dist / WHEEL)["Requires-Dist"]
    assert f"edl-horovod=={version}" in needed
    frameworks = [
        n for n in (*about["Requires-Dist"], *needed) if n.startswith(("tensorflow", "torch", "jax"))
    ]
    assert len(frameworks) == 3 and all("; extra ==" in need for need in frameworks), frameworks


RING = """
import sys
sys.modules["tensorflow"] = None
import numpy as np
from edl.trainer.ring import gloo
ring = gloo.GlooRing(1, "lo", "one")
ring.form(0, 1)
print(ring.reduce(np.ones(3, np.float32)), gloo.library()._name)
"""


def test_the_wheel_of_horovod_forms_rings_without_tensorflow(horovod: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(horovod) as archive:
        archive.extractall(tmp_path)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RING], capture_output=True, text=True, env=env)
    assert done.stdout.startswith(f"[1. 1. 1.] {tmp_path}"), done.stderr
    assert "host_buffers" in done.stdout


def test_horovod_refuses_a_tensorflow_for_which_it_was_not_compiled(horovod: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(horovod) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text('__version__ = "2.20.0"\n')
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import horovod.tensorflow.keras"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: edl-horovod")
    assert "but TensorFlow 2.20.0 is installed; install the other: pip install tensorflow-cpu==2" in last
    command = [sys.executable, "-m", "horovod.runner"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "Start scripts with `edl horovod`" in done.stderr


def test_the_list_of_parts_is_valid_and_names_all_that_is_locked(dist: Path, horovod: Path) -> None:
    found = json.loads((dist / SBOM).read_text())
    schema = Path(cyclonedx.schema.__file__).parent / "_res" / "bom-1.6.SNAPSHOT.schema.json"
    jsonschema.Draft7Validator(without_references(json.loads(schema.read_text()))).validate(found)
    edl, version = found["metadata"]["component"]["bom-ref"], parse_wheel_filename(horovod.name)[1]
    assert edl == f"pkg:pypi/edl-trainer@{__version__}"
    refs = {part["bom-ref"] for part in found["components"]}
    command: list[str | Path] = [sys.executable, ROOT / "scripts" / "dev" / "requirements", "worker"]
    lock = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pins = [line.split()[0].replace("==", "@") for line in lock.splitlines() if "==" in line]
    assert {f"pkg:pypi/{pin}" for pin in pins} < refs
    assert not any("pytest" in ref for ref in refs), "tools of development are not part of a release"
    needs = {entry["ref"]: entry.get("dependsOn", []) for entry in found["dependencies"]}
    assert f"pkg:pypi/edl-horovod@{version}" in needs[edl]
    reached, todo = set(), {edl}
    while todo:
        reached |= (new := todo)
        todo = {ref for one in new for ref in needs[one]} - reached
    assert reached == refs | {edl}


def without_references(schema: Any) -> Any:
    """The schema without its references to other files: of licences and signatures, which no part has."""
    if isinstance(schema, dict):
        if not str(schema.get("$ref", "#")).startswith("#"):
            return {}
        return {name: without_references(part) for name, part in schema.items()}
    return [without_references(part) for part in schema] if isinstance(schema, list) else schema


def test_the_released_chart_installs_what_the_tree_does(dist: Path, helm: Helm) -> None:
    """From a registry: tests/cluster/test_chart.py."""
    flags = ("--set", "token.value=x")
    assert helm("template", "edl", str(dist / PACKAGE), *flags) == helm("template", "edl", str(CHART), *flags)
