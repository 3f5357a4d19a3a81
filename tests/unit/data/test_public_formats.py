# SPDX-License-Identifier: Apache-2.0
"""Files in public formats: Parquet, and Criteo's click logs as text and as Parquet."""

from __future__ import annotations

from datetime import datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet as pa_parquet

import edl
from edl.contract.layout import StepSlice
from edl.data.files import find
from edl.data.lines import EVERY, Lines
from edl.errors import DataError
from edl.trainer.model.records import Records

RECORDS = 3 * EVERY + 17


def logs(records: int = RECORDS) -> dict[str, list[Any]]:
    """Made up; as Criteo has them: some values are missing, and counts can be negative."""
    chance = np.random.default_rng(3)
    columns: dict[str, list[Any]] = {"label": chance.integers(0, 2, records).tolist()}
    for n in range(1, 14):
        numbers = chance.integers(-2, 500, records).tolist()
        columns[f"I{n}"] = [None if chance.random() < 0.2 else number for number in numbers]
    for n in range(1, 27):
        hashes = chance.integers(0, 1 << 32, records).tolist()
        columns[f"C{n}"] = [None if chance.random() < 0.1 else f"{number:08x}" for number in hashes]
    return columns


def as_text(columns: dict[str, list[Any]], path: Path, last: str = "\n") -> Path:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join("\t".join("" if v is None else str(v) for v in row) for row in rows) + last)
    return path


def check(read: dict[str, np.ndarray], columns: dict[str, list[Any]], start: int, stop: int) -> None:
    """Against the definition, value by value."""
    assert read["clicked"].tolist() == columns["label"][start:stop] and read["clicked"].dtype == np.float32
    assert read["numbers"].shape == (stop - start, 13) and read["numbers"].dtype == np.float32
    assert read["ids"].shape == (stop - start, 26) and read["ids"].dtype == np.int64
    for n in range(13):
        expected = np.log1p(np.array([max(v or 0, 0) for v in columns[f"I{n + 1}"][start:stop]], float))
        assert np.allclose(read["numbers"][:, n], expected)
    for n in range(26):
        texts = columns[f"C{n + 1}"][start:stop]
        assert read["ids"][:, n].tolist() == [-1 if t is None else (n << 32) + int(t, 16) for t in texts]


SPANS = [(0, 5), (EVERY - 1, EVERY + 1), (EVERY, 2 * EVERY), (10, RECORDS), (RECORDS - 1, RECORDS), (7, 7)]


@pytest.mark.parametrize("last", ["\n", ""])
def test_the_text_of_criteo_is_read_from_anywhere(tmp_path: Path, last: str) -> None:
    columns = logs()
    columns["C26"][-1] = "0000002a"  # so that the last line ends with a value
    reader = edl.criteo(as_text(columns, tmp_path / "day_0.txt", last))
    assert len(reader) == RECORDS
    for start, stop in SPANS:
        check(reader.read(start, stop), columns, start, stop)


@pytest.mark.parametrize("names", ["I", "integer_feature_"])
@pytest.mark.parametrize("numbers", [False, True])
def test_the_parquet_of_criteo_says_the_same(tmp_path: Path, names: str, numbers: bool) -> None:
    columns = logs()
    table = {
        name.replace("I", names).replace("C", "C" if names == "I" else "categorical_feature_"): [
            int(v, 16) if numbers and name[0] == "C" and v is not None else v for v in values
        ]
        for name, values in columns.items()
    }
    pa_parquet.write_table(pyarrow.table(table), tmp_path / "logs.parquet", row_group_size=1000)
    reader = edl.criteo(tmp_path / "logs.parquet")
    assert len(reader) == RECORDS
    for start, stop in [*SPANS, (999, 2001)]:
        check(reader.read(start, stop), columns, start, stop)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("label", 2, "record 40: the label must be 0 or 1"),
        ("label", None, "record 40: the label must be 0 or 1"),
        ("C7", "xyz", "record 40: category C7 must be up to eight hexadecimal digits, and is 'xyz'"),
        ("C7", "123456789", "record 40: category C7 must be up to eight hexadecimal digits"),
        ("C7", "-1", "record 40: category C7 must be up to eight hexadecimal digits, and is '-1'"),
        ("C7", "0x1f", "record 40: category C7 must be up to eight hexadecimal digits, and is '0x1f'"),
        ("I3", "many", "line 41, column I3: not a click log of Criteo: .*invalid value 'many'"),
        ("I3", "1\t2", r"line 41: not a click log of Criteo: Expected 40 columns, got 41"),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path: Path, column: str, value: Any, says: str) -> None:
    columns = logs(100)
    columns[column][40] = value
    reader = edl.criteo(as_text(columns, tmp_path / "bad.txt"))
    with pytest.raises(DataError, match=says):
        reader.read(30, 50)
    assert len(reader.read(41, 60)["ids"]) == 19


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("label", ["yes", "no"], "column label holds string; expected numbers"),
        ("I3", ["1", "2"], "column I3 holds string; expected numbers"),
        ("C7", [1.0, None], "column C7 holds double; expected text or whole numbers"),
    ],
)
def test_a_column_of_another_type_is_named(tmp_path: Path, column: str, values: list[Any], says: str) -> None:
    path = tmp_path / "logs.parquet"
    pa_parquet.write_table(pyarrow.table({**logs(2), column: values}), path)
    with pytest.raises(DataError, match=says):
        edl.criteo(path).read(0, 2)


def test_truth_values_are_labels_categories_may_be_numbered_and_what_is_no_number_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "logs.parquet"
    given = {
        "label": [True, False],
        "I3": [float("nan"), 1.5],
        "C7": pyarrow.array(["ff", None]).dictionary_encode(),
    }
    pa_parquet.write_table(pyarrow.table({**logs(2), **given}), path)
    read = edl.criteo(path).read(0, 2)
    assert read["clicked"].tolist() == [1, 0]
    assert read["numbers"][:, 2] == pytest.approx([0, np.log1p(1.5)])
    assert read["ids"][:, 6].tolist() == [(6 << 32) + 255, -1]


def test_files_that_are_no_logs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"day\.gz: is compressed"):
        edl.criteo(tmp_path / "day.gz")
    with pytest.raises(DataError, match=r"none\.txt: cannot be read: there is no such file"):
        edl.criteo(tmp_path / "none.txt")
    pa_parquet.write_table(pyarrow.table({"label": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="is not one of Criteo's: column 'I1' is missing"):
        edl.criteo(tmp_path / "other.parquet")
    (tmp_path / "fake.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        edl.criteo(tmp_path / "fake.parquet")


def test_a_file_that_became_shorter_is_not_read_as_if_it_had_not(tmp_path: Path) -> None:
    path = as_text(logs(100), tmp_path / "logs.txt")
    reader = edl.criteo(path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match="records 0 to 99: the file was changed or replaced"):
        reader.read(0, 100)


@pytest.mark.parametrize("count", [0, 1, EVERY - 1, EVERY, EVERY + 1, 5 * EVERY])
def test_lines_are_found_wherever_chunks_end(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl.data.lines.CHUNK", 1000)
    lines = [b"%d\n" % (n * n) for n in range(count)]
    (tmp_path / "lines").write_bytes(b"".join(lines))
    found = Lines(find(tmp_path / "lines")[0])
    assert len(found) == count
    chance = np.random.default_rng(count)
    for _ in range(50):
        start, stop = sorted(chance.integers(0, count + 1, 2).tolist())
        assert found.read(start, stop) == b"".join(lines[start:stop])


def test_a_parquet_file_is_a_dict_of_its_columns(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "x": np.arange(10, dtype=np.int32),
            "text": [f"t{n}" for n in range(10)],
            "vector": [[n, n + 0.5] for n in range(10)],
        }
    )
    pa_parquet.write_table(table, tmp_path / "t.parquet", row_group_size=4)
    reader = edl.parquet(tmp_path / "t.parquet")
    assert len(reader) == 10
    read = reader.read(3, 9)
    assert read["x"].tolist() == [3, 4, 5, 6, 7, 8] and read["x"].dtype == np.int32
    assert read["text"].tolist() == [f"t{n}" for n in range(3, 9)]
    assert read["vector"].tolist() == [[n, n + 0.5] for n in range(3, 9)]
    assert list(edl.parquet(tmp_path / "t.parquet", ["x"]).read(0, 1)) == ["x"]
    with pytest.raises(DataError, match="column 'y' is missing; there are x, text, vector"):
        edl.parquet(tmp_path / "t.parquet", ["y"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_workers_of_a_ring_decode_each_row_group_once_in_an_epoch(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, size, step = 100, 50, 40
    for name in ("a", "b"):
        table = pyarrow.table({"x": np.arange(groups * size), "y": np.zeros(groups * size)})
        pa_parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=size)
    decode, decoded = pa_parquet.ParquetFile.read_row_group, []

    def counted(self: Any, group: int, **options: Any) -> Any:
        decoded.append(group)
        return decode(self, group, **options)

    ring = []
    for _ in range(ranks):
        ring.append(Records(edl.parquet(tmp_path, label="y"), None, "mine", seed=3, shuffle=True))
        ring[-1].fit(1 << 20, ranks)
    monkeypatch.setattr(pa_parquet.ParquetFile, "read_row_group", counted)
    read: list[int] = []
    for rank, records in enumerate(ring):
        for start in range(0, 2 * groups * size, step):
            batch = records.batch(start, start + step, StepSlice.even(rank, ranks))
            read += batch.indices.tolist() if batch else []
    assert sorted(read) == list(range(2 * groups * size))
    # The first row group may be there since `fit` has measured a record.
    assert 2 * groups - ranks <= len(decoded) <= 2 * groups


def test_a_value_that_is_missing_in_a_parquet_file_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"x": [1, 2, None, 4], "list": [[1], [2], [3], [4, 5]]})
    pa_parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    with pytest.raises(DataError, match="record 2: column 'x' is empty"):
        edl.parquet(tmp_path / "t.parquet", ["x"]).read(1, 4)
    with pytest.raises(DataError, match=r"column 'list' has lists of lengths \[1, 2\]"):
        edl.parquet(tmp_path / "t.parquet", ["list"]).read(1, 4)


L, NESTED = pyarrow.list_, [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 0], [1, 2]]]


@pytest.mark.parametrize(
    ("column", "options", "values"),
    [
        (pyarrow.array([[1, 2]] * 3, pyarrow.large_list(pyarrow.int8())), {}, np.array([[1, 2]] * 3, "i1")),
        (pyarrow.array([[1, 2]] * 3, L(pyarrow.float32(), 2)), {}, np.array([[1, 2]] * 3, np.float32)),
        (pyarrow.array(NESTED, L(L(pyarrow.int16()))), {}, np.array(NESTED, np.int16)),
        (pyarrow.array(NESTED, L(L(pyarrow.int16(), 2), 2)), {}, np.array(NESTED, np.int16)),
        (
            pyarrow.array([[1, None], [2**53 + 1, 4], [5, 6]]),
            {"fill": {"v": 0}},
            np.array([[1, 0], [2**53 + 1, 4], [5, 6]]),
        ),
        (pyarrow.array([1, None, 3]), {"fill": {"v": -1}}, np.array([1, -1, 3])),
        (
            pyarrow.array([1, None, 3]),
            {"fill": {"v": 0.5}, "dtype": {"v": "float32"}},
            np.array([1, 0.5, 3], np.float32),
        ),
        (pyarrow.nulls(3), {"fill": {"v": "none"}}, np.array(["none"] * 3, object)),
        (pyarrow.array([Decimal("1.5")] * 3), {"dtype": {"v": "float64"}}, np.array([1.5] * 3)),
        (pyarrow.array([Decimal("1.50")] * 3), {"dtype": {"v": str}}, np.array(["1.50"] * 3, object)),
        (
            pyarrow.array([datetime(2026, 1, 5)] * 3, pyarrow.timestamp("ms", "UTC")),
            {},
            np.array(["2026-01-05"] * 3, "M8[ms]"),
        ),
        (pyarrow.array(["a", "b", "a"]).dictionary_encode(), {}, np.array(["a", "b", "a"], object)),
        (pyarrow.array([2**64 - 1, 0, 1], pyarrow.uint64()), {}, np.array([2**64 - 1, 0, 1], np.uint64)),
    ],
)
def test_a_parquet_file_keeps_each_value(
    tmp_path: Path, column: Any, options: dict[str, Any], values: np.ndarray
) -> None:
    pa_parquet.write_table(pyarrow.table({"v": column}), tmp_path / "t.parquet", row_group_size=2)
    reader = edl.parquet(tmp_path / "t.parquet", **options)
    for start, stop in ((0, 3), (1, 3), (2, 3)):
        found = reader.read(start, stop)["v"]
        assert (found.dtype, found.shape) == (values.dtype, (stop - start, *values.shape[1:]))
        assert found.tolist() == values[start:stop].tolist()


@pytest.mark.parametrize(
    ("column", "options", "words"),
    [
        ([[1, 2], [3, 4], [5, None]], {}, "record 2: column 'v' has a null in a list; a value is needed"),
        ([[1, 2], [3, 4], None], {"fill": {"v": 0}}, "record 2: column 'v' has no list"),
        ([[[1], [2]], [[3], [4, 5]], [[6], [7]]], {}, "record 1: column 'v' has lists of lengths [1"),
        ([[[1], [2]], [[3], [4]], [[6], None]], {}, "record 2: column 'v' has no list"),
        ([1, 2, None], {"fill": {"v": 0.5}}, "fill: column 'v' is int64, which cannot have"),
        ([1, 2, None], {"fill": {"v": "x"}}, "fill: column 'v' is int64, which cannot have"),
        ([Decimal("1.5")] * 3, {}, "column 'v' is decimal128(2, 1), which has no array type; dtype={"),
        ([time(1, 2)] * 3, {}, "column 'v' is time64[us], which has no array type; dtype={'v': str}"),
        ([{"a": 1}] * 3, {}, "column 'v' is struct<a: int64>, which has no array type; leave it"),
        ([1.5] * 3, {"dtype": {"v": "int64"}}, "column 'v' is double and not int64, as dtype says"),
        ([2**53 + 1] * 3, {"dtype": {"v": float}}, "column 'v' is int64 and not double, as dtype says"),
        ([1] * 3, {"dtype": {"w": "int64"}}, "dtype: column 'w' is missing; there are v"),
    ],
)
def test_what_no_array_can_be_made_of_in_a_parquet_file_is_named(
    tmp_path: Path, column: Any, options: dict[str, Any], words: str
) -> None:
    path = tmp_path / "t.parquet"
    pa_parquet.write_table(pyarrow.table({"v": column}), path, row_group_size=2)
    with pytest.raises(DataError) as refused:
        edl.parquet(path, **options).read(0, 3)
    assert str(refused.value).startswith(f"{path}: {words}")


def test_two_columns_of_one_name_in_a_parquet_file_are_refused(tmp_path: Path) -> None:
    table = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], ["x", "x"])
    pa_parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: 2 columns have the name 'x'"):
        edl.parquet(tmp_path / "t.parquet")
