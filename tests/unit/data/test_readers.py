# SPDX-License-Identifier: Apache-2.0
"""Readers: records by index range, and errors that name the file, the column and the line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edl
from edl.errors import DataError


def test_arrays_give_ranges_of_every_column() -> None:
    reader = edl.arrays(np.arange(10), np.arange(10) * 2)
    assert isinstance(reader, edl.Reader)
    assert len(reader) == 10
    x, y = reader.read(3, 5)
    assert x.tolist() == [3, 4]
    assert y.tolist() == [6, 8]


def test_arrays_of_different_length_are_refused() -> None:
    with pytest.raises(DataError, match=r"arrays: the columns differ in length: \[3, 4\]"):
        edl.arrays(np.zeros(3), np.zeros(4))
    with pytest.raises(DataError, match="at least one array"):
        edl.arrays()


def test_csv_gives_its_columns_by_name(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,b,c\n1,2.5,x\n3,4.5,y\n")
    reader = edl.csv(tmp_path / "d.csv", ["a", "c"])
    assert len(reader) == 2
    records = reader.read(0, 2)
    assert set(records) == {"a", "c"}
    assert records["a"].tolist() == [1, 3]
    assert records["c"].tolist() == ["x", "y"]


def written(where: Path, text: str | bytes, name: str = "d.csv") -> Path:
    (where / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return where / name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n3\n", "line 3: cannot be read as CSV: Expected 2 columns, got 1: 3"),
        ('a,b\n1,"2\n"\n\n3\n', "line 5: cannot be read as CSV: Expected 2 columns, got 1: 3"),
        ("a,b\n1,2\n,4\n", "line 3: column 'a' is empty"),
        ('id,t,y\n1,"a\nb",3\n\n2,"c\nd",\n', "line 6: column 'y' is empty"),
        (
            "a,b\n1,2\nNA,4\n",
            "line 3: column 'a' is 'NA', which counts as empty; a value is needed",
        ),
        ("", "cannot be read as CSV"),
        ("größe,y\n1,1\n".encode("latin-1"), "line 1: the header is not utf-8; name the file's encoding"),
        ("c,y\nBern,2\nZürich,1\n".encode("latin-1"), "line 3: column 'c' is not utf-8; name the"),
        ("a,b,a\n1,2,3\n", "2 columns have the name 'a'"),
        ("zip,y\n10115,1\n00123,1\n", "line 3: column 'zip' is '00123', which loses its zeros"),
        (
            "a\n-1\n9223372036854775809\n",
            "line 3: column 'a' is 9223372036854775809, which a float64 rounds",
        ),
        ("a\n0.5\n9007199254740993\n", "line 3: column 'a' is 9007199254740993, which a float64 rounds"),
        ("a\n18446744073709551617\n", "line 2: column 'a' is 18446744073709551617, which a float64 rounds"),
    ],
)
def test_a_bad_csv_is_named_with_its_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError) as refused:
        edl.csv(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": ["c"]}, "column 'c' is missing; there are a, ' b'"),
        ({"dtype": {"c": str}}, "dtype: column 'c' is missing"),
        ({"dtype": {"a": "number"}}, "dtype: column 'a': 'number' is no type of numbers, text or times"),
        ({"dtype": {"a": None}}, "dtype: column 'a': None is no type"),
        ({"dtype": {"a": "int8"}}, "line 4: cannot be read as CSV: column 'a': CSV conversion error to int8"),
        ({"fill": {"c": 0}}, "fill: column 'c' is missing"),
        ({"features": ["a", "c"], "fill": 0}, "column 'c' is missing; there are a, ' b'"),
        ({"features": ["a"], "label": "c", "fill": 0}, "column 'c' is missing; there are a, ' b'"),
        ({"features": ["a", "c"], "dtype": "float32"}, "column 'c' is missing; there are a, ' b'"),
        ({"fill": {"a": 0.5}}, "fill: column 'a' is int64, which cannot have the value 0.5"),
        ({"encoding": "utf-88"}, "Python knows no encoding 'utf-88'"),
        ({"encoding": "ascii"}, "line 4: is not ascii"),
        ({"delimiter": ", "}, "delimiter must be one character, not ', '"),
    ],
)
def test_what_is_asked_of_a_csv_and_is_not_there_is_named(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, "a, b\n,x\n\n999,ü\n")
    with pytest.raises(DataError) as refused:
        edl.csv(path, **options)
    assert str(refused.value).startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("text", "options", "values"),
    [
        ("a\n9007199254740993\n-5\n", {}, np.array([2**53 + 1, -5])),
        ("a\n18446744073709551615\n007\n", {"dtype": {"a": "uint64"}}, np.array([2**64 - 1, 7], np.uint64)),
        ("a\n18446744073709551615\n9223372036854775809\n1\n", {}, np.array([2**64 - 1, 2**63 + 1, 1], "u8")),
        ("a,b\n18446744073709551615,\n,\n", {"fill": {"a": 3, "b": 0}}, np.array([2**64 - 1, 3], "u8")),
        ("a\n1e300\n9007199254740992\n0.25\n", {}, np.array([1e300, 2.0**53, 0.25])),
        ("a\n9007199254740993\n0.5\n", {"dtype": {"a": "float64"}}, np.array([2.0**53, 0.5])),
        ("a\n00123\n10115\n", {"dtype": {"a": str}}, np.array(["00123", "10115"], object)),
        ("a\n00123\n10115\n", {"dtype": {"a": int}}, np.array([123, 10115])),
        ("a\n2026-01-05 00:07\n2026-01-06\n", {}, np.array(["2026-01-05T00:07", "2026-01-06"], "M8[s]")),
        ("a\n12:30:00\n01:00:00\n", {}, np.array(["12:30:00", "01:00:00"], object)),
        ("a\nZürich\n".encode("latin-1"), {"encoding": "latin-1"}, np.array(["Zürich"], object)),
        ("a\n1\n2\n".encode("utf-16"), {"encoding": "utf-16"}, np.array([1, 2])),
        ("\ufeffa\r\n1\r\n\r\n2\r\n", {}, np.array([1, 2])),
        ("a,b\n1,x\nNA,NA\n", {"fill": {"a": -1}}, np.array([1, -1])),
    ],
)
def test_a_csv_keeps_each_value(
    tmp_path: Path, text: str | bytes, options: dict[str, Any], values: np.ndarray
) -> None:
    found = edl.csv(written(tmp_path, text), **options).read(0, 3)["a"]
    assert found.dtype == values.dtype
    assert found.tolist() == values.tolist()


def test_a_large_csv_may_have_line_ends_in_its_values(tmp_path: Path) -> None:
    rows = "".join(f'{n},"a\nb,{n}"\n' for n in range(100_000))
    found = edl.csv(written(tmp_path, "id,t\n" + rows))
    assert len(found) == 100_000
    assert found.read(99_999, 100_000)["t"].tolist() == ["a\nb,99999"]
    with pytest.raises(DataError, match=r"line 200002: column 'y' is empty"):
        edl.csv(written(tmp_path, "id,t,y\n" + rows.replace('"\n', '",1\n') + "7,x,\n"))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_padded_numbers_are_found_wherever_chunks_end(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl.data.formats.csv_text.CHUNK", chunk)
    for row in ("1,023", '1,"023"', "1, 023", "023,1"):
        with pytest.raises(DataError, match=r"line 3: .* is '023'"):
            edl.csv(written(tmp_path, f"a,b\n1,203\n{row}\n10,0\n"))


def test_a_list_that_numpy_would_round_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"a list with 9223372036854775809, which rounds it to 9223372036854775808"
    ):
        edl.arrays([1, 2**63 + 1], [0, 1])
    assert edl.arrays([0.5, 2**53]).read(1, 2)[0].tolist() == [2.0**53]
