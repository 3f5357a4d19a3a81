# SPDX-License-Identifier: Apache-2.0
"""CSV files without a header, in several files, and larger than memory, which are read by range."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edl
from edl.errors import DataError

RECORDS = 5000


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def by_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read even small files by range, in parts of a few records."""
    monkeypatch.setattr("edl.data.formats.csv_file.IN_MEMORY", 0)
    monkeypatch.setattr("edl.data.formats.csv_file.PART", 1000)


def test_a_file_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text("1;x\n2;y\n")
    assert edl.csv(path, header=False, delimiter=";").read(0, 2)["f1"].tolist() == ["x", "y"]
    reader = edl.csv(path, ["n", "t"], ";", header=False, features="t", label="n")
    assert [column.tolist() for column in reader.read(1, 2)] == [["y"], [2]]
    with pytest.raises(DataError, match=r"f\.csv: line 1 has 2 columns, and names has 1; without a header"):
        edl.csv(path, ["n"], ";", header=False)
    path.write_text("1;x\n2\n")
    with pytest.raises(DataError, match=r"f\.csv: line 2: cannot be read as CSV: Expected 2 columns, got 1"):
        edl.csv(path, delimiter=";", header=False)


def test_one_type_and_one_filling_for_all_columns(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text("a,b,y\n1,,3\n,2,4\n")
    x, y = edl.csv(path, dtype="float32", fill=0, label="y").read(0, 2)
    assert (x.dtype, x.tolist(), y.dtype) == (np.float32, [[1, 0], [0, 2]], np.int64)
    with pytest.raises(DataError, match=r"f\.csv: line 2: column 'b' is empty"):
        edl.csv(path, fill={"a": 0})


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        (["1", "0.5"], "f8"),
        (["1", "9223372036854775809"], "u8"),
        (["7", "x"], "O"),
        (["007", "x"], "O"),
        (["2026-01-05", "2026-01-05 10:00:00"], "M8[s]"),
        (["", "3"], "i8"),
        (["true", "false"], "?"),
    ],
)
def test_the_type_of_a_column_is_that_of_all_files(tmp_path: Path, parts: list[str], kind: str) -> None:
    for nth, value in enumerate(parts):
        (tmp_path / f"{nth}.csv").write_text(f"a,b\n{value},1\n")
    found = edl.csv(tmp_path, fill={"a": 0} if "" in parts else None).read(0, 2)["a"]
    assert found.dtype == np.dtype(kind)
    if kind == "O":
        assert found.tolist() == parts
    if kind == "u8":
        assert found.tolist() == [int(value) for value in parts]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (["9007199254740993", "0.5"], r"0\.csv: line 2: column 'a' is 9007.*, which a float64 rounds"),
        (["-1", "9223372036854775809"], r"1\.csv: line 2: column 'a' is 92.*, which a float64 rounds"),
        (["1", "007"], r"1\.csv: line 2: column 'a' is '007', which loses its zeros"),
    ],
)
def test_a_value_that_no_type_of_all_files_keeps_is_named(
    tmp_path: Path, parts: list[str], words: str
) -> None:
    for nth, value in enumerate(parts):
        (tmp_path / f"{nth}.csv").write_text(f"a\n{value}\n")
    with pytest.raises(DataError, match=words):
        edl.csv(tmp_path)


def rows(chance: np.random.Generator) -> tuple[str, dict[str, list[Any]]]:
    """Text with quotes, line ends in values, empty lines and both kinds of line ends."""
    columns: dict[str, list[Any]] = {"id": [], "x": [], "t": []}
    lines = []
    for n in range(RECORDS):
        text = str(chance.choice(["plain", 'a "quote"', "two\nlines", 'it,"\n"is', ""]))
        columns["id"].append(n)
        columns["x"].append(float(n) / 4 if n > RECORDS // 2 else float(n))
        columns["t"].append(text)
        quoted = '"' + text.replace('"', '""') + '"' if text else ""
        x = n / 4 if n > RECORDS // 2 else n
        lines.append(f"{n},{x},{quoted}" + chance.choice(["\n", "\r\n", "\n\n"]))
    return "".join(lines), columns


@pytest.mark.usefixtures("by_range")
@pytest.mark.parametrize("header", [True, False])
def test_a_large_file_is_read_by_range_as_it_is_read_whole(tmp_path: Path, header: bool) -> None:
    chance = np.random.default_rng(header)
    text, columns = rows(chance)
    path = tmp_path / "large.csv"
    path.write_bytes((("id,x,t\n" if header else "") + text.rstrip("\r\n")).encode())
    options = {"header": header} if header else {"header": header, "names": ["id", "x", "t"]}
    for _ in range(2):  # the second time with the stored index
        reader = edl.csv(path, **options)
        assert len(reader) == RECORDS
        assert not hasattr(reader, "take")
        spans = np.sort(chance.integers(0, RECORDS + 1, (20, 2)), axis=1).tolist()
        for start, stop in [*spans, (0, RECORDS), (1023, 1025), (RECORDS - 1, RECORDS), (7, 7)]:
            found = reader.read(start, stop)
            assert found["x"].dtype == np.float64
            assert {name: array.tolist() for name, array in found.items()} == {
                name: values[start:stop] for name, values in columns.items()
            }
    assert len(list(tmp_path.rglob("*.edl-index"))) == 1


@pytest.mark.usefixtures("by_range")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('a,b\n1,5" pipe\n2,"x\ny"\n', r"byte 7: a quote opens in the middle of a value"),
        ('a,b\n1,"x\n2,y\n', "the record that begins at byte 0 has no end within|is a quote never closed"),
        ("a,b\n1,2\n3\n", "line 3: cannot be read as CSV: Expected 2 columns, got 1: 3"),
        ("a,b\n1,2\r3,4\n", "pyarrow finds 2 records, and 1 lines end there"),
    ],
)
def test_a_large_file_whose_records_cannot_be_told_apart_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "f.csv").write_bytes(text.encode())
    with pytest.raises(DataError, match=rf"f\.csv: .*{words}"):
        edl.csv(tmp_path / "f.csv")


@pytest.mark.usefixtures("by_range")
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("x,", "line 4003: column 'b' is empty"),
        ("x,0012", "line 4003: column 'b' is '0012', which loses its zeros"),
    ],
)
def test_a_bad_record_of_a_large_file_is_named_when_it_is_read(tmp_path: Path, bad: str, words: str) -> None:
    lines = [f"x,{n}" for n in range(RECORDS)]
    lines[4001] = bad
    (tmp_path / "f.csv").write_text("a,b\n" + "\n".join(lines))
    reader = edl.csv(tmp_path / "f.csv")
    assert reader.read(100, 102)["b"].tolist() == [100, 101]
    with pytest.raises(DataError, match=rf"f\.csv: {words}"):
        reader.read(4000, 4003)


@pytest.mark.usefixtures("by_range")
def test_a_large_file_that_changes_is_told(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text("a\n" + "1\n" * RECORDS)
    reader = edl.csv(path)
    os.truncate(path, 100)
    with pytest.raises(DataError, match=r"f\.csv: records 5 to 9: the file was changed or replaced since"):
        reader.read(5, 10)
    (tmp_path / "g.csv.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"g\.csv\.gz: "):
        edl.csv(tmp_path / "g.csv.gz")


def test_a_large_file_is_not_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edl.data.formats.csv_file.IN_MEMORY", 1 << 20)
    monkeypatch.setattr("edl.data.formats.csv_file.PART", 1 << 20)
    path = tmp_path / "f.csv"
    line = "1," + "9" * 1000 + "\n"
    path.write_text("a,b\n" + line * 40_000)
    edl.csv(path, features="a")  # builds the index
    import pyarrow

    tracemalloc.start()
    before = pyarrow.total_allocated_bytes()
    reader = edl.csv(path, features="a")
    assert len(reader.read(39_000, 39_010)[0]) == 10
    peak = tracemalloc.get_traced_memory()[1] + pyarrow.total_allocated_bytes() - before
    tracemalloc.stop()
    assert peak < 12 << 20, peak


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n3,x\n", None),
        ("a,b\r\n3,x\r\n", None),
        ("a,b\n3,x", None),
        ("a,b\n3,x\n\n4,y\n", None),
        ('a,b\n3,"x\ny"\n', None),
        ("b,a\nx,3\n", None),
        ("a,b\n", None),
        ("a,b\n18446744073709551615,x\n", None),
        ("a,b\n2.5,x\n", None),
        ("a,b\n007,x\n", r"2\.csv: line 2: column 'a' is '007'"),
        ("a,b\n3,x,5\n", r"2\.csv: line 2"),
        ("a,b\n3,x\n,y\n", r"2\.csv: line 3: column 'a'"),
        ("a,c\n3,x\n", r"2\.csv: column 'b' is missing"),
        ("", r"2\.csv: cannot be read as CSV: it has no header line"),
    ],
)
def test_many_small_files_are_read_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, words: str | None
) -> None:
    for nth in (0, 1, 3):
        (tmp_path / f"{nth}.csv").write_text(f"a,b\n{nth},x\n{nth + 10},zeile\n")
    (tmp_path / "2.csv").write_bytes(content.encode())
    if words is not None:
        with pytest.raises(DataError, match=words):
            edl.csv(tmp_path)
        return
    fast: Any = edl.csv(tmp_path)
    monkeypatch.setattr("edl.data.formats.csv_together.SMALL", 0)
    slow: Any = edl.csv(tmp_path)
    assert len(fast) == len(slow)
    for name, array in slow.read(0, len(slow)).items():
        found = fast.read(0, len(fast))[name]
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    assert [fast.place(n) for n in range(len(fast))] == [slow.place(n) for n in range(len(slow))]
