# SPDX-License-Identifier: Apache-2.0
"""Sums over the ring inside a graph: their order, their gradient, and a ring that breaks in one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from edl.trainer.model.graphs import compiled
from edl.trainer.ring.base import RingBroken
from edl.trainer.ring.local import LocalRing
from edl.trainer.step.inner_sum import InnerSum
from tests.process.keras.ranks import on_ranks

ONE = tf.TensorSpec([1], tf.float32)


def ranks(size: int) -> tuple[list[LocalRing], list[InnerSum]]:
    rings = [LocalRing() for _ in range(size)]
    return rings, [InnerSum(ring.reduce) for ring in rings]


def call(total: InnerSum, graph: Callable[..., Any], value: float) -> np.ndarray:
    with total.ring_errors():
        return np.asarray(graph(np.array([value], np.float32)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_have_the_sum(size: int) -> None:
    rings, totals = ranks(size)
    graphs = [compiled(lambda x, t=total: t(t(x) + 1.0), ONE) for total in totals]
    expected = size * (sum(range(size)) + 1.0)
    for _ in range(3):
        found = on_ranks(rings, lambda rank: call(totals[rank], graphs[rank], rank))
        np.testing.assert_array_equal(found, [[expected]] * size)


def test_it_is_made_in_eager_code_too() -> None:
    rings, totals = ranks(2)
    found = on_ranks(rings, lambda rank: totals[rank](tf.constant([1.0 + rank])).numpy())
    np.testing.assert_array_equal(found, [[3.0]] * 2)


def in_branches_loops_and_functions(total: InnerSum, some: tf.Variable, x: tf.Tensor) -> None:
    """Sums of 0, 1, 2 ...: in that order, whose results are not used."""

    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> None:
        some.assign_add(1.0)  # TensorFlow orders calls with a resource apart from operations without one
        total(x + 1.0)

    total(x)
    function(x)
    tf.cond(tf.reduce_all(x < 5.0), lambda: total(x + 2.0), lambda: x)
    tf.while_loop(lambda i: i < 5.0, lambda i: (i + 1.0 + 0.0 * total(x + i)[0],), [tf.constant(3.0)])
    total(x + 5.0)


def test_they_are_made_in_the_order_in_which_the_code_makes_them() -> None:
    seen: list[float] = []

    def reduce(vector: Any) -> Any:
        seen.append(float(vector[0]))
        return vector

    total, some = InnerSum(reduce), tf.Variable(0.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        in_branches_loops_and_functions(total, some, x)
        return x

    graph = tf.function(step, autograph=False)
    for _ in range(5):
        seen.clear()
        graph(tf.constant([0.0]))
        assert seen == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_gradient_is_the_sum_of_the_gradients() -> None:
    rings, totals = ranks(3)

    def graph_of(total: InnerSum, rank: int) -> Callable[..., Any]:
        def gradient(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                # d/dx_i of the sum over ranks of (r + 1) sum(x^2).
                loss = (rank + 1.0) * total.differentiable(x * x)
            return tape.gradient(loss, x)

        return compiled(gradient, ONE)

    graphs = [graph_of(total, rank) for rank, total in enumerate(totals)]
    found = on_ranks(rings, lambda rank: call(totals[rank], graphs[rank], rank + 1.0))
    np.testing.assert_array_equal(found, [[2.0 * (rank + 1) * 6.0] for rank in range(3)])


def test_a_ring_that_breaks_in_the_second_sum_is_broken_and_the_third_is_not_tried() -> None:
    rings, totals = ranks(2)
    tries = [itertools.count(), itertools.count()]

    def reduce_on(rank: int) -> Callable[[Any], Any]:
        def reduce(vector: Any) -> Any:
            if next(tries[rank]) == 1 and rank == 0:
                rings[0].cut()
            return rings[rank].reduce(vector)

        return reduce

    totals = [InnerSum(reduce_on(rank)) for rank in range(2)]
    graphs = [compiled(lambda x, t=total: t(x) + t(2.0 * x) + t(3.0 * x), ONE) for total in totals]

    def work(rank: int) -> str:
        with pytest.raises(RingBroken) as caught:
            call(totals[rank], graphs[rank], 1.0)
        return str(caught.value)

    for words in on_ranks(rings, work):
        assert words == "reduce: rank 0 has cut the ring"
    assert [next(t) for t in tries] == [2, 2]


def test_an_error_of_the_graph_itself_passes_as_it_is() -> None:
    total = InnerSum(lambda vector: vector)
    graph = compiled(lambda x: tf.debugging.check_numerics(total(x), "not a number"), ONE)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
        call(total, graph, float("nan"))
    assert call(total, graph, 1.0).tolist() == [1.0]
