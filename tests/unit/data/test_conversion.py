# SPDX-License-Identifier: Apache-2.0
"""Records of any source in ArrayRecord files: they come back as they were, and a file is whole or absent."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import edl
from edl.contract.own_modules import module_command
from edl.data import RandomAccess
from edl.data.conversion import convert
from edl.data.nest import leaves
from edl.errors import DataError

COUNT = 300  # more than a block
X = np.random.default_rng(0).normal(size=(COUNT, 2, 3)).astype(np.float32)
Y = np.arange(COUNT) % 7
W = np.linspace(0, 1, COUNT)
RAW = np.random.default_rng(1).integers(0, 256, (COUNT, 4), np.uint8)
TEXT = np.array([f"zeile {n} ü".encode() for n in range(COUNT)], object)


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return -(-COUNT // 32)

    def __getitem__(self, batch: int) -> Any:
        here = slice(batch * 32, batch * 32 + 32)
        return X[here], Y[here]


def records() -> Iterator[Any]:
    for x, raw, text, y in zip(X, RAW, TEXT, Y, strict=True):
        yield {"x": x, "raw": raw, "text": text.decode()}, int(y)


def pipeline() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(((X, {"b": RAW}), Y, W)).batch(64)


SOURCES: dict[str, tuple[Callable[[], Any], Any]] = {
    "one array": (lambda: X, X),
    "arrays": (lambda: ({"age": W, "kind": Y}, (Y, W > 0.5)), ({"age": W, "kind": Y}, (Y, W > 0.5))),
    "records": (records, ({"x": X, "raw": RAW, "text": TEXT}, Y)),
    "tf.data": (pipeline, ((X, {"b": RAW}), Y, W)),
    "PyDataset": (Batches, (X, Y)),
    "one key twice": (lambda: ({"label": X, "a": W}, Y), ({"label": X, "a": W}, Y)),
}


def same(found: Any, wanted: Any, which: Any) -> None:
    for (path, array), (other, values) in zip(leaves(found), leaves(wanted), strict=True):
        assert path == other
        assert (array.dtype, array.tolist()) == (values.dtype, values[which].tolist()), path


@pytest.mark.parametrize("name", SOURCES)
def test_records_come_back_as_the_source_gave_them(name: str, tmp_path: Path) -> None:
    source, wanted = SOURCES[name]
    target = tmp_path / "a.array_record"
    written = convert(source(), target, name)
    assert (written.records, written.bytes) == (COUNT, target.stat().st_size)
    reader = edl.arrayrecord(target)
    assert len(reader) == COUNT
    same(reader.read(250, 270), wanted, slice(250, 270))
    assert isinstance(reader, RandomAccess)
    same(reader.take(np.array([299, 0, 7])), wanted, [299, 0, 7])
    assert [path.name for path in tmp_path.iterdir()] == ["a.array_record"]


def test_columns_of_a_converted_file_are_chosen_by_name(tmp_path: Path) -> None:
    convert(records(), tmp_path / "a.array_record", "records")
    x, y = edl.arrayrecord(tmp_path / "a.array_record", features="x", label="label").read(3, 5)
    same((x, y), (X, Y), slice(3, 5))


def test_single_records_of_a_pipeline_are_written_if_the_user_says_so(tmp_path: Path) -> None:
    single = tf.data.Dataset.from_tensor_slices((X, Y))
    target = tmp_path / "a.array_record"
    with pytest.raises(DataError, match=r"s: batch 0 has .*single record, use --elements records"):
        convert(single, target, "s")
    convert(single, target, "s", "records")
    same(edl.arrayrecord(target).read(0, COUNT), (X, Y), slice(None))


def broken() -> Iterator[Any]:
    yield X[0], 1
    yield X[1][:1], 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: iter(()), "s: has no records"),
        (broken, r"s: record 1: 'features' is float32 \[1, 3\]; expected float32 \[2, 3\], as in record 0"),
        (lambda: iter([{"a": 1}, {"b": 1}]), r"s: record 1: has the arrays \['b'\]; expected \['a'\]"),
        (lambda: iter([{1: 1}]), "s: record 0: the key 1 of a record is not text"),
        (lambda: iter([(X[0], None)] * 2 + [(X[0], Y[:2])]), "record 2"),
        (lambda: iter([{"a": object()}]), "s: record 0: 'a' has a object; expected numbers, text or arrays"),
        (lambda: pipeline().repeat(), r"s: the dataset has no end \(repeat\(\)\)"),
        (lambda: None, "s is None"),
    ],
)
def test_what_cannot_be_written_is_named(source: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        convert(source(), tmp_path / "a.array_record", "s")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.array_record"
    convert((X, Y), target, "s")
    with pytest.raises(
        DataError, match=r"a\.array_record: exists; name a new file, or replace it with --force"
    ):
        convert(X, target, "s")
    with pytest.raises(DataError, match="record 1"):
        convert(broken(), target, "s", replace=True)
    same(edl.arrayrecord(target).read(0, COUNT), (X, Y), slice(None))
    convert(X, target, "s", replace=True)
    same(edl.arrayrecord(target).read(0, COUNT), X, slice(None))
    with pytest.raises(DataError, match=r"the name of the file must end with \.array_record"):
        convert(X, tmp_path / "a.parquet", "s")


STREAM = """
import os

def data(split):
    for n in range(1000):
        if n == 500 and (waiting := os.environ.get("WAITING")):
            with open(waiting, "w") as fifo:  # the test reads it
                fifo.write("500 of " + split)
            os.kill(os.getpid(), 19)
        yield [float(n)] * 50, n
"""


def test_a_conversion_that_is_killed_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    module, target, fifo = tmp_path / "stream.py", tmp_path / "a.array_record", tmp_path / "fifo"
    module.write_text(STREAM)
    os.mkfifo(fifo)
    convert((X, Y), target, "old")
    request = {
        "source": str(module),
        "target": str(target),
        "split": "test",
        "elements": "",
        "format": "",
        "options": {},
        "replace": True,
    }
    child = subprocess.Popen(
        module_command("edl.trainer.programs.convert_data"),
        stdin=subprocess.PIPE,
        env=os.environ | {"WAITING": str(fifo)},
    )
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps(request).encode())
        child.stdin.close()
        assert fifo.read_text() == "500 of test"
        with pytest.raises(DataError, match="another process writes this file"):
            convert(X, target, "s", replace=True)
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL
    same(edl.arrayrecord(target).read(0, COUNT), (X, Y), slice(None))
    assert len(edl.arrayrecord(tmp_path)) == COUNT, "the hidden file is no file of the directory"
    convert(X, target, "s", replace=True)
    same(edl.arrayrecord(target).read(0, COUNT), X, slice(None))
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_ends_a_conversion_with_the_reason(tmp_path: Path) -> None:
    target = tmp_path / "a.array_record"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(DataError, match=r"a\.array_record: cannot be written after .*File too large"):
            convert(np.random.default_rng(0).random((4096, 200)), target, "s")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
