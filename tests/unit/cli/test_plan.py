# SPDX-License-Identifier: Apache-2.0
"""What `edl plan` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from edl.cli.app import app
from edl.errors import ConfigError, ModelError

WRONG = "def model(): ...\n\ndef data(a, b): ...\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["counting", "--set", "mode=ps"],
            "mode=ps: cannot be planned; expected a model that is trained by a ring",
        ),
        (["counting", "--set", "mode=evaluate"], "mode=evaluate: cannot be planned"),
        (["--set", "model.script=train.py"], "model.script: cannot be planned"),
        (["counting", "--mtbf", "0"], "--mtbf: expected more than 0 s"),
        (
            ["counting", "--set", "data.train=missing.csv"],
            "data.train: no such file or directory: .*/missing.csv",
        ),
        (["mine.py"], r"mine.py: line 3: data\(a, b\) is called as data\(split\)"),
    ],
)
def test_a_job_that_cannot_be_planned_is_refused_before_anything_starts(
    arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(WRONG)
    done = CliRunner().invoke(app, ["plan", *arguments])
    with pytest.raises((ConfigError, ModelError), match=why):
        raise done.exception or AssertionError(done.output)
    assert not Path("runs").exists()
