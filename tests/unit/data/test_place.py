# SPDX-License-Identifier: Apache-2.0
"""Messages about a record name its file and its number there, however readers are combined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edl
from edl.data.place import place


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))
    for nth, rows in enumerate((3, 0, 4)):
        lines = "".join(f"{10 * nth + row},{row}\n" for row in range(rows))
        (tmp_path / f"{nth}.csv").write_text("a,b\n" + lines)
        (tmp_path / f"{nth}.txt").write_text(lines)
        np.save(tmp_path / f"{nth}.npy", np.zeros((rows, 2)))
    return tmp_path


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_a_record_of_csv_files_is_named(folder: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.data.formats.csv_file.IN_MEMORY", most)
    reader: Any = edl.csv([folder / f"{nth}.csv" for nth in (0, 2)], features="a", label="b")
    held_out = edl.split(reader, validation=0.4)["validation"]
    for index in range(len(held_out)):
        value = int(held_out.read(index, index + 1)[0][0])
        assert place(held_out, index) == f"{folder}/{value // 10}.csv: record {value % 10}"
    assert (place(reader, 0), place(reader, 6)) == (f"{folder}/0.csv: record 0", f"{folder}/2.csv: record 3")


def test_a_record_after_an_empty_file_is_named(folder: Path) -> None:
    assert place(edl.text(folder / "*.txt"), 3) == f"{folder}/2.txt: record 0"
    both = edl.npy(folder / "*.npy", label=folder / "*.npy")
    assert (place(both, 2), place(both, 6)) == (f"{folder}/0.npy: record 2", f"{folder}/2.npy: record 3")


def test_records_that_are_in_no_file_have_no_place() -> None:
    assert place(edl.dataset(np.arange(3)), 1) == ""
    assert place(object(), 1) == ""
