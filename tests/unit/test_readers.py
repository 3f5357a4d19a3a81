"""Readers: records by index range, and errors that name the file, the column and the line."""

from pathlib import Path

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


def test_npz_gives_its_arrays_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(4), y=np.ones(4), note=np.zeros(1))
    assert edl.npz(tmp_path / "d.npz", ["x", "y"]).read(1, 3)["x"].tolist() == [1, 2]
    with pytest.raises(DataError, match=r"d\.npz: no array 'z'; it has note, x, y"):
        edl.npz(tmp_path / "d.npz", ["z"])
    with pytest.raises(DataError, match=r"d\.npz: the columns differ in length"):
        edl.npz(tmp_path / "d.npz")


def test_an_npz_that_would_run_code_or_is_none_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", x=np.array([object()]))
    (tmp_path / "t.npz").write_text("no zip")
    for name in ("o.npz", "t.npz", "nowhere.npz"):
        with pytest.raises(DataError, match=f"{name}: cannot be read as .npz"):
            edl.npz(tmp_path / name)


def test_csv_gives_its_columns_by_name(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,b,c\n1,2.5,x\n3,4.5,y\n")
    reader = edl.csv(tmp_path / "d.csv", ["a", "c"])
    assert len(reader) == 2
    records = reader.read(0, 2)
    assert set(records) == {"a", "c"}
    assert records["a"].tolist() == [1, 3]
    assert records["c"].tolist() == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n3\n", "cannot be read as CSV"),
        ("a,b\n1,2\n,4\n", "line 3: column 'a' is empty"),
        ("", "cannot be read as CSV"),
    ],
)
def test_a_bad_csv_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(DataError) as refused:
        edl.csv(tmp_path / "d.csv")
    assert str(refused.value).startswith(f"{tmp_path / 'd.csv'}: ")
    assert words in str(refused.value)


def test_a_csv_without_the_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match="cannot be read as CSV"):
        edl.csv(tmp_path / "d.csv", ["b"])
