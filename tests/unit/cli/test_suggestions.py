# SPDX-License-Identifier: Apache-2.0
"""Messages that name what was meant: choices of options, and the guide for scripts that call fit()."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edl.cli import main
from edl.cli.shared import models
from edl.config.job import Model
from edl.errors import ModelError

FIT = "import keras\nnet = keras.Sequential()\nnet.fit([1])\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["new", "it.py", "--from", "image"], "'custom-loop'; did you mean images?"),
        (["status", "-o", "jsn"], "'yaml'; did you mean json?"),
        (["new", "it.py", "--from", "zzz"], "'recommender', 'custom-loop'."),
    ],
)
def test_a_choice_that_is_similar_is_suggested(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["edl", *arguments])
    with pytest.raises(SystemExit):
        main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"Error: Invalid value for '{arguments[-2]}': '{arguments[-1]}' is not one of")
    assert last.endswith(said)


def script(path: Path, text: str, uses_integration: bool = False) -> None:
    path.write_text(text)
    models.check_script(Model.model_construct(script=str(path), source=""), uses_integration)


def test_a_script_that_calls_fit_alone_is_refused_at_once_with_the_guide(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"line 3: calls fit\(\) and no edl.join\(\).*coming-from-fit.md"):
        script(tmp_path / "it.py", FIT)
    script(tmp_path / "it.py", FIT, uses_integration=True)
    script(tmp_path / "it.py", "import edl\n" + FIT)
    script(tmp_path / "it.py", "import mine\n" + FIT.replace("keras", "sklearn"))
    (tmp_path / "mine.py").write_text("import edl\n")
    script(tmp_path / "it.py", "import mine\n" + FIT)
