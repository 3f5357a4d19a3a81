# SPDX-License-Identifier: Apache-2.0
"""Where the records of a split come from: data(split), data(), or addresses in the values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edl
from edl import config
from edl.config import values
from edl.config.job import Data
from edl.data.same import same_records
from edl.errors import DataError, ModelError
from edl.trainer.model import user_model
from edl.trainer.records.splits import Splits, memorized

X = np.arange(200.0).reshape(100, 2)


def data_values(*sets: str) -> Data:
    return config.parse(values.load([], list(sets))).data


def splits(function: Callable[..., Any] | None, *sets: str, seed: int = 1) -> Splits:
    return Splits("mine.py", function, data_values(*sets), seed)


def rows(reader: edl.Reader) -> list[float]:
    records = reader.read(0, len(reader))
    return np.asarray(records[0] if isinstance(records, tuple) else records)[:, 0].tolist()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, start in (("train", 0), ("validation", 1000), ("new", 2000)):
        lines = [f"{start + i},{i},{2 * i}" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    monkeypatch.chdir(tmp_path)


# --- data() without a split


def test_records_of_data_without_a_split_are_divided_alike_on_each_worker() -> None:
    calls = []

    def data() -> np.ndarray:
        calls.append(1)
        return X

    one, other = splits(data), splits(lambda: X.copy())
    train, test = rows(one("train")), rows(one("validation"))
    assert (len(train), len(test)) == (90, 10)
    assert sorted(train + test) == X[:, 0].tolist()
    assert (rows(other("train")), rows(other("validation"))) == (train, test)
    assert test != rows(splits(data, seed=2)("validation"))
    assert len(calls) == 2, "each job reads the data once for all splits"
    assert one("test") is None
    assert rows(edl.dataset(one("predict"))) == X[:, 0].tolist()
    assert (one.source("train"), one.source("validation")) == (
        "data()",
        "data.validationFraction=0.1 of data()",
    )


def test_no_records_are_held_out_with_a_share_of_zero() -> None:
    found = splits(lambda: (X, X), "data.validationFraction=0")
    assert rows(found("train")) == X[:, 0].tolist()
    assert found("validation") is None


def test_a_share_of_too_few_records_is_refused_with_the_value() -> None:
    with pytest.raises(
        DataError, match=r"mine.py: data\(\) has 4 records, too few .* \(data.validationFraction\)"
    ):
        splits(lambda: X[:4])("train")
    assert len(splits(lambda: X[:0])("train")) == 0, "an empty file is reported by data.allowEmpty"


def test_data_with_a_split_is_called_as_before() -> None:
    found = splits(lambda split: {"train": X, "validation": None}[split])
    assert found("train") is X
    assert found("validation") is None
    assert not found.divides


@pytest.mark.parametrize("function", [lambda a, b: X, lambda *, split: X])
def test_a_data_function_with_other_parameters_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"mine.py: data\(.*\) is called as data\(split\) or data\(\)"):
        splits(function)


# --- addresses in the values


@pytest.mark.usefixtures("files")
def test_values_name_the_records_and_a_share_of_them_is_held_out() -> None:
    found = splits(None, "data.train=train.csv,data.label=y")
    train, test = found("train"), found("validation")
    assert sorted(rows(train) + rows(test)) == list(range(20))
    assert len(test) == 2
    x, y = train.read(0, 3)
    assert (x[:, 1] * 2).tolist() == y.tolist()
    assert found("test") is None
    assert found("predict") is None
    assert found.source("validation") == "data.validationFraction=0.1 of data.train=train.csv"


@pytest.mark.usefixtures("files")
def test_each_split_has_its_address_and_the_options() -> None:
    sets = (
        "data.train=train.csv,data.validation=validation.csv,data.predict=new.csv,data.label=y",
        "data.features={b}",
        "data.weight=a,data.format=csv,data.options.dtype.y=float32",
    )
    found = splits(None, *sets)
    for split, start in (("train", 0), ("validation", 1000), ("predict", 2000)):
        x, y, weights = found(split).read(0, 2)
        assert (x.tolist(), weights.tolist()) == ([0, 1], [start, start + 1])
        assert y.dtype == np.float32


@pytest.mark.usefixtures("files")
def test_a_split_that_a_value_names_comes_from_there_and_not_from_data() -> None:
    def data(split: str) -> Any:
        return {"train": X, "validation": -X}[split]

    found = splits(data, "data.predict=new.csv")
    assert found("train") is X
    assert rows(edl.dataset(found("validation"))) == (-X)[:, 0].tolist()
    assert found("predict").read(0, 1)["a"].tolist() == [2000]
    found = splits(data, "data.train=train.csv")
    assert len(found("train")) == 18
    assert found("validation").read(0, 1).keys() == {"a", "b", "y"}, "data() is not asked for its own records"


@pytest.mark.usefixtures("files")
def test_a_file_with_the_model_alone_trains_on_named_records(tmp_path: Path) -> None:
    (tmp_path / "only_model.py").write_text("def model(): ...\n")
    path = str(tmp_path / "only_model.py")
    with pytest.raises(ModelError, match=r"no function data\(\) .* unless values such as data.train name"):
        user_model.load(path, "", data_values())
    module = user_model.load(path, "", data_values("data.train=train.csv", "data.label=y"), 3)
    reader = module.reader("train")
    assert reader is not None
    assert len(reader) == 18
    assert user_model.load(path, with_data=False).feed is None, "for the verification of an export"


def old_module(split: str) -> Any:
    return {"train": X, "test": -X}[split]


def old_file(split: str) -> Any:
    return edl.csv({"train": "train.csv", "test": "new.csv"}.get(split, f"{split}.none"))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("function", "sets", "old", "new"),
    [
        (old_module, (), '"test"', '"validation"'),
        (lambda split: None if split == "validation" else old_module(split), (), '"test"', '"validation"'),
        (old_file, (), '"test"', '"validation"'),
        (None, ("data.train=train.csv", "data.test=new.csv"), "data.test", "data.validation"),
    ],
)
def test_records_of_the_test_alone_are_those_of_the_validation(
    function: Any, sets: tuple[str, ...], old: str, new: str
) -> None:
    found = splits(function, *sets)
    assert found("train") is not None
    assert found.advice() == ""
    reader = edl.dataset(found("validation"))
    assert len(reader) in (20, 100)
    assert f"is used as validation data: rename {old} to {new}" in found.advice()
    assert found("test") is None, "they are evaluated once"
    assert (found.name_of("validation"), found.name_of("train")) == ("test", "train")
    assert found.source("validation") == found.source("test")


@pytest.mark.usefixtures("files")
def test_a_validation_that_cannot_be_read_is_not_replaced() -> None:
    with pytest.raises(DataError, match=r"validation\.none.* no such file"):
        splits(lambda split: None if split == "test" else old_file(split))("validation")
    with pytest.raises(ZeroDivisionError):
        splits(lambda split: X if split == "test" else 1 / 0)("validation")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (lambda split: X if split == "train" else -X, ["validation"]),
        (lambda split: {"train": X, "validation": -X}[split], ["validation"]),
        (lambda split: {"train": X, "validation": -X, "test": X + 1}[split], ["validation", "test"]),
        (old_module, ["validation"]),
        (lambda split: X if split == "train" else None, []),
    ],
)
def test_the_final_results_are_those_of_the_test_if_it_has_records_of_its_own(
    data: Any, found: list[str]
) -> None:
    module = user_model.UserModel("mine.py", lambda: None, splits(data), None)
    assert list(module.held_out()) == found
    assert bool(module.advice) == (data is old_module)


@pytest.mark.usefixtures("files")
def test_a_missing_file_and_a_wrong_column_are_told_by_name() -> None:
    with pytest.raises(DataError, match=r"none\.csv.* no such file"):
        splits(None, "data.train=none.csv")("train")
    with pytest.raises(DataError, match=r"train\.csv.*column 'z' is missing"):
        splits(None, "data.train=train.csv,data.label=z")("train")


# --- an evaluation of the records of the training


def test_the_same_records_are_found_without_reading_all() -> None:
    asked = []

    class Asked:
        def __init__(self, array: np.ndarray):
            self.array = array

        def __len__(self) -> int:
            return len(self.array)

        def read(self, start: int, stop: int) -> Any:
            asked.append((start, stop))
            return {"x": self.array[start:stop]}

    nan = np.where(X == 6, np.nan, X)
    assert same_records(Asked(nan), Asked(nan.copy()))
    assert asked == [(0, 1), (0, 1), (99, 100), (99, 100)]
    asked.clear()
    assert not same_records(Asked(X), Asked(-X - 1))
    assert asked == [(0, 1), (0, 1)]
    assert not same_records(Asked(X), Asked(X[:99]))
    assert not same_records(Asked(X), Asked(X.astype(int)))
    assert not same_records(Asked(X[:0]), Asked(X[:0]))


def test_a_job_that_would_evaluate_the_records_of_the_training_says_so() -> None:
    train = edl.dataset((X, X))
    assert "the records of data('validation') are those of the training" in memorized(
        train, train, "data('validation')"
    )
    assert memorized(train, edl.dataset((X, -X)), "data('validation')") == ""

    class Broken:
        def __len__(self) -> int:
            return 100

        def read(self, start: int, stop: int) -> Any:
            raise OSError("a bad record, which the step that reads it reports")

    assert memorized(train, Broken(), "data('validation')") == ""
