# SPDX-License-Identifier: Apache-2.0
"""The chart as a package: `scripts/dev/chart` writes this tree's chart, with all that a catalogue shows."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import CHART, ROOT, Helm, Rendered


def chart(*words: object, ok: bool = True) -> str:
    """What `scripts/dev/chart` prints, also of what it complains."""
    command = [str(word) for word in (ROOT / "scripts" / "dev" / "chart", *words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout.strip() if ok else done.stderr


def files(package: str) -> dict[str, str]:
    with tarfile.open(package) as archive:
        members = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read().decode() for name, file in members.items() if file}


def test_the_package_installs_what_the_tree_does(helm: Helm, tmp_path: Path) -> None:
    package = chart("package", "--output", tmp_path)
    assert package == str(tmp_path / "edl-0.2.0.tgz")
    there = files(package)
    assert {"edl/LICENSE", "edl/NOTICE", "edl/README.md", "edl/values.schema.json"} <= there.keys()
    assert not [name for name in there if name.startswith("edl/ci/")]
    flags = ("--set", "token.value=x")
    assert helm("template", "edl", package, *flags) == helm("template", "edl", str(CHART), *flags)


def test_a_published_chart_knows_where_its_images_are(helm: Helm, tmp_path: Path) -> None:
    words = ("--version", "1.2.3", "--image-registry", "r.example.org/team/")
    package = chart("package", "--output", tmp_path, *words)
    about = yaml.safe_load(files(package)["edl/Chart.yaml"])
    assert (about["version"], about["appVersion"]) == ("1.2.3", "1.2.3")
    images = yaml.safe_load(about["annotations"]["artifacthub.io/images"])
    release = Rendered(helm("template", "edl", package))
    pods = [spec["containers"][0]["image"] for _, spec in release.pods()]
    assert {image["image"] for image in images} == set(pods)
    assert set(pods) == {f"r.example.org/team/edl-{side}:1.2.3" for side in ("master", "worker")}


def test_what_a_catalogue_shows_is_there() -> None:
    about: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {"description", "icon", "keywords", "kubeVersion", "maintainers"} <= about.keys()
    kind, _, icon = about["icon"].partition(";base64,")
    assert kind == "data:image/svg+xml"
    assert base64.b64decode(icon).startswith(b"<svg ")
    notes = about["annotations"]
    assert notes["artifacthub.io/license"] == "Apache-2.0"
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
    for key in ("changes", "links"):
        assert yaml.safe_load(notes[f"artifacthub.io/{key}"])


def test_a_signed_package_can_be_verified(helm: Helm, tmp_path: Path) -> None:
    if not (gpg := shutil.which("gpg")):
        pytest.skip("gpg is needed to make a key")
    home = tmp_path / "keys"
    home.mkdir(mode=0o700)

    def run(*words: str) -> bytes:
        command = [gpg, "--homedir", str(home), "--batch", "--passphrase", "", *words]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout

    run("--pinentry-mode", "loopback", "--quick-generate-key", "Signer", "rsa2048", "sign", "never")
    keyring = tmp_path / "keyring"
    keyring.write_bytes(run("--pinentry-mode", "loopback", "--export-secret-keys"))
    subprocess.run(["gpgconf", "--homedir", home, "--kill", "gpg-agent"], check=True)
    package = chart("package", "--output", tmp_path, "--sign", "Signer", "--keyring", keyring)
    assert "Signer" in helm("verify", "--keyring", str(keyring), package)
    Path(package).write_bytes(Path(package).read_bytes() + b"x")
    done = subprocess.run(
        [helm.path, "verify", "--keyring", keyring, package], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "sha256 sum does not match" in done.stderr


def test_what_it_cannot_do_is_refused_in_words(tmp_path: Path) -> None:
    assert "expected REGISTRY[/PATH], without a scheme" in chart("push", "http://here", ok=False)
    assert "scripts/dev/chart push REGISTRY" in chart("push", ok=False)
    assert "scripts/dev/chart package" in chart("package", "--output", ok=False)
    assert "scripts/dev/chart package" in chart("package", "--plain-http", ok=False)
