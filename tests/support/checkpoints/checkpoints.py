# SPDX-License-Identifier: Apache-2.0
"""Small test checkpoints with a variable of every kind, and helpers that write and compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edl.checkpoints import Checkpoint, CheckpointFile, Manifest, Store, Tensor, Variable, utc_now

TENSORS = {
    "dense/kernel": Tensor.of(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "dense/bias": Tensor("bfloat16", (5,), memoryview(bytes(range(10)))),
    "seed": Tensor.of(np.array([1, 2**40], np.int64)),
    "flag": Tensor.of(np.array(True)),
    "none": Tensor.of(np.zeros((0, 3), np.float16)),
    "odd": Tensor("qint4", (3,), memoryview(b"\x12\x03")),  # a type that safetensors does not have
}


def of_size(nbytes: int, step: int) -> dict[str, Tensor]:
    """A state of `nbytes` bytes whose values identify its step."""
    count = nbytes // 4 // 3
    return {f"v{n}": Tensor.of(np.full(count, step * 10 + n, np.float32)) for n in range(3)}


def manifest_of(
    step: int, tensors: Mapping[str, Tensor], parts: tuple[CheckpointFile, ...], **more: Any
) -> Manifest:
    """The manifest of a checkpoint whose variables are distributed over the parts."""
    variables = tuple(
        Variable(name, tensor.dtype, tensor.shape, number % len(parts))
        for number, (name, tensor) in enumerate(tensors.items())
    )
    values: dict[str, Any] = {"run": "run", "attempt": "1", "epoch": 1, "model": "model"} | more
    return Manifest(
        step=step,
        records=step * 32,
        created=utc_now(),
        variables=variables,
        parts=parts,
        skipped=((3, 5),),
        bad={0: 2},
        **values,
    )


def write(
    store: Store,
    step: int,
    attempt: str = "1",
    parts: int = 2,
    tensors: Mapping[str, Tensor] = TENSORS,
    **more: Any,
) -> Checkpoint:
    """Write a whole checkpoint."""
    writing = store.begin(step, attempt)
    dealt = [dict(list(tensors.items())[index::parts]) for index in range(parts)]
    written = tuple(writing.write_part(index, parts, part) for index, part in enumerate(dealt))
    return writing.commit(manifest_of(step, tensors, written, attempt=attempt, **more))


def equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """True if both have equal tensors, bit for bit, in the same order."""
    return [(n, t.dtype, t.shape, t.data) for n, t in some.items()] == [
        (n, t.dtype, t.shape, t.data) for n, t in others.items()
    ]


def unexpected(line: str) -> None:
    """Fail the test: a `warn` callback for calls that must not warn."""
    raise AssertionError(line)
