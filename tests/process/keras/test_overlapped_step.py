# SPDX-License-Identifier: Apache-2.0
"""A step with several sums in one graph: all ranks end alike, and one that breaks has not happened."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers as o

from edl.trainer.agreement import control
from edl.trainer.model.graphs import concrete
from edl.trainer.ring.base import RingBroken
from edl.trainer.ring.graph_all_reduce import GraphAllReduce
from edl.trainer.ring.local import LocalRing
from edl.trainer.step.finite import finite_as
from edl.trainer.step.fused_updates import fused
from edl.trainer.step.layout import SMALL
from edl.trainer.step.learner import KerasLearner
from tests.process.keras.models import dense, plain, sgd, tagged, tagger
from tests.process.keras.ranks import on_ranks
from tests.process.keras.rings import Case, batch

WIDTH = SMALL // 8  # of float32: both kernels of `wide` are large, its biases are small
SUMS = 3  # of a step of `wide`


def wide(optimizer: Any = None, synchronized: bool = False, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((4,))
    if not synchronized:
        x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(keras.layers.Dense(WIDTH, activation="tanh")(x))
    if synchronized:
        x = keras.layers.BatchNormalization(synchronized=True)(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    model.compile(optimizer or sgd(), "mse", metrics=["mae"], **options)
    return model


class Rank:
    """One learner, in a ring that breaks at the given sum."""

    def __init__(self, case: Case, wire: str = "float32"):
        self.case, self.ring = case, LocalRing()
        self.made, self.breaks_at = 0, 0  # sums; counted from 1
        self.learner = KerasLearner(case.build(), batch(case, 0, 5), (), self.reduce, wire=wire)

    def reduce(self, vector: Any) -> Any:
        self.made += 1
        if self.made == self.breaks_at:
            self.ring.cut()
        return self.ring.reduce(vector)

    def sums(self, rank: int, step: int, start: int, stop: int, records: int = 12) -> control.StepResult:
        part = batch(self.case, start, stop) if start < stop else None
        return self.learner.allreduce_step(part, control.write(step), step, rank, records)


def ranks_of(case: Case, size: int, wire: str = "float32") -> list[Rank]:
    ranks = [Rank(case, wire) for _ in range(size)]
    for rank in ranks[1:]:
        rank.learner.load(ranks[0].learner.state())
    return ranks


def made(ranks: list[Rank], step: int, ends: tuple[int, ...], records: int = 12) -> list[control.StepResult]:
    """The sums of one step in one ring."""
    parts = list(itertools.pairwise(ends))
    return on_ranks([r.ring for r in ranks], lambda rank: ranks[rank].sums(rank, step, *parts[rank], records))


# Those whose updates are fused, and those that act on all variables at once, now and again, or later.
# test_optimizers.py compares all of Keras' optimizers.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: o.SGD(0.1),
    "SGD, Nesterov, clipped": lambda: o.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.1),
    "Adam": lambda: o.Adam(0.01),
    "AdamW, averaged now and again": lambda: o.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2),
    "one that accumulates": lambda: o.SGD(0.1, gradient_accumulation_steps=2),
}


def test_compressed_gradients_end_with_the_same_bits_and_what_is_counted_is_not_compressed() -> None:
    case, step = Case(wide, plain), 4001  # three times that, float16 does not hold
    exact, rounded = ranks_of(case, 3), ranks_of(case, 3, wire="float16")
    for rank in rounded:
        rank.learner.load(exact[0].learner.state())
    for ranks in (exact, rounded):
        for rank, sums in zip(ranks, made(ranks, step, (0, 5, 5, 12)), strict=True):
            assert sums.agreed.all_at(step, 0, 3)
            assert sums.agreed.records == 12
            rank.learner.apply(sums)
    assert len({rank.learner.digest() for rank in rounded}) == 1
    weights = [ranks[0].learner.model.get_weights() for ranks in (exact, rounded)]
    off = max(float(np.max(np.abs(a - b))) for a, b in zip(*weights, strict=True))
    assert 0 < off < 1e-3


@pytest.mark.parametrize("non_finite", [False, True])
def test_what_is_too_large_for_the_compressed_sum_all_see_and_nobody_applies(non_finite: bool) -> None:
    """Each rank's part is finite in float16; only their sum is not."""
    x, y, _ = plain()
    large = np.array(y, np.float32) * 0 + (np.nan if non_finite else 3e6)
    ranks = ranks_of(Case(wide, lambda: (x, large, None)), 2, wire="float16")
    found = made(ranks, 0, (0, 6, 12))
    assert [sums.agreed.nonfinite for sums in found] == [True] * 2
    assert [sums.at_fault for sums in found] == [True] * 2


def test_records_that_are_missing_are_not_in_the_mean() -> None:
    case = Case(wide, plain)
    ranks, digests = ranks_of(case, 3), []
    kept = [rank.learner.kept() for rank in ranks]
    for records in (12, 14):  # two of them would be bad
        for rank, sums in zip(ranks, made(ranks, 0, (0, 5, 5, 12), records), strict=True):
            assert sums.agreed.records == 12
            rank.learner.apply(sums)
        digests += [rank.learner.digest() for rank in ranks]
        assert [rank.made for rank in ranks] == [SUMS if records == 12 else 2 * SUMS] * 3
        for rank in ranks if kept else ():
            rank.learner.restore(kept.pop(0))
            rank.made = 0
    assert len(set(digests)) == 1


def test_sums_may_be_applied_later_to_the_state_that_they_are_for() -> None:
    case = Case(lambda: wide(o.Adam(0.01)), plain)
    old, new = Rank(case), Rank(case)
    old.learner.apply(made([old], 0, (0, 12))[0])
    state, kept = old.learner.state(), []
    for step in (1, 2, 3):
        ours, theirs = made([old, new], step, (0, 12, 12))
        old.learner.apply(ours)
        kept.append(theirs)
    new.learner.load(state)  # of the moment at which they met, and not before
    for sums in kept:
        new.learner.apply(sums)
    assert new.learner.digest() == old.learner.digest()


@pytest.mark.parametrize("name", ["Adam", "one that accumulates"])
def test_what_was_kept_is_put_back_to_the_bit(name: str) -> None:
    [rank] = ranks_of(Case(lambda: wide(OPTIMIZERS[name]()), plain), 1)
    for step in range(2):  # in the beginning slots are the same everywhere, and later they are not
        kept, before = rank.learner.kept(), rank.learner.digest()
        rank.learner.apply(made([rank], step, (0, 12))[0])
        assert rank.learner.digest() != before
        rank.learner.restore(kept)
        assert rank.learner.digest() == before
        rank.learner.apply(made([rank], step, (0, 12))[0])


# By optimizer: the operation that updates a variable, and those that need memory for their result. (Adam's
# are what a velocity is moved by: trainer/step/fused_updates.py.)
FUSED: dict[str, tuple[Any, str, list[str]]] = {
    "SGD": (o.SGD(0.1), "ResourceApplyGradientDescent", []),
    "momentum": (o.SGD(0.1, momentum=0.5), "ResourceApplyKerasMomentum", []),
    "Adam": (o.Adam(0.1), "ResourceApplyAdam", ["Square", "Sub"]),
}


@pytest.mark.parametrize("name", FUSED)
def test_an_update_of_a_variable_is_few_operations(name: str) -> None:
    optimizer, operation, others = FUSED[name]
    variables = [keras.Variable(np.zeros((3, 3), np.float32)) for _ in range(2)]
    optimizer.build(variables)

    def update(*gradients: tf.Tensor) -> None:
        with fused(optimizer):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    graph = concrete(update, *[tf.TensorSpec((3, 3))] * 2).graph
    assert [op.type for op in graph.get_operations()].count(operation) == 2
    made = [op.type for op in graph.get_operations() for t in op.outputs if t.shape.rank == 2]
    take_none = {"Placeholder", "Identity", "IdentityN", "ReadVariableOp"}
    assert sorted(kind for kind in made if kind not in take_none) == sorted(2 * others)


def test_all_hear_of_what_is_not_finite_and_one_knows_that_it_is_its_own() -> None:
    x = np.array(plain()[0])
    x[7, 1] = np.nan
    ranks = ranks_of(Case(wide, lambda: (x, *plain()[1:])), 3)
    found = made(ranks, 0, (0, 5, 5, 12))
    assert [sums.agreed.nonfinite for sums in found] == [True] * 3
    assert [sums.at_fault for sums in found] == [False, False, True]


# (factors of a product of matrices, 2 x 3 and 3 x 2; whether all of it is finite)
PRODUCTS: dict[str, tuple[float, float, bool]] = {
    "small": (1.0, -2.0, True),
    "zero": (0.0, 0.0, True),
    "not a number": (np.nan, 1.0, False),
    "infinite, times zero": (np.inf, 0.0, False),
    "large factors": (1e25, 1e-20, True),
    "large, and finite": (1e19, 1e18, True),
    "too large": (1e20, 1e20, False),
    "too large in one place": (1e38, 4.0, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_seen_to_be_finite_or_not_whatever_its_factors_are(name: str) -> None:
    one, other, finite = PRODUCTS[name]
    a, b = np.ones((2, 3), np.float32), np.full((3, 2), other, np.float32)
    a[0, 1] = one
    seen = concrete(lambda a, b: finite_as(tf.matmul(a, b)), *[tf.TensorSpec(m.shape) for m in (a, b)])
    assert np.all(np.isfinite(tf.matmul(a, b))) == finite, "what is expected here"
    assert np.isfinite(seen(tf.constant(a), tf.constant(b))) == finite


class Mine(o.SGD):
    """A user's own optimizer, whose update is unknown."""


KINDS: dict[str, tuple[Case, int]] = {  # by what a model is: the sums of its step
    **{name: (Case(lambda make=make: wide(make()), plain), SUMS) for name, make in OPTIMIZERS.items()},  # type: ignore[misc]
    "a masked mean, by rows": (Case(lambda: tagger(optimizer=o.Adam()), tagged), 3),
    "a masked mean, jit_compile": (Case(lambda: tagger(jit_compile=True), tagged), 2),
    "a loss that is scaled": (Case(lambda: wide(o.LossScaleOptimizer(sgd())), plain), SUMS),
    "an optimizer of one's own": (Case(lambda: dense(Mine(0.1)), plain), 1),
    "reads what it has changed": (Case(lambda: dense(o.ScheduleFreeAdamW()), plain), 1),
    "synchronized statistics": (Case(lambda: wide(synchronized=True), plain), SUMS + 4),
    "run eagerly": (Case(lambda: wide(run_eagerly=True), plain), SUMS),
    "run eagerly, by rows": (Case(lambda: tagger(None, o.Adam(), mask=False, run_eagerly=True), tagged), 2),
}


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_steps_end_with_the_same_bits_and_have_not_happened_if_they_break(name: str) -> None:
    case, sums = KINDS[name]
    ranks = ranks_of(case, 2)
    before = ranks[0].learner.digest()
    for nth in range(1, sums + 1):
        dying = nth % 2
        ranks[dying].made, ranks[dying].breaks_at = 0, nth
        with pytest.raises(RingBroken, match=rf"rank {dying} has cut the ring"):
            made(ranks, 0, (0, 12, 12))
        ranks[dying].breaks_at = 0
        assert [rank.learner.digest() for rank in ranks] == [before] * 2, f"sum {nth}"
    for step, middle in enumerate((12, 5)):  # rank 1 has no records in the first
        for rank in ranks:
            rank.made = 0
        for rank, result in zip(ranks, made(ranks, step, (0, middle, 12)), strict=True):
            assert (result.agreed.records, result.agreed.nonfinite) == (12, False)
            rank.learner.apply(result)
        assert [rank.made for rank in ranks] == [sums] * 2
    assert len({rank.learner.digest() for rank in ranks} - {before}) == 1


def test_a_step_is_the_same_where_its_variables_are_on_another_device() -> None:
    """The second of two CPUs: as with a GPU, they are not where Python reads and branches are decided."""
    command = [sys.executable, "-m", "tests.process.keras.elsewhere"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    digests = dict(line.split() for line in ran.stdout.splitlines() if line.startswith("CPU:"))
    assert set(digests) == {"CPU:0", "CPU:1"}, ran.stdout
    assert digests["CPU:0"] == digests["CPU:1"]


def test_no_check_is_made_of_the_side_of_a_sum_that_a_ring_of_one_does_not_take() -> None:
    sums = GraphAllReduce()
    tf.debugging.enable_check_numerics()
    try:
        graph = concrete(lambda a: sums(a / 2.0, "rest"), tf.TensorSpec([3], tf.float32)).graph
    finally:
        tf.debugging.disable_check_numerics()
    (total,) = (op for op in graph.get_operations() if op.type == "HorovodAllreduce")
    (result,) = total.outputs
    readers = {op.type for op in graph.get_operations() if any(given is result for given in op.inputs)}
    assert readers == {"Merge"}  # a check would be an operation with an effect, and dead as all results then
    assert "CheckNumericsV2" in {op.type for op in graph.get_operations()}  # of what is summed


def test_numeric_checks_that_a_script_enables_change_no_step() -> None:
    """`enable_check_numerics` watches every operation of a graph, and made the warm-up fail (IndexError)."""
    case = Case(lambda: dense(o.AdamW(0.1, weight_decay=0.01)), plain)

    def trained() -> list[np.ndarray]:
        [rank] = ranks_of(case, 1)
        for step in range(2):
            rank.learner.apply(made([rank], step, (0, 12))[0])
        return list(rank.learner.model.get_weights())

    expected = trained()
    tf.debugging.enable_check_numerics()
    try:
        found = trained()
    finally:
        tf.debugging.disable_check_numerics()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_variables_of_the_ring_are_not_taken_for_the_models() -> None:
    case = Case(dense, plain)
    learner = KerasLearner(
        case.build(), batch(case, 0, 5), [batch(case, 0, 1)], lambda v: v, in_graph=GraphAllReduce()
    )
    assert learner.others == []
