# SPDX-License-Identifier: Apache-2.0
"""Values that a library below a reader would change or leave out: read exactly, or refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas
import pyarrow
import pytest
import tensorflow as tf
from PIL import Image
from pyarrow import parquet as pa_parquet

import edl
from edl.data.objects.tables import by_column
from edl.errors import DataError

RNG = np.random.default_rng(0)
DARK = RNG.integers(0, 256, (4, 6, 4), np.uint16)  # values whose upper eight bits are zero


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def refused(read: Callable[[], Any], says: str) -> None:
    def all_records() -> None:
        reader = read()
        reader.read(0, len(reader))

    with pytest.raises(DataError, match=says):
        all_records()


# --- images


def tiff(path: str, pixels: np.ndarray, signed: bool = False) -> None:
    """An uncompressed TIFF image, little-endian."""
    height, width, channels = pixels.shape
    data, bits = pixels.tobytes(), 8 * pixels.itemsize
    entries = [
        *((256, 3, 1, width), (257, 3, 1, height), (259, 3, 1, 1), (262, 3, 1, 2 if channels > 1 else 1)),
        (258, 3, channels, bits if channels == 1 else 8 + len(data)),
        *((273, 4, 1, 8), (277, 3, 1, channels), (278, 3, 1, height), (279, 4, 1, len(data))),
        (339, 3, 1, 2 if signed else 1),
    ]
    lists = struct.pack(f"<{channels}H", *[bits] * channels)
    directory = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    where = 8 + len(data) + len(lists)
    head = struct.pack("<2sHI", b"II", 42, where)
    Path(path).write_bytes(head + data + lists + struct.pack("<H", len(entries)) + directory + bytes(4))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_files_of_16_bits_are_refused_whatever_mode_pillow_gives_them(channels: int) -> None:
    Path("deep.png").write_bytes(tf.io.encode_png(DARK[..., :channels]).numpy())
    refused(lambda: edl.images(["deep.png"]), r"deep\.png: has values of more than 8 bits .*convert it to 8")


def test_tiff_files_whose_values_pillow_changes_are_refused() -> None:
    tiff("narrow.tif", DARK[..., :3].astype(np.uint8))
    assert np.array_equal(edl.images(["narrow.tif"]).read(0, 1)[0], DARK[..., :3])
    tiff("deep.tif", DARK[..., :3])
    refused(lambda: edl.images(["deep.tif"]), r"deep\.tif: has values of more than 8 bits")
    tiff("signed.tif", DARK[..., :1].astype(np.int8), signed=True)
    refused(
        lambda: edl.images(["signed.tif"], channels=1), r"signed\.tif: is in the mode L with signed values"
    )
    Image.fromarray(DARK[..., :3].astype(np.uint8)).convert("LAB").save("lab.tif")
    refused(lambda: edl.images(["lab.tif"]), r"lab\.tif: is in the mode LAB.*convert it to RGB")


# --- HDF5


def test_links_of_hdf5_are_followed_within_the_file_and_refused_out_of_it() -> None:
    x, y = np.arange(24.0).reshape(8, 3), np.arange(8)
    with h5py.File("part.h5", "w") as file:
        file["x"] = x
    with h5py.File("links.h5", "w") as file:
        file["raw/x"], file["raw/up"] = x, file["/"]  # the second leads to a group above it
        file["hard"], file["soft"], file["y"] = file["raw/x"], h5py.SoftLink("/raw/x"), y
    for name in ("raw/x", "/raw/x", "hard", "soft"):
        found, labels = edl.hdf5("links.h5", features=name, label="y").read(0, 8)
        assert found.tolist() == x.tolist() and labels.tolist() == y.tolist()
    assert list(edl.hdf5("links.h5").read(0, 1)) == ["hard", "raw/x", "soft", "y"]
    layout = h5py.VirtualLayout((8, 3), "f8")
    layout[:] = h5py.VirtualSource("part.h5", "x", shape=(8, 3))
    for name, link, says in (
        (
            "outer",
            h5py.ExternalLink("part.h5", "/x"),
            "is a link to '/x' in the file part.h5; name that file",
        ),
        ("broken", h5py.SoftLink("/none"), "is a link to '/none', which is missing"),
    ):
        with h5py.File(f"{name}.h5", "w") as file:
            file["y"], file[name] = y, link
        for names in ([name], []):
            refused(partial(edl.hdf5, f"{name}.h5", names), f"'{name}' {says}")
    with h5py.File("virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
        file.create_dataset("raw", (8,), "i4", external=[("raw.bin", 0, 32)])
    refused(lambda: edl.hdf5("virtual.h5", ["x"]), r"virtual\.h5: dataset 'x' is a virtual dataset; copy")
    refused(lambda: edl.hdf5("virtual.h5", ["raw"]), "dataset 'raw' is stored in another file; copy")


def test_datasets_of_hdf5_that_no_array_has_are_not_left_out() -> None:
    with h5py.File("types.h5", "w") as file:
        file["be"] = np.arange(3, dtype=">i2")
        file["pair"] = np.zeros(3, "i4,f4")
        file["single"] = 7
    found = edl.hdf5("types.h5", ["be"]).read(0, 3)["be"]
    assert (found.tolist(), found.dtype) == ([0, 1, 2], np.dtype(np.int16))
    refused(lambda: edl.hdf5("types.h5"), "dataset 'pair' is .*leave it out by naming the datasets")
    refused(lambda: edl.hdf5("types.h5", ["single"]), "dataset 'single' has no entry for each record")


# --- Parquet


def parquet(name: str, columns: Any, **options: Any) -> str:
    pa_parquet.write_table(pyarrow.table(columns), name, **options)
    return name


def test_times_of_spark_are_exact_or_refused() -> None:
    near, far = datetime(2024, 3, 31, 1, 30, 0, 5), datetime(9999, 12, 31)
    times = pyarrow.array([near, None, far], pyarrow.timestamp("us"))
    lists = pyarrow.array([[near, near], [near, far], [far, far]])
    path = parquet("t.parquet", {"t": times, "v": lists}, use_deprecated_int96_timestamps=True)
    refused(
        lambda: edl.parquet(path, ["t"]), r"record 2: column 't' .*INT96.*dtype=\{'t': 'datetime64\[us\]'\}"
    )
    refused(lambda: edl.parquet(path, ["v"]), "record 1: column 'v' has a time")
    read = edl.parquet(path, ["t"], {"t": "datetime64[us]"}, {"t": near}).read(0, 3)["t"]
    assert read.tolist() == [near, near, far]
    assert edl.parquet(path, ["v"], {"v": "datetime64[us]"}).read(0, 3)["v"].tolist() == lists.to_pylist()
    nano = np.array(["2024-01-01T00:00:00.000000001"], "datetime64[ns]")
    path = parquet("n.parquet", {"t": nano}, use_deprecated_int96_timestamps=True)
    assert edl.parquet(path).read(0, 1)["t"].tolist() == nano.tolist()
    refused(lambda: edl.parquet(path, dtype={"t": "datetime64[us]"}), "record 0: column 't' .*nanoseconds")


def test_columns_in_names_of_folders_are_refused_and_not_left_out() -> None:
    table = pyarrow.table({"x": [1.0, 2.0, 3.0], "label": [0, 1, 1]})
    pa_parquet.write_to_dataset(table, "hive", partition_cols=["label"])
    for read in (
        lambda: edl.parquet("hive"),
        lambda: edl.parquet("hive", label="label"),
        lambda: edl.parquet("hive/*/*.parquet"),
    ):
        refused(read, r"hive/label=0/.*: column 'label' is in the name of a folder")
    assert edl.parquet("hive", features=["x"]).read(0, 3)[0].tolist() == [[1.0], [2.0], [3.0]]
    assert len(edl.parquet("hive/label=1")) == 2, "the folder itself is no part of the data, as in pandas"
    Path("texts/day=1").mkdir(parents=True)
    Path("texts/day=1/a.csv").write_text("x\n1\n")
    refused(lambda: edl.csv("texts"), r"a\.csv: column 'day' is in the name of a folder")
    Path("records/day=1").mkdir(parents=True)
    write_examples("records/day=1/a.tfrecord", {"x": [1]})
    refused(lambda: edl.tfrecord("records"), r"a\.tfrecord: column 'day' is in the name of a folder")
    assert len(edl.tfrecord("records", ["x"])) == 1


@pytest.mark.parametrize(("log", "name"), [("_delta_log", "Delta Lake"), (".hoodie", "Hudi")])
def test_a_table_with_a_log_of_its_files_is_refused(log: str, name: str) -> None:
    Path("table", log).mkdir(parents=True)
    parquet("table/removed.parquet", {"x": [1]})
    refused(lambda: edl.parquet("table"), f"table/: is a table of {name}.*give the list")
    assert len(edl.parquet(["table/removed.parquet"])) == 1


def test_the_index_of_a_frame_is_no_feature() -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "y": [0, 1, 0]}).sample(frac=1, random_state=1)
    frame.to_parquet("frame.parquet")
    x, y = edl.parquet("frame.parquet", label="y").read(0, 3)
    assert x.tolist() == frame[["a"]].to_numpy().tolist() and y.tolist() == frame["y"].tolist()
    assert list(by_column(pa_parquet.read_table("frame.parquet"), "table")) == ["a", "y"]
    frame.index.name = "id"
    frame.to_parquet("named.parquet")
    assert list(edl.parquet("named.parquet").read(0, 1)) == ["a", "y"]
    assert edl.parquet("named.parquet", ["id"]).read(0, 3)["id"].tolist() == frame.index.tolist()
    frame.to_csv("frame.csv", index_label="")
    refused(
        lambda: edl.csv("frame.csv", label="y"), r"column 1 of the header has no name.*to_csv\(index=False\)"
    )
    assert edl.csv("frame.csv", features=["a"], label="y").read(0, 3)[1].tolist() == frame["y"].tolist()


@pytest.mark.parametrize(
    ("values", "dtype", "says"),
    [
        ([1e300, 1.0], "float32", r"1e\+300 would change"),
        (["1e400", "1"], "float64", "'1e400' would change"),
        ([2, 0], bool, "2 would change"),
        ([datetime(2024, 1, 1, 5)] * 2, "datetime64[D]", "would change"),
    ],
)
def test_a_conversion_that_loses_a_value_is_refused(values: list[Any], dtype: Any, says: str) -> None:
    path = parquet("t.parquet", {"v": values})
    refused(lambda: edl.parquet(path, dtype={"v": dtype}), f"column 'v' is .*as dtype says: .*{says}")


def test_conversions_that_lose_nothing_are_made() -> None:
    path = parquet("t.parquet", {"f": [0.1, float("inf")], "b": [1, 0], "d": [datetime(2024, 1, 1)] * 2})
    read = edl.parquet(path, dtype={"f": "float32", "b": bool, "d": "datetime64[D]"}).read(0, 2)
    assert read["f"].tolist() == np.array([0.1, np.inf], np.float32).tolist()
    assert read["b"].tolist() == [True, False] and read["d"].dtype == np.dtype("datetime64[D]")


def test_extension_types_keep_their_shape_or_are_refused() -> None:
    values = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    tensors = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values)
    read = edl.parquet(parquet("t.parquet", {"v": tensors})).read(0, 2)["v"]
    assert read.tolist() == values.tolist() and read.shape == (2, 2, 3)
    turned = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values.transpose(0, 2, 1))
    if turned.type.permutation:
        refused(lambda: edl.parquet(parquet("p.parquet", {"v": turned})), "column 'v' has the extension type")
    months = pandas.period_range("2020-01", periods=2, freq="M")
    pandas.DataFrame({"v": months}).to_parquet("m.parquet")
    refused(lambda: edl.parquet("m.parquet"), "column 'v' has the extension type 'pandas.period'")


def test_files_whose_types_differ_are_refused_with_the_option_that_converts_them() -> None:
    files = [
        parquet("a.parquet", {"y": [1]}),
        parquet("b.parquet", {"y": pyarrow.array([1], pyarrow.int32())}),
    ]
    refused(lambda: edl.parquet(files), r"column 'y' is int32, and int64 in .*dtype=\{'y': TYPE\} converts")
    assert edl.parquet(files, dtype={"y": "int64"}).read(0, 2)["y"].tolist() == [1, 1]


# --- text and arrays


@pytest.mark.parametrize(
    ("text", "dtype", "says"),
    [
        ("1e400", None, "'1e400', which is beyond the numbers of double"),
        ("1e300", "float32", "'1e300', which is beyond the numbers of float"),
        ("0xa475f55fbb6bc638", None, "'0xa475f55fbb6bc638', a hexadecimal number; .*'uint64'"),
        ("0xa475f55fbb6bc638", "int64", "'0xa475f55fbb6bc638', which is beyond the numbers of int64"),
    ],
)
def test_numbers_of_csv_that_would_be_different_ones_are_refused(text: str, dtype: Any, says: str) -> None:
    Path("t.csv").write_text(f"x\n1\n{text}\n")
    refused(lambda: edl.csv("t.csv", dtype=dtype and {"x": dtype}), rf"t\.csv: line 3: column 'x' is {says}")


def test_numbers_of_csv_that_look_alike_are_read() -> None:
    Path("t.csv").write_text("a,b,c\n-Infinity,0xa475f55fbb6bc638,-1\n1,0x1F,0\n")
    read = edl.csv("t.csv", dtype={"a": "float32", "b": "uint64", "c": "int8"}).read(0, 2)
    assert read["a"].tolist() == [-np.inf, 1] and read["c"].tolist() == [-1, 0]
    assert read["b"].tolist() == [0xA475F55FBB6BC638, 31]


def test_bytes_after_an_array_and_arrays_without_records_are_refused() -> None:
    with open("two.npy", "wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(4))
    refused(lambda: edl.npy("two.npy"), r"two\.npy: has 160 bytes after its array")
    np.save("void.npy", np.zeros(2, "V2"))
    refused(lambda: edl.npy("void.npy"), r"void\.npy: holds \|V2")


# --- TFRecord


def write_examples(path: str, *records: dict[str, list[int]]) -> None:
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            lists = {key: tf.train.Int64List(value=values) for key, values in record.items()}
            features = {key: tf.train.Feature(int64_list=values) for key, values in lists.items()}
            features |= {key: tf.train.Feature() for key, values in record.items() if not values}
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def test_features_that_the_first_record_lacks_are_not_left_out() -> None:
    write_examples("late.tfrecord", {"x": [1]}, {"x": [2], "z": [3]})
    refused(lambda: edl.tfrecord("late.tfrecord"), "record 1: has the feature 'z', which record 0 lacks")
    assert edl.tfrecord("late.tfrecord", ["x"]).read(0, 2)[0].tolist() == [[1], [2]]
    write_examples("empty.tfrecord", {"x": [1], "z": []}, {"x": [2], "z": [3]})
    refused(lambda: edl.tfrecord("empty.tfrecord"), "record 0: feature 'z' has no values")
    assert len(edl.tfrecord("empty.tfrecord", ["x"])) == 2


def test_what_pandas_says_of_its_columns_may_be_missing_or_of_another_form() -> None:
    described = json.dumps({"index_columns": [{"kind": "range", "name": None}]}).encode()
    table = pyarrow.table({"x": [1]}).replace_schema_metadata({b"pandas": described})
    assert list(edl.parquet(parquet("t.parquet", table)).read(0, 1)) == ["x"]
