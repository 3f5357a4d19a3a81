# SPDX-License-Identifier: Apache-2.0
"""`edl checkpoint`: what it lists, what it shows, and what it says of damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edl.checkpoints import Store
from edl.cli.app import app
from edl.errors import EdlError
from tests.support.checkpoints.checkpoints import TENSORS, write


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With three whole checkpoints, and one that is being written."""
    store = Store.open(str(tmp_path / "dir"))
    for step in (100, 200, 1300):
        write(store, step, metrics={"loss": 30 / step, "auc": float("nan")}, config={"training.seed": 7})
    store.begin(1400, "a").write_part(0, 2, TENSORS)
    return tmp_path / "dir"


def edl(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def damage(directory: Path, step: int) -> None:
    """Alter one bit of a tensor."""
    part = sorted(directory.glob(f"step-*{step}-1/part-*"))[0]
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))


def test_all_are_listed_the_newest_last(directory: Path) -> None:
    found = edl("list", directory)
    rows = found.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["100", "200", "1,300", "1,400"]
    assert "complete (not verified)" in rows[0] and "auc nan, loss 0.3" in rows[0]
    assert "not completed" in rows[3]
    assert found.exit_code == 0


def test_damage_is_named(directory: Path) -> None:
    damage(directory, 200)
    assert edl("list", directory).exit_code == 0  # of the same size
    found = edl("verify", directory)
    assert found.exit_code == 1
    states = found.stdout.splitlines()[1:]
    assert "whole" in states[0] and "whole" in states[2]
    assert "part-00000-of-00002-" in states[1] and "its SHA-256 is not the one in the manifest" in states[1]


def test_json_says_the_same(directory: Path) -> None:
    damage(directory, 1300)
    found = json.loads(edl("verify", directory, "-o", "json").stdout, parse_constant=pytest.fail)["items"]
    assert [each["usable"] for each in found] == [True, True, False, False]
    assert found[0]["metrics"] == {"auc": "nan", "loss": 0.3}
    [one] = json.loads(edl("list", directory, 200, "-o", "json").stdout)["items"]
    assert one["manifest"]["variables"][1] == {
        "name": "dense/bias",
        "dtype": "bfloat16",
        "shape": [5],
        "part": 1,
    }


def test_one_is_shown_with_its_variables(directory: Path) -> None:
    found = edl("list", directory, 200)
    lines = [" ".join(line.split()) for line in found.stdout.splitlines()]
    assert lines[0] == "step 200, attempt 1: complete (not verified)"
    assert {"epoch 2", "records 6,400", "skipped steps 3-4", "bad records 2 in epoch 1"} <= set(lines)
    assert {"training.seed 7", "dense/kernel float32 3 x 4 0", "flag bool scalar 1"} <= set(lines)


def test_a_directory_without_checkpoints_is_told(tmp_path: Path, directory: Path) -> None:
    for arguments, words in (
        ((tmp_path,), "no checkpoints found"),
        ((directory, 7), "no checkpoint of step 7"),
    ):
        error = edl("list", *arguments).exception
        assert isinstance(error, EdlError) and words in str(error)
