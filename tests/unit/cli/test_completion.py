# SPDX-License-Identifier: Apache-2.0
"""What a shell completes, and the values that `edl run --dry-run` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from edl.cli import completion
from edl.cli.app import app
from edl.contract import artifacts

BIN = Path(sys.executable).parent


def test_bash_completes_commands_options_and_values() -> None:
    script = """
        eval "$(edl completion bash)"
        complete -p edl
        for typed in "st" "checkpoint cr" "model ex" "run --work" "run --set training.ep"; do
            COMP_WORDS=(edl $typed); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _edl_completion edl && echo "${COMPREPLY[@]}"
        done
    """
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == [
        "complete -o default -F _edl_completion edl",
        "status stop",
        "create",
        "export",
        "--workers",
        "training.epochs=",
    ], done.stderr


@pytest.mark.parametrize(
    ("shell", "part"), [("zsh", "compdef _edl_completion edl"), ("fish", "complete --command edl")]
)
def test_other_shells_have_a_script(shell: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    app(["completion", shell], standalone_mode=False)
    assert part in capsys.readouterr().out


def test_the_last_of_several_keys_and_models_are_completed() -> None:
    assert completion.keys("workers=3,checkpoint.k") == ["workers=3,checkpoint.keep="]
    assert completion.models("dig") == ["digits", "digits_ids"]


def test_a_dry_run_prints_the_values_with_which_a_job_would_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    app(["run", "digits", "--workers", "3", "--output", "job", "--dry-run"], standalone_mode=False)
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    assert values["workers"] == 3 and values["model"]["module"] == "digits"
    assert values["checkpoint"]["dir"] == str(tmp_path / "job" / artifacts.CHECKPOINTS)
    Path("values.yaml").write_text(printed)
    app(["run", "-f", "values.yaml", "--output", "job", "--dry-run"], standalone_mode=False)
    assert yaml.safe_load(capsys.readouterr().out) == values
    assert [path.name for path in tmp_path.iterdir()] == ["values.yaml"], "nothing is started"
