# SPDX-License-Identifier: Apache-2.0
"""What `data(split)` may return: each kind of data that people have, with the real libraries."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import grain
import numpy as np
import pandas
import polars
import pyarrow
import pytest

import edl
from edl.contract.layout import Layout, StepSlice
from edl.contract.order import Order
from edl.data import RandomAccess
from edl.data.objects.batched import Batched
from edl.errors import DataError

X, Y, W = np.arange(12.0).reshape(6, 2), np.arange(6), np.arange(6) / 2


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for entries in zip(found, expected, strict=True):
            same(*entries)
    else:
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (X, lambda i: X[i]),
        ((X, Y), lambda i: (X[i], Y[i])),
        ([X, Y, W], lambda i: (X[i], Y[i], W[i])),
        ((X, None), lambda i: (X[i],)),
        ({"a": X, "b": Y}, lambda i: {"a": X[i], "b": Y[i]}),
        (({"a": X, "b": [Y, W]}, Y), lambda i: ({"a": X[i], "b": [Y[i], W[i]]}, Y[i])),
        (Pair(X, Y), lambda i: Pair(X[i], Y[i])),
        ((X.tolist(), Y.tolist()), lambda i: (X[i], Y[i])),
        ((pandas.DataFrame(X, columns=["p", "q"]), pandas.Series(Y)), lambda i: (X[i], Y[i])),
        ((polars.DataFrame(X), polars.Series(Y)), lambda i: (X[i], Y[i])),
        ((pyarrow.table({"p": X[:, 0], "q": X[:, 1]}), pyarrow.array(Y)), lambda i: (X[i], Y[i])),
    ],
    ids=["array", "pair", "list", "none", "dict", "nest", "named", "lists", "pandas", "polars", "arrow"],
)
def test_arrays_and_tables_are_given_as_fit_takes_them(data: Any, expected: Any) -> None:
    reader = edl.dataset(data)
    assert len(reader) == 6
    same(reader.read(1, 4), expected(slice(1, 4)))
    assert isinstance(reader, RandomAccess)
    same(reader.take(np.array([5, 0])), expected([5, 0]))


def test_tables_of_other_types_are_dicts_of_their_columns() -> None:
    frame = pandas.DataFrame(
        {
            "city": ["a", "b", "a"],
            "kind": pandas.Categorical(["x", "y", "x"]),
            "flag": [True, False, True],
            "age": pandas.array([3, 4, 5], dtype="Int64"),
            "height": [1.5, np.nan, 2.5],
        },
        index=[7, 8, 9],
    )
    for data in (frame, polars.from_pandas(frame), pyarrow.Table.from_pandas(frame, preserve_index=False)):
        found = edl.dataset(data).read(0, 3)
        assert list(found) == list(frame.columns), "without the index of pandas"
        assert found["city"].tolist() == ["a", "b", "a"]
        assert found["kind"].tolist() == ["x", "y", "x"]
        assert found["flag"].dtype == bool
        assert found["age"].tolist() == [3, 4, 5]
        np.testing.assert_array_equal(found["height"], [1.5, np.nan, 2.5])


def test_columns_have_roles() -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4], "y": [0, 1], "w": [0.5, 1.0], "t": ["u", "v"]})
    same(
        edl.dataset(frame[["a", "b", "y"]], label="y").read(0, 2),
        (np.array([[1.0, 3], [2, 4]]), np.array([0, 1])),
    )
    found = edl.dataset(frame, features=["b", "t"], label="y", weight="w").read(1, 2)
    assert (found[0]["b"].tolist(), found[0]["t"].tolist()) == ([4], ["v"])
    assert (found[1].tolist(), found[2].tolist()) == ([1], [1.0])
    (features,) = edl.dataset(frame, features="b").read(0, 2)
    assert features.tolist() == [3, 4]


def test_files_give_labels_where_a_column_is_named(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {"a": [1.0, 2.0, 3.0], "b": [3.0, 4.0, 5.0], "y": [0, 1, 0], "note": ["p", "q", "r"]}
    )
    frame.to_csv(tmp_path / "f.csv", index=False)
    frame.to_parquet(tmp_path / "f.parquet")
    expected = (frame[["a", "b"]].to_numpy()[1:], np.array([1, 0]))
    for reader in (
        edl.csv(tmp_path / "f.csv", features=["a", "b"], label="y"),
        edl.parquet(tmp_path / "f.parquet", features=["a", "b"], label="y"),
    ):
        same(reader.read(1, 3), expected)
    for read, name in ((edl.csv, "f.csv"), (edl.parquet, "f.parquet")):
        with pytest.raises(DataError, match=rf"{name}: column 'z' is missing; there are a, b, y, note"):
            read(tmp_path / name, label="z", features=["a"])


class Items:
    """A map-style dataset, as PyTorch defines it."""

    def __init__(self, items: list[Any]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_datasets_of_records_are_stacked() -> None:
    reader = edl.dataset(
        Items([(np.full((2, 2), i, np.float32), {"age": i, "name": str(i)}) for i in range(5)])
    )
    assert isinstance(reader, RandomAccess)
    x, rest = reader.take(np.array([4, 1]))
    same(x, np.stack([np.full((2, 2), 4, np.float32), np.full((2, 2), 1, np.float32)]))
    assert (rest["age"].tolist(), rest["name"].tolist()) == ([4, 1], ["4", "1"])
    assert reader.read(1, 3)[0].shape == (2, 2, 2)


def test_a_dataset_of_hugging_face_is_asked_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    there = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    asked: list[list[int]] = []
    original = datasets.Dataset.__getitems__

    def items(self: Any, keys: list[int]) -> Any:
        asked.append(keys)
        return original(self, keys)

    monkeypatch.setattr(datasets.Dataset, "__getitems__", items)
    reader = edl.dataset(there, features="x", label="label")
    asked.clear()
    assert isinstance(reader, RandomAccess)
    same(reader.take(np.array([5, 2])), (X[[5, 2]], Y[[5, 2]]))
    assert asked == [[5, 2]]


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ([(1.0, [1, 2]), (1.0, [1, 2, 3])], r"record 1 does not go with record 0: shapes \(2,\) and \(3,\)"),
        ([{"a": 1}, {"b": 1}], r"record 1 does not go with record 0: keys \['a'\] and \['b'\]"),
        ([1, 2.5], "record 1 does not go with record 0: arrays of float64 and int64"),
        ([1, None], "record 1 is None: a filter of Grain"),
    ],
)
def test_a_record_of_another_form_is_named(items: list[Any], why: str) -> None:
    with pytest.raises(DataError, match=f"mine: {why}"):
        edl.dataset(Items(items), source="mine").read(0, 2)


class PyDataset:
    """Stands for the class of Keras, whose import takes seconds; test_data_kinds.py has the real one."""

    def __init__(self, sizes: list[int]):
        self.sizes = sizes
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        start = sum(self.sizes[:index])
        return np.arange(start, start + self.sizes[index]), np.full(self.sizes[index], index)


@pytest.mark.parametrize(("records", "size"), [(1000, 32), (70, 7), (5, 8), (64, 1)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_batch_is_read_once_in_an_epoch(records: int, size: int, ranks: int) -> None:
    sizes = [size] * (records // size) + ([records % size] if records % size else [])
    batches = PyDataset(sizes)
    reader = Batched(batches, "mine")
    assert len(reader) == records
    layout = Layout.fitting(records, 8.0, 1 << 20, ranks, reader.records_per_read)
    order = Order(layout, seed=3)
    reads: dict[int, int] = {}
    seen = []
    for rank in range(ranks):
        part = StepSlice.even(rank, ranks)
        opened: dict[int, tuple[int, np.ndarray]] = {}
        for start in range(0, records, 16):
            indices, shards = order.part(start, min(start + 16, records), part)
            for index, shard in zip(indices.tolist(), shards.tolist(), strict=True):
                block = index // layout.block
                if shard not in opened or opened[shard][0] != block:
                    batches.asked.clear()
                    begin = block * layout.block
                    opened[shard] = block, reader.read(begin, min(begin + layout.block, records))[0]
                    for number in batches.asked:
                        reads[number] = reads.get(number, 0) + 1
                seen.append(int(opened[shard][1][index - block * layout.block]))
    assert sorted(seen) == list(range(records))
    if order._shards >= 8 * ranks:  # with fewer, a shard may be divided between two ranks
        assert max(reads.values(), default=0) <= 1


def test_a_batch_of_another_size_is_named() -> None:
    with pytest.raises(DataError, match="mine: batch 1 has 3 records; expected 4, as batch 0 has 4"):
        Batched(PyDataset([4, 3, 4, 2]), "mine").read(0, 8)


def test_grain_gives_its_records_by_index() -> None:
    pairs = grain.MapDataset.source(list(zip(X, Y.tolist(), strict=True)))
    reader = edl.dataset(pairs)
    assert isinstance(reader, RandomAccess)
    same(reader.take(np.array([5, 0])), (X[[5, 0]], Y[[5, 0]]))
    named = pairs.map(lambda pair: {"x": pair[0] * 2, "label": pair[1]})
    same(edl.dataset(named, features="x", label="label").read(1, 4), (X[1:4] * 2, Y[1:4]))
    same(edl.dataset(grain.sources.RangeDataSource(0, 10, 1)).read(2, 4), np.array([2, 3]))
    with pytest.raises(DataError, match=r"^mine: the dataset has no end \(repeat\(\)\)"):
        edl.dataset(pairs.repeat(), source="mine")
    with pytest.raises(DataError, match=r"^mine: record 1 is None: a filter .* edl data convert FILE.py"):
        edl.dataset(pairs.filter(lambda pair: pair[1] % 2 == 0), source="mine").read(0, 3)


def stream() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "is None; expected arrays, a table, a dataset or a reader"),
        ("d.csv", r"is the path 'd.csv'; expected a reader of that file, such as edl.csv\(path\)"),
        (Path("d.csv"), "is the path 'd.csv'"),
        (stream(), "is of type generator, which gives records in a row, not by index"),
        (
            datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset(),
            "is of type datasets.*IterableDataset, which gives records in a row",
        ),
        (
            grain.MapDataset.range(3).to_iter_dataset(),
            r"is of type grain.*IterDataset, which gives .*edl data convert FILE.py train.array_record",
        ),
        (3, "is of type int, without __len__ and __getitem__"),
        ((X, Y[:3]), r": the columns differ in length: \[3, 6\] \(\[0\] has 6, \[1\] has 3\)"),
        ((), ": at least one array is needed"),
        ((X, np.float32(1)), r"\[1\] is a float32; expected an array with an entry for each record"),
        (pandas.DataFrame({"a": ["x", None]}), ": column 'a': record 1 has no value; fill it"),
        (polars.DataFrame({"a": [1, None]}), ": column 'a': record 1 has no value; fill it"),
    ],
)
def test_what_cannot_be_indexed_is_refused_with_the_way_on(data: Any, why: str) -> None:
    with pytest.raises(DataError, match=rf"^data\('train'\).*{why}"):
        edl.dataset(data, source="data('train')")


@pytest.mark.parametrize("is_random", [True, False])
def test_a_split_is_a_division_of_the_records_and_always_the_same(is_random: bool) -> None:
    class InBlocks:
        def __len__(self) -> int:
            return 5000

        def read(self, start: int, stop: int) -> Any:
            return (np.arange(start, stop),)

    data = (np.arange(5000),) if is_random else InBlocks()
    found = edl.split(data, test=0.2, validation=0.1, seed=4)
    records = {name: reader.read(0, len(reader))[0] for name, reader in found.items()}
    assert {name: len(r) for name, r in records.items()} == {"train": 3500, "test": 1000, "validation": 500}
    assert sorted(np.concatenate(list(records.values())).tolist()) == list(range(5000))
    again = edl.split(data, test=0.2, validation=0.1, seed=4)
    for name, reader in again.items():
        np.testing.assert_array_equal(reader.read(3, 77)[0], records[name][3:77])
        assert isinstance(reader, RandomAccess) == is_random
        if isinstance(reader, RandomAccess):
            np.testing.assert_array_equal(reader.take(np.array([7, 3]))[0], records[name][[7, 3]])
    other = edl.split(data, test=0.2, validation=0.1, seed=5)["test"]
    assert not np.array_equal(other.read(0, 1000)[0], records["test"])


def test_a_split_without_records_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"split: of 3 records, none is left for 'test' \(validation=0.0, test=0.1\)"
    ):
        edl.split(np.arange(3), test=0.1)
    with pytest.raises(DataError, match="split: test is 20; expected a share from 0 to less than 1"):
        edl.split(np.arange(3), test=20)
