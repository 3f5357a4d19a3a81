"""Checkpoints: whole or none, whatever happens to the files, the disk and the processes that write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edl.checkpoints import Manifest, Store, Tensor, Variable, utc_now

TENSORS = {
    "dense/kernel": Tensor.of(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "dense/bias": Tensor("bfloat16", (5,), memoryview(bytes(range(10)))),
    "seed": Tensor.of(np.array([1, 2**40], np.int64)),
    "flag": Tensor.of(np.array(True)),
    "none": Tensor.of(np.zeros((0, 3), np.float16)),
    "odd": Tensor("qint4", (3,), memoryview(b"\x12\x03")),
}


def write(store: Store, step: int, parts: int = 2, attempt: str = "1", **more: object) -> Manifest:
    """A checkpoint whose variables are dealt over the parts."""
    writing = store.begin(step, attempt)
    dealt = [dict(list(TENSORS.items())[index::parts]) for index in range(parts)]
    written = tuple(writing.write_part(index, parts, part) for index, part in enumerate(dealt))
    variables = tuple(
        Variable(name, tensor.dtype, tensor.shape, number % parts)
        for number, (name, tensor) in enumerate(TENSORS.items())
    )
    manifest = Manifest(
        step=step, run="run", attempt=attempt, epoch=1, records=step * 32, model="model", created=utc_now(),
        variables=variables, parts=written, skipped=((3, 5),), bad={0: 2}, **more,  # type: ignore[arg-type]
    )  # fmt: skip
    writing.commit(manifest)
    return manifest


def fail(line: str) -> None:
    raise AssertionError(line)


def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "checkpoints"))
    assert store.newest(fail) is None and store.load_newest(fail) is None
    manifest = write(store, 7, metrics={"loss": float("inf"), "accuracy": 1}, config={"training.seed": 3})
    loaded = store.load_newest(fail)
    assert loaded is not None and loaded.checkpoint.manifest == manifest
    assert list(loaded.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        found = loaded.tensors[name]
        assert (found.dtype, found.shape, found.data) == (tensor.dtype, tensor.shape, tensor.data)
