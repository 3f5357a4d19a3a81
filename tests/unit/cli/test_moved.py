# SPDX-License-Identifier: Apache-2.0
"""Old names of commands: each is refused with one line that has the new name."""

from __future__ import annotations

import pytest

from edl.cli import main


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("checkpoint", "edl checkpoint create"),
        ("checkpoint runs/a", "edl checkpoint create"),
        ("checkpoint --release edl", "edl checkpoint create"),
        ("checkpoints DIR", "edl checkpoint list"),
        ("checkpoints DIR --verify", "edl checkpoint verify"),
        ("export runs/a --format onnx --step 3", "edl model export"),
        ("export --help", "edl model export"),
        ("zoo init .", "edl image init"),
        ("zoo build --image a:1 .", "edl image build"),
        ("zoo push a:1", "edl image push"),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(
    old: str, new: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["edl", *old.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edl: `edl ") and new in line


@pytest.mark.parametrize("group", ["checkpoint", "model", "image"])
def test_a_group_has_help_without_old_names(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["edl", group, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"edl {group}" in told and "renamed" not in told
