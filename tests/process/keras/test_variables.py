# SPDX-License-Identifier: Apache-2.0
"""The values of variables of all types, taken, prepared and put back: `edl.trainer.model.snapshot`."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from edl.trainer.model import snapshot

TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool")
SHAPES = ((), (1,), (0, 3), (5, 7))


def variables(chance: int) -> list[tf.Variable]:
    some = np.random.default_rng(chance)
    return [
        tf.Variable(tf.cast(some.integers(0, 2 if dtype == "bool" else 100, shape), dtype))
        for dtype in TYPES
        for shape in SHAPES
    ]


def values(of: list[tf.Variable]) -> list[bytes]:
    return [v.numpy().tobytes() for v in of]


def test_the_values_of_one_are_taken_over_by_another_and_stay_what_they_were() -> None:
    one, other = variables(1), variables(2)
    assert values(one) != values(other)
    parts = snapshot.parts(one)
    before, prepared = values(one), snapshot.prepared(other, [part.copy() for part in parts])
    for v in one:
        v.assign(tf.zeros_like(v))
    snapshot.take_over(other, prepared)
    assert values(other) == before == [part.tobytes() for part in parts]


def test_a_value_that_comes_into_its_room_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGE", 1)
    one, other = variables(1), variables(2)
    come, places = [], []
    for part in snapshot.parts(one):
        come.append(snapshot.allocate(len(part)))
        come[-1][:] = part
        places.append(come[-1].ctypes.data)
    before = values(one)
    snapshot.take_over(other, snapshot.prepared(other, come))
    assert not come and values(other) == before
    now = [v.ctypes.data for v in snapshot.parts(other)]
    copied = {v.dtype.name for v, a, b in zip(other, now, places, strict=True) if a != b and tf.size(v) > 1}
    assert copied <= {"bool", "bfloat16"}
    other[0].assign_add(1.0)  # as any other variable
    assert values(one) == before


@pytest.mark.parametrize("same", [True, False])
def test_what_was_kept_is_put_back(same: bool) -> None:
    tried = [tf.Variable(tf.ones_like(v)) for v in variables(1)] if same else variables(1)
    before, kept = values(tried), snapshot.Kept(tried)
    for v in tried:
        v.assign(tf.zeros_like(v))
    kept.put_back()
    assert values(tried) == before


@pytest.mark.parametrize("large", [1, 1 << 30])
def test_memory_that_was_not_filled_yet_is_not_looked_at_as_numbers(
    monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    """TensorFlow checks each new tensor of a floating type for NaN, with `enable_check_numerics`."""
    monkeypatch.setattr(snapshot, "LARGE", large)
    one, other = (
        [v for v in variables(n) if v.dtype != "bfloat16"] for n in (1, 2)
    )  # TensorFlow cannot check it
    parts = snapshot.parts(one)

    def used_before(shape: list[int], dtype: tf.DType) -> tf.Tensor:
        return tf.fill(shape, tf.constant(255, dtype) if dtype.is_integer else tf.constant(np.nan, dtype))

    monkeypatch.setattr(tf.raw_ops, "Empty", used_before)
    tf.debugging.enable_check_numerics()
    try:
        come = [snapshot.allocate(len(part)) for part in parts]
        for room, part in zip(come, parts, strict=True):
            room[:] = part
        snapshot.take_over(other, snapshot.prepared(other, come))
        filled = snapshot.filled([3], lambda to: np.copyto(to, [1, 2, 3]))
    finally:
        tf.debugging.disable_check_numerics()
    assert values(other) == values(one)
    assert filled.numpy().tolist() == [1, 2, 3]
