# SPDX-License-Identifier: Apache-2.0
"""Values in memory are converted exactly, or refused with the place and a remedy."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import ml_dtypes
import numpy as np
import pandas
import PIL.Image
import polars
import pyarrow
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine

import edl
from edl.data.conversion import convert
from edl.data.objects.batched import Batched
from edl.data.objects.indexed import Indexed
from edl.data.same import KnownSplits
from edl.errors import DataError
from tests.unit.data.test_dataset import Items

BYTES = [b"\1\2\3\0", b"\0\0\0\0", b"\5\6\7\10", b""]
TEXTS = ["a\0", "\0\0", "é", ""]
BIG = 2**60 + 1


def hugging_face(values: list[Any], kind: str, format: str | None = None) -> Any:
    features = datasets.Features({"v": datasets.Value(kind)})
    return datasets.Dataset.from_dict({"v": values}, features=features).with_format(format)


@pytest.mark.parametrize("values", [BYTES, TEXTS], ids=["bytes", "text"])
@pytest.mark.parametrize(
    "read",
    [
        lambda v: edl.arrays(v).read(0, 4)[0],
        lambda v: edl.arrays([[t, t] for t in v]).read(0, 4)[0][:, 1],
        lambda v: edl.dataset({"v": v}).read(0, 4)["v"],
        lambda v: edl.dataset(Items(v)).read(0, 4),
        lambda v: Indexed(Items([{"v": [t, t]} for t in v]), "i").take(np.arange(4))["v"][:, 0],
        lambda v: edl.dataset(pandas.DataFrame({"v": v})).read(0, 4)["v"],
        lambda v: edl.dataset(polars.DataFrame({"v": v})).read(0, 4)["v"],
        lambda v: edl.dataset(pyarrow.table({"v": v})).read(0, 4)["v"],
        lambda v: Batched(Items([({"v": v[:2]}, [0, 1]), ({"v": v[2:]}, [2, 3])]), "b").read(0, 4)[0]["v"],
        lambda v: edl.dataset(hugging_face(v, "binary" if v is BYTES else "string")).read(0, 4)["v"],
        lambda v: edl.dataset(hugging_face(v, "binary" if v is BYTES else "string", "numpy")).read(0, 4)["v"],
        lambda v: edl.arrays(hugging_face(v, "binary" if v is BYTES else "string")["v"]).read(0, 4)[0],
    ],
    ids=[
        *("list", "nested list", "dict", "records", "lists in records", "pandas", "polars", "arrow"),
        *("batches", "hugging face", "hugging face, numpy", "column of hugging face"),
    ],
)
def test_bytes_and_text_keep_zero_bytes_at_their_end(read: Callable[[Any], Any], values: list[Any]) -> None:
    assert read(values).tolist() == values


def test_converted_records_keep_zero_bytes_at_their_end(tmp_path: Path) -> None:
    target = tmp_path / "t.array_record"
    convert(iter([{"b": b, "t": t} for b, t in zip(BYTES, TEXTS, strict=True)]), target, "stream")
    found = edl.arrayrecord(target).read(0, 4)
    assert found["b"].tolist() == BYTES
    assert [text.decode() for text in found["t"]] == TEXTS


MASKED = np.ma.masked_array([1.0, 2.0], [False, True])
OTHER_UNITS = [np.datetime64("2000-01-01T00:00:00.123456789"), np.datetime64("9999", "Y")]
PALETTE = PIL.Image.new("RGB", (2, 2), (10, 200, 30)).convert("P")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (MASKED, "1 of 2 values are masked; fill them"),
        ([1.0, np.ma.masked], "a list with a masked value; fill it"),
        ([1, "a"], "a list with text and values of type int"),
        (["a", None], "a list with None, so a value is missing"),
        ([1.5, None], "a list with None, so a value is missing"),
        ([BIG, 1.5], f"a list with {BIG}, which rounds it to {2**60}"),
        ([BIG, 1j], f"a list with {BIG}, which rounds it to {2**60}"),
        (OTHER_UNITS, "a list of dates with different units"),
    ],
    ids=[
        "masked array",
        "masked value",
        "text and numbers",
        "text and None",
        "None",
        "rounded",
        "complex",
        "dates",
    ],
)
@pytest.mark.filterwarnings("ignore:Warning. converting a masked element to nan")
def test_values_that_numpy_would_change_are_refused_with_their_place(value: Any, why: str) -> None:
    for read, place in (
        (lambda: edl.arrays(value), r"arrays\[0\]: "),
        (lambda: edl.dataset({"v": value}, source="mine"), r"mine\['v'\]: "),
        (
            lambda: edl.dataset(Items([{"v": value}]), source="mine").read(0, 1),
            "mine: record 0.*column 'v': ",
        ),
        (lambda: Batched(Items([({"v": value}, [0, 1])]), "mine"), r"mine: batch 0\[0\]\['v'\]: "),
    ):
        with pytest.raises(DataError, match=f"^{place}.*{why}"):
            read()


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (1, "a", "arrays of int64 and object"),
        *[
            (pandas.DataFrame({"i": [BIG], "x": [1.5]}),) * 2
            + ("record 0: a table with columns of several types",)
        ],
        (*OTHER_UNITS, r"arrays of datetime64\[Y\] and datetime64\[ns\]"),
        ({"v": 1}, {"v": None}, "record 1, column 'v': None, so a value is missing; fill it"),
        ({"v": [1, 2]}, {"v": [None, 2]}, r"record 1, \['v'\]\[0\]: None, so a value is missing"),
        (
            {"v": PALETTE},
            {"v": PALETTE},
            r"column 'v': an image with a palette; convert it with image.convert",
        ),
    ],
)
def test_records_that_numpy_would_change_are_refused(first: Any, second: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"mine: .*{why}"):
        edl.dataset(Items([first, second]), source="mine").read(0, 2)


def test_batches_of_different_types_are_refused() -> None:
    batches = Items([(np.array([BIG]), [0]), (np.array([1.5]), [0])])
    with pytest.raises(
        DataError, match="mine: batches 0 to 1 do not go together: arrays of float64 and int64"
    ):
        Batched(batches, "mine").read(0, 2)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.ma.masked_array([1.5, 2.5]), np.float64),
        (np.array([1, 2], ">i8"), ">i8"),
        (array("d", [1.5, 2.5]), np.float64),
        (np.array([1, 2], ml_dtypes.bfloat16), ml_dtypes.bfloat16),
        ([True, False], np.bool_),
        ([2**63, 2**63 + 1], np.uint64),
    ],
)
def test_other_arrays_keep_their_values(value: Any, dtype: Any) -> None:
    (found,) = edl.arrays(value).read(0, 2)
    assert found.dtype == dtype
    assert found.tolist() == np.asarray(value).tolist()


def test_a_format_of_hugging_face_changes_no_value() -> None:
    """The format of NumPy makes rounded floats of whole numbers where one is missing."""
    with pytest.raises(DataError, match="mine: record 1, column 'v': None, so a value is missing"):
        edl.dataset(hugging_face([BIG, None], "int64", "numpy"), source="mine").read(0, 2)
    for format in (None, "numpy", "pandas", "arrow", "polars"):
        assert edl.dataset(hugging_face([BIG, 3], "int64", format)).read(0, 2)["v"].tolist() == [BIG, 3]
    pixels = io.BytesIO()
    PALETTE.save(pixels, "PNG")
    images = datasets.Dataset.from_dict(
        {"i": [{"bytes": pixels.getvalue(), "path": None}]},
        features=datasets.Features({"i": datasets.Image()}),
    )
    with pytest.raises(DataError, match="mine: record 0, column 'i': an image with a palette"):
        edl.dataset(images, source="mine").read(0, 1)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"id": [BIG], "x": [1.5]}, "column 'id' has whole numbers beyond 2.*would round"),
        ({"id": np.array([2**63], np.uint64), "x": [-1]}, "column 'id' has whole numbers beyond 2"),
        ({"t": [Decimal("1.1")]}, "column 't' is decimal128.*convert it to numbers or text, or leave it out"),
        ({}, "the table has no columns"),
    ],
)
def test_columns_that_a_matrix_or_an_array_would_change_are_refused(columns: Any, why: str) -> None:
    frame = pandas.DataFrame(columns)
    with pytest.raises(DataError, match=f"mine: {why}"):
        edl.dataset(frame, source="mine")
    if "x" in columns:
        assert edl.dataset(frame, features="id").read(0, 1)[0].tolist() == list(map(int, columns["id"]))
        with pytest.raises(DataError, match=f"mine: {why}"):
            edl.dataset(frame, features=["id", "x"], source="mine")
    if "t" not in columns and columns:
        assert edl.dataset(frame.assign(id=2**53)).read(0, 1)[0, 0] == 2**53


def test_objects_of_python_in_polars_are_refused() -> None:
    frame = polars.DataFrame({"o": polars.Series([object()], dtype=polars.Object)})
    with pytest.raises(DataError, match="mine: column 'o' has objects of Python"):
        edl.dataset(frame, source="mine")


def test_public_tables_are_read_as_scikit_learn_and_pandas_read_them() -> None:
    """Against a second decoder, with data that come with scikit-learn."""
    for load in (load_iris, load_wine, load_breast_cancer, load_diabetes):
        frame = load(as_frame=True).frame
        x, y = edl.dataset(frame, label="target").read(0, len(frame))
        expected = load(return_X_y=True)
        np.testing.assert_array_equal(x, expected[0])
        np.testing.assert_array_equal(y, expected[1])
        named = frame.assign(kind=pandas.Categorical.from_codes(frame.target.astype(int) % 2, ["b", "a"]))
        kinds = edl.dataset(named.sample(frac=1, random_state=1)).read(0, 9)["kind"]
        assert kinds.tolist() == named.sample(frac=1, random_state=1).kind[:9].tolist()


def test_splits_of_hugging_face_are_not_taken_for_columns() -> None:
    splits = datasets.DatasetDict(train=hugging_face([1], "int64"), test=hugging_face([2], "int64"))
    with pytest.raises(
        DataError, match=r"^mine is a DatasetDict of the splits train, test; return one of them"
    ):
        edl.dataset(splits, source="mine")


def test_splits_that_number_their_classes_differently_are_refused() -> None:
    def labels(*names: str) -> Any:
        features = datasets.Features({"y": datasets.ClassLabel(names=list(names))})
        return edl.dataset(
            datasets.Dataset.from_dict({"y": [0, 1]}, features=features), label="y", features="y"
        )

    class Folder(Items):
        def __init__(self, *names: str):
            super().__init__([(1.0, 0), (2.0, 1)])
            self.class_to_idx = {name: number for number, name in enumerate(names)}

    for of in (labels, lambda *names: edl.split(Folder(*names), validation=0.5)["train"]):
        known = KnownSplits()
        known.check("train", of("cat", "dog"), "data('train')")
        known.check("validation", of("cat", "dog"), "data('validation')")
        with pytest.raises(
            DataError, match=r"^data\('test'\): the classes of .* are dog, fox, and those of data\('train'"
        ):
            known.check("test", of("dog", "fox"), "data('test')")


def test_weights_of_an_output_may_be_none_as_in_fit() -> None:
    x, w = np.zeros((3, 2)), np.array([1.0, 2.0, 3.0])
    for weights in ({"p": w, "q": None}, {"q": None, "p": w}):
        for reader in (edl.dataset((x, {"p": x, "q": x}, weights)), Batched(Items([(x, {}, weights)]), "b")):
            found = reader.read(1, 3)[2]
            assert (found["p"].tolist(), found["q"].tolist()) == ([2.0, 3.0], [1.0, 1.0])
