# SPDX-License-Identifier: Apache-2.0
"""Parquet files, and the lines of a text."""

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
from edl.data.files.addresses import find
from edl.data.files.lines import EVERY, Lines
from edl.errors import DataError
from edl.trainer.records.records import Records


@pytest.mark.parametrize("count", [0, 1, EVERY - 1, EVERY, EVERY + 1, 5 * EVERY])
def test_lines_are_found_wherever_chunks_end(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edl.data.files.lines.CHUNK", 1000)
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
        ring[-1].choose_layout(1 << 20, ranks)
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
