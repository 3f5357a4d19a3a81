# SPDX-License-Identifier: Apache-2.0
"""TFRecord, ArrayRecord, arrays, text and HDF5, as their own libraries write them."""

from __future__ import annotations

import gzip
import os
import random
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pytest
import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

import edl
from edl.data.formats.by_name import FORMATS
from edl.data.formats.tfrecord_file import checksum
from edl.data.nest import leaves
from edl.errors import DataError

COUNTS = (70, 0, 130)  # records of each file
TOTAL = sum(COUNTS)
X = np.random.default_rng(0).normal(size=(TOTAL, 2, 3)).astype(np.float32)
Y = np.arange(TOTAL) % 7
TEXT = [f"zeile {n} ü" if n % 3 else "" for n in range(TOTAL)]
BYTES = np.random.default_rng(1).integers(0, 256, (TOTAL, 4, 5), np.uint8)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edl.data.files.index_file.BESIDE", 0)


def example(n: int, **more: Any) -> bytes:
    features = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=X[n].ravel())),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[Y[n]])),
        "raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[BYTES[n].tobytes()])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features | more)).SerializeToString()


def write_tfrecord(path: Path, start: int, stop: int) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for n in range(start, stop):
            writer.write(example(n))


def write_arrayrecord(path: Path, start: int, stop: int) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for n in range(start, stop):
        writer.write(example(n))
    writer.close()


def write_recordio(path: Path, start: int, stop: int) -> None:
    """The form that the library in Go writes, without compression; see test_recordio.py."""
    examples = [example(n) for n in range(start, stop)]
    with open(path, "wb") as file:
        for first in range(0, len(examples), 16):
            chunk = examples[first : first + 16]
            data = b"".join(struct.pack("<I", len(record)) + record for record in chunk)
            file.write(struct.pack("<5I", 0x01020304, zlib.crc32(data), 0, len(data), len(chunk)) + data)


def write_npy(path: Path, start: int, stop: int) -> None:
    np.save(path, X[start:stop])


def write_idx(path: Path, start: int, stop: int) -> None:
    """Yann LeCun's page is the specification of the format."""
    path.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, stop - start, 4, 5) + BYTES[start:stop].tobytes())


def write_text(path: Path, start: int, stop: int) -> None:
    path.write_bytes("".join(f"{line}\n" for line in TEXT[start:stop]).encode())


def write_hdf5(path: Path, start: int, stop: int, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("group/x", data=X[start:stop], **options)
        file["y"] = Y[start:stop]
        file["t"] = np.array(TEXT[start:stop], object).astype(h5py.string_dtype())
        file["single"] = 3.0


def write_chunked(path: Path, start: int, stop: int) -> None:
    write_hdf5(path, start, stop, chunks=(16, 2, 3), maxshape=(None, 2, 3), compression="gzip")


SPEC = {"x": ("float32", (2, 3)), "y": tf.io.FixedLenFeature([], tf.int64), "raw": ("uint8", [4, 5])}
KINDS: dict[str, tuple[Callable[[Path, int, int], None], Callable[[Any], Any], Any]] = {
    "tfrecord": (write_tfrecord, lambda at: edl.tfrecord(at, SPEC, label="y"), ({"x": X, "raw": BYTES}, Y)),
    "array_record": (write_arrayrecord, lambda at: edl.arrayrecord(at, {"y": "int64"}), {"y": Y}),
    "npy": (write_npy, lambda at: edl.npy(at, at), (X, X)),
    "txt": (write_text, edl.text, np.array(TEXT, object)),
    "h5": (write_hdf5, lambda at: edl.hdf5(at, features="group/x", label="t"), (X, np.array(TEXT, object))),
    "hdf5": (write_chunked, edl.hdf5, {"group/x": X, "t": np.array(TEXT, object), "y": Y}),
}
if "recordio" in FORMATS:  # in compat/
    KINDS["recordio"] = (
        write_recordio,
        lambda at: edl.recordio(at, SPEC, label="y"),
        ({"x": X, "raw": BYTES}, Y),
    )


def same(found: Any, wanted: Any, which: Any) -> None:
    pairs = zip(leaves(found), leaves(wanted), strict=True)
    for (path, array), (other, values) in pairs:
        assert path == other
        assert (array.dtype, array.tolist()) == (values.dtype, values[which].tolist()), path


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A format, with three files of it in the folder `data`; one has no records."""
    (tmp_path / "data").mkdir()
    start = 0
    for nth, count in enumerate(COUNTS):
        KINDS[request.param][0](tmp_path / "data" / f"{nth}.{request.param}", start, start + count)
        start += count
    return str(request.param)


def test_records_are_read_from_anywhere(kind: str, tmp_path: Path) -> None:
    _, read, wanted = KINDS[kind]
    chance = np.random.default_rng(2)
    addresses: list[Any] = [tmp_path / "data", str(tmp_path / "data" / f"*.{kind}")]
    if kind != "array_record":
        store = fsspec.filesystem("memory")
        store.put(str(tmp_path / "data"), "/bucket/data", recursive=True)
        addresses.append("memory://bucket/data")
    for address in addresses:
        reader = read(address)
        assert len(reader) == TOTAL
        spans = np.sort(chance.integers(0, TOTAL + 1, (8, 2)), axis=1).tolist()
        for start, stop in [*spans, (0, TOTAL), (69, 71), (70, 70)]:
            same(reader.read(start, stop), wanted, slice(start, stop))
        is_near = kind not in ("hdf5", "recordio") and address != "memory://bucket/data"
        assert hasattr(reader, "take") == is_near
        if is_near:
            indices = chance.integers(0, TOTAL, 64)
            same(reader.take(indices), wanted, indices)
    if kind != "array_record":
        store.rm("/bucket", recursive=True)


def test_a_file_that_changes_is_told(kind: str, tmp_path: Path) -> None:
    _, read, _ = KINDS[kind]
    reader = read(tmp_path / "data")
    path = tmp_path / "data" / f"2.{kind}"
    data = path.read_bytes()
    os.truncate(path, len(data) // 2)
    words = rf"2\.{kind}: .*the file was changed or replaced since the job began"
    with pytest.raises(DataError, match=words):
        reader.read(190, 200)
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=words):
        reader.read(190, 200)
    if hasattr(reader, "take"):
        with pytest.raises(DataError, match=words):
            reader.take(np.array([3, 190, 80]))
        assert len(next(leaves(reader.take(np.array([3, 4]))))[1]) == 2


def test_a_torn_or_foreign_file_is_refused(kind: str, tmp_path: Path) -> None:
    _, read, _ = KINDS[kind]
    path = tmp_path / "data" / f"2.{kind}"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 7])
    if kind != "txt":  # a shorter text is a text
        with pytest.raises(DataError, match=rf"2\.{kind}: "):
            read(tmp_path / "data")
    path.write_bytes(random.Random(0).randbytes(1000))
    with pytest.raises(DataError, match=rf"2\.{kind}: "):
        read(path).read(0, 3)


# --- TFRecord


def tfrecords(tmp_path: Path, *records: bytes) -> Path:
    path = tmp_path / "f.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def test_types_of_the_first_example_are_those_of_all(tmp_path: Path) -> None:
    path = tfrecords(tmp_path, *map(example, range(4)))
    x, y = edl.tfrecord(path, "x", label="y").read(1, 3)
    assert np.array_equal(x, X[1:3].reshape(2, 6))
    assert y.tolist() == Y[1:3].tolist()
    assert sorted(edl.tfrecord(path).read(0, 1)) == ["raw", "x", "y"]
    raw = edl.tfrecord(path, raw=True).read(0, 4)
    assert raw.tolist() == [example(n) for n in range(4)]
    with pytest.raises(
        DataError, match=r"f\.tfrecord: record 0: feature 'z' is missing; there are raw, x, y"
    ):
        edl.tfrecord(path, "z")
    with pytest.raises(DataError, match=r"f\.tfrecord: features: 'x' is VarLenFeature.*must have one shape"):
        edl.tfrecord(path, {"x": tf.io.VarLenFeature(tf.float32)})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"x": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0]))}, r"feature 'x': float32 \[6\]"),
        ({"y": tf.train.Feature(float_list=tf.train.FloatList(value=[1.0]))}, r"feature 'y': int64 \[\]"),
        ({"y": tf.train.Feature()}, r"feature 'y': int64 \[\]"),
    ],
)
def test_an_example_that_differs_is_named(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    reader: Any = edl.tfrecord(tfrecords(tmp_path, *map(example, range(5)), example(5, **other)), ["x", "y"])
    assert len(reader.take(np.array([1, 4]))[0]["y"]) == 2
    with pytest.raises(DataError, match=rf"f\.tfrecord: record 5 is not as features says: .*{words}"):
        reader.take(np.array([1, 5, 2]))


def test_an_array_of_bytes_of_another_size_is_named(tmp_path: Path) -> None:
    short = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"abc"]))
    path = tfrecords(tmp_path, example(0), example(1, raw=short))
    with pytest.raises(
        DataError, match=r"record 1: feature 'raw' has 3 bytes; expected 20 for uint8 \[4, 5\]"
    ):
        edl.tfrecord(path, {"raw": ("uint8", (4, 5))}).read(0, 2)


def test_records_that_are_no_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"record 0 .*tf.train.Example.*raw=True returns the records as bytes"
    ):
        edl.tfrecord(tfrecords(tmp_path, b"\xff\xff"))


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda place: place, "record 3, at byte .* is damaged: its length has a wrong checksum"),
        (lambda place: place + 9, "record 3, at byte .* is damaged: its length has a wrong checksum"),
        (lambda place: place + 20, "record 3 is damaged: its data have a wrong checksum"),
        (lambda place: None, "record 3, at byte .* is torn: the file ends at byte"),
    ],
)
def test_a_damaged_record_is_named_by_its_number(tmp_path: Path, where: Any, words: str) -> None:
    path = tfrecords(tmp_path, *map(example, range(4)))
    data = bytearray(path.read_bytes())
    place = len(data) // 4 * 3
    if (at := where(place)) is None:
        del data[-1]
    else:
        data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"f\.tfrecord: {words}"):
        edl.tfrecord(path, {"y": "int64"}).read(0, 4)


def test_a_compressed_tfrecord_is_refused(tmp_path: Path) -> None:
    path = tfrecords(tmp_path, example(0))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=r"f\.tfrecord: is compressed, .*write it without compression"):
        edl.tfrecord(path)


def test_a_tfrecord_of_100_gigabytes_is_not_loaded(tmp_path: Path) -> None:
    size, count = 50 << 20, 2000
    path = tmp_path / "sparse.tfrecord"
    length = struct.pack("<Q", size)
    head = length + struct.pack("<I", checksum(length))
    good = tfrecords(tmp_path, *map(example, range(5))).read_bytes()
    with open(path, "wb") as file:
        file.write(good)
        for n in range(count):
            file.seek(len(good) + n * (size + 16))
            file.write(head)
        file.seek(len(good) + count * (size + 16))
        file.write(good)
    assert path.stat().st_size > 100e9
    for most in (30.0, 5.0):  # seconds: to build the index, and with it
        begun = time.monotonic()
        tracemalloc.start()
        reader: Any = edl.tfrecord(path, SPEC, label="y") if most > 5 else edl.tfrecord(path, raw=True)
        assert len(reader) == count + 10
        if most > 5:
            assert reader.read(count + 5, count + 10)[1].tolist() == Y[:5].tolist()
        else:
            assert reader.take(np.array([count + 9, 0])).tolist() == [example(4), example(0)]
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        tracemalloc.stop()
        assert time.monotonic() - begun < most


# --- arrays


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.asfortranarray(X[:, 0]), "is in Fortran order"),
        (np.float64(3), "holds a single value"),
        (np.zeros(3, [("a", "i4")]), "holds .*; expected an array of numbers"),
    ],
)
def test_an_array_whose_records_are_not_in_one_place_is_refused(
    tmp_path: Path, array: np.ndarray, words: str
) -> None:
    np.save(tmp_path / "f.npy", array)
    with pytest.raises(DataError, match=rf"f\.npy: {words}"):
        edl.npy(tmp_path / "f.npy")


def test_a_torn_array_names_its_record(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", X)
    os.truncate(tmp_path / "f.npy", (tmp_path / "f.npy").stat().st_size - 24 * 5 - 1)
    with pytest.raises(DataError, match=rf"f\.npy: record {TOTAL - 6} is torn: the file ends at byte"):
        edl.npy(tmp_path / "f.npy")
    np.save(tmp_path / "g.npy", X[:, 0])
    write_npy(tmp_path / "f.npy", 0, 5)
    with pytest.raises(
        DataError, match=r"g\.npy: records are float32 \[3\], and float32 \[2, 3\] in .*f\.npy"
    ):
        edl.npy(tmp_path)


# --- text and HDF5


def test_lines_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_bytes("eins\r\nzwei\nfünf".encode("latin-1"))
    with pytest.raises(DataError, match=r"f\.txt: line 3: is not utf-8, at byte 1 of it; name the file's"):
        edl.text(tmp_path / "f.txt").read(1, 3)
    assert edl.text(tmp_path / "f.txt", "latin-1").read(0, 3).tolist() == ["eins", "zwei", "fünf"]
    with pytest.raises(DataError, match="is utf-16, in which lines cannot be found"):
        edl.text(tmp_path / "f.txt", "utf-16")


def test_datasets_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"], file["y"] = X, Y[:3]
    with pytest.raises(DataError, match=r"f\.h5: the datasets differ in length \(x has 200, y has 3\)"):
        edl.hdf5(tmp_path / "f.h5")
    with pytest.raises(DataError, match=r"f\.h5: dataset 'z' is missing; there are x, y"):
        edl.hdf5(tmp_path / "f.h5", ["z"])
    write_hdf5(tmp_path / "g.h5", 0, 3)
    with pytest.raises(DataError, match=r"g\.h5: dataset 'x' is missing; there are group, single, t, y"):
        edl.hdf5(tmp_path, ["x"])


def test_sequences_of_a_sequence_example_are_not_dropped(tmp_path: Path) -> None:
    numbers = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    record = tf.train.SequenceExample(
        context=tf.train.Features(feature={"id": numbers}),
        feature_lists=tf.train.FeatureLists(feature_list={"t": tf.train.FeatureList(feature=[numbers])}),
    ).SerializeToString()
    path = tmp_path / "s.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(record)
    with pytest.raises(
        DataError, match=r"s.tfrecord: record 0 is a tf.train.SequenceExample: its sequences t "
    ):
        edl.tfrecord(path).read(0, 1)
    assert edl.tfrecord(path, ["id"]).read(0, 1)[0].tolist() == [[1]]
    assert edl.tfrecord(path, raw=True).read(0, 1).tolist() == [record]
