# SPDX-License-Identifier: Apache-2.0
"""Paths and texts are UTF-8 in every process of a job, in every locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edl import config
from edl.cli.local import latest
from edl.config import values
from edl.contract import artifacts
from edl.errors import ConfigError

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}  # Python decodes arguments, names of files and texts as ASCII
FOLDER, MODEL = "Ünïcode", "mödel.py"
SECONDS = 60


def test_a_job_runs_in_a_folder_whose_name_the_locale_cannot_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path(MODEL).write_text("# ß\ndef model(): ...\ndef data(split): ...\n", encoding="utf-8")
    Path("größe.yaml").write_text("checkpoint: {dir: prüfpunkte}\n", encoding="utf-8")
    environment = {**os.environ, **ASCII, "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [Path(sys.executable).with_name("edl")]

    def edl(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, encoding="utf-8", timeout=SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    master = subprocess.Popen(
        [*command, "master", "--output", "öut", "-f", "größe.yaml", f"./{MODEL}"],
        env=environment,
        stdout=subprocess.PIPE,
    )
    try:
        assert master.stdout is not None
        assert master.stdout.readline() != b"", "it has not begun"
        assert edl("status", "öut").startswith(f"./{MODEL}: Starting")
        edl("stop", "öut")
        assert master.wait(SECONDS) == 1, "the job was stopped"
    finally:
        master.kill()
        master.communicate()
    found = json.loads(Path("öut/values.json").read_text(encoding="utf-8"))
    assert found["model"]["module"] == f"./{MODEL}"
    assert found["checkpoint"]["dir"] == f"{folder}/prüfpunkte"
    assert artifacts.read_summary(Path("öut"))["reason"].startswith("stopped by edl stop; no worker holds")
    (remembered,) = (tmp_path / "state" / "edl" / "jobs").iterdir()
    assert remembered.read_text(encoding="utf-8") == f"{folder}/öut\n"


def test_a_job_whose_folder_has_a_name_that_is_not_utf_8_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    output = tmp_path / os.fsdecode(b"\xff")
    output.mkdir()
    (output / latest.VALUES).touch()
    latest.remember(output)
    assert latest._remembered() == [output]


def test_a_name_that_is_not_utf_8_is_refused_as_a_value() -> None:
    given = values.load([], [])
    with pytest.raises(ConfigError, match=r"^model.module: invalid value .*\(expected text in UTF-8\)$"):
        config.parse(values.merge(given, {"model": {"module": os.fsdecode(b"./m\xffd.py")}}))
