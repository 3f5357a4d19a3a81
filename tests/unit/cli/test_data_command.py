# SPDX-License-Identifier: Apache-2.0
"""`edl data inspect`: what is in files, and files that cannot be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edl.cli import main

HOUSES = "rooms,city,price\n3,Oslo,1.5\n5,Bergen,2.25\n4,Oslo,0.5\n2,Oslo,1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command in this process."""
    monkeypatch.setattr("sys.argv", ["edl", "data", "inspect", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_columns_and_first_records_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("houses.csv").write_text(HOUSES)
    assert called(monkeypatch, "houses.csv") == 0
    head, access, opened, empty, *table = capsys.readouterr().out.splitlines()
    assert head == "houses.csv  csv, 4 records in 1 file, 62 bytes"
    assert access == "single records can be read: yes"
    assert re.fullmatch(r"opened in [0-9]+\.[0-9]{2} s", opened), "a small file has no index beside it"
    assert empty == ""
    assert table == [
        "column  type     shape  record 0  record 1  record 2",
        "rooms   int64    ()     3         5         4",
        "city    text     ()     Oslo      Bergen    Oslo",
        "price   float64  ()     1.5       2.25      0.5",
    ]


def test_a_description_is_json_too_with_options_and_roles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("houses.txt").write_text(HOUSES.replace(",", ";"))
    options = ("--format", "csv", "--option", "delimiter=;", "--option", "label=price,features={rooms}")
    assert called(monkeypatch, "houses.txt", *options, "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["records"], found["files"], found["single_records"]) == ("csv", 4, 1, True)
    assert [(c["name"], c["dtype"], c["first"]) for c in found["columns"]] == [
        ("features", "int64", ["3", "5", "4"]),
        ("labels", "float64", ["1.5", "2.25", "0.5"]),
    ]


def test_arrays_are_cut_to_a_few_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, array in (("x", np.arange(64.0).reshape(2, 8, 4)), ("y", np.array(["a" * 90, "\x1b[2J"]))):
        np.save(f"{name}.npy", array)
    assert called(monkeypatch, "x.npy", "--option", "label=y.npy") == 0
    assert re.search(r"float64 +\(8, 4\) +0, 1, 2, 3, \.\.\.", out := capsys.readouterr().out)
    assert "a" * 37 + "..." in out
    assert "\x1b" not in out, "text of a file cannot control a terminal"


def test_the_cost_of_an_index_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lines.txt").write_text("a line of text\n" * 80_000)
    for built in (r", built in [0-9.]+ s", ""):
        assert called(monkeypatch, "lines.txt") == 0
        out = capsys.readouterr().out
        assert "text, 80,000 records in 1 file, 1.1 MiB" in out
        assert re.search(rf"opened in [0-9.]+ s with an index beside it \([0-9.]+ KiB{built}\)", out), out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.csv", None, "none.csv: cannot be read: there is no such file or directory"),
        ("model.py", b"x = 1", "the name of model.py does not say its format; give format (expected csv"),
        ("torn.parquet", b"PAR1" + bytes(99), "torn.parquet: cannot be read as Parquet"),
        ("digits.npz", b"PK", "edl has no reader npz; write in data(split): arrays = np.load(path)"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | None,
    words: str,
) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    assert called(monkeypatch, name) == 1
    told = capsys.readouterr().err
    assert told.startswith("edl: ")
    assert words in told
    assert told.count("\n") == 1


def test_the_columns_of_a_matrix_and_the_numbers_of_classes_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t.csv").write_text("a,b,y\n1,2,3\n4,5,6\n")
    assert called(monkeypatch, "t.csv", "--option", "label=y") == 0
    assert "columns of the features: a, b\n" in capsys.readouterr().out
    for name in ("cat", "dog", "owl"):
        Path("pets", name).mkdir(parents=True)
    Image.new("RGB", (2, 2)).save("pets/owl/0.png")
    assert called(monkeypatch, "pets") == 0
    assert "labels: 0 cat, 1 dog, 2 owl\n" in capsys.readouterr().out
    assert called(monkeypatch, "pets", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["classes"] == ["cat", "dog", "owl"]
