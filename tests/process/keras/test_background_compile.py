# SPDX-License-Identifier: Apache-2.0
"""XLA compiles a model's step in the background: for each size that steps keep having."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from edl.trainer.agreement import control
from edl.trainer.model.graphs import concrete
from edl.trainer.step import tracer
from edl.trainer.step.background_compile import SETTLED, BackgroundCompiled
from edl.trainer.step.learner import KerasLearner
from edl.zoo import counting
from tests.process.keras.models import plain, sgd
from tests.process.keras.rings import Case, batch

SECONDS = 60.0  # for a compilation
FLOATS = [tf.TensorSpec([None], tf.float32)]


def normalized(jit: bool) -> keras.Model:
    """Its gradients depend on all records of a part."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(64, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(sgd(), "mse", metrics=["mae"], jit_compile=jit)
    return model


def counted(jit: bool) -> keras.Model:
    """Each record raises a weight of its own by one."""
    model = counting.model()
    model.compile(keras.optimizers.SGD(1.0), counting.MinusOutput(reduction="sum"), jit_compile=jit)
    return model


def numbers() -> tuple[Any, Any, None]:
    records = np.arange(30, dtype=np.int32)
    return records, np.zeros(30, np.float32), None


@dataclass(frozen=True)
class Way:
    """A model, and options of its learner."""

    build: Callable[[bool], keras.Model]
    data: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "several sums": Way(normalized, plain),
    "micro-batches": Way(normalized, plain, {"pieces": 2}),
    "a count of records": Way(counted, numbers),
}


def refuse(*_: tf.Tensor) -> list[tf.Tensor]:
    raise AssertionError("the uncompiled graph was called")


def await_compilation(graph: BackgroundCompiled) -> None:
    assert graph._thread is not None, "no compilation has begun"
    graph._thread.join(SECONDS)
    assert not graph.is_compiling


@pytest.mark.parametrize("name", WAYS)
def test_a_compiled_step_of_any_size_is_the_uncompiled_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, made = WAYS[name], list[BackgroundCompiled]()

    class Kept(BackgroundCompiled):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(tracer, "BackgroundCompiled", Kept)
    case = Case(lambda: way.build(False), way.data)
    without, xla = (
        KerasLearner(way.build(jit), batch(case, 0, 5), [batch(case, 0, 3)], lambda v: v, **way.options)
        for jit in (False, True)
    )
    xla.load(without.state())
    used = made[-1]  # with micro-batches, a batch of one piece has its own graph

    def step(learner: KerasLearner, start: int, stop: int) -> control.StepResult:
        return learner.allreduce_step(batch(case, start, stop), control.write(0), 0, 0, stop - start)

    for start, stop in ((0, 12), (12, 30)):  # the sizes of two rings
        for _ in range(SETTLED):
            step(xla, start, stop)
        await_compilation(used)
        with monkeypatch.context() as patch:
            patch.setattr(used, "_uncompiled", refuse)
            found = step(xla, start, stop)
        expected = step(without, start, stop)
        for one, other in zip(found.given, expected.given, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
        assert found.agreed.records == stop - start
        for learner, sums in ((xla, found), (without, expected)):
            learner.apply(sums)
    if way.build is counted:
        np.testing.assert_array_equal(xla.model.get_weights()[0][:30], np.ones(30))


def test_sizes_that_soon_change_again_are_not_compiled() -> None:
    graph = BackgroundCompiled(concrete(lambda x: [2 * x], *FLOATS), FLOATS)
    for _ in range(SETTLED - 1):
        for size in (3, 4):
            (found,) = graph(tf.ones([size]))
            np.testing.assert_array_equal(found, 2 * np.ones(size))
    assert graph._thread is None


def test_a_graph_that_xla_cannot_compile_runs_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    def reversed_(x: tf.Tensor) -> list[tf.Tensor]:
        return [tf.numpy_function(lambda a: a[::-1], [x], tf.float32)]

    graph = BackgroundCompiled(concrete(reversed_, *FLOATS), FLOATS)
    for _ in range(SETTLED):
        graph(tf.range(3.0))
    await_compilation(graph)
    (found,) = graph(tf.range(3.0))
    np.testing.assert_array_equal(found, [2, 1, 0])
    assert "trained without XLA, which cannot compile it" in caplog.text
    assert not graph.is_compiling
